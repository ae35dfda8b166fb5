"""The driver's side of the workers: start them, send them jobs, and send a lost worker's jobs again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import compound.core.errors
from compound.cluster import messages
from compound.cluster.handshake import SAME, WorkerMismatch, first_difference
from compound.cluster.messages import Document, Generate, MakeCall, ProtocolError, WorkerLost
from compound.core.errors import CompoundError
from compound.core.formatting import plural

MAX_LOSSES = 5  # workers that may be lost while they run one job
START_ATTEMPTS = 3  # times that one replacement is started
RESUME = "run the same command to resume; finished calls are recorded"


class WorkersLost(CompoundError):
    """Too many workers were lost."""


class _LostInStart(WorkersLost):
    """A worker was lost before it had completed the handshake."""


class _RemoteWorker:
    def __init__(self, number: int, connection: messages.WorkerConnection) -> None:
        self.number, self.name = number, f"worker {number}"
        self.connection, self.load = connection, 0

    async def ask(self, message: messages.WorkerMessage) -> messages.WorkerMessage:
        """Send a message and return the answer; count the job while it runs."""
        self.load += 1
        try:
            text = await self.connection.call(messages.encode(message))
        finally:
            self.load -= 1
        return messages.decode(text, *messages.ToDriver)


class WorkerPool:
    """Workers that run jobs: a number of them, or one per machine.

    Each gets ``hello``, must have equal ``facts``, and starts within ``start_seconds``. Up to
    ``max_restarts`` lost workers are replaced, counting those that are lost while they start.
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
        self._replacing: set[asyncio.Task[None]] = set()
        self._opening = asyncio.Lock()
        self._opened = False
        self._changed = asyncio.Event()  # there is a worker, or none will be
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
            self._opened = True
            self._changed.set()

    async def run(self, message: MakeCall | Generate, what: str) -> Document | None:
        """Run a job on the worker with the fewest jobs, and on another one if it is lost.

        Returns the result; None if only the driver can do the job. Messages call it ``what``.

        Raises:
            CompoundError: the job failed, or too many workers were lost.
        """
        await self.start()
        for losses in range(1, MAX_LOSSES + 1):
            worker = await self._free_worker()
            try:
                answer = await worker.ask(message)
            except WorkerLost as error:
                self._lose(worker, str(error))
                if losses == MAX_LOSSES:
                    raise WorkersLost(
                        f"{losses} workers were lost while they ran {what}",
                        hint=f"it may use too much memory; {RESUME}",
                    ) from error
            except CompoundError as error:
                problem = f"{worker.name} sent {error.message}"
                raise WorkerMismatch(problem, hint=f"{SAME}; {RESUME}") from error
            except Exception as error:
                raise _unexpected(f"calling {worker.name}", error) from error
            else:
                break
        match answer:
            case messages.Done(result=result):
                return result
            case messages.Declined():
                return None
            case messages.JobFailed():
                raise _error(answer, worker.name)
        raise WorkerMismatch(f"{worker.name} answered out of turn", hint=f"{SAME}; {RESUME}")

    async def aclose(self) -> None:
        """End all workers."""
        for task in self._replacing:
            task.cancel()
        await asyncio.gather(*self._replacing, return_exceptions=True)
        workers, self._workers, self._opened = self._workers, [], False
        closing = (worker.connection.aclose() for worker in workers)
        await asyncio.gather(*closing, return_exceptions=True)
        await self._transport.aclose()

    async def _free_worker(self) -> _RemoteWorker:
        while True:
            if self._broken is not None:
                raise self._broken
            if self._workers:
                return min(self._workers, key=lambda worker: worker.load)
            self._changed.clear()
            await self._changed.wait()

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
        try:
            first = await worker.ask(self._hello)
        except WorkerLost as error:
            raise _LostInStart(
                f"{worker.name} ended while it started: {error}", hint=SAME
            ) from error
        except ProtocolError as error:
            raise WorkerMismatch(
                f"{worker.name} cannot be used: it sent {error.message}", hint=SAME
            ) from error
        match first:
            case messages.Ready(facts=facts):
                if difference := first_difference(self._facts, facts):
                    raise WorkerMismatch(f"{worker.name} cannot be used: {difference}", hint=SAME)
            case messages.Refused(message=message, hint=hint):
                raise WorkerMismatch(
                    f"{worker.name} cannot load the system: {message}", hint=hint or SAME
                )
            case _:
                raise WorkerMismatch(f"{worker.name} cannot be used: it did not answer", hint=SAME)

    def _lose(self, worker: _RemoteWorker, reason: str) -> None:
        """Replace a lost worker; its other jobs notice the loss, too."""
        if worker not in self._workers:
            return
        self._workers.remove(worker)
        calls = plural(worker.load + 1, "call")
        self._notify(f"{worker.name} was lost ({reason}), and {calls} will be sent again")
        if self._restarts_left == 0:
            problem = f"{worker.name} was lost ({reason}), and max_restarts is used up"
            self._break(WorkersLost(problem, hint=RESUME))
            return
        self._restarts_left -= 1
        task = asyncio.create_task(self._replace(worker))
        self._replacing.add(task)
        task.add_done_callback(self._replacing.discard)

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
        self._changed.set()

    def _break(self, error: CompoundError) -> None:
        """End all jobs that wait for a worker, now and later, with an error."""
        self._broken = error
        self._changed.set()


def _unexpected(doing: str, error: Exception) -> CompoundError:
    return CompoundError(f"{doing} failed: {type(error).__name__}: {error}", hint=RESUME)


def _error(message: messages.JobFailed, worker: str) -> CompoundError:
    """Return the error that ended a job, of the class that a run in this process raises."""
    found = getattr(compound.core.errors, message.error, None)
    if isinstance(found, type) and issubclass(found, CompoundError):
        error = found.__new__(found)
        Exception.__init__(error, message.message)
        facts = message.model_dump(exclude={"error", "charged"})
        vars(error).update({**facts, "charged": message.charged, "outputs": {}})
        return error
    return CompoundError(f"{worker}: {message.message}", hint=message.hint)
