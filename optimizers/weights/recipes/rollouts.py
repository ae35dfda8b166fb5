"""Runs and forks of a system made for learning: warm, scored, and counted in order.

A run that fails by what was said in it is a rollout like any other: its trace holds what was done before, its
score is the failure score. One that was lost to a server or a time limit says nothing of the weights: nobody
learns from it. Where too many are lost, or the metric fails on too many, there is an error.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from pydantic import Field

from compound.errors import TransientError
from compound.evaluation.evaluate import Rules, raise_too_many_failures, score
from compound.example import Example, Metric
from compound.execution.executor import Executor
from compound.execution.ordered import gather_ordered
from compound.execution.trace import Call, Failure, Trace
from compound.graph.component import Component
from compound.graph.composite import Composite
from compound.graph.system import System
from compound.optimizers.weights.learner.samples import SamplingSettings

FIRST, STEP = 3_000_000, 10_000  # sample indices of rollouts begin there; each step has so many
SEVERAL = 4  # rollouts from which on a step may end before all of them are made
BROKEN = (TransientError.kind, "metric")  # failures that are not of what was said


class RolloutSettings(SamplingSettings):
    """Which examples a training step runs, how often, and how their samples are drawn."""

    runs: int = Field(default=8, ge=1)
    """Runs, or forks, of each example."""


@dataclass(frozen=True)
class Rollout:
    """One run made for learning.

    Attributes:
        example: what was run.
        trace: what it did, scored.
        number: which of the example's rollouts it is.
        fork: the address of the call at which it left another rollout; ``""`` for a run from the beginning.
        teacher: who made it, where it was not the system that is trained.
    """

    example: Example
    trace: Trace
    number: int
    fork: str = ""
    teacher: str = ""

    @property
    def score(self) -> float:
        """The global reward."""
        assert self.trace.score is not None  # rollouts are scored when they are made
        return self.trace.score

    @property
    def lost(self) -> bool:
        """Whether an error that may pass ended it, such as a server that was gone; not what was said."""
        return is_lost(self.trace.failure)


@dataclass(frozen=True)
class Fork:
    """A fork to be made: of a rollout, at an address, as the example's rollout ``number``."""

    of: Rollout
    address: str
    number: int


@dataclass
class Sampler:
    """Makes rollouts of one version of a system.

    Attributes:
        executor: runs them, with its cache and its budget.
        system: bound to the weights that sample.
        metric: the global reward.
        rules: how many run at once, what a failed one scores, and what trained components run with.
        step: names the sample indices: no other step draws the same.
        made: how many rollouts, or answers, were made so far.
        failures: of these, by kind and message.
    """

    executor: Executor
    system: System
    metric: Metric
    rules: Rules
    step: int
    made: int = 0
    failures: Counter[tuple[str, str]] = field(default_factory=Counter)

    @property
    def facts(self) -> dict[str, Any]:
        """How many were lost, and how many failed otherwise, with the most frequent reason; as JSON."""
        failed = Counter({which: n for which, n in self.failures.items() if which[0] != TransientError.kind})
        lost = self.failures.total() - failed.total()
        reason = ": ".join(failed.most_common(1)[0][0]) if failed else ""
        return {"lost": lost, "failed": failed.total(), "failure": reason}

    def index(self, number: int) -> int:
        """Return the sample index of an example's rollout."""
        return FIRST + STEP * self.step + number

    async def runs(
        self,
        examples: Sequence[Example],
        numbers: Sequence[int],
        system: System | None = None,
        teacher: str = "",
        *,
        shared: Collection[str] = (),
    ) -> list[Rollout]:
        """Run every example once for each number, all in flight together; results by example, then number.

        What components draw that are ``shared`` is the same in all runs of an example.

        Raises:
            TooManyFailures: see `raise_too_many_failures`.
        """
        wanted = [(example, number) for example in examples for number in numbers]
        return await self.attempts(wanted, system, teacher, shared=shared)

    async def attempts(
        self,
        wanted: Sequence[tuple[Example, int]],
        system: System | None = None,
        teacher: str = "",
        *,
        shared: Collection[str] = (),
    ) -> list[Rollout]:
        """Run examples as the rollouts of theirs that are named, all in flight together; results in order.

        Raises:
            TooManyFailures: see `raise_too_many_failures`.
        """
        first = dict.fromkeys(shared, self.index(0))

        async def one(example: Example, number: int) -> Rollout:
            trace = await self.executor.run(
                system or self.system, example.inputs, example=example.id, sample=self.index(number),
                cache=self.rules.cache, settings=self.rules.settings, samples=first,
            )  # fmt: skip
            return Rollout(example, trace, number, teacher=teacher)

        return await self._all([partial(one, *each) for each in wanted])

    async def forks(self, wanted: Sequence[Fork]) -> list[Rollout]:
        """Make forks, all in flight together; what follows the forked call is drawn anew, too.

        Raises:
            TooManyFailures: see `raise_too_many_failures`.
        """

        async def one(fork: Fork) -> Rollout:
            index = self.index(fork.number)
            trace = await self.executor.fork(
                self.system, fork.of.trace, fork.address,
                resample=index, sample=index,
                settings=self.rules.settings.get(fork.of.trace.call(fork.address).component),
                others=self.rules.settings,
            )  # fmt: skip
            return Rollout(fork.of.example, trace, fork.number, fork.address)

        sizes = [_share(fork, self.system) for fork in wanted]
        return await self._all([partial(one, fork) for fork in wanted], sizes)

    async def _all(
        self, making: Sequence[Callable[[], Awaitable[Rollout]]], sizes: Sequence[float] | None = None
    ) -> list[Rollout]:
        """Make rollouts with bounded concurrency, and score them.

        Runs are reserved and settled in order, so that no later one takes what an earlier one needs.

        Args:
            making: starts each of them.
            sizes: the system runs that each takes at most; one whole run by default.
        """
        held = [1.0] * len(making) if sizes is None else sizes

        async def one(make: Callable[[], Awaitable[Rollout]]) -> Rollout:
            rollout = await make()
            scored = await score(rollout.trace, self.metric, rollout.example, self.rules)
            return replace(rollout, trace=scored)

        rollouts = await gather_ordered(
            self.executor,
            [partial(one, make) for make in making],
            lambda number, rollout: self.executor.settle(rollout.trace, held[number]),
            self.rules.concurrency,
            held,
        )
        self.count([rollout.trace.failure for rollout in rollouts])
        return rollouts

    def count(self, failures: Sequence[Failure | None]) -> None:
        """Count what was made, and what became of it.

        Raises:
            TooManyFailures: see `raise_too_many_failures`; not before several were made.
        """
        self.made += len(failures)
        self.failures.update((failure.kind, failure.message) for failure in failures if failure)
        if self.made >= SEVERAL:
            self.check_failures()

    def check_failures(self) -> None:
        """Raise where the step says too little of the weights; call it when all of its rollouts are made.

        Raises:
            TooManyFailures: a larger share than ``rules.max_failed`` was lost, or failed in the metric.
        """
        broken = Counter({message: n for (kind, message), n in self.failures.items() if kind in BROKEN})
        if broken.total() > self.rules.max_failed * self.made:
            raise_too_many_failures(broken.most_common(), self.made, self.rules)


