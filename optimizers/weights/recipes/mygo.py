"""MyGO: imitate attempts whose reward reaches a rising threshold, by maximum likelihood.

An attempt is a whole run. All answers of trained components in an accepted attempt are imitated, of
planner and workers alike. An example is attempted until it has enough accepted attempts or has used
up its attempts (section 3.3 and appendix D.1 of the paper).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Self

from pydantic import Field, model_validator

from compound.core.errors import DeclarationError
from compound.core.example import Example
from compound.core.storage.state import State
from compound.optimizers.weights.credit import trajectory_samples
from compound.optimizers.weights.learner.losses import ImitationObjective, ImitationObjectiveField
from compound.optimizers.weights.recipes.recipe import (
    CreditedSamples,
    Recipe,
    RecipeContext,
    SharedAdapters,
    TrainingSettings,
    samples_of,
    scores_of,
)
from compound.optimizers.weights.recipes.rollouts import Rollout

# The threshold never falls, so the mean of a small batch would raise it to that of the luckiest
# batch. It is therefore averaged over the last first attempts, and weighs less until there are
# some. A batch of the paper's 1,000 questions counts alone, as in the paper.
AVERAGED = 256  # first attempts that the mean covers, or the batch if it is larger
ASSUMED = 16  # first attempts that the initial threshold counts as


class MyGOSettings(TrainingSettings, SharedAdapters):
    """Settings of `mygo`."""

    loss: ImitationObjectiveField = ImitationObjective()
    """The loss: `sft` or `sft_sum`."""
    attempts: int = Field(default=16, ge=1)
    """Maximum number of attempts at an example."""
    keep: int = Field(default=3, ge=1)
    """Number of accepted attempts per example to train on."""
    threshold: float = Field(default=0.5)
    """Initial threshold: the minimum reward of an accepted attempt."""
    max_reward: float = Field(default=1.0, gt=0)
    """Maximum reward of the metric; the threshold rises towards it."""
    pace: float = Field(default=1.0, gt=0, le=1)
    """Fraction of the way by which each step raises the threshold to half way between the mean reward of
    the last 256 first attempts and `max_reward`."""
    cold_start: int = Field(default=0, ge=0)
    """Number of attempts with the maximum reward to imitate before the threshold is used (300 in the
    paper)."""

    @model_validator(mode="after")
    def _reachable(self) -> Self:
        if self.threshold > self.max_reward:
            raise ValueError(
                f"threshold {self.threshold:g} is above max_reward {self.max_reward:g}, the highest reward"
            )
        return self


class MyGOState(State):
    """State of `MyGO` between steps."""

    imitated: int = 0  # attempts in the cold start
    threshold: float | None = None  # of the last step
    mean: float | None = None  # of the last first attempts
    seen: int = ASSUMED  # first attempts that the mean covers


@dataclass(frozen=True)
class MyGO(Recipe):
    """Recipe of progressive rejection fine-tuning."""

    settings: MyGOSettings

    def cost(self, examples: int, components: int) -> float:
        """Return the maximum cost: every attempt at every example."""
        return examples * self.settings.attempts

    async def collect(self, context: RecipeContext, examples: Sequence[Example]) -> CreditedSamples:
        """Attempt the examples, and return samples of the attempts that reach the threshold."""
        settings, state = self.settings, context.recall(MyGOState)
        warming = state.imitated < settings.cold_start
        rollouts = await context.sampler.runs(examples, [0])
        attempts = {rollout.example.id: [rollout] for rollout in rollouts}
        first, answers = scores_of(rollouts), samples_of(context, rollouts)
        threshold = settings.max_reward if warming else self._next_threshold(state, first)
        await self._attempt_again(context, attempts, threshold)
        chosen = [run for own in attempts.values() for run in self._accepted(own, threshold)]
        samples = [
            sample.with_advantage(1.0)
            for run in chosen
            for sample in trajectory_samples(run.trace, context.trained, rollout=run.number)
            # answers of failed calls were not used by the rest of the run
            if run.trace.call(sample.address).failure is None
        ]
        if warming:
            state.imitated += len(chosen)
        else:
            state.threshold = threshold
        context.keep(state)
        count = sum(map(len, attempts.values()))
        facts = {"threshold": threshold, "attempts": count, "kept": len(chosen), "warming": warming}
        return CreditedSamples(samples, first, facts, answers)

    def _next_threshold(self, state: MyGOState, first: Sequence[float]) -> float:
        """Return the threshold of this step's attempts.

        It is the previous threshold, raised by the rewards of the last first attempts, whose mean
        is updated in the state; unchanged if all of this step's were lost to transient errors.
        """
        settings, most = self.settings, self.settings.max_reward
        before = settings.threshold if state.threshold is None else state.threshold
        for reward in first:
            if not math.isfinite(reward) or not _reaches(most, reward):
                raise DeclarationError(
                    f"rewards and thresholds are at most {most}, but one is {reward}",
                    hint="set optimize.mygo.max_reward to the highest score that the metric can return",
                )
        if not first:
            return before
        mean = 2 * before - most if state.mean is None else state.mean
        state.seen = max(len(first), min(state.seen + len(first), AVERAGED))
        state.mean = mean + len(first) / state.seen * (fmean(first) - mean)
        return before + settings.pace * (raised_threshold(before, state.mean, most) - before)

    async def _attempt_again(
        self, context: RecipeContext, attempts: dict[str, list[Rollout]], threshold: float
    ) -> None:
        """Attempt the examples again until enough attempts of each are accepted or the maximum is reached.

        An example that needs n more accepted attempts gets n at once, so concurrency never causes
        more attempts than running them one by one.
        """
        while True:
            wanted = list[tuple[Example, int]]()
            for own in attempts.values():
                missing = self.settings.keep - len(self._accepted(own, threshold))
                end = min(self.settings.attempts, len(own) + missing)
                wanted += [(own[0].example, number) for number in range(len(own), end)]
            if not wanted:
                return
            for rollout in await context.sampler.attempts(wanted):
                attempts[rollout.example.id].append(rollout)

    def _accepted(self, attempts: Sequence[Rollout], threshold: float) -> list[Rollout]:
        good = [r for r in attempts if r.trace.failure is None and _reaches(r.score, threshold)]
        return good[: self.settings.keep]


def raised_threshold(previous: float, mean: float, most: float = 1.0) -> float:
    """Return the threshold half way from a mean reward to the maximum; it never falls.

    The formula as printed in the paper, max(K', (mean / most + 1) most), is at least the maximum if
    no reward is negative, and the paper requires rewards above the threshold, so it accepts
    nothing.

    >>> raised_threshold(0.5, 0.4), raised_threshold(0.9, 0.4)
    (0.7, 0.9)
    """
    return min(max(previous, (mean + most) / 2), most)


def _reaches(reward: float, threshold: float) -> bool:
    # rewards are often sums of floats: 0.7 + 0.2 + 0.1 is less than 1.0
    return reward >= threshold or math.isclose(reward, threshold)
