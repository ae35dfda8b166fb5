"""The driver's side of the workers: start them, send them jobs, and send a lost worker's jobs again."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial

import compound.core.errors
from compound.cluster import messages
from compound.cluster.handshake import SAME, WorkerMismatch, compare
from compound.cluster.messages import (
    Document,
    Generate,
    Outbox,
    ProtocolError,
    Run,
    WorkerLost,
)
from compound.core.errors import CompoundError
from compound.core.formatting import plural

MAX_LOSSES = 5  # workers that may be lost while they run one job
START_ATTEMPTS = 3  # times that one replacement is started
RESUME = "run the same command to resume; finished calls are recorded"


class WorkersLost(CompoundError):
    """Too many workers were lost."""


class _LostInStart(WorkersLost):
    """A worker was lost before it had completed the handshake."""


@dataclass(eq=False)
class _Job:
    """A message to a worker, and the result that the driver waits for; ``what`` names it in messages."""

    message: Run | Generate
    what: str
    result: asyncio.Future[Document | None]
    losses: int = 0

    def fail(self, error: BaseException) -> None:
        if not self.result.done():
            self.result.set_exception(error)


class _RemoteWorker:
    """A worker that has passed the handshake."""

    def __init__(self, number: int, connection: messages.WorkerConnection) -> None:
        self.number, self.name = number, f"worker {number}"
        self.connection = connection
        self.jobs: dict[int, _Job] = {}
        self.outbox = Outbox(connection)
        self.tasks: list[asyncio.Task[None]] = []

    def start(self, job: _Job) -> None:
        self.jobs[job.message.job] = job
        self.outbox.post(job.message)

    def cancel(self, job: _Job) -> None:
        if self.jobs.pop(job.message.job, None) is not None:
            self.outbox.post(messages.Cancel(job=job.message.job))

    def handle(self, message: messages.ToDriver) -> None:
        """Act on a message; those of jobs that have ended are dropped.

        Raises:
            ProtocolError: the worker sent it out of turn.
        """
        if isinstance(message, messages.Ready | messages.Refused):
            raise ProtocolError("a second handshake")
        job = self.jobs.pop(message.job, None)
        if job is None or job.result.done():
            return
        if isinstance(message, messages.JobFailed):
            job.fail(_error(message, self.name))
        else:
            job.result.set_result(message.result if isinstance(message, messages.Done) else None)


class WorkerPool:
    """Workers that run jobs.

    Args:
        transport: starts workers.
        workers: number of workers; None for one per machine.
        hello: first message to each worker.
        facts: what must be equal on each worker.
        notify: receives one-line notices.
        start_seconds: maximum time in which a worker must start and rebuild the system.
        max_restarts: number of lost workers that are replaced; one that is lost while it starts
            counts, too.
    """

    def __init__(
        self,
        transport: messages.Transport,
        workers: int | None,
        hello: messages.Hello,
        facts: messages.Facts,
        notify: Callable[[str], object],
        *,
        start_seconds: float = 120.0,
        max_restarts: int = 20,
    ) -> None:
        self._transport, self._count, self._hello, self._facts = transport, workers, hello, facts
        self._notify = notify
        self._start_seconds, self._restarts_left = start_seconds, max_restarts
        self._workers: list[_RemoteWorker] = []
        self._waiting: list[_Job] = []
        self._replacing: set[asyncio.Task[None]] = set()
        self._opening = asyncio.Lock()
        self._opened = False
        self._broken: CompoundError | None = None

    @property
    def size(self) -> int:
        """Number of workers; 1 before they are started if it is one per machine."""
        return self._count or 1

    async def start(self) -> None:
        """Start all workers, once; nothing is sent to any of them unless all pass the handshake.

        Raises:
            CompoundError: a worker cannot be started, or differs from the driver.
        """
        async with self._opening:
            if self._opened:
                return
            self._count = self._count or await self._transport.machines()
            started = [asyncio.create_task(self._started(n + 1)) for n in range(self._count)]
            found = await asyncio.gather(*started, return_exceptions=True)
            self._workers = [worker for worker in found if isinstance(worker, _RemoteWorker)]
            errors = [error for error in found if isinstance(error, BaseException)]
            if errors:
                await self.aclose()
                raise errors[0]
            for worker in self._workers:
                self._attach(worker)
            self._opened = True

    async def run(self, message: Run | Generate, what: str) -> Document | None:
        """Run a job on the worker with the fewest jobs, and on another one if it is lost.

        Args:
            message: the job.
            what: its description in messages.

        Returns:
            The result; None if only the driver can do the job.

        Raises:
            CompoundError: the job failed, or too many workers were lost.
        """
        await self.start()
        job = _Job(message, what, asyncio.get_running_loop().create_future())
        self._assign(job)
        try:
            return await job.result
        finally:
            if job in self._waiting:
                self._waiting.remove(job)
            for worker in self._workers:
                worker.cancel(job)

    async def aclose(self) -> None:
        """End all workers."""
        tasks = [*self._replacing, *(task for worker in self._workers for task in worker.tasks)]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        workers, self._workers, self._opened = self._workers, [], False
        await asyncio.gather(
            *(worker.connection.aclose() for worker in workers), return_exceptions=True
        )
        await self._transport.aclose()

    def _assign(self, job: _Job) -> None:
        if self._broken is not None:
            job.fail(self._broken)
        elif not self._workers:
            self._waiting.append(job)
        else:
            min(self._workers, key=lambda worker: len(worker.jobs)).start(job)

    async def _started(self, number: int) -> _RemoteWorker:
        connection = await self._transport.connect(number)
        worker = _RemoteWorker(number, connection)
        try:
            async with asyncio.timeout(self._start_seconds):
                await self._shake_hands(worker)
        except BaseException as error:
            await connection.aclose()
            if isinstance(error, TimeoutError):
                raise WorkersLost(
                    f"{worker.name} did not start within {self._start_seconds:g} s",
                    hint="check that the cluster has a free place for it, or raise start_seconds",
                ) from None
            raise
        return worker

    async def _shake_hands(self, worker: _RemoteWorker) -> None:
        worker.outbox.post(self._hello)
        sending = asyncio.create_task(worker.outbox.run())
        try:
            first = messages.for_driver(await worker.connection.receive())
        except WorkerLost as error:
            raise _LostInStart(
                f"{worker.name} ended while it started: {error}", hint=SAME
            ) from error
        except ProtocolError as error:
            raise WorkerMismatch(
                f"{worker.name} cannot be used: it sent {error.message}", hint=SAME
            ) from error
        finally:
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)
        match first:
            case [messages.Ready(facts=facts)]:
                compare(self._facts, facts, worker.name)
            case [messages.Refused(message=message, hint=hint)]:
                raise WorkerMismatch(
                    f"{worker.name} cannot load the system: {message}", hint=hint or SAME
                )
            case _:
                raise WorkerMismatch(f"{worker.name} cannot be used: it did not answer", hint=SAME)

    def _attach(self, worker: _RemoteWorker) -> None:
        sending = self._guarded(worker.outbox.run, f"sending to {worker.name}")
        receiving = self._guarded(partial(self._receive, worker), f"receiving from {worker.name}")
        worker.tasks = [asyncio.create_task(sending), asyncio.create_task(receiving)]

    async def _guarded(self, work: Callable[[], Awaitable[None]], doing: str) -> None:
        try:
            await work()
        except WorkerLost:
            pass  # of the sender; the receiver notices it, too
        except CompoundError as error:
            self._break(error)
        except Exception as error:  # noqa: BLE001 - jobs would wait for ever
            self._break(_unexpected(doing, error))

    async def _receive(self, worker: _RemoteWorker) -> None:
        """Act on the messages of a worker until it is lost, and then replace it."""
        try:
            while True:
                for message in messages.for_driver(await worker.connection.receive()):
                    worker.handle(message)
        except ProtocolError as error:
            problem = f"{worker.name} sent {error.message}"
            raise WorkerMismatch(problem, hint=f"{SAME}; {RESUME}") from error
        except WorkerLost as error:
            self._lose(worker, str(error))

    def _lose(self, worker: _RemoteWorker, reason: str) -> None:
        self._workers.remove(worker)
        worker.tasks[0].cancel()
        jobs, worker.jobs = list(worker.jobs.values()), {}
        self._notify(
            f"{worker.name} was lost ({reason}), and {plural(len(jobs), 'call')} will be sent again"
        )
        if self._restarts_left == 0:
            self._break(
                WorkersLost(
                    f"{worker.name} was lost ({reason}), and max_restarts is used up", hint=RESUME
                )
            )
        else:
            self._restarts_left -= 1
            task = asyncio.create_task(self._replace(worker))
            self._replacing.add(task)
            task.add_done_callback(self._replacing.discard)
        for job in jobs:
            job.losses += 1
            if job.losses >= MAX_LOSSES:
                job.fail(
                    WorkersLost(
                        f"{job.losses} workers were lost while they ran {job.what}",
                        hint=f"it may use too much memory; {RESUME}",
                    )
                )
            else:
                self._assign(job)

    async def _replace(self, lost: _RemoteWorker, attempts_left: int = START_ATTEMPTS - 1) -> None:
        await asyncio.gather(lost.connection.aclose(), return_exceptions=True)
        try:
            worker = await self._started(lost.number)
        except Exception as found:  # noqa: BLE001 - jobs would wait for ever
            if isinstance(found, _LostInStart) and attempts_left and self._restarts_left:
                self._restarts_left -= 1
                self._notify(f"{found.message}; it will be started again")
                await self._replace(lost, attempts_left - 1)
                return
            replacing = f"replacing {lost.name}"
            error = found if isinstance(found, CompoundError) else _unexpected(replacing, found)
            if (task := asyncio.current_task()) is not None:
                # another one may fail in the same pass of the event loop
                self._replacing.discard(task)
            if self._workers or self._replacing:
                self._notify(f"{lost.name} cannot be replaced: {error.message}")
            else:
                hint = f"{error.hint}; {RESUME}" if error.hint else RESUME
                self._break(WorkersLost(f"no worker is left: {error.message}", hint=hint))
            return
        self._workers.append(worker)
        self._attach(worker)
        waiting, self._waiting = self._waiting, []
        for job in waiting:
            self._assign(job)

    def _break(self, error: CompoundError) -> None:
        """End all jobs, now and later, with an error."""
        self._broken = error
        for jobs in (self._waiting, *(worker.jobs.values() for worker in self._workers)):
            for job in jobs:
                job.fail(error)


def _unexpected(doing: str, error: Exception) -> CompoundError:
    return CompoundError(f"{doing} failed: {type(error).__name__}: {error}", hint=RESUME)


def _error(message: messages.JobFailed, worker: str) -> CompoundError:
    """Return the error that ended a job, of the class that a run in this process raises."""
    found = getattr(compound.core.errors, message.error, None)
    if isinstance(found, type) and issubclass(found, CompoundError):
        error = found.__new__(found)
        Exception.__init__(error, message.message)
        facts = message.model_dump(exclude={"job", "error", "charged"})
        vars(error).update({**facts, "charged": message.charged, "outputs": {}})
        return error
    return CompoundError(f"{worker}: {message.message}", hint=message.hint)
