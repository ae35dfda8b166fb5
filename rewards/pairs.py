"""Collect preference pairs: two outputs of a call, ordered by the global reward that they lead to.

The candidates of a call are its own output and additional draws, with other settings where there are
any. For each candidate, only the components downstream of the call run again, with the same random
streams for all candidates. Two candidates make a pair if their mean rewards differ significantly
(OPTIMAS, section 4.1 and the expectation in equation 4).
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np

from compound.core.errors import DeclarationError, first_leaf, suggest_name
from compound.core.example import Example, Metric, Values
from compound.evaluation.evaluate import EvaluationRules, score
from compound.execution.executor import Executor
from compound.execution.rng import generator
from compound.execution.schedule import setting_values
from compound.execution.trace import Failure, Trace
from compound.graph.component import Component, Node
from compound.graph.composite import Composite
from compound.graph.configuration import canonical_json, to_readable_json, to_readable_values
from compound.graph.space import Choice, Float, Int
from compound.graph.system import System
from compound.rewards.candidates import (
    Candidate,
    Sampling,
    could_be_decided,
    differences,
    is_decided,
)

WARM = 1.0  # temperature of additional draws of a greedy component without other settings to vary
TRIES = 200  # random settings to consider for the draws of a call; a few for each option of a small space

CallSettings = Mapping[str, object]


def settings_of_draws(
    component: Component,
    current: CallSettings,
    proposals: Sequence[CallSettings],
    draws: int,
    rng: np.random.Generator,
) -> list[CallSettings]:
    """Return the settings of each additional draw of a call, as changes of the component's own.

    Draws have different settings as long as there are any: first ``proposals``, then random choices and
    numbers. Every second draw of a stochastic component keeps its settings. A deterministic component is
    not drawn with the same settings twice, but at a temperature if it has one.
    """
    is_fixed = component.deterministic(current)
    others = _distinct_settings(current, _candidates(component, proposals, rng))
    found: list[CallSettings] = []
    for i in range(draws):
        is_plain = not is_fixed and i % 2 == 1
        other = None if is_plain else next(others, None)
        if other is not None:
            found.append(other)
        elif not is_fixed:
            found.append({})
        elif "temperature" in component.settings:
            found.append({"temperature": WARM})
    return found


def _candidates(
    component: Component, proposals: Sequence[CallSettings], rng: np.random.Generator
) -> Iterator[CallSettings]:
    yield from (proposals[i] for i in rng.permutation(len(proposals)))
    spaces = {n: s for n, s in component.parameters.items() if isinstance(s, Choice | Int | Float)}
    for _ in range(TRIES if spaces else 0):
        yield {name: space.draw(rng) for name, space in spaces.items()}


def _distinct_settings(
    current: CallSettings, candidates: Iterator[CallSettings]
) -> Iterator[CallSettings]:
    """Yield the candidates that differ from the current settings and from earlier candidates."""
    known = {canonical_json({})}
    for settings in candidates:
        changed = {name: value for name, value in settings.items() if current.get(name) != value}
        key = canonical_json(to_readable_values(changed))
        if key not in known:
            known.add(key)
            yield settings


DRAWS = 1_000  # first sample index of additional draws of a call
DOWNSTREAM = 2_000  # first sample index of downstream runs


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
    """Collected draws and pairs, in input order, and their cost in executed calls and system runs."""

    draws: tuple[Draw, ...]
    pairs: tuple[Pair, ...]
    calls: int
    system_runs: float
    lost: int = 0


def ordered_pairs(draw: Draw, sampling: Sampling, *, decided: bool = True) -> list[Pair]:
    """Return the pairs of a call, largest gap first.

    Without ``decided``, they are of candidates that ran once each before random components.
    """
    found = []
    for a, b in combinations(draw.candidates, 2):
        gaps = differences(a, b)
        gap = sum(gaps) / len(gaps)
        ran_once = len(a.rewards) == len(b.rewards) == 1 and not (a.certain or b.certain)
        if is_decided(a, b, sampling.level) == decided and (decided or (ran_once and gap)):
            better, worse = (a, b) if gap > 0 else (b, a)
            origin = draw.component, draw.example, draw.configuration, draw.inputs
            found.append(Pair(*origin, better.outputs, worse.outputs, abs(gap)))
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

    Calls with transient failures are drawn once more at the end, and then without the candidates that
    still fail in this way. The traces are of the system's configuration; ``round_index`` seeds the random
    streams; ``proposals`` are settings of each component, such as candidate prompts.

    Raises:
        DeclarationError: the system has no such component.
        BudgetExhausted: the budget ended before all candidates ran.
    """
    for name in components:
        if name not in system.components:
            raise DeclarationError(
                f"no component {name!r}", hint=suggest_name(name, system.components)
            )
    rules, given = rules or EvaluationRules(), dict(proposals or {})
    work = _Work(executor, system, metric, sampling or Sampling(), rules, round_index, given)
    jobs = [
        (example, trace, call.address)
        for example, trace in traced
        for name in components
        for call in trace.calls_of(name)
        if call.failure is None
    ]
    try:
        found = await work.draw_all(jobs)
        lost = [i for i, draw in enumerate(found) if draw is None]
        again = await work.draw_all([jobs[i] for i in lost], is_last=True)
    except BaseExceptionGroup as errors:
        executor.meter.release_runs()
        raise first_leaf(errors) from None
    drawn = {**dict(enumerate(found)), **dict(zip(lost, again, strict=True))}
    draws = tuple(draw for draw in drawn.values() if draw is not None)
    pairs = tuple(pair for draw in draws for pair in ordered_pairs(draw, work.sampling))
    return Collection(draws, pairs, work.calls, work.system_runs, work.lost)


