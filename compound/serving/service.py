"""Run the system for requests: admission, time limits, metrics, and the record of each run."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

from starlette.types import Receive

from compound.api.stream import Event, EventQueue
from compound.concurrency.functions import all_in_threads
from compound.engine import Engine
from compound.errors import CompoundError, QuotaExhausted
from compound.execution.executor import Executor
from compound.execution.observers.events import RunListener
from compound.execution.trace import Call, Failure, Trace
from compound.graph.system import System
from compound.registry.engines import for_system
from compound.security.sanitize import remember_environment, sanitize_text
from compound.serving.deployment import Deployment, Deployments
from compound.serving.feedback_store import FeedbackStore
from compound.serving.metrics import Metrics
from compound.serving.problems import of_failure, overloaded, public_failure
from compound.serving.settings import ServerSettings
from compound.web.problems import INTERNAL, Problem

LOG = logging.getLogger("compound.serving")
Value = TypeVar("Value")


@dataclass(frozen=True)
class Ticket:
    """Identity of a run: its id, the deployment that serves it, and its random stream."""

    run: str
    deployment: Deployment
    seed: int


class ClientGone(Exception):
    """The client ended the connection before the answer."""


class Service:
    """Runs of a system for requests.

    Args:
        deployments: the system in use.
        find: finds the engine of a model.
        settings: the limits.
        metrics: counts runs.
        store: records runs; ``None`` records nothing.

    Attributes:
        draining: whether the server is about to stop.
        running: number of runs that execute.
        waiting: number of runs that wait for a place.
    """

    def __init__(
        self,
        deployments: Deployments,
        find: Callable[[str], Engine],
        settings: ServerSettings,
        metrics: Metrics,
        store: FeedbackStore | None = None,
    ) -> None:
        self.deployments, self.settings, self.metrics, self.store = deployments, settings, metrics, store
        self.draining, self.ready = False, False
        self.running = self.waiting = 0
        self._timers: set[asyncio.Timeout] = set()
        self._stopped = False
        system = deployments.current.system
        self._executor = Executor(for_system(find, system), on_call=metrics.called, on_notice=_log_notice)
        self._places = asyncio.Semaphore(settings.concurrency)
        metrics.watch(lambda: self.running, lambda: self.waiting)
        metrics.deployed(deployments.current.digest)
        deployments.prepare = self.open_engines

    async def warm_up(self) -> None:
        """Open the engines of the current configuration, unless they are open.

        Raises:
            CompoundError: an engine cannot be opened, or its key is missing.
        """
        if self.ready:
            return
        remember_environment()
        await self.open_engines(self.deployments.current.system)
        self.ready = True

    async def open_engines(self, system: System) -> None:
        """Open the engines that the configuration of a system names, and check their keys.

        Raises:
            CompoundError: an engine cannot be opened, or its key is missing.
        """
        for lm in sorted(models(system)):
            engine = self._executor.engine(lm)
            if require_key := getattr(engine, "require_key", None):
                await asyncio.to_thread(require_key)
            if warm_up := getattr(engine, "warm_up", None):
                await warm_up()

    async def aclose(self) -> None:
        """Close the engines, and write the feedback."""
        self.ready = False
        await self._executor.aclose()
        if self.store is not None:
            await asyncio.to_thread(self.store.close)

    def stop_runs(self) -> None:
        """End the runs in flight; their requests are answered with status 503."""
        self._stopped = True
        now = asyncio.get_running_loop().time()
        for timer in list(self._timers):
            if not timer.expired():
                timer.reschedule(now)

    def ticket(self, seed: int | None = None) -> Ticket:
        """Return the identity of a new run, on the current deployment."""
        chosen = secrets.randbits(31) if seed is None else seed
        return Ticket(f"run-{secrets.token_hex(12)}", self.deployments.current, chosen)

    def check_queue(self) -> None:
        """Reject a request if too many runs wait.

        Raises:
            Problem: they do.
        """
        settings = self.settings
        if self._places.locked() and self.waiting >= settings.queue:
            raise overloaded(settings.concurrency + settings.queue)

    async def run(self, ticket: Ticket, inputs: Mapping[str, object], *, queued: bool = True) -> Trace:
        """Run the system once.

        Args:
            ticket: the identity of the run.
            inputs: a value for each input.
            queued: whether the run is rejected if the queue is full; the runs of an admitted batch are not.

        Raises:
            Problem: the server is overloaded, the run failed, or it took too long.
        """
        trace = await self._execute(ticket, inputs, queued, None)
        if trace.failure is not None:
            raise of_failure(trace.failure, ticket.run)
        return trace

    async def events(
        self, ticket: Ticket, inputs: Mapping[str, object]
    ) -> AsyncGenerator[Event | Trace, None]:
        """Yield the events of the calls of a run, and last its trace; closing the iterator cancels the run.

        A slow reader does not delay the run.

        Raises:
            Problem: the server is overloaded, or the run took too long or could not be made.
        """
        queue = PublicEvents(ticket.deployment.system)

        async def work() -> Trace:
            try:
                return await self._execute(ticket, inputs, True, queue)
            finally:
                queue.end()

        task = asyncio.create_task(work())
        try:
            while (event := await queue.next()) is not None:
                yield event
            yield await task
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, Problem):
                await task

    async def _execute(
        self, ticket: Ticket, inputs: Mapping[str, object], queued: bool, listener: RunListener | None
    ) -> Trace:
        """Wait for a place, run the system within the time limit, and count and record the run."""
        arrived = started = time.perf_counter()
        outcome = "cancelled"
        try:
            async with asyncio.timeout(self.settings.timeout) as timer:
                self._timers.add(timer)
                try:
                    async with self._admitted(queued):
                        started = time.perf_counter()
                        with all_in_threads():
                            trace = await self._executor.run(
                                ticket.deployment.system, inputs, sample=ticket.seed, listener=listener
                            )
                finally:
                    self._timers.discard(timer)
            outcome = "ok" if trace.failure is None else trace.failure.kind
            if self.store is not None:
                self.store.add_run(ticket.run, trace)
            if trace.failure is not None:
                return self._published(ticket, trace, trace.failure)
        except TimeoutError:
            if self._stopped:
                outcome = "draining"
                message = "the server stops, and the run did not finish in time"
                raise Problem(503, outcome, message, ticket.run) from None
            outcome = "timeout"
            message = f"the run took longer than {self.settings.timeout:g} s"
            raise Problem(504, outcome, message, ticket.run) from None
        except Problem as problem:
            outcome = problem.kind
            raise
        except QuotaExhausted as error:
            outcome = "quota"
            LOG.warning("%s: %s", ticket.run, sanitize_text(str(error)))
            message = "the model's provider refuses further requests"
            raise Problem(502, outcome, message, ticket.run) from None
        except Exception as error:
            outcome = "internal"
            LOG.log(
                logging.ERROR, "%s failed: %s", ticket.run, sanitize_text(str(error)),
                exc_info=not isinstance(error, CompoundError),
            )  # fmt: skip
            raise Problem(500, outcome, INTERNAL, ticket.run) from None
        finally:
            if outcome != "overloaded":
                self.metrics.ran(time.perf_counter() - started, started - arrived, outcome)
        return trace

    @staticmethod
    def _published(ticket: Ticket, trace: Trace, failure: Failure) -> Trace:
        """Return a failed trace with the failure that clients may see; log one that they may not."""
        failed = next((call for call in trace.calls if call.failure is failure), None)
        public = public_failure(failed, failure, ticket.deployment.system)
        if public is not failure:
            LOG.error("%s failed: %s: %s", ticket.run, failed.address if failed else "run", failure.message)
        return replace(trace, failure=public)

    @contextlib.asynccontextmanager
    async def _admitted(self, queued: bool) -> AsyncIterator[None]:
        """Wait for a place.

        Raises:
            Problem: too many runs wait.
        """
        if queued:
            self.check_queue()
        self.waiting += 1
        try:
            await self._places.acquire()
        finally:
            self.waiting -= 1
        self.running += 1
        try:
            yield
        finally:
            self.running -= 1
            self._places.release()


class PublicEvents(EventQueue):
    """Queues the events of a run, with failures as clients may see them."""

    def __init__(self, system: System) -> None:
        super().__init__()
        self._system = system

    def on_call(self, call: Call) -> None:  # noqa: D102
        if call.failure is not None:
            call = replace(call, failure=public_failure(call, call.failure, self._system))
        super().on_call(call)


def models(system: System) -> set[str]:
    """Return the models that the components of a system call under its configuration."""
    found: set[object] = set()
    for name, component in system.components.items():
        if "lm" in component.settings:
            setting = component.settings["lm"]
            fixed = setting if isinstance(setting, str) else None
            found.add(system.configuration.get(f"{name}.lm", fixed) or system.lm)
    return {lm for lm in found if isinstance(lm, str)}


async def while_connected(receive: Receive, work: Awaitable[Value]) -> Value:
    """Await something, and cancel it when the client ends the connection.

    Raises:
        ClientGone: it did.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGone
    finally:
        for each in (task, gone):
            each.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await task


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _log_notice(text: str) -> None:
    LOG.warning("%s", text)
