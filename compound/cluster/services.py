"""The driver's services for one job on one worker: cache, budget, and admission to servers.

Each question is answered by a task that uses the driver's own caller and meter, so equal calls,
reservations and rate limits are treated exactly as in one process. If the worker is lost, tasks
whose outcome has arrived complete, and the others are cancelled: a call in flight counts as not
made, and its reservation is charged.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from compound.cluster.messages import (
    Claim,
    Document,
    Enter,
    Finished,
    Leave,
    Rejected,
    Reply,
    Reserve,
    Settle,
    Start,
    Withdraw,
    WorkerMessage,
)
from compound.cluster.wire import (
    CallCodec,
    result_from_wire,
    result_to_wire,
    usage_from_wire,
    usage_to_wire,
)
from compound.core.engine import NO_USAGE, Usage
from compound.execution.budget import Meter, clip_usage
from compound.execution.caller import Caller
from compound.execution.results import CallResult
from compound.execution.sender import NeverAdmitted, Throttle, Turn
from compound.graph.component import Component
from compound.graph.system import System

T = TypeVar("T")
Question = Claim | Finished | Enter | Leave | Rejected | Withdraw | Reserve | Settle


@dataclass(eq=False)
class ExampleJob:
    """A run that the driver waits for."""

    start: Start
    system: System
    codec: CallCodec
    caller: Caller
    meter: Meter
    result: asyncio.Future[Document]
    done: dict[str, Document] = field(default_factory=dict)
    losses: int = 0

    def fail(self, error: BaseException) -> None:
        """End the job with an error."""
        if not self.result.done():
            self.result.set_exception(error)


@dataclass(eq=False)
class _Open(Generic[T]):
    """A question in progress: its task, and the outcome that the worker reports."""

    outcome: asyncio.Future[T]
    task: asyncio.Task[None] | None = None
    granted: bool = False
    worst: Usage = NO_USAGE  # what it reserves
    follows: int = 0  # id of the question that was asked together with this one

    def close(self) -> bool:
        """Cancel the task unless its outcome has arrived; return whether a granted one was cancelled."""
        if self.outcome.done() or self.task is None or self.task.done():
            return False
        self.task.cancel()
        return self.granted


class ExampleServices:
    """Answers the questions of a job."""

    def __init__(self, job: ExampleJob, reply: Callable[[WorkerMessage], None]) -> None:
        self.job = job
        self._reply = reply
        self._claims: dict[int, _Open[CallResult]] = {}
        self._turns: dict[int, _Open[Leave]] = {}
        self._held: dict[int, tuple[Throttle, Turn]] = {}
        self._leases: dict[int, _Open[list[Usage]]] = {}

    def handle(self, message: Question) -> None:
        """Act on a message about the job; errors of the driver's own checks end the job.

        Raises:
            KeyError: it names something that the system or the job does not have.
            ValueError: it reports usage that is impossible.
        """
        match message:
            case Claim():
                self._begin_claim(message, None)
            case Finished():
                self._finish(message)
            case Enter(claim=None):
                self._begin(self._turns, message.id, lambda open_: self._enter(message, open_))
            case Enter(claim=Claim() as claim):
                self._begin_claim(claim, message)
            case Leave():
                self._leave(message)
            case Rejected():
                held = self._held[message.turn]
                self._begin({}, message.id, lambda _: self._reject(message, *held))
            case Reserve():
                self._begin(self._leases, message.id, lambda open_: self._reserve(message, open_))
            case Settle():
                self._end(self._leases, message.lease, list(map(usage_from_wire, message.used)))
            case Withdraw():
                self._withdraw(message.id)

    def close(self) -> None:
        """Cancel what is in progress, because the worker is lost or the job has ended."""
        for claim in self._claims.values():
            claim.close()
        lost = sum(turn.close() for turn in self._turns.values())
        lost += sum(lease.close() for lease in self._leases.values())
        self.job.meter.incidents["lost"] += lost

    def _begin_claim(self, message: Claim, request: Enter | None) -> None:
        component = self.job.system.components[message.component]
        self._begin(
            self._claims, message.id, lambda open_: self._claim(message, component, request, open_)
        )

    def _begin(
        self,
        kind: dict[int, _Open[T]],
        number: int,
        work: Callable[[_Open[T]], Coroutine[object, object, None]],
    ) -> None:
        opened: _Open[T] = _Open(asyncio.get_running_loop().create_future())
        kind[number] = opened
        opened.task = asyncio.create_task(self._guarded(kind, number, opened, work))

    async def _guarded(
        self,
        kind: dict[int, _Open[T]],
        number: int,
        opened: _Open[T],
        work: Callable[[_Open[T]], Coroutine[object, object, None]],
    ) -> None:
        try:
            await work(opened)
        except Exception as error:  # noqa: BLE001 - such as an exhausted budget; it is raised by the job
            self.job.fail(error)
        finally:
            kind.pop(number, None)

    @staticmethod
    def _end(kind: dict[int, _Open[T]], number: int, outcome: T) -> None:
        opened = kind.get(number)
        if opened is not None and not opened.outcome.done():
            opened.outcome.set_result(outcome)

    def _answer(self, number: int, value: Document) -> None:
        self._reply(Reply(id=number, value=value))

    async def _claim(
        self, message: Claim, component: Component, request: Enter | None, opened: _Open[CallResult]
    ) -> None:
        """Answer with the result of the call, or let the worker execute it, with its first request."""

        async def execute() -> CallResult:
            opened.granted = True
            if request is None:
                self._answer(message.id, {"result": None})
            else:
                opened.follows = request.id
                self._begin(self._turns, request.id, lambda open_: self._enter(request, open_))
            return await opened.outcome

        result = await self.job.caller.share(message.key, component, execute)
        if not opened.granted:
            asked = message.id if request is None else request.id
            types = self.job.codec.outputs_of(message.component)
            self._answer(asked, {"result": result_to_wire(result, types, message.component)})

    def _finish(self, message: Finished) -> None:
        """Keep the result of a paid call, and pass it to those who wait for an equal one."""
        types = self.job.codec.outputs_of(message.component)
        result = result_from_wire(message.result, types, message.key)
        self.job.done[message.address] = message.result
        self._end(self._claims, message.id, result)

    def _leave(self, message: Leave) -> None:
        """End a turn, whose request is charged at most its reservation, as in one process."""
        if (opened := self._turns.get(message.turn)) is not None:
            used = sum(map(usage_from_wire, message.used), NO_USAGE)
            if wrong := clip_usage(used, opened.worst)[1]:
                raise ValueError(f"a request used more than it reserved ({wrong})")
        self._end(self._turns, message.turn, message)

    async def _enter(self, message: Enter, opened: _Open[Leave]) -> None:
        throttle, worst = self.job.caller.throttle(message.lm), usage_from_wire(message.worst)
        opened.worst = worst
        try:
            async with throttle.admit(message.seed, message.patience, self.job.meter, worst) as (
                turn,
                used,
            ):
                opened.granted = True
                self._held[message.id] = throttle, turn
                try:
                    self._answer(
                        message.id, {"admitted": True, "round": turn.round, "waited": turn.waited}
                    )
                    end = await opened.outcome
                    used.extend(map(usage_from_wire, end.used))
                    if end.answered:
                        throttle.speed_up()
                finally:
                    del self._held[message.id]
        except NeverAdmitted:
            self._answer(message.id, {"admitted": False})

    async def _reject(self, message: Rejected, throttle: Throttle, turn: Turn) -> None:
        found = await throttle.refuse(turn, message.retry_after)
        self._answer(
            message.id, {"ahead": found.ahead, "first": found.first, "in_flight": found.in_flight}
        )

    async def _reserve(self, message: Reserve, opened: _Open[list[Usage]]) -> None:
        async with self.job.meter.reserve(usage_from_wire(message.worst)) as used:
            opened.granted = True
            self._answer(message.id, {})
            used.extend(await opened.outcome)

    def _withdraw(self, number: int) -> None:
        if (claim := self._claims.get(number)) is not None:
            claim.close()
            self._withdraw(claim.follows)
        unsent = usage_to_wire(NO_USAGE)
        self._give_back(
            self._turns.get(number),
            Leave(job=self.job.start.job, turn=number, answered=False, used=[unsent]),
        )
        self._give_back(self._leases.get(number), [NO_USAGE])

    @staticmethod
    def _give_back(opened: _Open[T] | None, outcome: T) -> None:
        """End a reservation whose request was not sent."""
        if opened is None or opened.outcome.done():
            return
        opened.outcome.set_result(outcome)
        if not opened.granted and opened.task is not None:
            opened.task.cancel()
