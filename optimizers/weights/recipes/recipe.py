"""Training recipes: rollouts and credit.

Everything else is shared: sampling, the trainer, checkpoints, budgets
(`compound.optimizers.weights.training`).
"""

from __future__ import annotations

import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any, Literal, Self, TypeVar

from pydantic import Field, model_validator

from compound.errors import DeclarationError, OutputTypeError, ParseError
from compound.example import Example
from compound.execution.trace import Call
from compound.formatting import short
from compound.optimization.method import Task
from compound.optimizers.weights.learner.samples import Sample, SamplingSettings
from compound.optimizers.weights.learner.trainer import Trainer
from compound.optimizers.weights.learner.updates import OptimizerSettings
from compound.optimizers.weights.learner.values import CriticSettings
from compound.optimizers.weights.loss.objective import (
    ImitationObjective,
    Objective,
    PolicyObjective,
    PolicyObjectiveField,
)
from compound.optimizers.weights.recipes.rollouts import Rollout, RolloutSettings, Sampler, is_lost
from compound.optimizers.weights.recipes.selection import EvaluationSettings
from compound.registry.code import find_code
from compound.registry.user_code import UserCodeError, check_signature, definition, located
from compound.settings.base import Settings
from compound.settings.references import CodeName
from compound.storage.state import State

Penalty = Callable[[Call], float]
Scale = Literal["trl", "plain", "population", "center", "leave_one_out", "none"]
Sharing = Literal["each", "shared"] | dict[str, tuple[str, ...]]
Penalties = dict[str, CodeName]
S = TypeVar("S", bound=State)


class TrainingSettings(Settings):
    """What every way of training weights reads."""

    steps: int = Field(default=25, ge=1)
    """Training steps of a job: sample, assign credit, update."""
    optimizer: OptimizerSettings = OptimizerSettings()
    """How the weights are updated."""
    evaluation: EvaluationSettings = EvaluationSettings()
    """How the step to propose is chosen."""


class PolicySettings(TrainingSettings):
    """What every way of training weights by policy gradients reads."""

    rollouts: RolloutSettings = RolloutSettings()
    """How rollouts are made."""
    loss: PolicyObjectiveField = PolicyObjective()
    """The loss: a name, or a name with its settings."""

    @model_validator(mode="after")
    def _corrected(self) -> Self:
        """Refuse samples of earlier weights without a correction."""
        if self.rollouts.max_staleness and not self.loss.settings.corrected:
            raise ValueError(
                "samples of earlier weights (rollouts.max_staleness) need a correction; the loss has none"
            )
        return self


class GroupSettings(PolicySettings):
    """What every way of training weights that compares the runs of an example reads."""

    scale: Scale = "trl"
    """How the rewards of a group become advantages."""

    @model_validator(mode="after")
    def _compared(self) -> Self:
        """Refuse groups of one run, which leave nothing to compare."""
        if self.rollouts.runs < 2 and self.scale != "none":
            raise ValueError(
                f"the runs of an example are compared, but rollouts.runs is {self.rollouts.runs}; 8 is a "
                "good default; or use method ppo, or scale: none, which compares nothing"
            )
        return self


@dataclass(frozen=True)
class RecipeContext:
    """What a recipe works with in one step.

    Attributes:
        sampler: makes rollouts with the present weights.
        trained: the components whose weights are trained, in the order of the system.
        seed: names the step's random streams.
        trainer: knows the value head.
        task: the job, for recipes that need more of it.
        kept: JSON of what the recipe keeps from step to step; see `recall`.
        folder: where code and files that the settings name are looked for.
    """

    sampler: Sampler
    trained: tuple[str, ...]
    seed: int
    trainer: Trainer
    task: Task
    kept: dict[str, object] = field(default_factory=dict)
    folder: Path = Path()

    @property
    def fallback(self) -> float:
        """The reward of a failed run."""
        return self.sampler.rules.failure_score

    def recall(self, kind: type[S]) -> S:
        """Return what the recipe keeps from step to step; the defaults at first."""
        return kind.from_json(self.kept) if self.kept else kind()

    def keep(self, state: State) -> None:
        """Keep a state for the next step."""
        self.kept.clear()
        self.kept.update(state.to_json())

    def penalties(self, wanted: Penalties) -> dict[str, Penalty]:
        """Return what is added to the rewards of trained components, by what a call read and returned."""
        trained = {name: path for name, path in wanted.items() if name in self.trained}
        return {name: of_call(find_code(path, self.folder)) for name, path in trained.items()}


@dataclass(frozen=True)
class Credited:
    """Samples with advantages, and what is to be known of how they came about.

    ``scores`` are the global rewards of the step's rollouts, or the local ones of a component's answers;
    ``facts`` is JSON.
    """

    samples: Sequence[Sample]
    scores: Sequence[float]
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def reward(self) -> float | None:
        """The mean of the scores."""
        return fmean(self.scores) if self.scores else None


