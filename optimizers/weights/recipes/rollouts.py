"""Rollouts: runs and forks of a system for training, sampled at the rollout temperature and scored.

A run that fails because of a model's answer is a rollout like any other, with the failure score and
the calls made before the failure. A run lost to a transient error (a server or a time limit)
carries no information about the weights and is excluded. If too many runs are lost, or the metric
fails on too many, an error is raised.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from pydantic import Field

from compound.core.example import Example, Metric
from compound.evaluation.evaluate import EvaluationRules, raise_too_many_failures, score
from compound.execution.executor import Executor, gather_ordered
from compound.execution.trace import Call, Failure, Trace
from compound.graph.composite import Composite
from compound.graph.system import System
from compound.optimizers.weights.learner.samples import SamplingSettings

FIRST_INDEX = 3_000_000  # first sample index of rollouts; disjoint from those of other runs
INDICES_PER_STEP = 10_000
MIN_ROLLOUTS = 4  # rollouts after which a step may be aborted because of too many failures


class RolloutSettings(SamplingSettings):
    """Examples of a training step, and the number and sampling of their rollouts."""

    runs: int = Field(default=8, ge=1)
    """Runs or forks of each example."""


@dataclass(frozen=True)
class Rollout:
    """A run or fork for training."""

    example: Example  # the example that was run
    trace: Trace  # the scored trace
    number: int  # the index among the rollouts of the example
    fork: str = ""  # the address of the call at which it was forked; `""` for a whole run
    # the configuration file of the teacher that made it; `""` for the trained system
    teacher: str = ""

    @property
    def score(self) -> float:
        """The global reward."""
        assert self.trace.score is not None  # rollouts are scored when they are made
        return self.trace.score

    @property
    def lost(self) -> bool:
        """Whether a transient error, such as an unreachable server, ended it."""
        return is_lost(self.trace.failure)


@dataclass(frozen=True)
class RolloutFork:
    """Request for a fork."""

    of: Rollout
    address: str  # of the call to resample
    number: int  # among the rollouts of the example


@dataclass
class Sampler:
    """Makes the rollouts of one step."""

    executor: Executor  # runs them, with its cache and budget
    system: System  # the system, bound to the weights that sample
    metric: Metric  # the global reward
    # concurrency, failure score, and the settings of trained components in rollouts
    rules: EvaluationRules
    step: int  # an index of the step, unique in the run, from which sample indices are derived
    made: int = 0  # the number of rollouts or answers so far
    # counts of their failures, by kind and message
    failures: Counter[Failure] = field(default_factory=Counter)

    @property
    def facts(self) -> dict[str, Any]:
        """Counts of lost and of otherwise failed rollouts, with the most frequent failure, as JSON."""
        failed = Counter(
            {failure: n for failure, n in self.failures.items() if not is_lost(failure)}
        )
        lost = self.failures.total() - failed.total()
        reason = ": ".join(failed.most_common(1)[0][0].row) if failed else ""
        return {"lost": lost, "failed": failed.total(), "failure": reason}

    def index(self, number: int) -> int:
        """Return the sample index of an example's rollout."""
        return FIRST_INDEX + INDICES_PER_STEP * self.step + number

    async def runs(
        self,
        examples: Sequence[Example],
        numbers: Sequence[int],
        system: System | None = None,
        teacher: str = "",
        *,
        shared: Collection[str] = (),
    ) -> list[Rollout]:
        """Run every example once per number, concurrently; return the rollouts by example, then number.

        ``numbers`` are the indices of the rollouts of each example; see `attempts`.
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
        """Run pairs of an example and a rollout index, concurrently; return the rollouts in order.

        Args:
            wanted: examples with the indices of their rollouts.
            system: the system to run; the trained one by default.
            teacher: the configuration file of the teacher; ``""`` for the trained system.
            shared: components whose samples are the same in all runs of an example.

        Raises:
            TooManyFailures: see `raise_too_many_failures`.
        """
        first = dict.fromkeys(shared, self.index(0))

        async def one(example: Example, number: int) -> Rollout:
            trace = await self.executor.run(
                system or self.system,
                example.inputs,
                example=example.id,
                sample=self.index(number),
                cache=self.rules.cache,
                settings=self.rules.settings,
                samples=first,
            )
            return Rollout(example, trace, number, teacher=teacher)

        return await self._all([partial(one, *each) for each in wanted])

    async def forks(self, wanted: Sequence[RolloutFork]) -> list[Rollout]:
        """Make forks concurrently, resampling the forked call and all later ones; return them in order."""

        async def one(fork: RolloutFork) -> Rollout:
            index = self.index(fork.number)
            trace = await self.executor.fork(
                self.system,
                fork.of.trace,
                fork.address,
                resample=index,
                sample=index,
                settings=self.rules.settings.get(fork.of.trace.call(fork.address).component),
                others=self.rules.settings,
            )
            return Rollout(fork.of.example, trace, fork.number, fork.address)

        sizes = [_share(fork, self.system) for fork in wanted]
        return await self._all([partial(one, fork) for fork in wanted], sizes)

    async def _all(
        self,
        factories: Sequence[Callable[[], Awaitable[Rollout]]],
        costs: Sequence[float] | None = None,
    ) -> list[Rollout]:
        """Make rollouts with bounded concurrency, and score them.

        The budget is reserved and charged in order, so that a later rollout never takes the share
        of an earlier one.
        """
        reserved = [1.0] * len(factories) if costs is None else costs

        async def one(make: Callable[[], Awaitable[Rollout]]) -> Rollout:
            rollout = await make()
            scored = await score(
                self.executor, rollout.trace, self.metric, rollout.example, self.rules
            )
            return replace(rollout, trace=scored)

        rollouts = await gather_ordered(
            self.executor,
            [partial(one, make) for make in factories],
            lambda number, rollout: self.executor.settle(rollout.trace, reserved[number]),
            self.rules.concurrency,
            reserved,
        )
        self.count([rollout.trace.failure for rollout in rollouts])
        return rollouts

    def count(self, failures: Sequence[Failure | None]) -> None:
        """Count rollouts or answers and their failures."""
        self.made += len(failures)
        self.failures.update(failure for failure in failures if failure)
        if self.made >= MIN_ROLLOUTS:
            self.check_failures()

    def check_failures(self) -> None:
        """Raise if too many rollouts are uninformative; call it after all rollouts of the step."""
        counts = Counter[str]()
        for failure, n in self.failures.items():
            if is_lost(failure) or failure.kind == "metric":  # neither is due to a model's answer
                counts[failure.message] += n
        if counts.total() > self.rules.max_failed * self.made:
            raise_too_many_failures(counts.most_common(), self.made, self.rules)


def _share(fork: RolloutFork, system: System) -> float:
    """Return the maximum cost of a fork, in system runs.

    A fork runs the descendants of the forked call. If conditions or loops decide which calls are
    made, or the forked run failed before making them, that may be a whole run.
    """
    trace = fork.of.trace
    fixed = not any(
        isinstance(node.component, Composite) or node.when for node in system.nodes.values()
    )
    if not fixed or trace.failure is not None:
        return 1.0
    after = {fork.address}
    for call in trace.calls:  # parents come first
        if not after.isdisjoint(call.parents):
            after.add(call.address)
    return min(1.0, sum(trace.run_fraction(call) for call in trace.calls if call.address in after))


def is_lost(failure: Failure | None) -> bool:
    """Return whether a transient error or a rate limit ended a run or call: it carries no training signal."""
    return failure is not None and failure.is_transient


def upstream_components(system: System, trained: Collection[str]) -> set[str]:
    """Return the components that do not depend on any trained component."""
    held: dict[str, set[str]] = {}
    for name, node in system.nodes.items():
        body = node.component.body.components if isinstance(node.component, Composite) else ()
        held[name] = {node.component.name, *body}
    first = [name for name, components in held.items() if not components.isdisjoint(trained)]
    after = {*first}.union(*(system.descendants(name) for name in first))
    return set(system.components).difference(*(held[name] for name in after))


def calls_of(trace: Trace, components: Sequence[str]) -> list[Call]:
    """Return the calls of some components that sampled tokens, in order."""
    return [call for call in trace.calls if call.component in components and call.tokens]


def rollout_rules(
    rules: EvaluationRules, system: System, components: Sequence[str], settings: SamplingSettings
) -> EvaluationRules:
    """Return the evaluation rules of rollouts: trained components sample at the same temperature."""
    score = rules.failure_score if settings.failure_score is None else settings.failure_score
    own = {
        c: {"temperature": settings.temperature}
        for c in components
        if "temperature" in system.components[c].settings
    }
    return replace(rules, failure_score=score, settings=own)
