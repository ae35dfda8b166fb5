"""Runs and forks of a system made for learning: warm, scored, and counted in order.

A run that fails by what was said in it is a rollout like any other: its trace holds what was done before, its
score is the failure score. One that was lost to a server or a time limit says nothing of the weights: nobody
learns from it, and where too many are lost there is an error.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from compound.contracts import Example, Metric
from compound.errors import TransientError
from compound.evaluation import Rules, refuse_broken, score
from compound.executor import Executor
from compound.in_turn import in_turn
from compound.system import System
from compound.trace import Call, Failure, Trace

FIRST, STEP = 3_000_000, 10_000  # sample indices of rollouts begin there; each step has so many


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
        lost: how many rollouts were lost so far.
    """

    executor: Executor
    system: System
    metric: Metric
    rules: Rules
    step: int
    lost: int = 0

    def index(self, number: int) -> int:
        """Return the sample index of an example's rollout."""
        return FIRST + STEP * self.step + number

    async def runs(
        self,
        examples: Sequence[Example],
        numbers: Sequence[int],
        system: System | None = None,
        teacher: str = "",
    ) -> list[Rollout]:
        """Run every example once for each number, all in flight together; results by example, then number.

        Raises:
            TooManyFailures: a larger share than ``rules.max_failed`` was lost.
        """
        return await self.attempts([(e, n) for e in examples for n in numbers], system, teacher)

    async def attempts(
        self, wanted: Sequence[tuple[Example, int]], system: System | None = None, teacher: str = ""
    ) -> list[Rollout]:
        """Run examples as the rollouts of theirs that are named, all in flight together; results in order.

        Raises:
            TooManyFailures: a larger share than ``rules.max_failed`` was lost.
        """

        async def one(example: Example, number: int) -> Rollout:
            trace = await self.executor.run(
                system or self.system, example.inputs, example=example.id, sample=self.index(number),
                cache=self.rules.cache, settings=self.rules.settings,
            )  # fmt: skip
            return Rollout(example, trace, number, teacher=teacher)

        return await self._all([partial(one, *each) for each in wanted])

    async def forks(self, wanted: Sequence[Fork]) -> list[Rollout]:
        """Make forks, all in flight together; what follows the forked call is drawn anew, too.

        Raises:
            TooManyFailures: a larger share than ``rules.max_failed`` was lost.
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

        return await self._all([partial(one, fork) for fork in wanted])

    async def _all(self, making: Sequence[Callable[[], Awaitable[Rollout]]]) -> list[Rollout]:
        """Make rollouts, so many at once as may be, and score them.

        Runs are reserved and settled in order, so that no later one takes what an earlier one needs.
        """

        async def one(make: Callable[[], Awaitable[Rollout]]) -> Rollout:
            rollout = await make()
            scored = await score(rollout.trace, self.metric, rollout.example, self.rules)
            return replace(rollout, trace=scored)

        rollouts = await in_turn(
            self.executor,
            [partial(one, make) for make in making],
            lambda _, rollout: self.executor.settle(rollout.trace),
            self.rules.concurrency,
        )
        self.refuse_lost([rollout.trace.failure for rollout in rollouts])
        return rollouts

    def refuse_lost(self, failures: Sequence[Failure | None]) -> None:
        """Count those that were lost.

        Raises:
            TooManyFailures: a larger share than ``rules.max_failed`` was.
        """
        lost = Counter(failure.message for failure in failures if failure and is_lost(failure))
        if lost.total() > self.rules.max_failed * len(failures):
            refuse_broken(lost.most_common(), len(failures), self.rules)
        self.lost += lost.total()


def is_lost(failure: Failure | None) -> bool:
    """Return whether an error that may pass ended a run or a call: that says nothing of the weights."""
    return failure is not None and failure.kind == TransientError.kind


def calls_of(trace: Trace, components: Sequence[str]) -> list[Call]:
    """Return the calls of some components that sampled something, in order."""
    return [call for call in trace.calls if call.component in components and call.tokens]


def warm(system: System, components: Sequence[str], temperature: float) -> Mapping[str, Mapping[str, object]]:
    """Return the settings of rollouts: trained components sample at one temperature."""
    return {
        c: {"temperature": temperature} for c in components if "temperature" in system.components[c].settings
    }


def rolling(rules: Rules, settings: Mapping[str, Mapping[str, object]], failure: float | None) -> Rules:
    """Return the rules of rollouts."""
    score_of_failed = rules.failure_score if failure is None else failure
    return replace(rules, failure_score=score_of_failed, settings=settings)