@dataclass(frozen=True)
class Recipe(ABC):
    """One way of training weights.

    Attributes:
        settings: how many steps are made, and how.
    """

    settings: TrainingSettings

    @property
    @abstractmethod
    def sampling(self) -> SamplingSettings:
        """How rollouts are made."""

    @property
    @abstractmethod
    def loss(self) -> Objective:
        """The loss."""

    @property
    def critic(self) -> CriticSettings | None:
        """The settings of the value head, where there is one."""
        return None

    @property
    def likelihood(self) -> bool:
        """Whether samples are imitated, and not weighed by advantages."""
        return isinstance(self.loss, ImitationObjective)

    @property
    def local(self) -> bool:
        """Whether rewards are a component's own, and not those of runs."""
        return False

    @abstractmethod
    def cost(self, examples: int, components: int) -> float:
        """Return about how many system runs a step takes.

        Args:
            examples: train examples of the step.
            components: how many are trained.
        """

    def evaluation_cost(self, examples: int) -> float:
        """Return the most system runs that an evaluation on some held-out examples takes."""
        return float(examples)

    async def evaluate(
        self, context: RecipeContext, values: Mapping[str, Any], examples: Sequence[Example]
    ) -> list[float]:
        """Return the score of each held-out example with the weights that ``values`` name.

        The system runs as it is declared, not as in rollouts: at its own temperature, one run per example,
        with the same sample index at every step. Runs that were lost have no score.
        """
        traces = await context.task.scorer.traces(values, examples)
        return [trace.score for trace in traces if trace.score is not None and not is_lost(trace.failure)]

    @abstractmethod
    async def collect(self, context: RecipeContext, examples: Sequence[Example]) -> Credited:
        """Make rollouts of some examples and turn them into samples with advantages."""


async def credited_by(recipe: Recipe, context: RecipeContext, examples: Sequence[Example]) -> Credited:
    """Let a recipe, which may be code of a user, make the samples of a step.

    Raises:
        UserCodeError: ``collect`` takes other arguments, is not asynchronous, or returns something else.
    """
    role = f"collect of recipe {type(recipe).__name__!r}"
    check_signature(recipe.collect, role, "context", "examples")
    started: object = recipe.collect(context, examples)
    found = await started if inspect.isawaitable(started) else started
    if found is started or not isinstance(found, Credited):
        raise UserCodeError(
            f"{role} at {definition(recipe.collect)} returned {short(found)}",
            hint="write async def collect(self, context, examples), which returns Credited(samples, scores)",
        )
    return found


@dataclass(frozen=True)
class PolicyRecipe(Recipe):
    """A recipe by advantages from rewards of whole runs, where it says nothing else.

    Attributes:
        settings: how many steps are made, how rollouts are made, and the loss.
    """

    settings: PolicySettings

    @property
    def sampling(self) -> RolloutSettings:
        """How rollouts are made."""
        return self.settings.rollouts

    @property
    def loss(self) -> PolicyObjective:
        """The loss."""
        return self.settings.loss

    def cost(self, examples: int, components: int) -> float:
        """Return the runs of all examples."""
        return examples * self.settings.rollouts.runs


def of_call(function: Callable[[Mapping[str, Any], Mapping[str, Any]], float]) -> Penalty:
    """Return a penalty of calls from one of what they read and returned.

    A call whose reply could not be read pays the function's own ``malformed``, where it has such a number;
    one that failed otherwise pays nothing.

    Raises:
        DeclarationError: when called: the function raised something, or returned no finite number.
    """

    def penalty(call: Call) -> float:
        if call.failure is not None:
            unread = call.tokens and call.failure.kind in (ParseError.kind, OutputTypeError.kind)
            return float(getattr(function, "malformed", 0.0)) if unread else 0.0
        try:
            found = float(function(call.inputs, call.outputs))
        except Exception as error:
            raise DeclarationError(
                f"the penalty of {call.component!r} failed: {located(error, function)}",
                hint="it takes a call's inputs and outputs by name, and returns a number",
            ) from error
        if not math.isfinite(found):
            raise DeclarationError(f"the penalty of {call.component!r} must be finite, but is {found}")
        return found

    return penalty


def learnable(rollouts: Sequence[Rollout]) -> list[Rollout]:
    """Return the rollouts that something can be learned from: those that were not lost."""
    return [rollout for rollout in rollouts if not rollout.lost]


def scores_of(rollouts: Sequence[Rollout]) -> list[float]:
    """Return the global rewards of rollouts."""
    return [rollout.score for rollout in rollouts if not rollout.lost]
