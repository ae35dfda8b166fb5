"""MyGO: attempts that are good enough are imitated, by plain maximum likelihood, and the bar rises.

An attempt is a whole run; where it is kept, everything that trained components said in it is imitated,
planner and workers alike. Attempts go on until enough of an example's are kept, or the most are made.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Self

from pydantic import Field, model_validator

from compound.example import Example
from compound.graph.system import System
from compound.optimizers.weights.credit.grouping import trajectory_samples
from compound.optimizers.weights.credit.threshold import Selection, raise_threshold, select
from compound.optimizers.weights.learner.samples import SamplingSettings
from compound.optimizers.weights.loss.objective import ImitationObjective, ImitationObjectiveField
from compound.optimizers.weights.recipes.recipe import (
    Credited,
    Recipe,
    RecipeContext,
    Sharing,
    TrainingSettings,
    scores_of,
)
from compound.optimizers.weights.recipes.rollouts import Rollout
from compound.storage.artifacts import is_reference
from compound.storage.state import State


class MyGOSettings(TrainingSettings):
    """Settings of `mygo`."""

    rollouts: SamplingSettings = SamplingSettings()
    """How attempts are made."""
    loss: ImitationObjectiveField = ImitationObjective()
    """The loss: `sft` or `sft_sum`."""
    adapters: Sharing = "each"
    """Which components share an adapter: `each` has its own, all have one, or names with their components."""
    attempts: int = Field(default=16, ge=1)
    """The most attempts at an example."""
    keep: int = Field(default=3, ge=1)
    """Attempts of an example that are trained on."""
    threshold: float = Field(default=0.5)
    """The reward from which an attempt is kept, at first."""
    max_reward: float = Field(default=1.0, gt=0)
    """The highest possible reward: the threshold rises towards it."""
    rule: Literal["halved", "fixed", "paper"] = "halved"
    """How the threshold rises: `halved`, half way from the mean reward of first attempts to the highest
    reward; `fixed`, not at all; or `paper`, by the formula as printed."""
    pace: float = Field(default=1.0, gt=0, le=1)
    """The share of that way that the threshold rises in a step: small batches need more steps than the
    paper's."""
    online: bool = True
    """Whether attempts are made by the present weights; otherwise by those at the start of the job, or after
    its cold start."""
    cold_start: int = Field(default=0, ge=0)
    """Attempts with the highest reward that are imitated before anything else (300 in the paper)."""

    @model_validator(mode="after")
    def _reachable(self) -> Self:
        """Refuse a threshold that no attempt can reach."""
        if self.threshold > self.max_reward:
            raise ValueError(
                f"threshold {self.threshold:g} is above max_reward {self.max_reward:g}, the highest reward"
            )
        return self


class MyGOState(State):
    """What is kept from step to step.

    Attributes:
        imitated: attempts that were imitated in the cold start.
        threshold: that of the last step; ``None`` before the first one.
        policy: the weights that attempts are made with offline; ``None`` where they are not fixed yet.
    """

    imitated: int = 0
    threshold: float | None = None
    policy: dict[str, dict[str, str] | None] | None = None


