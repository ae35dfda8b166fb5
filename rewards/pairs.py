"""Preference pairs: which of two outputs of one call leads to the higher global reward.

For a call of a trace, candidates are its own output and further draws of it. Everything that depends on the
call, and only that, is run again for each candidate, several times, with the same downstream randomness for
all (common random numbers). Two candidates make a pair when their mean rewards differ by more than that
randomness explains (OPTIMAS, section 4.1 and the expectation in equation 4).
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations

import numpy as np

from compound.errors import DeclarationError, first_of, nearest
from compound.evaluation.evaluate import Rules, score
from compound.example import Example, Metric, Values
from compound.execution.executor import Executor
from compound.execution.rng import generator
from compound.execution.schedule import values_of
from compound.execution.trace import Trace
from compound.graph.component import Node
from compound.graph.composite import Composite
from compound.graph.configuration import canonical, readable
from compound.graph.space import Choice, Float, Int
from compound.graph.system import System

WARM = 1.0  # the temperature of further draws, where a component's own gives nothing new
DRAWS = 1_000  # sample indices from here on belong to further draws of a call
DOWNSTREAM = 2_000  # and from here on to the runs of what depends on it


@dataclass(frozen=True)
class Sampling:
    """How many candidates a call gets, and how surely they are ordered.

    Attributes:
        samples: further draws of the call, besides the output it has.
        rollouts: the fewest runs of what depends on the call, for each candidate.
        most: the most of them; between the two, until every pair is decided.
        z: standard errors by which two candidates must differ; 0 takes any difference.
        pairs: the most pairs for one call, those with the largest gaps.
    """

    samples: int = 3
    rollouts: int = 2
    most: int = 6
    z: float = 1.64
    pairs: int = 6


@dataclass(frozen=True)
class Candidate:
    """One output of a call, with the global rewards it led to, one for each downstream sample.

    ``settings`` are those it was drawn with, where they are not the component's own.
    """

    outputs: Mapping[str, object]
    rewards: tuple[float, ...] = ()
    settings: Mapping[str, object] = field(default_factory=dict)

    @property
    def value(self) -> float:
        """The mean reward: a Monte Carlo estimate of the expectation in equation 4."""
        return sum(self.rewards) / len(self.rewards)


@dataclass(frozen=True)
class Draw:
    """The candidates of one call, and where they come from."""

    component: str
    address: str
    example: str
    configuration: str
    inputs: Mapping[str, object]
    candidates: tuple[Candidate, ...]


@dataclass(frozen=True)
class Pair:
    """Two outputs of one component for the same inputs; the first led to the higher reward, by ``gap``."""

    component: str
    example: str
    configuration: str
    inputs: Mapping[str, object]
    chosen: Mapping[str, object]
    rejected: Mapping[str, object]
    gap: float


@dataclass(frozen=True)
class Collected:
    """What a collection found, in input order, and what it took.

    ``calls`` counts executed calls of components, ``system_runs`` the shares of runs they make up.
    """

    draws: tuple[Draw, ...]
    pairs: tuple[Pair, ...]
    calls: int
    system_runs: float


def decided(a: Candidate, b: Candidate, z: float) -> bool:
    """Return whether two candidates differ by more than their downstream randomness explains.

    The rewards are paired by downstream sample. Differences that are all equal leave no doubt; a single
    one is taken as it is.

    >>> decided(Candidate({}, (1.0, 0.8)), Candidate({}, (0.0, 0.2)), z=1.64)
    True
    >>> decided(Candidate({}, (1.0, 0.0)), Candidate({}, (0.0, 0.9)), z=1.64)
    False
    """
    differences = np.subtract(a.rewards, b.rewards)
    gap = abs(float(differences.mean()))
    if len(differences) < 2:
        return gap > 0
    return gap > z * float(differences.std(ddof=1)) / math.sqrt(len(differences))


def ordered(draw: Draw, sampling: Sampling) -> list[Pair]:
    """Return the decided pairs of a call, in either direction, those with the largest gaps first."""
    found = []
    for a, b in combinations(draw.candidates, 2):
        if decided(a, b, sampling.z):
            better, worse = (a, b) if a.value > b.value else (b, a)
            gap = better.value - worse.value
            pair = Pair(
                draw.component,
                draw.example,
                draw.configuration,
                draw.inputs,
                better.outputs,
                worse.outputs,
                gap,
            )
            found.append(pair)
    return sorted(found, key=lambda pair: -pair.gap)[: sampling.pairs]


async def collect(
    executor: Executor,
    system: System,
    traced: Sequence[tuple[Example, Trace]],
    components: Sequence[str],
    metric: Metric,
    *,
    sampling: Sampling | None = None,
    rules: Rules | None = None,
    round_: int = 0,
    proposals: Mapping[str, Sequence[Mapping[str, object]]] | None = None,
) -> Collected:
    """Draw and order candidates for every call of some components in some traces, all in flight together.

    Args:
        executor: runs the forks, with its cache and its budget.
        system: what made the traces, bound to the same configuration.
        traced: examples with their traces.
        components: whose calls to draw again.
        metric: the global reward.
        sampling: how many candidates, how surely ordered.
        rules: how failures score, and how many forks may run at once.
        round_: names the random streams; another round draws other candidates.
        proposals: for a component, settings to draw its calls with, such as candidate prompts: pairs are then
            of outputs like those that the rewards will be asked about.

    Raises:
        DeclarationError: the system has no such component.
        BudgetExhausted: the budget ended before all candidates were run.
    """
    for name in components:
        if name not in system.components:
            raise DeclarationError(f"no component {name!r}", hint=nearest(name, system.components))
    work = _Work(
        executor, system, metric, sampling or Sampling(), rules or Rules(), round_, dict(proposals or {})
    )
    jobs = [
        (example, trace, call.address)
        for example, trace in traced
        for name in components
        for call in trace.calls_of(name)
        if call.failure is None
    ]
    try:
        with executor.batch():
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(work.draw(*job)) for job in jobs]
    except BaseExceptionGroup as errors:
        executor.meter.release_runs()
        raise first_of(errors) from None
    draws = tuple(task.result() for task in tasks)
    pairs = tuple(pair for draw in draws for pair in ordered(draw, work.sampling))
    return Collected(draws, pairs, work.calls, work.system_runs)


def compared(
    component: str, runs: Sequence[tuple[Mapping[str, object], Trace]], sampling: Sampling
) -> list[Draw]:
    """Return draws of a component out of scored runs of one example, which settings of it alone tell apart.

    Where calls read the same, their outputs are candidates, and the scores of the runs their rewards: whoever
    compares settings by the global reward has paid for pairs. The first run, of the incumbent, is a part of
    every draw; a draw has as many others as one that `collect` makes.

    Args:
        component: whose settings differ.
        runs: settings that replace those of the incumbent, with the trace.
        sampling: how many candidates a draw has.
    """
    (settings_of_first, first), *others = runs
    found = []
    for call in first.calls_of(component):
        if call.failure is not None:
            continue
        alike = [
            Candidate(other.outputs, (trace.score or 0.0,), settings)
            for settings, trace in others
            for other in trace.calls_of(component)
            if other.address == call.address and other.failure is None
            and canonical(readable(other.inputs)) == canonical(readable(call.inputs))
        ]  # fmt: skip
        own = Candidate(call.outputs, (first.score or 0.0,), settings_of_first)
        found += [
            Draw(component, call.address, first.example, first.configuration, dict(call.inputs), candidates)
            for start in range(0, len(alike), sampling.samples)
            if len(candidates := _distinct([own, *alike[start : start + sampling.samples]])) > 1
        ]
    return found


def _distinct(candidates: Sequence[Candidate]) -> tuple[Candidate, ...]:
    """Return the first candidate of each output."""
    found: dict[str, Candidate] = {}
    for candidate in candidates:
        found.setdefault(canonical(readable(candidate.outputs)), candidate)
    return tuple(found.values())


def expected_cost(system: System, component: str, sampling: Sampling) -> float:
    """Return about how many system runs the pairs of a component take, for one input of the system.

    Further draws, and runs of what follows for each candidate: once where nothing random follows, else
    halfway between the fewest and the most. A loop counts as one turn, a map as one item.
    """
    counted = sum(node.component.cacheable for node in system.all_nodes())
    calls = 0.0
    for after in _followers(system, component):
        chance = any(not n.component.deterministic(values_of(n.component, system)) for n in after)
        runs = (sampling.rollouts + sampling.most) / 2 if chance else 1.0
        calls += sampling.samples * system.components[component].cacheable
        calls += runs * (sampling.samples + 1) * sum(node.component.cacheable for node in after)
    return calls / max(1, counted)


def _followers(system: System, component: str) -> list[list[Node]]:
    """Return the nodes that depend on each use of a component, with what is inside loops and maps."""
    found = []
    for name, node in system.nodes.items():
        after = [other for below in system.descendants(name) for other in _with_body(system.nodes[below])]
        if node.component.name == component:
            found.append(after)
        elif isinstance(node.component, Composite):
            found += [inside + after for inside in _followers(node.component.body, component)]
    return found


def _with_body(node: Node) -> list[Node]:
    return [node, *(node.component.body.all_nodes() if isinstance(node.component, Composite) else ())]


@dataclass
class _Work:
    """One collection: what all of its draws share."""

    executor: Executor
    system: System
    metric: Metric
    sampling: Sampling
    rules: Rules
    round: int
    proposals: Mapping[str, Sequence[Mapping[str, object]]]
    calls: int = 0
    system_runs: float = 0.0

    def __post_init__(self) -> None:
        self._places = asyncio.Semaphore(self.rules.concurrency)

    async def draw(self, example: Example, trace: Trace, address: str) -> Draw:
        """Return the candidates of one call with their rewards."""
        call = trace.call(address)
        further = await self._further(example, trace, address)
        candidates = _distinct([Candidate(call.outputs), *further])
        if len(candidates) > 1:
            candidates = await self._rewarded(example, trace, address, candidates)
        inputs = dict(call.inputs)
        return Draw(call.component, address, trace.example, trace.configuration, inputs, candidates)

    async def _further(self, example: Example, trace: Trace, address: str) -> list[Candidate]:
        """Draw the call again; where that gives nothing new, draw its settings.

        What depends on the call runs along: that is each candidate's first reward.
        """
        drawn = self._settings(trace, address)
        tasks = [
            self._fork(
                example, trace, address,
                resample=self._index(DRAWS, i), settings=settings, sample=self._index(DOWNSTREAM, 0),
            )
            for i, settings in enumerate(drawn)
        ]  # fmt: skip
        made = await asyncio.gather(*tasks)
        return [
            Candidate(fork.call(address).outputs, (fork.score or 0.0,), settings)
            for fork, settings in zip(made, drawn, strict=True)
            if fork.call(address).failure is None
        ]

    def _settings(self, trace: Trace, address: str) -> list[Mapping[str, object]]:
        """Return the settings of each further draw: proposed ones, or, where nothing else varies, others."""
        component = self.system.components[trace.call(address).component]
        fixed = component.deterministic(values_of(component, self.system))
        numbers = {n: s for n, s in component.parameters.items() if isinstance(s, Choice | Int | Float)}
        proposed = self.proposals.get(component.name, ())
        order = generator(self.round, "proposals", trace.example, address).permutation(len(proposed))
        found: list[Mapping[str, object]] = []
        for i in range(self.sampling.samples):
            plain = not fixed and i % 2 == 1  # every second draw of a component that is never the same
            if plain or not (fixed or proposed or numbers):
                found.append({})
            elif proposed:
                found.append(proposed[order[i % len(order)]])
            elif numbers:
                rng = generator(self.round, "settings", trace.example, address, i)
                found.append({name: space.draw(rng) for name, space in numbers.items()})
            elif "temperature" in component.settings:
                found.append({"temperature": WARM})
        return found

    async def _rewarded(
        self,
        example: Example,
        trace: Trace,
        address: str,
        candidates: Sequence[Candidate],
    ) -> tuple[Candidate, ...]:
        """Run what depends on the call for each candidate until every pair is decided."""
        done = list(candidates)
        certain = False
        for sample in range(self.sampling.most):
            lacking = [i for i, candidate in enumerate(done) if len(candidate.rewards) <= sample]
            index = self._index(DOWNSTREAM, sample)
            made = await asyncio.gather(
                *(self._fork(example, trace, address, outputs=done[i].outputs, sample=index) for i in lacking)
            )
            for i, fork in zip(lacking, made, strict=True):
                done[i] = replace(done[i], rewards=(*done[i].rewards, fork.score or 0.0))
                certain = certain or self._certain(fork, address)
            if certain:  # nothing random follows: the other runs would say the same
                break
            sure = all(decided(a, b, self.sampling.z) for a, b in combinations(done, 2))
            if sample + 1 >= self.sampling.rollouts and sure:
                break
        return tuple(done)

    def _certain(self, fork: Trace, address: str) -> bool:
        """Return whether nothing random follows the call: once is then enough."""
        after = {address}
        for call in fork.calls:  # in an order in which parents come first
            if not after.isdisjoint(call.parents):
                after.add(call.address)
        components = [self.system.components[fork.call(a).component] for a in after - {address}]
        return all(component.deterministic(values_of(component, self.system)) for component in components)

    async def _fork(
        self,
        example: Example,
        trace: Trace,
        address: str,
        *,
        outputs: Values | None = None,
        resample: int | None = None,
        settings: Values | None = None,
        sample: int | None = None,
    ) -> Trace:
        async with self._places:
            await self.executor.meter.reserve_run()
            made = await self.executor.fork(
                self.system, trace, address,
                outputs=outputs, resample=resample, settings=settings, sample=sample,
            )  # fmt: skip
            fork = self.executor.settle(made)
            self.calls += sum(not call.reused for call in fork.calls)
            self.system_runs += fork.equivalents
            return await score(fork, self.metric, example, self.rules)

    def _index(self, start: int, i: int) -> int:
        """Return a sample index that no other round uses."""
        return start + i + 10_000 * self.round
