"""A worker: rebuilds a system from its file, and runs examples that the driver sends."""

from __future__ import annotations

import asyncio
import traceback
from pathlib import Path

from compound.cluster import messages
from compound.cluster.handshake import facts_of, rebuild
from compound.cluster.messages import Document, Outbox, WorkerLost
from compound.cluster.remote_calls import DriverQuestions, ExampleLink, RemoteMeter, WorkerCaller
from compound.cluster.wire import CallCodec, values_from_wire
from compound.core.errors import CompoundError
from compound.execution.budget import Meter
from compound.execution.executor import Executor
from compound.execution.graph_run import Fork, RunState
from compound.graph.configuration import canonical_json
from compound.graph.registry.engines import for_system
from compound.graph.system import System

KEPT = 32  # configurations that stay bound
SHOWN = 20  # last lines of a traceback that the driver shows


async def serve(connection: messages.WorkerConnection) -> None:
    """Run examples until the connection to the driver is lost."""
    outbox = Outbox(connection)
    sending = asyncio.create_task(outbox.run())
    worker = ExampleWorker(outbox)
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


async def _receive(connection: messages.WorkerConnection, worker: ExampleWorker) -> None:
    while True:
        for message in messages.for_worker(await connection.receive()):
            await worker.handle(message)


class ExampleWorker:
    """The state of a worker."""

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox
        self._questions = DriverQuestions(outbox)
        self._program: Rebuilt | None = None
        self._jobs: dict[int, asyncio.Task[None]] = {}

    async def handle(self, message: messages.ToWorker) -> None:
        """Act on a message of the driver."""
        match message:
            case messages.Hello():
                self._rebuild(message)
            case messages.Start():
                task = asyncio.create_task(self._run(message))
                self._jobs[message.job] = task
                task.add_done_callback(lambda _: self._jobs.pop(message.job, None))
            case messages.Cancel():
                if (running := self._jobs.get(message.job)) is not None:
                    running.cancel()
            case messages.Reply():
                self._questions.answer(message)

    def _rebuild(self, hello: messages.Hello) -> None:
        try:
            self._program = Rebuilt(hello, self._questions)
            self._outbox.post(messages.Ready(facts=self._program.facts))
        except CompoundError as error:
            self._outbox.post(messages.Refused(message=error.message, hint=error.hint))
        except Exception as error:  # noqa: BLE001 - code that the file names may raise anything
            self._outbox.post(messages.Refused(message=f"{type(error).__name__}: {error}", hint=""))

    async def _run(self, start: messages.Start) -> None:
        assert self._program is not None
        link = ExampleLink(start, self._questions)
        meter = RemoteMeter(link)
        try:
            result = await self._program.run(start, link, meter)
        except CompoundError as error:
            self._fail(start.job, type(error).__name__, error.message, error.hint)
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is None or task.cancelling():  # by the driver, which does not wait for a result
                raise
            self._fail(start.job, "", "a component raised CancelledError", _end_of_traceback(error))
        except Exception as error:  # noqa: BLE001 - the driver reports it; a worker outlives its jobs
            self._fail(start.job, "", f"{type(error).__name__}: {error}", _end_of_traceback(error))
        else:
            self._outbox.post(
                messages.Done(job=start.job, result=result, incidents=dict(+meter.incidents))
            )

    def _fail(self, job: int, error: str, message: str, hint: str) -> None:
        self._outbox.post(messages.JobFailed(job=job, error=error, message=message, hint=hint))

    async def aclose(self) -> None:
        """Cancel all jobs and close the engines."""
        jobs = list(self._jobs.values())
        for job in jobs:
            job.cancel()
        await asyncio.gather(*jobs, return_exceptions=True)
        if self._program is not None:
            await self._program.aclose()


class Rebuilt:
    """A system rebuilt from its file, with its engines."""

    def __init__(self, hello: messages.Hello, questions: DriverQuestions) -> None:
        program = rebuild(hello.program)
        self._system = program.system
        self.facts = facts_of(program.system, program.folder)
        engines = for_system(program.find_engine, program.system)
        folder = None if hello.folder is None else Path(hello.folder)
        self._executor = Executor(engines, seed=hello.seed, folder=folder)
        self._caller = WorkerCaller(
            engines, Meter(), lambda text: questions.post(messages.Notice(text=text))
        )
        self._caller.folder = folder
        self._bound: dict[str, tuple[System, CallCodec]] = {}

    async def run(self, start: messages.Start, link: ExampleLink, meter: RemoteMeter) -> Document:
        """Run a job and return its trace."""
        system, codec = self._bind(start.configuration)
        executor = self._executor.with_caller(self._caller.for_job(link, meter), meter)
        run = RunState(
            system,
            start.example,
            start.sample,
            start.seed,
            start.bypass,
            start.settings,
            _fork(codec, start),
            start.samples,
        )
        return codec.trace_to_wire(
            await executor.execute(run, values_from_wire(start.inputs, codec.inputs()))
        )

    def _bind(self, configuration: Document) -> tuple[System, CallCodec]:
        """Return the system bound to a configuration, the same object for an equal one."""
        name = canonical_json(configuration)
        if name not in self._bound:
            while len(self._bound) >= KEPT:
                del self._bound[next(iter(self._bound))]
            system = self._system.bind(configuration)
            self._bound[name] = system, CallCodec(system)
        return self._bound[name]

    async def aclose(self) -> None:
        """Close the engines."""
        await self._caller.aclose()


def _end_of_traceback(error: BaseException) -> str:
    return "\n".join("".join(traceback.format_exception(error)).splitlines()[-SHOWN:])


def _fork(codec: CallCodec, start: messages.Start) -> Fork | None:
    if start.fork is None:
        return None
    kept = {call.address: call for call in map(codec.from_wire, start.fork.calls)}
    outputs = start.fork.outputs
    if outputs is not None:
        outputs = values_from_wire(outputs, codec.outputs_of(kept[start.fork.address].component))
    return Fork(kept, start.fork.address, outputs, start.fork.resample, start.fork.settings)
