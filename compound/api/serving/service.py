"""The service that runs a system for requests, its Prometheus metrics, and errors of runs as HTTP answers."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.openmetrics.exposition import CONTENT_TYPE_LATEST as OPENMETRICS
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from starlette.responses import Response
from starlette.types import Receive, Scope

from compound.api.serving.feedback_store import FeedbackStore
from compound.api.serving.settings import Deployment, Deployments, ServerSettings
from compound.api.stream import Event, EventQueue, events_of
from compound.core.engine import Capabilities, Engine
from compound.core.errors import CompoundError, QuotaExhausted, RateLimited
from compound.core.security.sanitize import remember_environment, sanitize_text
from compound.core.threads import all_in_threads
from compound.core.web.problems import INTERNAL, HTTPProblem
from compound.execution.executor import Executor
from compound.execution.observers import RunListener
from compound.execution.trace import Call, Failure, Trace
from compound.graph.component import Operation
from compound.graph.registry.engines import for_system
from compound.graph.system import System

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
PLAIN = "text/plain; version=0.0.4; charset=utf-8"


class ServerMetrics:
    """Prometheus metrics of a server."""

    def __init__(self) -> None:
        self.paths: frozenset[str] = frozenset()
        registry = self.registry = CollectorRegistry()

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"compound_{name}", text, labels, registry=registry)

        self.requests = counter("http_requests", "Answers by route and status.", "route", "status")
        self.calls = counter("calls", "Calls by component and outcome.", "component", "outcome")
        self.tokens = counter("tokens", "Tokens by kind.", "kind")
        self.cost = counter("cost_dollars", "Known cost in US dollars.")
        self.feedback = counter("feedback", "Feedback by kind.", "kind")
        self.reloads = counter(
            "reloads", "Readings of the configuration file by outcome.", "outcome"
        )
        self.lost = counter("unrecorded_runs", "Runs that could not be written.")
        self.runs = Histogram(
            "compound_run_seconds",
            "Duration of runs, without their wait.",
            ["outcome"],
            buckets=SECONDS,
            registry=registry,
        )
        self.waits = Histogram(
            "compound_wait_seconds", "Wait of runs for a place.", buckets=SECONDS, registry=registry
        )
        self.running = Gauge("compound_runs_executing", "Runs that execute.", registry=registry)
        self.waiting = Gauge(
            "compound_runs_waiting", "Runs that wait for a place.", registry=registry
        )
        self.configuration = Gauge(
            "compound_configuration_info",
            "The configuration in use.",
            ["digest"],
            registry=registry,
        )

    def answered(self, scope: Scope, status: int) -> None:
        """Count an answer; requests to unknown paths share one label."""
        path = scope["path"]
        self.requests.labels(path if path in self.paths else "other", str(status)).inc()

    def called(self, call: Call) -> None:
        """Count a finished call and its usage, also of a run that times out."""
        self.calls.labels(call.component, call.failure.kind if call.failure else "ok").inc()
        if call.reused:
            return
        self.tokens.labels("prompt").inc(call.usage.prompt_tokens)
        self.tokens.labels("completion").inc(call.usage.completion_tokens)
        self.cost.inc(call.usage.cost)

    def deployed(self, digest: str) -> None:
        """Show the configuration in use."""
        self.configuration.clear()
        self.configuration.labels(digest).set(1)

    def text(self, accept: str) -> tuple[bytes, str]:
        """Return the metrics in the format that is asked for, and its content type."""
        if "application/openmetrics-text" in accept:
            return generate_openmetrics(self.registry), OPENMETRICS  # type: ignore[no-untyped-call]
        return generate_latest(self.registry), PLAIN


GONE = 499  # the client ended the connection; for the metrics
RETRY_SECONDS = 1
PRIVATE = "internal"  # kind of failures whose text is in the log only
STATUS_OF_KIND = {RateLimited.kind: 429, PRIVATE: 500}
"""Statuses by kind of failure; all others are 502."""


def public_failure(call: Call | None, failure: Failure, system: System) -> Failure:
    """Return a failure as clients may see it: texts of models as they are, without those of the user's code.

    The text of an exception, or of a value that has another type than declared, may hold anything
    that a function works with.
    """
    component = system.components.get(call.component) if call is not None else None
    if isinstance(component, Operation) and "lm" in component.settings:
        return failure
    return Failure(failure.kind if failure.kind == RateLimited.kind else PRIVATE, INTERNAL)


def of_failure(failure: Failure, run: str) -> HTTPProblem:
    """Return the problem of a failed run; the failure is one that clients may see."""
    status = STATUS_OF_KIND.get(failure.kind, 502)
    headers = {"Retry-After": str(RETRY_SECONDS)} if status == 429 else {}
    return HTTPProblem(status, failure.kind, failure.message, run, headers=headers)


LOG = logging.getLogger("compound.api.serving")
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
    """Runs of a system for requests."""

    def __init__(
        self,
        deployments: Deployments,
        find: Callable[[str], Engine],
        settings: ServerSettings,
        metrics: ServerMetrics,
        store: FeedbackStore | None = None,
    ) -> None:
        self.deployments, self.settings = deployments, settings
        self.metrics, self.store = metrics, store
        self.draining, self.ready = False, False
        self.running = self.waiting = 0
        self._timers: set[asyncio.Timeout] = set()
        self._stopped = False
        system = deployments.current.system
        self._executor = Executor(
            for_system(find, system), on_call=metrics.called, on_notice=LOG.warning
        )
        self._places = asyncio.Semaphore(settings.concurrency)
        metrics.running.set_function(lambda: self.running)
        metrics.waiting.set_function(lambda: self.waiting)
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
            engine = Capabilities(self._executor.engine(lm))
            await asyncio.to_thread(engine.require_key)
            await engine.warm_up()

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
            limit = settings.concurrency + settings.queue
            message = f"{limit} runs are executing or waiting; try again later"
            retry = {"Retry-After": str(RETRY_SECONDS)}
            raise HTTPProblem(429, "overloaded", message, headers=retry)

    async def run(
        self, ticket: Ticket, inputs: Mapping[str, object], *, queued: bool = True
    ) -> Trace:
        """Run the system once; a run that is not ``queued`` waits even if the queue is full.

        Raises:
            Problem: the server is overloaded, the run failed, or it took too long.
        """
        trace = await self._execute(ticket, inputs, queued, None)
        if trace.failure is not None:
            raise of_failure(trace.failure, ticket.run)
        return trace

    def events(
        self, ticket: Ticket, inputs: Mapping[str, object]
    ) -> AsyncGenerator[Event | Trace, None]:
        """Yield the events of a run, and last its trace; see `compound.api.stream.events_of`.

        Raises:
            Problem: the server is overloaded, or the run took too long or could not be made.
        """
        return events_of(
            lambda queue: self._execute(ticket, inputs, True, queue),
            PublicEvents(ticket.deployment.system),
        )

    async def _execute(
        self,
        ticket: Ticket,
        inputs: Mapping[str, object],
        queued: bool,
        listener: RunListener | None,
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
                                ticket.deployment.system,
                                inputs,
                                sample=ticket.seed,
                                listener=listener,
                            )
                finally:
                    self._timers.discard(timer)
            outcome = "ok" if trace.failure is None else trace.failure.kind
            if self.store is not None:
                self.store.add_run(ticket.run, trace)
            if trace.failure is not None:
                return self._published(ticket, trace, trace.failure)
        except TimeoutError:
            status, outcome = (503, "draining") if self._stopped else (504, "timeout")
            message = (
                "the server stops, and the run did not finish in time"
                if self._stopped
                else f"the run took longer than {self.settings.timeout:g} s"
            )
            raise HTTPProblem(status, outcome, message, ticket.run) from None
        except HTTPProblem as problem:
            outcome = problem.kind
            raise
        except QuotaExhausted as error:
            outcome = "quota"
            LOG.warning("%s: %s", ticket.run, sanitize_text(str(error)))
            message = "the model's provider refuses further requests"
            raise HTTPProblem(502, outcome, message, ticket.run) from None
        except Exception as error:
            outcome = "internal"
            shown, text = not isinstance(error, CompoundError), sanitize_text(str(error))
            LOG.log(logging.ERROR, "%s failed: %s", ticket.run, text, exc_info=shown)
            raise HTTPProblem(500, outcome, INTERNAL, ticket.run) from None
        finally:
            if outcome != "overloaded":
                self.metrics.runs.labels(outcome).observe(time.perf_counter() - started)
                self.metrics.waits.observe(started - arrived)
        return trace

    @staticmethod
    def _published(ticket: Ticket, trace: Trace, failure: Failure) -> Trace:
        """Return a failed trace with the failure that clients may see; log one that they may not."""
        failed = next((call for call in trace.calls if call.failure is failure), None)
        public = public_failure(failed, failure, ticket.deployment.system)
        if public is not failure:
            LOG.error(
                "%s failed: %s: %s",
                ticket.run,
                failed.address if failed else "run",
                failure.message,
            )
        return replace(trace, failure=public)

    @contextlib.asynccontextmanager
    async def _admitted(self, queued: bool) -> AsyncIterator[None]:
        """Wait for a place."""
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


async def answer_connected(receive: Receive, work: Awaitable[Response]) -> Response:
    """Await an answer, or return that the client ended the connection."""
    try:
        return await while_connected(receive, work)
    except ClientGone:
        return Response(status_code=GONE)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
