"""PPO and MAPPO: token-level advantages from a critic, by generalized advantage estimation.

The reward of a whole run is propagated back to every call, plus the component's penalty, and given
at the call's last token. One value head serves all components, and sees each component's own prompt
and tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from pydantic import Field

from compound.core.example import Example
from compound.core.threads import compute
from compound.optimizers.weights.credit import (
    check_rewards,
    explained_variance,
    gae,
    whiten,
)
from compound.optimizers.weights.learner.losses import (
    ClippedLoss,
    PolicyObjective,
    PolicyObjectiveField,
)
from compound.optimizers.weights.learner.samples import Sample
from compound.optimizers.weights.learner.updates import CriticSettings
from compound.optimizers.weights.recipes.recipe import (
    CreditedSamples,
    PenaltySettings,
    PolicyRecipe,
    PolicySettings,
    RecipeContext,
    SharedAdapters,
    propagated_samples,
    scores_of,
)


class PPOSettings(PolicySettings, PenaltySettings):
    """Settings of `ppo`."""

    loss: PolicyObjectiveField = PolicyObjective(dapo=ClippedLoss())
    """The loss: a name, or a name with its settings; `dapo` by default, the mean over tokens as in PPO."""
    critic: CriticSettings = CriticSettings()
    """The value head, and the estimation of advantages from its values."""


class LocalCriticSettings(CriticSettings):
    """The value head of PPO by a local reward, with a KL penalty by default."""

    kl_reward: float = Field(default=0.05, ge=0)
    """Coefficient of the KL penalty in the per-token reward: the log-ratio of the policy to the base model,
    adapter off (0.05 in TRL's PPO). It keeps the answers close to those that the local reward was learned
    from. The `beta` of a loss adds a KL term to the loss instead."""


class LocalPPOSettings(PPOSettings):
    """Settings of PPO by a local reward."""

    critic: LocalCriticSettings = LocalCriticSettings()
    """The value head, and the estimation of advantages from its values."""


class MAPPOSettings(PPOSettings, SharedAdapters):
    """Settings of `mappo`."""


@dataclass(frozen=True)
class PPO(PolicyRecipe):
    """Recipe that estimates advantages of whole runs with a critic."""

    settings: PPOSettings

    async def collect(self, context: RecipeContext, examples: Sequence[Example]) -> CreditedSamples:
        """Run every example several times, and estimate the advantage of every token."""
        rollouts = await context.sampler.runs(examples, range(self.settings.rollouts.runs))
        samples, propagated = propagated_samples(
            context, rollouts, lambda rollout, credit: (), self.settings.penalties
        )
        valued, facts = await estimate_advantages(context, self.settings.critic, samples)
        return CreditedSamples(valued, scores_of(rollouts), {**propagated, **facts})


async def estimate_advantages(
    context: RecipeContext, settings: CriticSettings, samples: Sequence[Sample]
) -> tuple[list[Sample], dict[str, Any]]:
    """Return the samples with advantages by generalized advantage estimation, whitened over the step.

    With `kl_reward`, the reward of every token includes a penalty on its log-ratio to the base
    model.
    """
    check_rewards(samples)
    async with context.trainer_turn():
        valued = await compute(context.trainer.values, samples)
        log_ratios: list[tuple[float, ...]] = [()] * len(valued)
        if settings.kl_reward:
            log_ratios = await compute(context.trainer.divergences, valued)
    estimated = []
    for sample, kl in zip(valued, log_ratios, strict=True):
        # too long: the trainer excludes and counts the sample
        if len(sample.values) != sample.length:
            estimated.append(sample)
            continue
        gains, returns = gae(
            sample.values,
            sample.reward,
            gamma=settings.gamma,
            lam=settings.lam,
            kl=kl,
            beta=settings.kl_reward,
        )
        estimated.append(replace(sample, advantages=tuple(gains), returns=tuple(returns)))
    white = whiten([sample.advantages for sample in estimated])
    known = [s for s in estimated if s.returns]
    explained = explained_variance([s.values for s in known], [s.returns for s in known])
    facts = {} if explained is None else {"explained": explained}
    if tokens := [value for kl in log_ratios for value in kl]:
        facts["kl_to_base"] = fmean(tokens)
    return [
        replace(s, advantages=tuple(row)) for s, row in zip(estimated, white, strict=True)
    ], facts
