"""Base classes and settings of training recipes, which define rollouts and credit assignment.

Sampling, the trainer, checkpoints and budgets are shared by all recipes
(`compound.optimizers.weights.training`).
"""

from __future__ import annotations

import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any, ClassVar, Literal, Self, TypeVar

from pydantic import Field, model_validator

from compound.core.engine import Capabilities
from compound.core.errors import DeclarationError, OutputTypeError, ParseError
from compound.core.example import Example
from compound.core.formatting import short_repr
from compound.core.storage.state import State
from compound.engines.local.chat_tokens import ChatTokenizer
from compound.execution.schedule import setting_values
from compound.execution.trace import Call
from compound.graph.registry.code import find_code
from compound.graph.registry.user_code import UserCodeError, check_signature, definition, located
from compound.graph.system import System
from compound.optimization.method import Task
from compound.optimization.settings.base import CodeName, Settings
from compound.optimizers.weights.credit import Credit, call_samples, propagate, trajectory_samples
from compound.optimizers.weights.distributed.learner import BaseModelSettings, LearnerSettings
from compound.optimizers.weights.distributed.processes import Learner
from compound.optimizers.weights.learner.losses import (
    ImitationObjective,
    Objective,
    PolicyObjective,
    PolicyObjectiveField,
)
from compound.optimizers.weights.learner.samples import Group, Sample, SamplingSettings
from compound.optimizers.weights.learner.updates import CriticSettings, OptimizerSettings
from compound.optimizers.weights.recipes.rollouts import Rollout, RolloutSettings, Sampler, is_lost

Penalty = Callable[[Call], float]
Scale = Literal["trl", "plain", "population", "center", "leave_one_out", "none"]
Sharing = Literal["each", "shared"] | dict[str, tuple[str, ...]]
Penalties = dict[str, CodeName]
S = TypeVar("S", bound=State)


class EvaluationSettings(Settings):
    """Evaluations on held-out train examples, which choose the training step to propose."""

    every: int = Field(default=5, ge=0)
    """Training steps between evaluations. The best evaluated step is proposed; of equal steps, the earliest.
    With 0, or in a job too short for two evaluated steps, the last step is proposed."""
    examples: int = Field(default=16, ge=1)
    """Train examples held out for evaluations, at most a quarter of all train examples. Each evaluation costs
    one system run per example from the job's budget."""


class TrainingSettings(Settings):
    """Settings of all methods that train weights."""

    steps: int = Field(default=25, ge=1)
    """Training steps of a job: sample, assign credit, update."""
    rollouts: SamplingSettings = SamplingSettings()
    """Sampling of rollouts."""
    loss: PolicyObjective | ImitationObjective = PolicyObjective()
    """The loss."""
    optimizer: OptimizerSettings = OptimizerSettings()
    """Weight updates."""
    base: BaseModelSettings = BaseModelSettings()
    """The frozen base model in the trainer."""
    learner: LearnerSettings = LearnerSettings()
    """Processes that compute the training steps."""
    evaluation: EvaluationSettings = EvaluationSettings()
    """Evaluations that choose the step to propose."""
    keep_samples: bool = False
    """Store the samples of every step with their credit in the run directory, for `export_groups`."""


class SharedAdapters(Settings):
    """Settings of all methods that train several components jointly."""

    adapters: Sharing = "each"
    """Adapters: `each` (one per component), `shared` (one for all), or a mapping from adapter names to the
    components that share them."""


class PenaltySettings(Settings):
    """Settings of all methods that propagate rewards back through the calls."""

    penalties: Penalties = Field(default={})
    """Penalty function `module:name` of each component. It receives the inputs and outputs of a call; its
    value is added to the call's reward when rewards are propagated back through the calls."""


class PolicySettings(TrainingSettings):
    """Settings of all methods that train weights by policy gradients."""

    rollouts: RolloutSettings = RolloutSettings()
    """Sampling of rollouts."""
    loss: PolicyObjectiveField = PolicyObjective()
    """The loss: a name, or a name with its settings."""

    @model_validator(mode="after")
    def _corrected(self) -> Self:
        if self.rollouts.max_staleness and self.loss.settings.correction is None:
            raise ValueError(
                "samples of earlier weights (rollouts.max_staleness) need a correction, but it is disabled; "
                f"set loss.{self.loss.name}.correction, or rollouts.max_staleness to 0"
            )
        return self


class GroupSettings(PolicySettings):
    """Settings of all methods that compare the runs of an example."""

    scale: Scale = "trl"
    """Conversion of rewards r to advantages within a group, with mean m and standard deviation s: `trl`,
    (r - m) / (s + 1e-4); `plain`, (r - m) / s; `population`, with the population variance; `center`, r - m;
    `leave_one_out`, r minus the mean of the others; `none`, r."""

    @model_validator(mode="after")
    def _compared(self) -> Self:
        if self.rollouts.runs < 2 and self.scale != "none":
            raise ValueError(
                f"the runs of an example are compared, but rollouts.runs is {self.rollouts.runs}; set "
                "rollouts.runs to 2 or more (for example 8), scale to none, or use method ppo"
            )
        return self


