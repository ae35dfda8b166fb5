"""Routes of a served system: runs, their events, operations, and feedback."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any, Self

from pydantic import BaseModel, Field, create_model, model_validator
from pydantic_core import to_json
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from compound.api.serving.feedback_store import FeedbackStore, StoreError
from compound.api.serving.ports import (
    EVENTS,
    Closed,
    Interface,
    ServedRoute,
    documented,
    parse_body,
)
from compound.api.serving.service import (
    ClientGone,
    ServerMetrics,
    Service,
    Ticket,
    answer_connected,
    while_connected,
)
from compound.api.stream import Event
from compound.core.web.problems import HTTPProblem, json_response
from compound.execution.trace import Failure, Trace
from compound.graph.configuration import to_readable_values
from compound.graph.system import System

HEARTBEAT = 15.0  # seconds between comments that keep an idle connection open
# proxies must not collect the events
HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}


def event(name: str, document: object) -> bytes:
    r"""Return a named event.

    >>> event("usage", {"calls": 1})
    b'event: usage\ndata: {"calls":1}\n\n'
    """
    return (
        b"event: " + name.encode() + b"\ndata: " + to_json(document, inf_nan_mode="null") + b"\n\n"
    )


def data(document: object) -> bytes:
    """Return an event without a name, as OpenAI's clients read it."""
    return b"data: " + to_json(document, inf_nan_mode="null") + b"\n\n"


class EventResponse(Response):
    """An answer of server-sent events; when the client disconnects, the generator is closed."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None], run: str) -> None:
        super().__init__(headers={**HEADERS, "X-Run-Id": run})
        del self.headers["content-length"]
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: D102
        with contextlib.suppress(ClientGone):
            await while_connected(receive, self._send(send))

    async def _send(self, send: Send) -> None:
        await send(
            {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        )
        async with contextlib.aclosing(self._events) as events:
            async for chunk in _with_heartbeat(events):
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _with_heartbeat(events: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Yield chunks, and a comment whenever none arrives for a while."""
    following = asyncio.ensure_future(anext(events, None))
    try:
        while True:
            await asyncio.wait({following}, timeout=HEARTBEAT)
            if not following.done():
                yield b": waiting\n\n"
                continue
            chunk = following.result()
            if chunk is None:
                return
            yield chunk
            following = asyncio.ensure_future(anext(events, None))
    finally:
        following.cancel()
        with contextlib.suppress(asyncio.CancelledError, StopAsyncIteration):
            await following


def run_routes(service: Service, interface: Interface) -> list[ServedRoute]:
    """Return the routes that run the system."""

    async def run(request: Request) -> Response:
        body = parse_body(interface.run, await request.body())
        ticket = service.ticket(body.seed)
        inputs = interface.inputs_of(body.inputs)

        async def answer() -> Response:
            document = run_document(ticket, await service.run(ticket, inputs))
            return json_response(document, headers={"X-Run-Id": ticket.run})

        return await answer_connected(request.receive, answer())

    async def batch(request: Request) -> Response:
        body = parse_body(interface.batch, await request.body())

        async def answer() -> Response:
            return json_response({"results": await _batch(service, interface, body)})

        return await answer_connected(request.receive, answer())

    async def stream(request: Request) -> Response:
        body = parse_body(interface.run, await request.body())
        service.check_queue()  # while the answer can still have another status than 200
        ticket = service.ticket(body.seed)
        return EventResponse(_events(service, ticket, interface.inputs_of(body.inputs)), ticket.run)

    wanted, several = interface.run, interface.batch
    return [
        ServedRoute("/v1/run", run, "Run the system once.", wanted, interface.answer),
        ServedRoute(
            "/v1/batch", batch, "Run the system on several inputs.", several, interface.answers
        ),
        ServedRoute(
            "/v1/run/stream",
            stream,
            "Run the system and stream events.",
            wanted,
            media="text/event-stream",
            description=EVENTS,
        ),
    ]


def run_document(ticket: Ticket, trace: Trace) -> dict[str, object]:
    """Return the answer of a run as JSON types."""
    return {
        "run_id": ticket.run,
        "outputs": to_readable_values(trace.outputs),
        "usage": trace.usage.to_json(),
        "configuration": ticket.deployment.digest,
        "seed": ticket.seed,
    }


async def _batch(service: Service, interface: Interface, body: Any) -> list[dict[str, object]]:  # noqa: ANN401
    """Run every item, and return the answers in order; a failed item is an error in its place.

    The first run is admitted like any other; the others then wait for places as long as it takes.
    """
    seeds = [None if body.seed is None else body.seed + i for i in range(len(body.inputs))]
    tickets = [service.ticket(seed) for seed in seeds]
    service.check_queue()

    async def one(ticket: Ticket, inputs: Any) -> dict[str, object]:  # noqa: ANN401 - a port model
        try:
            trace = await service.run(ticket, interface.inputs_of(inputs), queued=False)
        except HTTPProblem as problem:
            return problem.document()
        return run_document(ticket, trace)

    async with asyncio.TaskGroup() as group:
        made = [group.create_task(one(*pair)) for pair in zip(tickets, body.inputs, strict=True)]
    return [task.result() for task in made]


