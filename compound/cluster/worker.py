"""A worker: rebuilds a system from its file, and makes calls and requests that the driver sends."""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from functools import partial
from typing import Any

from pydantic import TypeAdapter

from compound.cluster import messages
from compound.cluster.handshake import facts_of, rebuild
from compound.cluster.messages import Document, Outbox, WorkerLost
from compound.cluster.wire import NotSendable, result_to_wire, values_from_wire
from compound.core import engine
from compound.core.engine import Engine, Request, Usage
from compound.core.errors import CallError, CompoundError
from compound.core.image import Image
from compound.execution.budget import Meter
from compound.execution.caller import Caller, PendingCall
from compound.execution.sender import find_in
from compound.graph.component import Operation
from compound.graph.registry.engines import for_system

Work = Callable[[], Awaitable[Document]]
SHOWN = 20  # last lines of a traceback that the driver shows
REQUEST = TypeAdapter(Request)
REQUEST.rebuild(_types_namespace={**vars(engine), "Image": Image})  # a type of its messages


class NeedsDriver(BaseException):
    """A component uses a model or the budget; no base of components' own errors, so that none catches it."""


class _NoMeter(Meter):
    def reserve(self, worst: Usage) -> Any:  # noqa: ANN401 - never returns
        raise NeedsDriver


def _no_engine(lm: str) -> Engine:
    raise NeedsDriver


async def serve(connection: messages.WorkerConnection) -> None:
    """Make calls until the connection to the driver is lost."""
    outbox = Outbox(connection)
    sending = asyncio.create_task(outbox.run())
    worker = Worker(outbox)
    receiving = asyncio.create_task(_receive(connection, worker))
    try:
        await asyncio.wait((sending, receiving), return_when=asyncio.FIRST_COMPLETED)
        for task in (sending, receiving):
            if (
                task.done()
                and (error := task.exception()) is not None
                and not isinstance(error, WorkerLost)
            ):
                raise error  # the driver finds the worker lost, instead of waiting for its messages
    finally:
        sending.cancel()
        receiving.cancel()
        await worker.aclose()
        await asyncio.gather(sending, receiving, return_exceptions=True)


async def _receive(connection: messages.WorkerConnection, worker: Worker) -> None:
    while True:
        for message in messages.for_worker(await connection.receive()):
            worker.handle(message)


class Worker:
    """The state of a worker, which has one system."""

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox
        self._caller = Caller(_no_engine, None, _NoMeter(), asyncio.sleep)
        self._engines: dict[str, Engine] = {}
        self._jobs: dict[int, asyncio.Task[None]] = {}

    def handle(self, message: messages.ToWorker) -> None:
        """Act on a message of the driver."""
        match message:
            case messages.Hello():
                self._rebuild(message)
            case messages.Run():
                self._start(message.job, partial(self._run, message))
            case messages.Generate():
                self._start(message.job, partial(self._generate, message))
            case messages.Cancel():
                if (running := self._jobs.get(message.job)) is not None:
                    running.cancel()

    def _rebuild(self, hello: messages.Hello) -> None:
        try:
            program = rebuild(hello.program)
            self._components = program.system.components
            self._find = find_in(for_system(program.find_engine, program.system))
            facts = facts_of(program.system, program.folder)
            self._outbox.post(messages.Ready(facts=facts))
        except CompoundError as error:
            self._outbox.post(messages.Refused(message=error.message, hint=error.hint))
        except Exception as error:  # noqa: BLE001 - code that the file names may raise anything
            self._outbox.post(messages.Refused(message=f"{type(error).__name__}: {error}", hint=""))

    def _start(self, job: int, work: Work) -> None:
        task = self._jobs[job] = asyncio.create_task(self._reported(job, work))
        task.add_done_callback(lambda _: self._jobs.pop(job, None))

    async def _reported(self, job: int, work: Work) -> None:
        """Send the result of a job, or why there is none; a worker outlives its jobs."""
        try:
            self._outbox.post(messages.Done(job=job, result=await work()))
        except (NeedsDriver, NotSendable):
            self._outbox.post(messages.Declined(job=job))
        except CompoundError as error:
            shown = ("kind", "retry_after", "charged")
            facts = {name: getattr(error, name) for name in shown if hasattr(error, name)}
            self._fail(job, type(error).__name__, error.message, error.hint, **facts)
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is None or task.cancelling():  # by the driver, which does not wait for a result
                raise
            self._fail(job, "", "a component raised CancelledError", _end_of_traceback(error))
        except Exception as error:  # noqa: BLE001 - the driver reports it
            self._fail(job, "", f"{type(error).__name__}: {error}", _end_of_traceback(error))

    def _fail(self, job: int, error: str, message: str, hint: str, **facts: object) -> None:
        found = {"job": job, "error": error, "message": message, "hint": hint, **facts}
        self._outbox.post(messages.JobFailed.model_validate(found))

    async def _run(self, run: messages.Run) -> Document:
        component = self._components[run.component]
        assert isinstance(component, Operation)
        inputs = values_from_wire(run.inputs, component.inputs or {})
        pending = PendingCall(
            component, run.address, inputs, run.values, (), 0, component.outputs, _seed=run.seed
        )
        return result_to_wire(await self._caller.execute(pending, ""), component.outputs)

    async def _generate(self, message: messages.Generate) -> Document:
        if message.lm not in self._engines:
            self._engines[message.lm] = self._find(message.lm)
        request = REQUEST.validate_python(message.request)
        try:
            return asdict(await self._engines[message.lm].generate(request))
        except CompoundError:
            raise
        except Exception as error:  # a failed call, as in one process
            raise CallError(f"{type(error).__name__}: {error}") from error

    async def aclose(self) -> None:
        """Cancel all jobs and close the engines."""
        jobs = list(self._jobs.values())
        for job in jobs:
            job.cancel()
        await asyncio.gather(*jobs, return_exceptions=True)
        await self._caller.aclose()
        for opened in self._engines.values():
            await opened.aclose()


def _end_of_traceback(error: BaseException) -> str:
    return "\n".join("".join(traceback.format_exception(error)).splitlines()[-SHOWN:])
