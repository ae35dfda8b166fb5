"""PPO and MAPPO: a critic says what to expect, and every token's advantage is what came beyond that.

Runs are whole ones. Their rewards flow back to every call, with the component's own penalty, and stand at
its last token. One value head serves all components; it reads each one's own prompt and tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from pydantic import Field

from compound.concurrency.threads import compute
from compound.example import Example
from compound.optimizers.weights.credit.advantages import check_rewards
from compound.optimizers.weights.credit.gae import explained_variance, gae, whiten
from compound.optimizers.weights.learner.samples import Sample
from compound.optimizers.weights.learner.values import CriticSettings
from compound.optimizers.weights.recipes.propagated import earned
from compound.optimizers.weights.recipes.recipe import (
    Credited,
    Penalties,
    PolicyRecipe,
    PolicySettings,
    RecipeContext,
    Sharing,
    scores_of,
)


class PPOSettings(PolicySettings):
    """Settings of `ppo`."""

    critic: CriticSettings = CriticSettings()
    """The value head, and how advantages are estimated from its values."""
    penalties: Penalties = Field(default={})
    """By component, a function `module:name` of its inputs and outputs. Its value is added to the component's
    reward where rewards flow back through the calls."""


class MAPPOSettings(PPOSettings):
    """Settings of `mappo`."""

    adapters: Sharing = "each"
    """Which components share an adapter: `each` has its own, all have one, or names with their components."""


@dataclass(frozen=True)
class PPO(PolicyRecipe):
    """A critic on whole runs."""

    settings: PPOSettings

    @property
    def critic(self) -> CriticSettings:
        """The settings of the value head."""
        return self.settings.critic

    async def collect(self, context: RecipeContext, examples: Sequence[Example]) -> Credited:
        """Run every example several times; estimate advantages token by token."""
        rollouts = await context.sampler.runs(examples, range(self.settings.rollouts.runs))
        found = earned(context, rollouts, lambda rollout, credit: (), self.settings.penalties)
        samples, facts = await estimated(context, self.settings.critic, found.samples)
        return Credited(samples, scores_of(rollouts), {**found.facts, **facts})


async def estimated(
    context: RecipeContext, settings: CriticSettings, samples: Sequence[Sample]
) -> tuple[list[Sample], dict[str, Any]]:
    """Return samples with advantages by generalized advantage estimation, whitened over the step.

    With `kl_reward`, every token pays for its log-ratio to the base model, besides the sample's reward.

    Besides, as JSON: how much of the returns the value head expected, where that can be said, and the mean of
    the log-ratios.
    """
    check_rewards(samples)
    valued = await compute(context.trainer.values, samples)
    far: list[tuple[float, ...]] = [()] * len(valued)
    if settings.kl_reward:
        far = await compute(context.trainer.divergences, valued)
    found = []
    for sample, kl in zip(valued, far, strict=True):
        if len(sample.values) != sample.length:  # it is too long: the trainer leaves it out, and counts it
            found.append(sample)
            continue
        gains, returns = gae(
            sample.values, sample.reward,
            gamma=settings.gamma, lam=settings.lam, kl=kl, beta=settings.kl_reward,
        )  # fmt: skip
        found.append(replace(sample, advantages=tuple(gains), returns=tuple(returns)))
    white = whiten([sample.advantages for sample in found])
    known = [s for s in found if s.returns]
    explained = explained_variance([s.values for s in known], [s.returns for s in known])
    facts = {} if explained is None else {"explained": explained}
    if tokens := [value for kl in far for value in kl]:
        facts["kl_to_base"] = fmean(tokens)
    return [replace(s, advantages=tuple(row)) for s, row in zip(found, white, strict=True)], facts