@dataclass(frozen=True)
class RecipeContext:
    """Inputs of a recipe for one step."""

    sampler: Sampler  # makes rollouts with the current weights
    trained: tuple[str, ...]  # the components whose weights are trained, in the order of the system
    seed: int  # the seed of the step's random numbers
    trainer: Learner  # computes values and log-ratios to the base model
    task: Task  # the job
    # the recipe's state between steps, as JSON; see `recall` and `keep`
    state: dict[str, object] = field(default_factory=dict)
    folder: Path = Path()  # the folder that code and files named in the settings are relative to
    # opens a block in which the trainer may compute; engines on its GPUs may sleep meanwhile
    trainer_turn: Callable[[], AbstractAsyncContextManager[object]] = nullcontext

    @property
    def fallback(self) -> float:
        """The reward of a failed run."""
        return self.sampler.rules.failure_score

    def recall(self, kind: type[S]) -> S:
        """Return the state stored by the previous step, or the defaults in the first step."""
        return kind.from_json(self.state) if self.state else kind()

    def keep(self, state: State) -> None:
        """Store a state for the next step."""
        self.state.clear()
        self.state.update(state.to_json())

    @property
    def chat(self) -> ChatTokenizer:
        """The tokenizer of the trained model's chats, with the template of its engine."""
        system, tokenizer = self.sampler.system, self.trainer.tokenizer
        lm = str(setting_values(system.components[self.trained[0]], system)["lm"])
        engine = Capabilities(self.sampler.executor.engine(lm))
        tokenizer.chat_template = engine.chat_template or tokenizer.chat_template
        return ChatTokenizer(tokenizer, lm, engine.chat_template_kwargs)

    def penalties(self, declared: Penalties) -> dict[str, Penalty]:
        """Load the penalty functions of the trained components."""
        trained = {name: path for name, path in declared.items() if name in self.trained}
        return {name: call_penalty(find_code(path, self.folder)) for name, path in trained.items()}


@dataclass(frozen=True)
class CreditedSamples:
    """Samples with advantages, and statistics of their credit assignment."""

    samples: Sequence[Sample]  # the samples to train on
    # the global rewards of the step's rollouts, or the local rewards of a component's answers
    scores: Sequence[float]
    facts: Mapping[str, Any] = field(default_factory=dict)  # statistics for the record, as JSON
    # the answers of all rollouts in `scores`, with their rewards, if `samples` are a selection
    # of them. Reward, length and the like of components describe these; by default `samples`
    answers: Sequence[Sample] = ()

    @property
    def reward(self) -> float | None:
        """The mean of the scores; ``None`` without scores."""
        return fmean(self.scores) if self.scores else None


@dataclass(frozen=True)
class Recipe(ABC):
    """Base class of training recipes.

    Attributes:
        settings: the settings of the method.
    """

    local: ClassVar[bool] = False  # rewards are those of a component rather than of runs

    settings: TrainingSettings

    @property
    def sampling(self) -> SamplingSettings:
        """The settings of rollouts."""
        return self.settings.rollouts

    @property
    def loss(self) -> Objective:
        """The loss."""
        return self.settings.loss

    @property
    def critic(self) -> CriticSettings | None:
        """The settings of the value head; ``None`` for no value head."""
        found: CriticSettings | None = getattr(self.settings, "critic", None)
        return found

    @property
    def likelihood(self) -> bool:
        """Whether samples are imitated, without advantages."""
        return isinstance(self.loss, ImitationObjective)

    @property
    def teacher(self) -> str | None:
        """A model that scores answers instead of the base model; ``None`` for none."""
        return None

    def values(self, system: System, trained: Sequence[str]) -> Mapping[str, object]:
        """Return values of other parameters that the weights are trained for, and proposed with.

        Args:
            system: the system, bound to the configuration that the job starts from.
            trained: the trained components.
        """
        return {}

    def obstacle(self, system: System, trained: Sequence[str]) -> str:
        """Return why a job that starts from a system would learn nothing; ``""`` if it may learn."""
        return ""

    @abstractmethod
    def cost(self, examples: int, components: int) -> float:
        """Return the approximate or maximum cost of a step, in system runs.

        Args:
            examples: the number of train examples of the step.
            components: the number of trained components.
        """

    def evaluation_cost(self, examples: int) -> float:
        """Return the maximum cost of an evaluation on held-out examples, in system runs."""
        return float(examples)

    async def evaluate(
        self, context: RecipeContext, values: Mapping[str, Any], examples: Sequence[Example]
    ) -> list[float]:
        """Return the score of each held-out example with the weights in ``values``.

        The system runs as declared rather than with the settings of rollouts: at its own
        temperature, once per example, with the same sample index at every step. Runs lost to
        transient errors have no score.
        """
        traces = await context.task.scorer.traces(values, examples)
        return [
            trace.score
            for trace in traces
            if trace.score is not None and not is_lost(trace.failure)
        ]

    @abstractmethod
    async def collect(self, context: RecipeContext, examples: Sequence[Example]) -> CreditedSamples:
        """Make rollouts of some examples, and return samples with advantages."""