def _share(fork: Fork, system: System) -> float:
    """Return the part of a run that a fork takes at most.

    It runs the calls that descend from the forked one. Where conditions or loops decide which calls there
    are, or the forked run failed before it made them, that may be a whole run.
    """
    trace = fork.of.trace
    fixed = not any(isinstance(node.component, Composite) or node.when for node in system.nodes.values())
    if not fixed or trace.failure is not None:
        return 1.0
    after = {fork.address}
    for call in trace.calls:  # in an order in which parents come first
        if not after.isdisjoint(call.parents):
            after.add(call.address)
    return min(1.0, sum(trace.share(call) for call in trace.calls if call.address in after))


def is_lost(failure: Failure | None) -> bool:
    """Return whether an error that may pass ended a run or a call: that says nothing of the weights."""
    return failure is not None and failure.kind == TransientError.kind


def upstream_components(system: System, trained: Collection[str]) -> set[str]:
    """Return the components that run before the trained ones, or beside them: they read nothing of theirs."""
    held = {name: _components(node.component) for name, node in system.nodes.items()}
    first = [name for name, components in held.items() if not components.isdisjoint(trained)]
    after = {*first}.union(*(system.descendants(name) for name in first))
    return set(system.components).difference(*(held[name] for name in after))


def _components(component: Component) -> set[str]:
    """Return a component's name, and those in its body."""
    return {component.name, *(component.body.components if isinstance(component, Composite) else ())}


def calls_of(trace: Trace, components: Sequence[str]) -> list[Call]:
    """Return the calls of some components that sampled something, in order."""
    return [call for call in trace.calls if call.component in components and call.tokens]


def rollout_settings(
    system: System, components: Sequence[str], temperature: float
) -> Mapping[str, Mapping[str, object]]:
    """Return the settings of rollouts: trained components sample at one temperature."""
    return {
        c: {"temperature": temperature} for c in components if "temperature" in system.components[c].settings
    }


def rolling(rules: Rules, system: System, components: Sequence[str], settings: SamplingSettings) -> Rules:
    """Return the rules of rollouts."""
    score_of_failed = rules.failure_score if settings.failure_score is None else settings.failure_score
    return replace(
        rules,
        failure_score=score_of_failed,
        settings=rollout_settings(system, components, settings.temperature),
    )
