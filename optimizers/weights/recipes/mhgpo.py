"""MHGPO: rollouts that share what comes before a fork, and rewards that flow back through the calls.

What tells the three ways of sampling apart is where runs fork: at every agent (IS), at the first (FoF), or
at one drawn for each example (RR). A call earns the mean of what its successors earn, and its own penalty.

Calls are counted: with n agents in a row and groups of G, forks at every agent cost the sum over k of
G·(n-k+1), forks at the first n·G, and a fork at agent k costs (k-1) + G·(n-k+1).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from pydantic import Field, NonNegativeFloat

from compound.example import Example
from compound.execution.rng import generator
from compound.optimizers.weights.credit.advantages import advantages
from compound.optimizers.weights.credit.regrouping import regroup
from compound.optimizers.weights.learner.samples import Group, Sample
from compound.optimizers.weights.recipes.propagated import earned
from compound.optimizers.weights.recipes.recipe import (
    Credited,
    GroupSettings,
    Penalties,
    PolicyRecipe,
    RecipeContext,
    Sharing,
    scores_of,
)
from compound.optimizers.weights.recipes.rollouts import Fork, Rollout, calls_of, upstream_components
from compound.rewards.credit.propagation import Credit

Kind = Literal["is", "fof", "rr"]


class MHGPOSettings(GroupSettings):
    """Settings of `mhgpo_is` and `mhgpo_fof`."""

    adapters: Sharing = "each"
    """Which components share an adapter: `each` has its own, all have one, or names with their components."""
    penalties: Penalties = Field(default={})
    """By component, a function `module:name` of its inputs and outputs. Its value is added to the component's
    reward where rewards flow back through the calls."""


class MHGPORandomSettings(MHGPOSettings):
    """Settings of `mhgpo_rr`."""

    group: int | None = Field(default=None, ge=2)
    """How many calls before the forks are compared with each other; all runs of an example by default."""
    forks: dict[str, NonNegativeFloat] = Field(default={})
    """By component, how likely a fork is there; equal by default."""


@dataclass(frozen=True)
class MHGPO(PolicyRecipe):
    """Groups of forks.

    Attributes:
        settings: those of the method; `rr` takes `MHGPORandomSettings`.
        kind: `is` forks at every agent and keeps what was forked; `fof` forks at the first; `rr` at one
            drawn for each example, and forms groups anew of what came before the forks.
    """

    settings: MHGPOSettings
    kind: Kind

    def cost(self, examples: int, components: int) -> float:
        """Return the most: forks share what comes before them."""
        later = sum((components - k) / components for k in range(components))
        return examples * self.settings.rollouts.runs * (later if self.kind == "is" else 1.0)

    async def collect(self, context: RecipeContext, examples: Sequence[Example]) -> Credited:
        """Run, fork, propagate, compare."""
        settings, runs = self.settings, self.settings.rollouts.runs
        own = settings if isinstance(settings, MHGPORandomSettings) else MHGPORandomSettings()
        if self.kind == "rr":
            rollouts = await _drawn(context, examples, runs, own.forks)
        else:
            rollouts = await (_everywhere if self.kind == "is" else _first)(context, examples, runs)
        found = earned(context, rollouts, _group, settings.penalties)
        samples, facts = list(found.samples), dict(found.facts)
        if self.kind == "is":
            samples = [sample for sample in samples if sample.address == sample.group[-1]]
        elif self.kind == "rr":
            size = own.group or max(2, runs)
            samples, more = _regrouped(samples, rollouts, size, context.seed)
            facts |= more
        trained, groups = advantages(samples, settings.scale)
        return Credited(trained, scores_of(rollouts), {**asdict(groups), **facts})


async def _first(context: RecipeContext, examples: Sequence[Example], count: int) -> list[Rollout]:
    """Fork at the first agent: what comes before it is the same in every run."""
    shared = upstream_components(context.sampler.system, context.trained)
    runs = await context.sampler.runs(examples, range(count), shared=shared)
    return [_at_entry(context, rollout) for rollout in runs]


async def _everywhere(context: RecipeContext, examples: Sequence[Example], count: int) -> list[Rollout]:
    """Fork at every agent: at the first one by whole runs, at later ones from the first of these."""
    runs = await _first(context, examples, count)
    wanted = [
        Fork(rollout, call.address, place * count + number)
        for rollout in runs
        if rollout.number == 0
        for place, call in enumerate(calls_of(rollout.trace, context.trained))
        if place
        for number in range(count)
    ]
    return [*runs, *await context.sampler.forks(wanted)]


async def _drawn(
    context: RecipeContext, examples: Sequence[Example], count: int, forks: Mapping[str, float]
) -> list[Rollout]:
    """Fork at one agent of each example, drawn by the settings' probabilities."""
    runs = [
        replace(run, fork=_agent(context, run, forks)) for run in await context.sampler.runs(examples, [0])
    ]
    wanted = [Fork(run, run.fork, number) for run in runs if run.fork for number in range(1, count)]
    return [*runs, *await context.sampler.forks(wanted)]


def _at_entry(context: RecipeContext, rollout: Rollout) -> Rollout:
    """Return a whole run as what it is among forks: one at its first agent."""
    calls = calls_of(rollout.trace, context.trained)
    return replace(rollout, fork=calls[0].address if calls else "")


def _agent(context: RecipeContext, rollout: Rollout, forks: Mapping[str, float]) -> str:
    """Return the address of the agent to fork at, ``""`` where a run called none."""
    calls = calls_of(rollout.trace, context.trained)
    times = Counter(call.component for call in calls)
    weights = [forks.get(call.component, 1.0) / times[call.component] for call in calls]
    if not sum(weights):
        return ""
    rng = generator(context.seed, "fork", rollout.example.id)
    return calls[int(rng.choice(len(calls), p=[w / sum(weights) for w in weights]))].address


def _group(rollout: Rollout, credit: Credit) -> Group:
    """Return a call's group: example, address, and where its rollout was forked."""
    return (rollout.example.id, credit.call.address, rollout.fork)


def _regrouped(
    samples: Sequence[Sample], rollouts: Sequence[Rollout], size: int, seed: int
) -> tuple[list[Sample], dict[str, Any]]:
    """Compare what came before the forks with its like in other examples: same agent, same fork."""
    forked = {(r.example.id, r.fork): r.trace.call(r.fork).component for r in rollouts if r.fork}
    found = regroup(
        samples,
        size,
        lambda sample: (sample.component, forked.get((sample.example, str(sample.group[-1])), "")),
        seed=seed,
    )
    facts = {"mixed_groups": found.groups, "mixed_variance": found.variance, "alone": found.alone}
    return list(found.samples), facts