def is_transient(failure: Failure | None) -> bool:
    """Return whether a run failed for a reason that may pass, and that its outputs did not cause."""
    return failure is not None and failure.is_transient


def candidate_of(
    system: System, trace: Trace, address: str, settings: Mapping[str, object] | None = None
) -> Candidate:
    """Return the output of a call in a scored trace as a candidate with one reward."""
    outputs, certain = trace.call(address).outputs, _is_certain(system, trace, address)
    return Candidate(outputs, (trace.score or 0.0,), settings or {}, certain)


def _is_certain(system: System, trace: Trace, address: str) -> bool:
    """Return whether the calls downstream of a call are deterministic, so that one run is enough."""
    after = {address}
    for call in trace.calls:  # parents come before their children
        if not after.isdisjoint(call.parents):
            after.add(call.address)
    components = [system.components[trace.call(a).component] for a in after - {address}]
    return all(
        component.deterministic(setting_values(component, system)) for component in components
    )


def expected_cost(system: System, component: str, sampling: Sampling) -> float:
    """Estimate the system runs for the pairs of a component, per input of the system.

    These are additional draws, and downstream runs of each candidate: one if all of it is deterministic.
    """
    counted = sum(node.component.cacheable for node in system.all_nodes())
    calls = 0.0
    for after in _followers(system, component):
        chance = any(
            not n.component.deterministic(setting_values(n.component, system)) for n in after
        )
        runs = (sampling.rollouts + sampling.max_rollouts) / 2 if chance else 1.0
        calls += sampling.samples * system.components[component].cacheable
        calls += runs * (sampling.samples + 1) * sum(node.component.cacheable for node in after)
    return calls / max(1, counted)


def _followers(system: System, component: str) -> list[list[Node]]:
    """Return the nodes downstream of each use of a component, including those inside loops and maps."""
    found = []
    for name, node in system.nodes.items():
        after = [
            other for below in system.descendants(name) for other in _with_body(system.nodes[below])
        ]
        if node.component.name == component:
            found.append(after)
        elif isinstance(node.component, Composite):
            found += [inside + after for inside in _followers(node.component.body, component)]
    return found


def has_certain_downstream(system: System, component: str) -> bool:
    """Return whether everything that may read outputs of a component is deterministic."""
    after = [node for found in _followers(system, component) for node in found]
    for node in system.all_nodes():
        body = node.component.body if isinstance(node.component, Composite) else None
        if body is not None and component in body.components:
            after += body.all_nodes()
    return all(n.component.deterministic(setting_values(n.component, system)) for n in after)


def _with_body(node: Node) -> list[Node]:
    body = node.component.body.all_nodes() if isinstance(node.component, Composite) else ()
    return [node, *body]


