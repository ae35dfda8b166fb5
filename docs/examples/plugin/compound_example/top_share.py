"""A training recipe: imitate the best runs of each example."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pydantic import Field

import compound as cp
from compound.optimizers.weights.credit import trajectory_samples
from compound.optimizers.weights.learner.losses import ImitationObjective
from compound.optimizers.weights.recipes.recipe import (
    CreditedSamples,
    RecipeContext,
    TrainingSettings,
    learnable,
    scores_of,
)
from compound.optimizers.weights.recipes.rollouts import RolloutSettings


class TopShareSettings(TrainingSettings):
    """Settings of `top_share`."""

    share: float = Field(default=0.25, gt=0, le=1)
    """The share of the runs of each example that is imitated."""
    rollouts: RolloutSettings = RolloutSettings()
    """How runs are made."""
    loss: ImitationObjective = ImitationObjective()
    """The loss."""


@cp.ext.recipe(settings=TopShareSettings)
@dataclass(frozen=True)
class TopShare(cp.ext.Recipe):
    """Imitate the best runs of each example by maximum likelihood."""

    settings: TopShareSettings

    def cost(self, examples: int, components: int) -> float:
        """Return the system runs of a step."""
        return examples * self.settings.rollouts.runs

    async def collect(
        self, context: RecipeContext, examples: Sequence[cp.Example]
    ) -> CreditedSamples:
        """Run each example several times, and keep the best runs."""
        rollouts = await context.sampler.runs(examples, range(self.settings.rollouts.runs))
        samples, answers = [], []
        for example in examples:
            runs = [
                r
                for r in learnable(rollouts)
                if r.example.id == example.id and r.trace.failure is None
            ]
            runs.sort(key=lambda rollout: rollout.score, reverse=True)
            for rollout in runs[: max(1, round(self.settings.share * len(runs)))]:
                found = trajectory_samples(rollout.trace, context.trained, rollout=rollout.number)
                samples += [sample.with_advantage(1.0) for sample in found]
        for rollout in learnable(
            rollouts
        ):  # metrics describe all answers, also those that are not imitated
            answers += trajectory_samples(rollout.trace, context.trained, fallback=context.fallback)
        return CreditedSamples(samples, scores_of(rollouts), {"imitated": len(samples)}, answers)
