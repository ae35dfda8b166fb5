"""Prompt-R1: multi-turn interaction of an agent with an environment, with one reward per conversation.

Every turn of a conversation is a sample with the conversation's reward. Group statistics count each
conversation once, regardless of its number of turns. So does the loss `grpo`: it is the mean over
conversations of the mean over their tokens (equations 14 and 15). The published code uses the mean over all
tokens, which is the loss `dapo`. Replies of the environment are part of the prompts and have no loss.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from compound.example import Example
from compound.optimizers.weights.credit.advantages import advantages
from compound.optimizers.weights.credit.grouping import trajectory_samples
from compound.optimizers.weights.learner.samples import Group, Sample
from compound.optimizers.weights.recipes.groups import GroupRecipe
from compound.optimizers.weights.recipes.recipe import (
    CreditedSamples,
    GroupSettings,
    RecipeContext,
    Sharing,
    learnable,
    scores_of,
)
from compound.optimizers.weights.recipes.rollouts import Rollout


class PromptR1Settings(GroupSettings):
    """Settings of `prompt_r1`."""

    adapters: Sharing = "each"
    """Adapters: `each` (one per component), `shared` (one for all), or a mapping from adapter names to the
    components that share them."""


@dataclass(frozen=True)
class PromptR1(GroupRecipe):
    """Recipe that compares whole conversations; groups are keyed by (example, agent)."""

    settings: PromptR1Settings

    async def draw(self, context: RecipeContext, examples: Sequence[Example]) -> list[Rollout]:
        """Run every example several times."""
        return await context.sampler.runs(examples, range(self.settings.rollouts.runs))

    async def credit(self, context: RecipeContext, rollouts: Sequence[Rollout]) -> CreditedSamples:
        """Compare the conversations."""
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
        trained, facts = advantages(samples, self.settings.scale, references=rollout_rewards(samples))
        return CreditedSamples(trained, scores_of(rollouts), asdict(facts), samples)


def rollout_rewards(samples: Sequence[Sample]) -> Mapping[Group, tuple[float, ...]]:
    """Return the rewards of the rollouts of each group, one per rollout."""
    found: dict[Group, dict[int, float]] = {}
    for sample in samples:
        found.setdefault(sample.group, {})[sample.rollout] = sample.reward
    return {group: tuple(rewards.values()) for group, rewards in found.items()}
