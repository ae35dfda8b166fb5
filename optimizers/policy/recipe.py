"""What tells one way of training weights from another: how rollouts are made, and who gets which credit.

Everything else is shared: sampling, the trainer, checkpoints, budgets
(`compound.optimizers.policy.training`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from compound.contracts import Example
from compound.optimization import Task
from compound.optimizers.policy.rollouts import Rollout, Sampler
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
    """

    sampler: Sampler
    trained: tuple[str, ...]
    settings: WeightSettings
    seed: int
    trainer: Trainer
    task: Task
    kept: dict[str, Any] = field(default_factory=dict)

    @property
    def fallback(self) -> float:
        """The reward of a failed run."""
        return self.sampler.rules.failure_score

    def penalties(self) -> dict[str, Penalty]:
        """Return what is added to the rewards of trained components, by what a call read and returned."""
        wanted = self.settings.penalties.items()
        return {name: _of_call(find_code(path, Path())) for name, path in wanted if name in self.trained}


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
    def local(self) -> bool:
        """Whether rewards are a component's own, and not those of runs."""
        return False

    def cost(self, work_on: int, components: int, settings: WeightSettings) -> float:
        """Return about how many system runs a step takes that works on so many examples."""
        return work_on * settings.runs

    @abstractmethod
    async def collect(self, work: Work, examples: Sequence[Example]) -> Credited:
        """Make rollouts of some examples and turn them into samples with advantages."""


def _of_call(function: Callable[[Mapping[str, Any], Mapping[str, Any]], float]) -> Penalty:
    """Return a penalty of calls; one that returned nothing has none."""
    return lambda call: float(function(call.inputs, call.outputs)) if call.outputs else 0.0


def learnable(rollouts: Sequence[Rollout]) -> list[Rollout]:
    """Return the rollouts that something can be learned from: those that were not lost."""
    return [rollout for rollout in rollouts if not rollout.lost]


def scores_of(rollouts: Sequence[Rollout]) -> list[float]:
    """Return the global rewards of rollouts."""
    return [rollout.score for rollout in rollouts if not rollout.lost]
