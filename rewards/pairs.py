"""Collect preference pairs: two outputs of a call, ordered by the global reward that they lead to.

The candidates of a call are its own output and additional draws. For each candidate, only the components
downstream of the call run again, several times, with the same random streams for all candidates (common
random numbers). Two candidates make a pair if their mean rewards differ by more than the downstream
randomness explains (OPTIMAS, section 4.1 and the expectation in equation 4).
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations

import numpy as np

from compound.errors import DeclarationError, first_leaf, suggest_name
from compound.evaluation.evaluate import EvaluationRules, score
from compound.example import Example, Metric, Values
from compound.execution.executor import Executor
from compound.execution.rng import generator
from compound.execution.schedule import setting_values
from compound.execution.trace import Trace
from compound.graph.component import Node
from compound.graph.composite import Composite
from compound.graph.configuration import canonical_json, to_readable_json
from compound.graph.space import Choice, Float, Int
from compound.graph.system import System

WARM = 1.0  # temperature of additional draws of a greedy component without other settings to vary
DRAWS = 1_000  # first sample index of additional draws of a call
DOWNSTREAM = 2_000  # first sample index of downstream runs


@dataclass(frozen=True)
class Sampling:
    """Number of candidates per call, and the significance threshold for ordering them.

    Attributes:
        samples: the additional draws of a call.
        rollouts: the minimum number of downstream runs for each candidate.
        max_rollouts: the maximum number of downstream runs; more than the minimum run only until all pairs
            are decided.
        z: the standard errors by which two candidates must differ; 0 accepts any difference.
        pairs: the maximum number of pairs per call, those with the largest gaps.
    """

    samples: int = 3
    rollouts: int = 2
    max_rollouts: int = 6
    z: float = 1.64
    pairs: int = 6


@dataclass(frozen=True)
class Candidate:
    """An output of a call, with the global reward of each downstream sample.

    ``settings`` are the settings of the draw that differ from those of the component.
    """

    outputs: Mapping[str, object]
    rewards: tuple[float, ...] = ()
    settings: Mapping[str, object] = field(default_factory=dict)

    @property
    def value(self) -> float:
        """Mean reward: a Monte Carlo estimate of the expectation in equation 4."""
        return sum(self.rewards) / len(self.rewards)


@dataclass(frozen=True)
class Draw:
    """Candidates of a call, with its origin."""

    component: str
    address: str
    example: str
    configuration: str
    inputs: Mapping[str, object]
    candidates: tuple[Candidate, ...]


@dataclass(frozen=True)
class Pair:
    """Two outputs of a component for the same inputs; the chosen one led to a reward higher by ``gap``."""

    component: str
    example: str
    configuration: str
    inputs: Mapping[str, object]
    chosen: Mapping[str, object]
    rejected: Mapping[str, object]
    gap: float


@dataclass(frozen=True)
class Collection:
    """Collected draws and pairs, in input order, and their cost.

    ``calls`` is the number of executed calls of components, ``system_runs`` their fraction of system runs.
    """

    draws: tuple[Draw, ...]
    pairs: tuple[Pair, ...]
    calls: int
    system_runs: float


def is_decided(a: Candidate, b: Candidate, z: float) -> bool:
    """Return whether two candidates differ by more than their downstream randomness explains.

    The rewards are paired by downstream sample. If all differences are equal, or there is only one, any
    difference other than 0 decides.

    >>> is_decided(Candidate({}, (1.0, 0.8)), Candidate({}, (0.0, 0.2)), z=1.64)
    True
    >>> is_decided(Candidate({}, (1.0, 0.0)), Candidate({}, (0.0, 0.9)), z=1.64)
    False
    """
    differences = np.subtract(a.rewards, b.rewards)
    gap = abs(float(differences.mean()))
    if len(differences) < 2:
        return gap > 0
    return gap > z * float(differences.std(ddof=1)) / math.sqrt(len(differences))


def ordered_pairs(draw: Draw, sampling: Sampling) -> list[Pair]:
    """Return the decided pairs of a call, largest gap first."""
    found = []
    for a, b in combinations(draw.candidates, 2):
        if is_decided(a, b, sampling.z):
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
    rules: EvaluationRules | None = None,
    round_index: int = 0,
    proposals: Mapping[str, Sequence[Mapping[str, object]]] | None = None,
) -> Collection:
    """Draw and order candidates for every call of some components in some traces, concurrently.

    Args:
        executor: runs the forks, with its cache and budget.
        system: the system of the traces, bound to the same configuration.
        traced: the examples with their traces.
        components: the components whose calls are drawn again.
        metric: the global reward.
        sampling: the number of candidates and the significance threshold.
        rules: the score of failures, and the maximum number of concurrent forks.
        round_index: seeds the random streams; different rounds draw different candidates.
        proposals: for each component, settings for drawing its calls, such as candidate prompts, so that the
            pairs resemble the outputs that the rewards will score.

    Raises:
        DeclarationError: the system has no such component.
        BudgetExhausted: the budget ended before all candidates ran.
    """
    for name in components:
        if name not in system.components:
            raise DeclarationError(f"no component {name!r}", hint=suggest_name(name, system.components))
    work = _Work(
        executor,
        system,
        metric,
        sampling or Sampling(),
        rules or EvaluationRules(),
        round_index,
        dict(proposals or {}),
    )
    jobs = [
        (example, trace, call.address)
        for example, trace in traced
        for name in components
        for call in trace.calls_of(name)
        if call.failure is None
    ]
    try:
        with executor.sharing_failures():
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(work.draw(*job)) for job in jobs]
    except BaseExceptionGroup as errors:
        executor.meter.release_runs()
        raise first_leaf(errors) from None
    draws = tuple(task.result() for task in tasks)
    pairs = tuple(pair for draw in draws for pair in ordered_pairs(draw, work.sampling))
    return Collection(draws, pairs, work.calls, work.system_runs)


def draws_from_runs(
    component: str, runs: Sequence[tuple[Mapping[str, object], Trace]], sampling: Sampling
) -> list[Draw]:
    """Return draws of a component from scored runs of an example that differ only in its settings.

    If calls have equal inputs, their outputs are candidates with the scores of the runs as rewards. A
    comparison of settings by the global reward thus also gives pairs at no extra cost. The first run, of the
    incumbent, is part of every draw; a draw has as many other candidates as in `collect`.

    Args:
        component: the component whose settings differ.
        runs: the settings that replace those of the incumbent, each with its trace.
        sampling: the number of candidates of a draw.
    """
    (settings_of_first, first), *others = runs
    found = []
    for call in first.calls_of(component):
        if call.failure is not None:
            continue
        comparable = [
            Candidate(other.outputs, (trace.score or 0.0,), settings)
            for settings, trace in others
            for other in trace.calls_of(component)
            if other.address == call.address and other.failure is None
            and canonical_json(to_readable_json(other.inputs))
            == canonical_json(to_readable_json(call.inputs))
        ]  # fmt: skip
        own = Candidate(call.outputs, (first.score or 0.0,), settings_of_first)
        found += [
            Draw(component, call.address, first.example, first.configuration, dict(call.inputs), candidates)
            for start in range(0, len(comparable), sampling.samples)
            if len(candidates := _distinct([own, *comparable[start : start + sampling.samples]])) > 1
        ]
    return found


def _distinct(candidates: Sequence[Candidate]) -> tuple[Candidate, ...]:
    """Return the first candidate of each output."""
    found: dict[str, Candidate] = {}
    for candidate in candidates:
        found.setdefault(canonical_json(to_readable_json(candidate.outputs)), candidate)
    return tuple(found.values())


def expected_cost(system: System, component: str, sampling: Sampling) -> float:
    """Estimate the system runs for the pairs of a component, per input of the system.

    The cost consists of additional draws and downstream runs for each candidate: one if the downstream nodes
    are deterministic, otherwise the mean of minimum and maximum. A loop counts as one turn, a map as one
    item.
    """
    counted = sum(node.component.cacheable for node in system.all_nodes())
    calls = 0.0
    for after in _followers(system, component):
        chance = any(not n.component.deterministic(setting_values(n.component, system)) for n in after)
        runs = (sampling.rollouts + sampling.max_rollouts) / 2 if chance else 1.0
        calls += sampling.samples * system.components[component].cacheable
        calls += runs * (sampling.samples + 1) * sum(node.component.cacheable for node in after)
    return calls / max(1, counted)


def _followers(system: System, component: str) -> list[list[Node]]:
    """Return the nodes downstream of each use of a component, including those inside loops and maps."""
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
    """Shared state of the draws of a collection."""

    executor: Executor
    system: System
    metric: Metric
    sampling: Sampling
    rules: EvaluationRules
    round: int
    proposals: Mapping[str, Sequence[Mapping[str, object]]]
    calls: int = 0
    system_runs: float = 0.0

    def __post_init__(self) -> None:
        self._places = asyncio.Semaphore(self.rules.concurrency)

    async def draw(self, example: Example, trace: Trace, address: str) -> Draw:
        """Return the candidates of a call with their rewards."""
        call = trace.call(address)
        further = await self._further(example, trace, address)
        candidates = _distinct([Candidate(call.outputs), *further])
        if len(candidates) > 1:
            candidates = await self._rewarded(example, trace, address, candidates)
        inputs = dict(call.inputs)
        return Draw(call.component, address, trace.example, trace.configuration, inputs, candidates)

    async def _further(self, example: Example, trace: Trace, address: str) -> list[Candidate]:
        """Draw the call again with the settings of each additional draw.

        The downstream nodes run in the same fork, which gives each candidate its first reward.
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
        """Return the settings of each additional draw: unchanged, proposed, random, or a temperature."""
        component = self.system.components[trace.call(address).component]
        fixed = component.deterministic(setting_values(component, self.system))
        numbers = {n: s for n, s in component.parameters.items() if isinstance(s, Choice | Int | Float)}
        proposed = self.proposals.get(component.name, ())
        order = generator(self.round, "proposals", trace.example, address).permutation(len(proposed))
        found: list[Mapping[str, object]] = []
        for i in range(self.sampling.samples):
            plain = not fixed and i % 2 == 1  # every second draw of a stochastic component keeps its settings
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
        """Run the nodes downstream of the call for each candidate until every pair is decided."""
        done = list(candidates)
        certain = False
        for sample in range(self.sampling.max_rollouts):
            lacking = [i for i, candidate in enumerate(done) if len(candidate.rewards) <= sample]
            index = self._index(DOWNSTREAM, sample)
            made = await asyncio.gather(
                *(self._fork(example, trace, address, outputs=done[i].outputs, sample=index) for i in lacking)
            )
            for i, fork in zip(lacking, made, strict=True):
                done[i] = replace(done[i], rewards=(*done[i].rewards, fork.score or 0.0))
                certain = certain or self._certain(fork, address)
            if certain:  # the downstream nodes are deterministic: further runs would give the same rewards
                break
            sure = all(is_decided(a, b, self.sampling.z) for a, b in combinations(done, 2))
            if sample + 1 >= self.sampling.rollouts and sure:
                break
        return tuple(done)

    def _certain(self, fork: Trace, address: str) -> bool:
        """Return whether the downstream nodes are deterministic, so that one run is enough."""
        after = {address}
        for call in fork.calls:  # parents come before their children
            if not after.isdisjoint(call.parents):
                after.add(call.address)
        components = [self.system.components[fork.call(a).component] for a in after - {address}]
        return all(
            component.deterministic(setting_values(component, self.system)) for component in components
        )

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
