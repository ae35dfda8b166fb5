"""The driver's services for one job on one worker: cache, budget, and admission to servers.

Each question is answered by a task that uses the driver's own caller and meter, so equal calls,
reservations and rate limits are treated exactly as in one process. If the worker is lost, tasks
whose outcome has arrived complete, and the others are cancelled: a call in flight counts as not
made, and its reservation is charged.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

from compound.cluster import messages
from compound.cluster.messages import Document
from compound.cluster.wire import CallCodec, result_from_wire, result_to_wire
from compound.core.engine import NO_USAGE, Usage
from compound.execution.budget import Meter, clip_usage
from compound.execution.caller import Caller
from compound.execution.sender import NeverAdmitted, Throttle, Turn
from compound.execution.trace import CallResult
from compound.graph.component import Component
from compound.graph.system import System

Question = (
    messages.Claim
    | messages.Finished
    | messages.Enter
    | messages.Leave
    | messages.Rejected
    | messages.Withdraw
)


@dataclass(eq=False)
class ExampleJob:
    """A run that the driver waits for."""

    start: messages.Start
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
class _Open:
    """A question in progress: its task, and the outcome that the worker reports."""

    outcome: asyncio.Future[Any]
    task: asyncio.Task[None] | None = None
    granted: bool = False
    worst: Usage = NO_USAGE  # what it reserves
    held: tuple[Throttle, Turn] | None = None

    def close(self) -> bool:
        """Cancel the task unless its outcome has arrived; return whether a granted one was cancelled."""
        if self.outcome.done() or self.task is None or self.task.done():
            return False
        self.task.cancel()
        return self.granted


Work = Callable[[_Open], Coroutine[object, object, None]]


class ExampleServices:
    """Answers the questions of a job."""

    def __init__(self, job: ExampleJob, reply: Callable[[messages.WorkerMessage], None]) -> None:
        self.job = job
        self._reply = reply
        self._claims: dict[int, _Open] = {}
        self._reserved: dict[int, _Open] = {}  # requests

    def handle(self, message: Question) -> None:
        """Act on a message about the job; errors of the driver's own checks end the job.

        Raises:
            KeyError: it names something that the system or the job does not have.
            ValueError: it reports usage that is impossible.
        """
        match message:
            case messages.Claim():
                component = self.job.system.components[message.component]
                self._begin(self._claims, message.id, partial(self._claim, message, component))
            case messages.Finished():
                self._finish(message)
            case messages.Enter():
                self._begin(self._reserved, message.id, partial(self._enter, message))
            case messages.Leave():
                self._leave(message)
            case messages.Rejected():
                if (held := self._reserved[message.turn].held) is None:
                    raise KeyError(message.turn)
                self._begin({}, message.id, lambda _: self._reject(message, *held))
            case messages.Withdraw():
                self._withdraw(message.id)

    def close(self) -> None:
        """Cancel what is in progress, because the worker is lost or the job has ended."""
        for claim in self._claims.values():
            claim.close()
        lost = sum(request.close() for request in self._reserved.values())
        self.job.meter.incidents["lost"] += lost

    def _begin(self, kind: dict[int, _Open], number: int, work: Work) -> None:
        opened = kind[number] = _Open(asyncio.get_running_loop().create_future())
        opened.task = asyncio.create_task(self._guarded(kind, number, opened, work))

    async def _guarded(
        self, kind: dict[int, _Open], number: int, opened: _Open, work: Work
    ) -> None:
        try:
            await work(opened)
        except Exception as error:  # noqa: BLE001 - such as an exhausted budget; it is raised by the job
            self.job.fail(error)
        finally:
            kind.pop(number, None)

    @staticmethod
    def _end(opened: _Open | None, outcome: object) -> None:
        if opened is not None and not opened.outcome.done():
            opened.outcome.set_result(outcome)

    def _answer(self, number: int, value: Document) -> None:
        self._reply(messages.Reply(id=number, value=value))

    async def _claim(self, message: messages.Claim, component: Component, opened: _Open) -> None:
        """Answer with the result of the call, or let the worker execute it."""

        async def execute() -> CallResult:
            opened.granted = True
            self._answer(message.id, {"result": None})
            found: CallResult = await opened.outcome
            return found

        result = await self.job.caller.share(message.key, component, execute)
        if not opened.granted:
            types = self.job.codec.outputs_of(message.component)
            found = result_to_wire(result, types, message.component)
            self._answer(message.id, {"result": found})

    def _finish(self, message: messages.Finished) -> None:
        """Keep the result of a paid call, and pass it to those who wait for an equal one."""
        types = self.job.codec.outputs_of(message.component)
        result = result_from_wire(message.result, types, message.key)
        self.job.done[message.address] = message.result
        self._end(self._claims.get(message.id), result)

    def _leave(self, message: messages.Leave) -> None:
        """End a request, which is charged at most its reservation, as in one process."""
        opened = self._reserved.get(message.turn)
        spent = sum(message.used, NO_USAGE)
        if opened is not None and (wrong := clip_usage(spent, opened.worst)[1]):
            raise ValueError(f"a request used more than it reserved ({wrong})")
        self._end(opened, (message.answered, message.used))

    async def _enter(self, message: messages.Enter, opened: _Open) -> None:
        opened.worst = message.worst
        if not message.lm:
            async with self.job.meter.reserve(message.worst) as used:
                opened.granted = True
                self._answer(message.id, {})
                used.extend((await opened.outcome)[1])
            return
        throttle = self.job.caller.throttle(message.lm)
        limits = message.seed, message.patience, self.job.meter, message.worst
        try:
            async with throttle.admit(*limits) as (turn, used):
                opened.granted, opened.held = True, (throttle, turn)
                admitted: Document = {"admitted": True, "round": turn.round, "waited": turn.waited}
                self._answer(message.id, admitted)
                answered, spent = await opened.outcome
                used.extend(spent)
                if answered:
                    throttle.speed_up()
        except NeverAdmitted:
            self._answer(message.id, {"admitted": False})

    async def _reject(self, message: messages.Rejected, throttle: Throttle, turn: Turn) -> None:
        self._answer(message.id, asdict(await throttle.refuse(turn, message.retry_after)))

    def _withdraw(self, number: int) -> None:
        """Give up a claim, or give back what was reserved for a request that was not sent."""
        if (claim := self._claims.get(number)) is not None:
            claim.close()
        request = self._reserved.get(number)
        if request is not None and not request.outcome.done():
            request.outcome.set_result((False, [NO_USAGE]))
            if not request.granted and request.task is not None:
                request.task.cancel()
