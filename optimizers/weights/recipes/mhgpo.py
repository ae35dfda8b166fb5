"""MHGPO: forked rollouts that share a common prefix, with rewards propagated back through the calls.

The three sampling schemes differ in where runs fork: at every agent (IS), at the first agent (FoF),
or at one random agent per example (RR). The reward of a call is the mean reward of its successors
plus the component's penalty.

Cost in calls, with n agents in a row and groups of G: forks at every agent cost the sum over k of
G·(n-k+1), forks at the first agent n·G, and a fork at agent k costs (k-1) + G·(n-k+1).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from pydantic import Field, NonNegativeFloat

from compound.core.example import Example
from compound.execution.rng import generator
from compound.optimizers.weights.credit import advantages, regroup
from compound.optimizers.weights.recipes.recipe import (
    CreditedSamples,
    GroupSettings,
    PenaltySettings,
    PolicyRecipe,
    RecipeContext,
    SharedAdapters,
    propagated_samples,
    scores_of,
)
from compound.optimizers.weights.recipes.rollouts import (
    Rollout,
    RolloutFork,
    RolloutSettings,
    calls_of,
    upstream_components,
)

Kind = Literal["is", "fof", "rr"]


class MHGPOSettings(GroupSettings, PenaltySettings, SharedAdapters):
    """Settings of `mhgpo_is` and `mhgpo_fof`."""


class RandomForkSettings(RolloutSettings):
    """Examples of a training step, and the number and sampling of their rollouts."""

    examples: int = Field(default=16, ge=1)
    """Train examples per step. An agent before the fork answers once per example, and is compared with the
    same agent on other examples that were forked at the same agent. With few examples, it has no other, or
    only one, so that the difficulty of the two examples decides."""


class MHGPORandomSettings(MHGPOSettings):
    """Settings of `mhgpo_rr`."""

    rollouts: RandomForkSettings = RandomForkSettings()
    """Sampling of rollouts."""
    group: int | None = Field(default=None, ge=2)
    """Size of the groups that calls before the fork are compared in, across examples; `rollouts.runs` by
    default."""
    forks: dict[str, NonNegativeFloat] = Field(default={})
    """Relative probability of a fork at each component; 1 for components that are not named."""


@dataclass(frozen=True)
class MHGPO(PolicyRecipe):
    """Recipe that compares forks of the same run."""

    settings: MHGPOSettings
    kind: Kind

    def cost(self, examples: int, components: int) -> float:
        """Return the maximum cost of a step, in system runs; forks reuse the calls before the fork."""
        later = sum((components - k) / components for k in range(components))
        return examples * self.settings.rollouts.runs * (later if self.kind == "is" else 1.0)

    async def collect(self, context: RecipeContext, examples: Sequence[Example]) -> CreditedSamples:
        """Run and fork the examples, propagate rewards, and compute advantages within groups."""
        settings, runs = self.settings, self.settings.rollouts.runs
        if isinstance(settings, MHGPORandomSettings):
            rollouts = await _forked_at_random(context, examples, runs, settings.forks)
        else:
            rollouts = await _forked_at_first(context, examples, runs)
        if self.kind == "is":
            rollouts += await _forked_later(context, rollouts, runs)
        every, facts = propagated_samples(
            context,
            rollouts,
            lambda rollout, credit: (rollout.example.id, credit.call.address, rollout.fork),
            settings.penalties,
        )
        samples = every
        if self.kind == "is":
            samples = [sample for sample in every if sample.address == sample.group[-1]]
        elif isinstance(settings, MHGPORandomSettings):
            # calls before the forks: those of the same agent and the same fork agent
            forked = {
                (r.example.id, r.fork): r.trace.call(r.fork).component for r in rollouts if r.fork
            }
            samples, more = regroup(
                every,
                settings.group or max(2, runs),
                lambda s: (s.component, forked.get((s.example, str(s.group[-1])), "")),
                seed=context.seed,
            )
            facts |= more
        trained, groups = advantages(samples, settings.scale)
        return CreditedSamples(trained, scores_of(rollouts), {**groups, **facts}, every)


async def _forked_at_first(
    context: RecipeContext, examples: Sequence[Example], count: int
) -> list[Rollout]:
    """Fork at the first agent: the calls before it are the same in every run of an example."""
    shared = upstream_components(context.sampler.system, context.trained)
    runs = await context.sampler.runs(examples, range(count), shared=shared)
    first = [calls_of(run.trace, context.trained)[:1] for run in runs]
    return [
        replace(run, fork=calls[0].address if calls else "")
        for run, calls in zip(runs, first, strict=True)
    ]


async def _forked_later(
    context: RecipeContext, runs: Sequence[Rollout], count: int
) -> list[Rollout]:
    """Fork at all agents but the first.

    They are forked in an example's first run that no transient error ended: lost runs lack calls.
    """
    complete: dict[str, Rollout] = {}
    for run in runs:
        if not run.lost:
            complete.setdefault(run.example.id, run)
    wanted = [
        RolloutFork(rollout, call.address, place * count + number)
        for rollout in complete.values()
        for place, call in enumerate(calls_of(rollout.trace, context.trained))
        if place
        for number in range(count)
    ]
    return await context.sampler.forks(wanted)


async def _forked_at_random(
    context: RecipeContext, examples: Sequence[Example], count: int, forks: Mapping[str, float]
) -> list[Rollout]:
    runs = [
        replace(run, fork=_agent(context, run, forks))
        for run in await context.sampler.runs(examples, [0])
    ]
    wanted = [
        RolloutFork(run, run.fork, number) for run in runs if run.fork for number in range(1, count)
    ]
    return [*runs, *await context.sampler.forks(wanted)]


def _agent(context: RecipeContext, rollout: Rollout, forks: Mapping[str, float]) -> str:
    """Return the address of the call to fork at; ``""`` if no call of the run can be forked."""
    calls = calls_of(rollout.trace, context.trained)
    times = Counter(call.component for call in calls)
    weights = [forks.get(call.component, 1.0) / times[call.component] for call in calls]
    if not sum(weights):
        return ""
    rng = generator(context.seed, "fork", rollout.example.id)
    return calls[int(rng.choice(len(calls), p=[w / sum(weights) for w in weights]))].address
