"""Calls of a job on a worker: cached, admitted and paid by the driver, executed here.

The driver has the only cache, the only budget and the only admission control of each server. A
worker asks it before it executes a cached call, sends a request to a server, or spends anything,
and reports each executed call at once. A call that is finished is therefore not repeated if the
worker dies.

Each question costs the latency of a message and its reply. A request to a server is therefore one
question for admission and budget.
"""

from __future__ import annotations

import asyncio
import copy
import itertools
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Self, cast

from compound.cluster import messages
from compound.cluster.messages import Document, Outbox
from compound.cluster.wire import Types, result_from_wire, result_to_wire
from compound.core.engine import NO_USAGE, Engine, Usage
from compound.execution.budget import Budget, Meter
from compound.execution.caller import Caller, PendingCall
from compound.execution.sender import Engines, Gate, NeverAdmitted, Notify, Refusal, Sender, Turn
from compound.execution.trace import CallResult


class DriverQuestions:
    """Questions to the driver that wait for a reply."""

    def __init__(self, outbox: Outbox) -> None:
        self.post = outbox.post
        self.ids = itertools.count(1)
        self._open: dict[int, asyncio.Future[Document]] = {}

    async def ask(self, question: messages.JobQuestion) -> Document:
        """Send a question and return the reply; take it back if this is cancelled."""
        future: asyncio.Future[Document] = asyncio.get_running_loop().create_future()
        self._open[question.id] = future
        self.post(question)
        try:
            return await future
        except asyncio.CancelledError:
            self.post(messages.Withdraw(job=question.job, id=question.id))
            raise
        finally:
            del self._open[question.id]

    def answer(self, reply: messages.Reply) -> None:
        """Pass a reply on; one to a question that was taken back is dropped."""
        future = self._open.get(reply.id)
        if future is not None and not future.done():
            future.set_result(reply.value)


@dataclass(frozen=True)
class ExampleLink:
    """The driver's services for one job."""

    start: messages.Start
    questions: DriverQuestions

    def next(self) -> dict[str, Any]:
        """Return the job and the id of a new question."""
        return {"job": self.start.job, "id": next(self.questions.ids)}

    def finish(self, claim: int, key: str, pending: PendingCall, result: Document) -> None:
        """Report an executed call."""
        address, component = pending.address, pending.component.name
        call: dict[str, Any] = {"id": claim, "key": key, "address": address, "component": component}
        self.questions.post(messages.Finished(job=self.start.job, **call, result=result))


@dataclass(slots=True)
class RemoteTurn(Turn):
    """A turn that the driver has granted."""

    id: int = 0
    answered: bool = False


@dataclass(frozen=True)
class RemoteGate:
    """The driver's admission control of one engine; see `compound.execution.sender.Gate`."""

    lm: str
    link: ExampleLink

    @asynccontextmanager
    async def admit(
        self, seed: int, patience: float, meter: Meter, worst: Usage
    ) -> AsyncIterator[tuple[Turn, list[Usage]]]:
        """Wait for a turn and a reservation of the driver's budget, and hold both."""
        question = messages.Enter(
            **self.link.next(), lm=self.lm, seed=seed, patience=patience, worst=worst
        )
        value = await self.link.questions.ask(question)
        if not value["admitted"]:
            raise NeverAdmitted
        number, round_ = question.id, cast("int", value["round"])
        turn = RemoteTurn(round_, cast("float", value["waited"]), number)
        used: list[Usage] = []
        try:
            yield turn, used
        finally:
            end: dict[str, Any] = {"answered": turn.answered, "used": used or [worst]}
            self.link.questions.post(messages.Leave(job=question.job, turn=number, **end))

    def speed_up(self, turn: Turn) -> None:
        """Record the answer to the request of a turn."""
        cast("RemoteTurn", turn).answered = True

    async def refuse(self, turn: Turn, retry_after: float | None) -> Refusal:
        """Record that the request of a turn was rejected because of the rate limit."""
        held = cast("RemoteTurn", turn).id
        value = await self.link.questions.ask(
            messages.Rejected(**self.link.next(), turn=held, retry_after=retry_after)
        )
        return Refusal(**cast("Any", value))


class RemoteMeter(Meter):
    """The driver's budget, for one job."""

    def __init__(self, link: ExampleLink) -> None:
        # any limit of the cost makes models without a price an error; the driver has the amount
        super().__init__(Budget(cost=float("inf") if link.start.priced else None))
        self._link = link

    @asynccontextmanager
    async def reserve(self, worst: Usage) -> AsyncIterator[list[Usage]]:
        """Reserve ``worst`` while a request is in flight; see `Meter.reserve`."""
        # also without a limit: the driver charges what is in flight when the worker is lost
        question = messages.Enter(**self._link.next(), worst=worst)
        await self._link.questions.ask(question)
        used: list[Usage] = []
        try:
            yield used
        finally:
            end: dict[str, Any] = {"answered": False, "used": used or [worst]}
            self._link.questions.post(messages.Leave(job=question.job, turn=question.id, **end))


class WorkerSender(Sender):
    """Sends the requests of a job; those to servers when the driver admits them."""

    link: ExampleLink | None = None

    def for_job(self, link: ExampleLink) -> Self:
        """Return a sender of a job, which shares the engines."""
        other = copy.copy(self)
        other.link = link
        return other

    def _gate(self, lm: str, engine: Engine) -> Gate:
        assert self.link is not None
        # a model in this process has a queue of its own; a server is shared with all workers
        return RemoteGate(lm, self.link) if engine.remote else self.throttle(engine)


class WorkerCaller(Caller):
    """Executes the calls of a job that the driver does not have."""

    _link: ExampleLink

    def __init__(self, engines: Engines, meter: Meter, notify: Notify) -> None:
        super().__init__(engines, None, meter, asyncio.sleep, None, notify)
        self._own_sender = WorkerSender(engines, asyncio.sleep, notify)
        self._sender = self._own_sender

    def for_job(self, link: ExampleLink, meter: Meter) -> Self:
        """Return a caller of a job, which shares engines and connections."""
        sender, start = self._own_sender.for_job(link), link.start
        shared = {"caches": start.caches, "shares": start.shares}
        return self.replace(meter=meter, _link=link, _sender=sender, **shared)

    async def _call(self, pending: PendingCall) -> CallResult:
        component, link, key = pending.component, self._link, self.key(pending)
        types = _types(pending)
        if (known := link.start.done.get(pending.address)) is not None:
            return result_from_wire(known, types, key)
        if not key:
            result = await self.execute(pending, "")
            if result.usage != NO_USAGE:  # free calls can be repeated
                link.finish(0, "", pending, result_to_wire(result, types, pending.address))
            return result
        question = messages.Claim(**link.next(), key=key, component=component.name)
        found = (await link.questions.ask(question))["result"]
        if found is not None:
            return result_from_wire(cast("Document", found), types, key)
        try:
            result = await self.execute(pending, key)
            made = result_to_wire(result, types, pending.address)
        except BaseException:
            link.questions.post(messages.Withdraw(job=question.job, id=question.id))
            raise
        link.finish(question.id, key, pending, made)
        return result


def _types(pending: PendingCall) -> Types:
    ports: Mapping[str, object] = {
        name: port.type for name, port in pending.component.outputs.items()
    }
    return lambda name: ports[name]
