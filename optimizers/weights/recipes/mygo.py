"""MyGO: imitate attempts whose reward reaches a rising threshold, by maximum likelihood.

An attempt is a whole run. All answers of trained components in an accepted attempt are imitated, of planner
and workers alike. An example is attempted until enough attempts are accepted or the maximum is reached.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Literal, Self

from pydantic import Field, model_validator

from compound.example import Example
from compound.graph.system import System
from compound.optimizers.weights.credit.grouping import trajectory_samples
from compound.optimizers.weights.credit.threshold import Selection, raise_threshold, select
from compound.optimizers.weights.learner.samples import SamplingSettings
from compound.optimizers.weights.loss.objective import ImitationObjective, ImitationObjectiveField
from compound.optimizers.weights.recipes.recipe import (
    CreditedSamples,
    Recipe,
    RecipeContext,
    Sharing,
    TrainingSettings,
    learnable,
    scores_of,
)
from compound.optimizers.weights.recipes.rollouts import Rollout
from compound.storage.artifacts import is_reference
from compound.storage.state import State

# The threshold never falls, so the mean of a small batch would raise it to that of the luckiest batch. It is
# therefore averaged over the last first attempts, and weighs less until there are some. A batch of the
# paper's 1,000 questions counts alone, as in the paper.
AVERAGED = 256  # first attempts that the mean covers, or the batch if it is larger
ASSUMED = 16  # first attempts that the initial threshold counts as


class MyGOSettings(TrainingSettings):
    """Settings of `mygo`."""

    rollouts: SamplingSettings = SamplingSettings()
    """Sampling of attempts."""
    loss: ImitationObjectiveField = ImitationObjective()
    """The loss: `sft` or `sft_sum`."""
    adapters: Sharing = "each"
    """Adapters: `each` (one per component), `shared` (one for all), or a mapping from adapter names to the
    components that share them."""
    attempts: int = Field(default=16, ge=1)
    """Maximum number of attempts at an example."""
    keep: int = Field(default=3, ge=1)
    """Number of accepted attempts per example to train on."""
    threshold: float = Field(default=0.5)
    """Initial threshold: the minimum reward of an accepted attempt."""
    max_reward: float = Field(default=1.0, gt=0)
    """Maximum reward of the metric; the threshold rises towards it."""
    rule: Literal["halved", "fixed", "paper"] = "halved"
    """Rule for raising the threshold: `halved`, to half way between the mean reward of first attempts and
    `max_reward`; `fixed`, never; or `paper`, by the formula as printed in the paper."""
    pace: float = Field(default=1.0, gt=0, le=1)
    """Fraction of the increase that is applied in each step. The mean reward of first attempts is averaged
    over the last 256 of them, so small batches need no lower value."""
    online: bool = True
    """Whether the current weights make the attempts; otherwise the weights at the start of the job, or after
    its cold start."""
    cold_start: int = Field(default=0, ge=0)
    """Number of attempts with the maximum reward to imitate before the threshold is used (300 in the
    paper)."""

    @model_validator(mode="after")
    def _reachable(self) -> Self:
        """Check that the threshold is not above the maximum reward."""
        if self.threshold > self.max_reward:
            raise ValueError(
                f"threshold {self.threshold:g} is above max_reward {self.max_reward:g}, the highest reward"
            )
        return self


class MyGOState(State):
    """State of `MyGO` between steps.

    Attributes:
        imitated: the number of attempts imitated in the cold start.
        threshold: the threshold of the last step; ``None`` before the first step.
        mean: the mean reward of the last first attempts; ``None`` before the first step.
        seen: the number of first attempts that ``mean`` covers.
        policy: the fixed weights of offline attempts; ``None`` until they are fixed.
    """

    imitated: int = 0
    threshold: float | None = None
    mean: float | None = None
    seen: int = ASSUMED
    policy: dict[str, dict[str, str] | None] | None = None


@dataclass(frozen=True)
class MyGO(Recipe):
    """Recipe of progressive rejection fine-tuning."""

    settings: MyGOSettings

    @property
    def sampling(self) -> SamplingSettings:
        """The settings of attempts."""
        return self.settings.rollouts

    @property
    def loss(self) -> ImitationObjective:
        """The loss."""
        return self.settings.loss

    def cost(self, examples: int, components: int) -> float:
        """Return the maximum cost: every attempt at every example."""
        return examples * self.settings.attempts

    async def collect(self, context: RecipeContext, examples: Sequence[Example]) -> CreditedSamples:
        """Attempt the examples, and return samples of the attempts that reach the threshold."""
        settings, state = self.settings, context.recall(MyGOState)
        warming = state.imitated < settings.cold_start
        system = None if settings.online else self._offline_system(context, state)
        attempts = await self._first_attempts(context, examples, system)
        first = scores_of([rollouts[0] for rollouts in attempts.values()])
        threshold = settings.max_reward if warming else self._next_threshold(state, first)
        # the rule `paper` accepts no attempt with the maximum reward, so a cold start would never end
        rule = "fixed" if warming else self._rule
        await self._attempt_again(context, attempts, system, threshold, rule)
        numbers = self._select(attempts, threshold, rule).kept
        chosen = [attempts[example][number] for example in attempts for number in numbers[example]]
        samples = [
            sample.with_advantage(1.0)
            for rollout in chosen
            for sample in trajectory_samples(rollout.trace, context.trained, rollout=rollout.number)
            # answers of failed calls were not used by the rest of the run
            if rollout.trace.call(sample.address).failure is None
        ]
        if warming:
            state.imitated += len(chosen)
            state.policy = None
        else:
            state.threshold = threshold
        context.keep(state)
        count = sum(map(len, attempts.values()))
        facts = {"threshold": threshold, "attempts": count, "kept": len(chosen), "warming": warming}
        answers = [
            sample
            for rollout in learnable([rollouts[0] for rollouts in attempts.values()])
            for sample in trajectory_samples(rollout.trace, context.trained, fallback=context.fallback)
        ]
        return CreditedSamples(samples, first, facts, answers)

    @staticmethod
    async def _first_attempts(
        context: RecipeContext, examples: Sequence[Example], system: System | None
    ) -> dict[str, list[Rollout]]:
        """Return the first attempt at each example, by which the threshold is raised."""
        rollouts = await context.sampler.attempts([(example, 0) for example in examples], system)
        return {rollout.example.id: [rollout] for rollout in rollouts}

    def _next_threshold(self, state: MyGOState, first: Sequence[float]) -> float:
        """Return the threshold of this step's attempts.

        It is the previous threshold, raised by the rewards of the last first attempts, whose mean is updated
        in the state; unchanged if all of this step's were lost to transient errors.
        """
        settings = self.settings
        before = settings.threshold if state.threshold is None else state.threshold
        if not first:
            return before
        goal = raise_threshold(before, first, supremum=settings.max_reward, rule=self._rule)
        if self._rule == "halved":
            mean = 2 * before - settings.max_reward if state.mean is None else state.mean
            state.seen = max(len(first), min(state.seen + len(first), AVERAGED))
            state.mean = mean + len(first) / state.seen * (fmean(first) - mean)
            goal = raise_threshold(before, [state.mean], supremum=settings.max_reward)
        return before + settings.pace * (goal - before)

    async def _attempt_again(
        self,
        context: RecipeContext,
        attempts: dict[str, list[Rollout]],
        system: System | None,
        threshold: float,
        rule: str,
    ) -> None:
        """Attempt the examples again until enough attempts of each are accepted or the maximum is reached.

        An example that needs n more accepted attempts gets n at once, so concurrency never causes more
        attempts than running them one by one.
        """
        while lacking := self._lacking(attempts, threshold, rule):
            wanted = [
                (rollouts[0].example, len(rollouts) + number)
                for example, rollouts in attempts.items()
                for number in range(lacking.get(example, 0))
            ]
            for rollout in await context.sampler.attempts(wanted, system):
                attempts[rollout.example.id].append(rollout)

    def _lacking(
        self, attempts: Mapping[str, Sequence[Rollout]], threshold: float, rule: str
    ) -> dict[str, int]:
        """Return the number of attempts to make next, by example; only examples that need more."""
        selection, settings = self._select(attempts, threshold, rule), self.settings
        return {
            example: min(
                settings.keep - len(selection.kept[example]), settings.attempts - len(attempts[example])
            )
            for example in selection.unfinished
        }

    def _select(self, attempts: Mapping[str, Sequence[Rollout]], threshold: float, rule: str) -> Selection:
        """Return the accepted attempts and the examples that need more; failed runs are never accepted."""
        rewards = {
            example: [r.score if r.trace.failure is None else -math.inf for r in rollouts]
            for example, rollouts in attempts.items()
        }
        most, keep = self.settings.attempts, self.settings.keep
        return select(rewards, threshold, keep=keep, most=most, rule=rule)

    @staticmethod
    def _offline_system(context: RecipeContext, state: MyGOState) -> System:
        """Return the system with the fixed weights of offline attempts; fix the current ones if unset."""
        current = context.sampler.system.configuration
        if state.policy is None:
            weights = {f"{name}.weights": current[f"{name}.weights"] for name in context.trained}
            state.policy = {
                key: dict(value) if is_reference(value) else None for key, value in weights.items()
            }
        return context.sampler.system.bind({**current, **state.policy})

    @property
    def _rule(self) -> str:
        """The rule for raising the threshold; offline it is fixed, since the policy does not improve."""
        return self.settings.rule if self.settings.online else "fixed"