async def credited_by(
    recipe: Recipe, context: RecipeContext, examples: Sequence[Example]
) -> CreditedSamples:
    """Let a recipe, which may be code of a user, make the samples of a step."""
    role = f"collect of recipe {type(recipe).__name__!r}"
    check_signature(recipe.collect, role, "context", "examples")
    started: object = recipe.collect(context, examples)
    found = await started if inspect.isawaitable(started) else started
    if found is started or not isinstance(found, CreditedSamples):
        raise UserCodeError(
            f"{role} at {definition(recipe.collect)} returned {short_repr(found)}",
            hint="write async def collect(self, context, examples), which returns "
            "CreditedSamples(samples, scores)",
        )
    return found


@dataclass(frozen=True)
class PolicyRecipe(Recipe):
    """Base class of policy-gradient recipes, with defaults for training on whole runs."""

    settings: PolicySettings

    def cost(self, examples: int, components: int) -> float:
        """Return the number of runs of all examples."""
        return examples * self.settings.rollouts.runs


def call_penalty(function: Callable[[Mapping[str, Any], Mapping[str, Any]], float]) -> Penalty:
    """Return a penalty of calls that applies a function to their inputs and outputs.

    A call whose reply could not be parsed gets the function's attribute ``malformed`` if it has
    one; other failed calls get 0.
    """

    def penalty(call: Call) -> float:
        if call.failure is not None:
            is_malformed = call.tokens and call.failure.kind in (
                ParseError.kind,
                OutputTypeError.kind,
            )
            return float(getattr(function, "malformed", 0.0)) if is_malformed else 0.0
        try:
            value = float(function(call.inputs, call.outputs))
        except Exception as error:
            raise DeclarationError(
                f"the penalty of {call.component!r} failed: {located(error, function)}",
                hint="a penalty takes the inputs and the outputs of a call as two mappings, and returns a "
                "number",
            ) from error
        if not math.isfinite(value):
            raise DeclarationError(
                f"the penalty of {call.component!r} must be finite, but is {value}",
                hint="return a finite number for all inputs and outputs",
            )
        return value

    return penalty


def learnable(rollouts: Sequence[Rollout]) -> list[Rollout]:
    """Return the rollouts to learn from: all that were not lost to transient errors."""
    return [rollout for rollout in rollouts if not rollout.lost]


def scores_of(rollouts: Sequence[Rollout]) -> list[float]:
    """Return the global rewards of the rollouts that were not lost to transient errors."""
    return [rollout.score for rollout in rollouts if not rollout.lost]


def samples_of(context: RecipeContext, rollouts: Sequence[Rollout]) -> list[Sample]:
    """Return the samples of all rollouts to learn from, with the rewards of their runs."""
    return [
        sample
        for rollout in learnable(rollouts)
        for sample in trajectory_samples(
            rollout.trace,
            context.trained,
            rollout=rollout.number,
            fallback=context.fallback,
            on_policy=not rollout.teacher,
        )
    ]


def propagated_samples(
    context: RecipeContext,
    rollouts: Sequence[Rollout],
    group: Callable[[Rollout, Credit], Group],
    penalties: Penalties,
) -> tuple[list[Sample], dict[str, Any]]:
    """Return the samples of each call of trained components; a call shared by several forks counts once."""
    by_example: dict[str, list[Rollout]] = {}
    for rollout in learnable(rollouts):
        by_example.setdefault(rollout.example.id, []).append(rollout)
    samples: list[Sample] = []
    rules, paid = context.penalties(penalties), dict[str, list[float]]()
    unreached = 0
    for example, own in by_example.items():
        traces = [rollout.trace for rollout in own]
        found, lost = propagate(traces, context.trained, penalties=rules, fallback=context.fallback)
        unreached += len(lost)
        for credit in found:
            first, call = own[credit.traces[0]], credit.call
            paid.setdefault(call.component, []).append(credit.penalty)
            key = group(first, credit)
            samples += call_samples(call, example, credit.reward, rollout=first.number, group=key)
    means = {name: sum(some) / len(some) for name, some in paid.items() if name in rules}
    return samples, {"unreached": unreached, **({"penalties": means} if means else {})}
