"""Run a system and receive its progress: calls, pieces of text, outputs and usage.

The events of the HTTP server are the same; see `Event`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from compound.api.arguments import check_inputs
from compound.core.engine import NO_USAGE, Usage
from compound.execution.executor import Executor
from compound.execution.observers import TextPiece
from compound.execution.trace import Call, Failure, Trace
from compound.graph.configuration import to_readable_values
from compound.graph.registry.engines import GivenEngines, for_system, resolve_engines
from compound.graph.system import System


@dataclass(frozen=True, slots=True)
class Event:
    """An event of a run.

    Attributes:
        kind: ``call``, the start or the end of a call; ``token``, a piece of the text of a model,
            whose engine decides on its size; ``output``, the outputs of the system; ``error``, the
            failure of the run, in place of its outputs; ``usage``, the usage of the run, the last
            event.
        address: address of the call, such as ``agent[1]/reader``.
        component: name of its component.
        state: of a call, ``started``, ``finished`` or ``failed``.
        text: the piece of text.
        attempt: number of the attempt that the text is from. A call that is tried again starts its
            text again; the outputs of the finished call are authoritative.
        request: number of the request of the call that the text answers, from 0.
        outputs: the outputs of a finished call, or of the system.
        failure: the failure of a call, or of the run.
        usage: the usage of a call that has ended, or of the run.
        seconds: the duration of a call that has ended.
    """

    kind: Literal["call", "token", "output", "error", "usage"]
    address: str = ""
    component: str = ""
    state: Literal["", "started", "finished", "failed"] = ""
    text: str = ""
    attempt: int = 1
    request: int = 0
    outputs: Mapping[str, object] = field(default_factory=dict)
    failure: Failure | None = None
    usage: Usage = NO_USAGE
    seconds: float = 0.0

    def to_json(self) -> dict[str, object]:
        """Return the event as JSON types, with what its kind has."""
        call, found = ("address", "component"), dict[str, object]()
        names = {"call": (*call, "state"), "token": (*call, "text", "attempt", "request")}
        found |= {name: getattr(self, name) for name in names.get(self.kind, ())}
        if self.kind == "usage" or self.state in ("finished", "failed"):
            found["usage"] = self.usage.to_json()
        if self.state in ("finished", "failed"):
            found["seconds"] = round(self.seconds, 6)
        if self.failure is not None:
            found["error"] = {"type": self.failure.kind, "message": self.failure.message}
        elif self.kind == "output" or self.state == "finished":
            found["outputs"] = to_readable_values(self.outputs)
        return found


async def stream(
    system: System,
    inputs: Mapping[str, Any],
    *,
    engines: GivenEngines | None = None,
    seed: int = 0,
    sample: int = 0,
) -> AsyncGenerator[Event, None]:
    """Run ``system`` on one set of inputs and yield its events.

    Calls start and finish in the order of execution. There are token events where the engine can
    stream (`compound.core.engine.StreamingEngine`). The last events are the outputs or the error,
    and the usage. A failed run does not raise. Leaving the loop early and closing the iterator
    cancels the run.

    Args:
        system: the system to run, bound to a configuration.
        inputs: a value for each input of the system.
        engines: engines by model name, as in `compound.run`.
        seed: seed of the random streams.
        sample: sample index of the stochastic components.

    Raises:
        DeclarationError: an input is missing, unknown or of the wrong type, or a model has no
            engine.

    Example:
        >>> import compound as cp
        >>> from compound.testing import ScriptedLM
        >>> answerer = cp.LLM("answerer", prompt=cp.Text("Answer."))
        >>> system = cp.System("qa", {"answer": answerer(cp.Input("question"))}, lm="lm")
        >>> async def show() -> None:
        ...     engines = {"lm": ScriptedLM(["the Rímac"])}
        ...     stream = cp.stream(system, {"question": "Which river?"}, engines=engines)
        ...     events = [event async for event in stream]
        ...     print("".join(event.text for event in events))
        ...     print([event.kind for event in events if event.kind != "token"])
        >>> asyncio.run(show())
        the Rímac
        ['call', 'call', 'output', 'usage']
    """
    find = resolve_engines(system, engines)
    values = check_inputs(system, inputs)
    executor = Executor(for_system(find, system), seed=seed)

    async def run(listener: EventQueue) -> Trace:
        return await executor.run(system, values, sample=sample, listener=listener)

    try:
        async with contextlib.aclosing(events_of(run, EventQueue())) as events:
            async for event in events:
                if not isinstance(event, Trace):
                    yield event
    finally:
        await executor.aclose()


async def events_of(
    run: Callable[[EventQueue], Awaitable[Trace]], queue: EventQueue
) -> AsyncGenerator[Event | Trace, None]:
    """Yield the events of a run, and last its trace; closing the iterator cancels the run.

    ``run`` makes the run with a listener. A slow reader of the events does not delay it.
    """

    async def work() -> Trace:
        try:
            return await run(queue)
        finally:
            queue.end()

    task = asyncio.create_task(work())
    try:
        while (event := await queue.next()) is not None:
            yield event
        trace = await task
        if trace.failure is None:
            yield Event("output", outputs=trace.outputs)
        else:
            yield Event("error", failure=trace.failure)
        yield Event("usage", usage=trace.usage)
        yield trace
    finally:
        task.cancel()
        # an error of the run was raised above, unless the consumer has stopped
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await task


class EventQueue:
    """A `RunListener` that queues events."""

    def __init__(self) -> None:
        self._events: asyncio.Queue[Event | None] = asyncio.Queue()

    def on_start(self, address: str, component: str) -> None:
        """Queue the start of a call."""
        self._events.put_nowait(Event("call", address, component, "started"))

    def on_text(self, piece: TextPiece) -> None:
        """Queue a piece of text."""
        place = piece.address, piece.component
        told = Event("token", *place, "", piece.text, piece.attempt, piece.request)
        self._events.put_nowait(told)

    def on_call(self, call: Call) -> None:
        """Queue the end of a call."""
        event = Event(
            "call",
            call.address,
            call.component,
            "finished" if call.failure is None else "failed",
            outputs=call.outputs,
            failure=call.failure,
            usage=call.usage,
            seconds=call.seconds,
        )
        self._events.put_nowait(event)

    def end(self) -> None:
        """Queue the end of the events."""
        self._events.put_nowait(None)

    async def next(self) -> Event | None:
        """Return the next event; ``None`` after the last one."""
        return await self._events.get()
