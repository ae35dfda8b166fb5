"""Routes that run the system: one run, a batch, and a stream of events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from compound.api.stream import ErrorEvent, OutputEvent, UsageEvent
from compound.execution.trace import Failure, Trace
from compound.graph.configuration import to_readable_values
from compound.serving.ports import Interface, parse_body
from compound.serving.routes.events import EventResponse, event
from compound.serving.service import ClientGone, Service, Ticket, while_connected
from compound.web.problems import Problem, json_response

Handler = Callable[[Request], Awaitable[Response]]
GONE = 499  # the client ended the connection; for the metrics


def run_handlers(service: Service, interface: Interface) -> dict[str, Handler]:
    """Return the handlers by path."""

    async def run(request: Request) -> Response:
        body = parse_body(interface.run, await request.body())
        ticket = service.ticket(body.seed)
        made = service.run(ticket, interface.inputs_of(body.inputs))
        try:
            trace = await while_connected(request.receive, made)
        except ClientGone:
            return Response(status_code=GONE)
        return json_response(run_document(ticket, trace), headers={"X-Run-Id": ticket.run})

    async def batch(request: Request) -> Response:
        body = parse_body(interface.batch, await request.body())
        made = _batch(service, interface, body)
        try:
            results = await while_connected(request.receive, made)
        except ClientGone:
            return Response(status_code=GONE)
        return json_response({"results": results})

    async def stream(request: Request) -> Response:
        body = parse_body(interface.run, await request.body())
        service.check_queue()  # while the answer can still have another status than 200
        ticket = service.ticket(body.seed)
        return EventResponse(_events(service, ticket, interface.inputs_of(body.inputs)), ticket.run)

    return {"/v1/run": run, "/v1/batch": batch, "/v1/run/stream": stream}


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
        except Problem as problem:
            return problem.document()
        return run_document(ticket, trace)

    async with asyncio.TaskGroup() as group:
        made = [group.create_task(one(*pair)) for pair in zip(tickets, body.inputs, strict=True)]
    return [task.result() for task in made]


async def _events(service: Service, ticket: Ticket, inputs: dict[str, object]) -> AsyncGenerator[bytes, None]:
    """Yield the events of a run, encoded; the last ones are the output or the error, and the usage."""
    identity = {"run_id": ticket.run, "configuration": ticket.deployment.digest, "seed": ticket.seed}
    events = service.events(ticket, inputs)
    try:
        async for found in events:
            if not isinstance(found, Trace):
                yield event(found.kind, found.to_json())
            elif found.failure is None:
                yield event("output", OutputEvent(found.outputs).to_json() | identity)
                yield event("usage", UsageEvent(found.usage).to_json())
            else:
                yield event("error", ErrorEvent(found.failure).to_json() | identity)
                yield event("usage", UsageEvent(found.usage).to_json())
    except Problem as problem:
        yield event("error", ErrorEvent(Failure(problem.kind, problem.message)).to_json() | identity)
    finally:
        await events.aclose()
