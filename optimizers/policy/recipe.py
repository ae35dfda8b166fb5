"""What tells one way of training weights from another: how rollouts are made, and who gets which credit.

Everything else is shared: sampling, the trainer, checkpoints, budgets
(`compound.optimizers.policy.training`).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from compound.contracts import Example
from compound.errors import DeclarationError, OutputTypeError, ParseError
from compound.optimization import Task
from compound.optimizers.policy.rollouts import Rollout, Sampler, is_lost
from compound.optimizers.policy.samples import Sample
from compound.optimizers.policy.trainer import Trainer
from compound.settings import WeightSettings
from compound.spec.python_code import find_code
from compound.trace import Call

Penalty = Callable[[Call], float]


@dataclass(frozen=True)
class Work:
    """What a recipe works with in one step.

    Attributes:
        sampler: makes rollouts with the present weights.
        trained: the components whose weights are trained, in the order of the system.
        settings: how.
        seed: names the step's random streams.
        trainer: knows the value head.
        task: the job, for recipes that need more of it.
        kept: JSON that the recipe keeps from step to step; it may change it in place.
        folder: where code and files that the settings name are looked for.
    """

    sampler: Sampler
    trained: tuple[str, ...]
    settings: WeightSettings
    seed: int
    trainer: Trainer
    task: Task
    kept: dict[str, Any] = field(default_factory=dict)
    folder: Path = Path()

    @property
    def fallback(self) -> float:
        """The reward of a failed run."""
        return self.sampler.rules.failure_score

    def penalties(self) -> dict[str, Penalty]:
        """Return what is added to the rewards of trained components, by what a call read and returned."""
        wanted = self.settings.penalties.items()
        return {name: of_call(find_code(path, self.folder)) for name, path in wanted if name in self.trained}


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


class Recipe(ABC):
    """One way of training weights: by advantages from rewards of whole runs, where it says nothing else."""

    @property
    def critic(self) -> bool:
        """Whether there is a value head."""
        return False

    @property
    def likelihood(self) -> bool:
        """Whether samples are imitated, and not weighed by advantages."""
        return False

    @property
    def compares(self) -> bool:
        """Whether samples are compared with each other, so that one alone says nothing."""
        return not self.critic and not self.likelihood

    @property
    def local(self) -> bool:
        """Whether rewards are a component's own, and not those of runs."""
        return False

    def cost(self, work_on: int, components: int, settings: WeightSettings) -> float:
        """Return about how many system runs a step takes that works on so many examples."""
        return work_on * settings.runs

    def evaluation_cost(self, examples: int) -> float:
        """Return how many system runs an evaluation on so many held-out examples takes at most."""
        return float(examples)

    async def evaluate(
        self, work: Work, values: Mapping[str, Any], examples: Sequence[Example]
    ) -> list[float]:
        """Return the score of each held-out example with the weights that ``values`` name.

        The system runs as it is declared, not as in rollouts: at its own temperature, one run per example,
        with the same sample index at every step. Runs that were lost have no score.
        """
        traces = await work.task.scorer.traces(values, examples)
        return [trace.score for trace in traces if trace.score is not None and not is_lost(trace.failure)]

    @abstractmethod
    async def collect(self, work: Work, examples: Sequence[Example]) -> Credited:
        """Make rollouts of some examples and turn them into samples with advantages."""


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
                f"the penalty of {call.component!r} failed: {type(error).__name__}: {error}",
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