@dataclass(frozen=True)
class MyGO(Recipe):
    """Progressive rejection fine-tuning."""

    settings: MyGOSettings

    @property
    def sampling(self) -> SamplingSettings:
        """How attempts are made."""
        return self.settings.rollouts

    @property
    def loss(self) -> ImitationObjective:
        """The loss."""
        return self.settings.loss

    def cost(self, examples: int, components: int) -> float:
        """Return the most: every attempt at every example."""
        return examples * self.settings.attempts

    async def collect(self, context: RecipeContext, examples: Sequence[Example]) -> Credited:
        """Attempt the examples; keep the attempts that reach the threshold."""
        settings, state = self.settings, context.recall(MyGOState)
        warming = state.imitated < settings.cold_start
        system = None if settings.online else self._first(context, state)
        attempts = await self._first_pass(context, examples, system)
        first = scores_of([rollouts[0] for rollouts in attempts.values()])
        bar = settings.max_reward if warming else self._raised(state, first)
        await self._more(context, attempts, system, bar)
        numbers = self._selected(attempts, bar).kept
        chosen = [attempts[example][number] for example in attempts for number in numbers[example]]
        samples = [
            sample.with_advantage(1.0)
            for rollout in chosen
            for sample in trajectory_samples(rollout.trace, context.trained, rollout=rollout.number)
            if rollout.trace.call(sample.address).failure is None  # what nobody read is not to be imitated
        ]
        if warming:
            state.imitated += len(chosen)
            state.policy = None
        else:
            state.threshold = bar
        context.keep(state)
        made = sum(map(len, attempts.values()))
        facts = {"threshold": bar, "attempts": made, "kept": len(chosen), "warming": warming}
        return Credited(samples, first, facts)

    @staticmethod
    async def _first_pass(
        context: RecipeContext, examples: Sequence[Example], system: System | None
    ) -> dict[str, list[Rollout]]:
        """Return the first attempt at each example: what the step's threshold is raised by."""
        made = await context.sampler.attempts([(example, 0) for example in examples], system)
        return {rollout.example.id: [rollout] for rollout in made}

    def _raised(self, state: MyGOState, first: Sequence[float]) -> float:
        """Return the threshold that the step's own attempts must reach.

        That of the step before, raised by what this step's first attempts earned. It stays where all of them
        were lost.
        """
        settings = self.settings
        before = settings.threshold if state.threshold is None else state.threshold
        if not first:
            return before
        goal = raise_threshold(before, first, supremum=settings.max_reward, rule=self._rule)
        return before + settings.pace * (goal - before)

    async def _more(
        self, context: RecipeContext, attempts: dict[str, list[Rollout]], system: System | None, bar: float
    ) -> None:
        """Attempt the examples again until enough attempts of each are kept, or the most are made.

        An example that lacks some kept ones makes as many attempts at once: never one more than if it had
        made one after the other.
        """
        while lacking := self._lacking(attempts, bar):
            wanted = [
                (rollouts[0].example, len(rollouts) + number)
                for example, rollouts in attempts.items()
                for number in range(lacking.get(example, 0))
            ]
            for rollout in await context.sampler.attempts(wanted, system):
                attempts[rollout.example.id].append(rollout)

    def _lacking(self, attempts: Mapping[str, Sequence[Rollout]], bar: float) -> dict[str, int]:
        """Return how many attempts each example may need, and make, to have enough of them kept."""
        selection, settings = self._selected(attempts, bar), self.settings
        return {
            example: min(
                settings.keep - len(selection.kept[example]), settings.attempts - len(attempts[example])
            )
            for example in selection.wanting
        }

    def _selected(self, attempts: Mapping[str, Sequence[Rollout]], bar: float) -> Selection:
        """Return which attempts are kept, and which examples need more; a failed run is never kept."""
        rewards = {
            example: [r.score if r.trace.failure is None else -math.inf for r in rollouts]
            for example, rollouts in attempts.items()
        }
        most, keep = self.settings.attempts, self.settings.keep
        return select(rewards, bar, keep=keep, most=most, rule=self._rule)

    @staticmethod
    def _first(context: RecipeContext, state: MyGOState) -> System:
        """Return what attempts are made with offline: the policy after the cold start, or the job's first."""
        present = context.sampler.system.configuration
        if state.policy is None:
            weights = {f"{name}.weights": present[f"{name}.weights"] for name in context.trained}
            state.policy = {
                key: dict(value) if is_reference(value) else None for key, value in weights.items()
            }
        return context.sampler.system.bind({**present, **state.policy})

    @property
    def _rule(self) -> str:
        """How the threshold rises: not at all where attempts are those of one policy."""
        return self.settings.rule if self.settings.online else "fixed"
