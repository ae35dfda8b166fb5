"""Prompt-R1: an agent that talks to an environment, rewarded for the conversation as a whole.

Every turn of a conversation is a sample with the conversation's reward. The statistics of a group count each
conversation once, however many turns it had. So does the loss `grpo`: it is the mean over conversations of
the mean over their tokens (equations 14 and 15). The published code takes the mean over all tokens, which is
the loss `dapo`. What the environment says is in the prompts and carries no loss.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from compound.example import Example
from compound.optimizers.weights.credit.advantages import advantages
from compound.optimizers.weights.credit.grouping import trajectory_samples
from compound.optimizers.weights.learner.samples import Group, Sample
from compound.optimizers.weights.recipes.recipe import (
    Credited,
    GroupSettings,
    PolicyRecipe,
    RecipeContext,
    Sharing,
    learnable,
    scores_of,
)


class PromptR1Settings(GroupSettings):
    """Settings of `prompt_r1`."""

    adapters: Sharing = "each"
    """Which components share an adapter: `each` has its own, all have one, or names with their components."""


@dataclass(frozen=True)
class PromptR1(PolicyRecipe):
    """Groups of whole conversations: (example, agent)."""

    settings: PromptR1Settings

    async def collect(self, context: RecipeContext, examples: Sequence[Example]) -> Credited:
        """Run every example several times and compare the conversations."""
        rollouts = await context.sampler.runs(examples, range(self.settings.rollouts.runs))
        samples = [
            replace(
                sample,
                group=(sample.example, sample.component),
                unit=(sample.example, sample.component, sample.rollout),
            )
            for rollout in learnable(rollouts)
            for sample in trajectory_samples(
                rollout.trace, context.trained, rollout=rollout.number, fallback=context.fallback
            )
        ]
        trained, facts = advantages(samples, self.settings.scale, references=once_each(samples))
        return Credited(trained, scores_of(rollouts), asdict(facts))


def once_each(samples: Sequence[Sample]) -> Mapping[Group, tuple[float, ...]]:
    """Return the rewards of each group's rollouts, each rollout once."""
    found: dict[Group, dict[int, float]] = {}
    for sample in samples:
        found.setdefault(sample.group, {})[sample.rollout] = sample.reward
    return {group: tuple(rewards.values()) for group, rewards in found.items()}
