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
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from pydantic import Field, NonNegativeFloat

from compound.core.example import Example
from compound.execution.rng import generator
from compound.optimizers.weights.credit.advantages import advantages
from compound.optimizers.weights.credit.grouping import regroup
from compound.optimizers.weights.credit.propagation import Credit
from compound.optimizers.weights.learner.samples import Group, Sample
from compound.optimizers.weights.recipes.groups import GroupRecipe, propagated_samples
from compound.optimizers.weights.recipes.recipe import (
    CreditedSamples,
    GroupSettings,
    Penalties,
    RecipeContext,
    Sharing,
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


class MHGPOSettings(GroupSettings):
    """Settings of `mhgpo_is` and `mhgpo_fof`."""

    adapters: Sharing = "each"
    """Adapters: `each` (one per component), `shared` (one for all), or a mapping from adapter names to the
    components that share them."""
    penalties: Penalties = Field(default={})
    """Penalty function `module:name` of each component. It receives the inputs and outputs of a call; its
    value is added to the call's reward when rewards are propagated back through the calls."""


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
class MHGPO(GroupRecipe):
    """Recipe that compares forks of the same run.

    Attributes:
        settings: the settings of the method; `MHGPORandomSettings` for `rr`.
        kind: `is` forks at every agent and trains on the forked calls; `fof` forks at the first
            agent; `rr` forks at one random agent per example, and regroups the calls before the
            forks across examples.
    """

    settings: MHGPOSettings
    kind: Kind

    def cost(self, examples: int, components: int) -> float:
        """Return the maximum cost of a step, in system runs; forks reuse the calls before the fork."""
        later = sum((components - k) / components for k in range(components))
        return examples * self.settings.rollouts.runs * (later if self.kind == "is" else 1.0)

    @property
    def _random(self) -> MHGPORandomSettings:
        """The settings of `rr`; their defaults for other sampling schemes."""
        return (
            self.settings
            if isinstance(self.settings, MHGPORandomSettings)
            else MHGPORandomSettings()
        )

    async def draw(self, context: RecipeContext, examples: Sequence[Example]) -> list[Rollout]:
        """Run and fork the examples."""
        runs = self.settings.rollouts.runs
        if self.kind == "rr":
            return await _drawn(context, examples, runs, self._random.forks)
        return await (_everywhere if self.kind == "is" else _first)(context, examples, runs)

    async def credit(self, context: RecipeContext, rollouts: Sequence[Rollout]) -> CreditedSamples:
        """Propagate rewards, and compute advantages within groups."""
        settings = self.settings
        propagated = propagated_samples(context, rollouts, _group, settings.penalties)
        samples, facts = list(propagated.samples), dict(propagated.facts)
        if self.kind == "is":
            samples = [sample for sample in samples if sample.address == sample.group[-1]]
        elif self.kind == "rr":
            size = self._random.group or max(2, settings.rollouts.runs)
            samples, more = _regrouped(samples, rollouts, size, context.seed)
            facts |= more
        trained, groups = advantages(samples, settings.scale)
        return CreditedSamples(
            trained, scores_of(rollouts), {**asdict(groups), **facts}, propagated.samples
        )


async def _first(context: RecipeContext, examples: Sequence[Example], count: int) -> list[Rollout]:
    """RolloutFork at the first agent: the calls before it are the same in every run of an example."""
    shared = upstream_components(context.sampler.system, context.trained)
    runs = await context.sampler.runs(examples, range(count), shared=shared)
    return [_at_entry(context, rollout) for rollout in runs]


async def _everywhere(
    context: RecipeContext, examples: Sequence[Example], count: int
) -> list[Rollout]:
    """RolloutFork at every agent: whole runs at the first agent, and forks of one run at later agents.

    Later agents are forked in an example's first run that no transient error ended: lost runs lack
    calls.
    """
    runs = await _first(context, examples, count)
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
    return [*runs, *await context.sampler.forks(wanted)]


async def _drawn(
    context: RecipeContext, examples: Sequence[Example], count: int, forks: Mapping[str, float]
) -> list[Rollout]:
    """RolloutFork at one agent per example, drawn with the configured probabilities."""
    runs = [
        replace(run, fork=_agent(context, run, forks))
        for run in await context.sampler.runs(examples, [0])
    ]
    wanted = [
        RolloutFork(run, run.fork, number) for run in runs if run.fork for number in range(1, count)
    ]
    return [*runs, *await context.sampler.forks(wanted)]


def _at_entry(context: RecipeContext, rollout: Rollout) -> Rollout:
    """Return a whole run as a fork at its first agent."""
    calls = calls_of(rollout.trace, context.trained)
    return replace(rollout, fork=calls[0].address if calls else "")


def _agent(context: RecipeContext, rollout: Rollout, forks: Mapping[str, float]) -> str:
    """Return the address of the call to fork at; ``""`` if no call of the run can be forked."""
    calls = calls_of(rollout.trace, context.trained)
    times = Counter(call.component for call in calls)
    weights = [forks.get(call.component, 1.0) / times[call.component] for call in calls]
    if not sum(weights):
        return ""
    rng = generator(context.seed, "fork", rollout.example.id)
    return calls[int(rng.choice(len(calls), p=[w / sum(weights) for w in weights]))].address


def _group(rollout: Rollout, credit: Credit) -> Group:
    """Return the group of a call: example, address, and fork address of its rollout."""
    return (rollout.example.id, credit.call.address, rollout.fork)


def _regrouped(
    samples: Sequence[Sample], rollouts: Sequence[Rollout], size: int, seed: int
) -> tuple[list[Sample], dict[str, Any]]:
    """Group calls before the forks across examples: those of the same agent and the same fork agent."""
    forked = {(r.example.id, r.fork): r.trace.call(r.fork).component for r in rollouts if r.fork}
    regrouped = regroup(
        samples,
        size,
        lambda sample: (sample.component, forked.get((sample.example, str(sample.group[-1])), "")),
        seed=seed,
    )
    facts = {
        "mixed_groups": regrouped.groups,
        "mixed_variance": regrouped.variance,
        "alone": regrouped.alone,
    }
    return list(regrouped.samples), facts