async def _events(
    service: Service, ticket: Ticket, inputs: dict[str, object]
) -> AsyncGenerator[bytes, None]:
    """Yield the events of a run, encoded; the last ones are the output or the error, and the usage."""
    digest = ticket.deployment.digest
    identity = {"run_id": ticket.run, "configuration": digest, "seed": ticket.seed}
    events = service.events(ticket, inputs)
    try:
        async for found in events:
            if not isinstance(found, Trace):
                last = identity if found.kind in ("output", "error") else {}
                yield event(found.kind, found.to_json() | last)
    except HTTPProblem as problem:
        failure = Event("error", failure=Failure(problem.kind, problem.message))
        yield event("error", failure.to_json() | identity)
    finally:
        await events.aclose()


def operation_routes(service: Service) -> list[ServedRoute]:
    """Return the routes for operators."""

    async def health(request: Request) -> Response:
        return json_response({"status": "ok"})

    async def ready(request: Request) -> Response:
        status = "draining" if service.draining else "ready" if service.ready else "starting"
        document = {"status": status, "configuration": service.deployments.current.digest}
        if service.deployments.problem:
            document["warning"] = "the last configuration file was rejected; see the log"
        return json_response(document, 200 if status == "ready" else 503)

    async def metrics(request: Request) -> Response:
        service.metrics.deployed(service.deployments.current.digest)
        content, kind = service.metrics.text(request.headers.get("accept", ""))
        return Response(content, headers={"Content-Type": kind})

    return [
        ServedRoute("/health", health, "Tell whether the process answers."),
        ServedRoute("/ready", ready, "Tell whether runs are accepted."),
        ServedRoute("/metrics", metrics, "Return Prometheus metrics.", media="text/plain"),
    ]


MAX_COMMENT = 4_000
FORMS = "give run_id with a score, a correction or a comment, or give better and worse"


class FeedbackRequest(Closed):
    """Feedback on one run, or on two.

    Either ``run_id`` with at least one of ``score``, ``correction`` and ``comment``, or ``better``
    and ``worse``, the ids of two runs with equal inputs.
    """

    run_id: str | None = None
    score: float | None = Field(
        None, ge=0, le=1, description="0 is useless, 1 is right.", allow_inf_nan=False
    )
    comment: str | None = Field(None, max_length=MAX_COMMENT)
    better: str | None = None
    worse: str | None = None

    @model_validator(mode="after")
    def check_form(self) -> Self:
        """Reject a mixture of the two forms."""
        correction: BaseModel | None = getattr(self, "correction", None)
        if correction is not None and not correction.model_fields_set:
            raise ValueError("a correction must name at least one output")
        rated = any(value is not None for value in (self.score, correction, self.comment))
        if self.run_id is not None:
            fits = rated and self.better is self.worse is None
        else:
            fits = None not in (self.better, self.worse) and not rated
        if not fits or (self.better is not None and self.better == self.worse):
            raise ValueError(FORMS)
        return self


def feedback_model(system: System) -> type[FeedbackRequest]:
    """Return the model of feedback on a system, with typed corrections of its outputs."""
    fields: dict[str, Any] = {
        f"port_{i}": (documented(source.type), Field(None, alias=name))
        for i, (name, source) in enumerate(system.outputs.items())
    }
    corrections: Any = create_model("Correction", __base__=Closed, **fields) | None
    correction: Any = (corrections, Field(None, description="The right outputs."))
    return create_model(
        "FeedbackRequest",
        __base__=FeedbackRequest,
        __doc__=FeedbackRequest.__doc__,
        correction=correction,
    )


def feedback_route(
    store: FeedbackStore | None, model: type[FeedbackRequest], metrics: ServerMetrics
) -> ServedRoute:
    """Return the route that accepts feedback."""

    async def feedback(request: Request) -> Response:
        if store is None:
            message = "this server records no feedback; start it with --feedback FOLDER"
            raise HTTPProblem(404, "no_feedback", message)
        given: Any = parse_body(model, await request.body())
        _check_runs(store, given)
        document = _document(given)
        try:
            await asyncio.wrap_future(store.add_feedback(document))
        except StoreError as error:
            raise HTTPProblem(503, "not_stored", error.message) from None
        kind = "preference" if given.better is not None else "rating"
        metrics.feedback.labels(kind).inc()
        return json_response({"stored": True}, 201)

    summary = "Rate a run, correct it, or prefer one of two."
    return ServedRoute("/v1/feedback", feedback, summary, model, status="201")


def _check_runs(store: FeedbackStore, given: FeedbackRequest) -> None:
    """Reject feedback on unknown runs, and preferences between runs with different inputs."""
    named = [run for run in (given.run_id, given.better, given.worse) if run is not None]
    for run in named:
        if not store.knows(run):
            raise HTTPProblem(404, "unknown_run", f"no run {run!r:.100} is recorded")
    if given.better is not None and given.worse is not None and not store.have_equal_inputs(*named):
        raise HTTPProblem(
            422, "different_inputs", "better and worse must be runs with equal inputs"
        )


def _document(given: Any) -> dict[str, object]:  # noqa: ANN401 - an instance of `feedback_model`
    """Return feedback as it is stored."""
    if given.better is not None:
        return {"better": given.better, "worse": given.worse}
    document: dict[str, object] = {"run": given.run_id}
    if given.score is not None:
        document["score"] = given.score
    if given.correction is not None:
        document["correction"] = given.correction.model_dump(
            mode="json", by_alias=True, exclude_unset=True
        )
    if given.comment is not None:
        document["comment"] = given.comment
    return document