@dataclass
class _Work:
    executor: Executor
    system: System
    metric: Metric
    sampling: Sampling
    rules: EvaluationRules
    round: int
    proposals: Mapping[str, Sequence[Mapping[str, object]]]
    calls: int = 0
    system_runs: float = 0.0
    lost: int = 0

    def __post_init__(self) -> None:
        self._places = asyncio.Semaphore(self.rules.concurrency)

    async def draw_all(
        self, jobs: Sequence[tuple[Example, Trace, str]], *, is_last: bool = False
    ) -> list[Draw | None]:
        """Return the draw of each call, or ``None`` if it was lost to transient failures."""
        with self.executor.sharing_failures():
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self.draw(*job, is_last)) for job in jobs]
        return [task.result() for task in tasks]

    async def draw(
        self, example: Example, trace: Trace, address: str, is_last: bool
    ) -> Draw | None:
        """Return the candidates of a call with their rewards; ``None`` if lost to transient failures."""
        call = trace.call(address)
        further = await self._further(example, trace, address)
        drawn = [candidate for candidate in further if candidate is not None]
        distinct: dict[str, Candidate] = {}
        for candidate in (Candidate(call.outputs), *drawn):
            distinct.setdefault(canonical_json(to_readable_json(candidate.outputs)), candidate)
        candidates = [*distinct.values()]
        kept = [*candidates]
        if len(candidates) > 1 and (is_last or len(drawn) == len(further)):
            kept = await self._rewarded(example, trace, address, candidates, is_last)
        lost = len(further) - len(drawn) + len(candidates) - len(kept)
        if lost and not is_last:
            return None
        self.lost += lost
        if (
            lost and len(kept) < 2
        ):  # other candidates may exist: a single one would mean that there are none
            return None
        inputs = dict(call.inputs)
        return Draw(
            call.component, address, trace.example, trace.configuration, inputs, tuple(kept)
        )

    async def _further(
        self, example: Example, trace: Trace, address: str
    ) -> list[Candidate | None]:
        """Draw the call again, with everything downstream; ``None`` after transient failures."""
        component = self.system.components[trace.call(address).component]
        drawn = settings_of_draws(
            component,
            setting_values(component, self.system),
            self.proposals.get(component.name, ()),
            self.sampling.samples,
            generator(self.round, "settings", trace.example, address),
        )
        tasks = [
            self._fork(
                example,
                trace,
                address,
                resample=self._index(DRAWS, i),
                settings=settings,
                sample=self._index(DOWNSTREAM, 0),
            )
            for i, settings in enumerate(drawn)
        ]
        made = await asyncio.gather(*tasks)
        return [
            None
            if is_transient(fork.failure)
            else candidate_of(self.system, fork, address, settings)
            for fork, settings in zip(made, drawn, strict=True)
            if is_transient(fork.failure) or fork.call(address).failure is None
        ]

    async def _rewarded(
        self,
        example: Example,
        trace: Trace,
        address: str,
        candidates: Sequence[Candidate],
        is_last: bool,
    ) -> list[Candidate]:
        """Run the nodes downstream of the call for each candidate whose order they could decide."""
        done = dict(enumerate(candidates))
        waiting = list(done)
        for sample in range(self.sampling.max_rollouts):
            lacking = [i for i in waiting if len(done[i].rewards) <= sample]
            index = self._index(DOWNSTREAM, sample)
            forks = await asyncio.gather(
                *(
                    self._fork(example, trace, address, outputs=done[i].outputs, sample=index)
                    for i in lacking
                )
            )
            for i, fork in zip(lacking, forks, strict=True):
                if is_transient(fork.failure):
                    del done[i]
                else:
                    rewards = (*done[i].rewards, fork.score or 0.0)
                    certain = _is_certain(self.system, fork, address)
                    done[i] = replace(done[i], rewards=rewards, certain=certain)
            if len(done) < len(candidates) and not is_last:
                break
            pairs = combinations(done, 2)
            could = [{i, j} for i, j in pairs if could_be_decided(done[i], done[j], self.sampling)]
            waiting = [i for i in done if not done[i].certain and any(i in pair for pair in could)]
        return list(done.values())

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
                self.system,
                trace,
                address,
                outputs=outputs,
                resample=resample,
                settings=settings,
                sample=sample,
            )
            # calls of the metric are settled with those of the system
            fork = self.executor.settle(
                await score(self.executor, made, self.metric, example, self.rules)
            )
            self.calls += sum(not call.reused for call in fork.calls)
            self.system_runs += fork.equivalents
            return fork

    def _index(self, start: int, i: int) -> int:
        """Return a sample index that no other round uses."""
        return start + i + 10_000 * self.round
