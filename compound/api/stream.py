"""Run a system and receive its progress: calls, pieces of text, outputs and usage.

The events of the HTTP server are the same; see `Event`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from compound.api.arguments import check_inputs
from compound.core.engine import NO_USAGE, Usage
from compound.core.errors import CompoundError
from compound.execution.executor import Executor
from compound.execution.observers import TextPiece
from compound.execution.trace import Call, Failure, Trace
from compound.graph.configuration import to_readable_values
from compound.graph.registry.engines import GivenEngines, for_system, resolve_engines
from compound.graph.system import System


@dataclass(frozen=True, slots=True)
class CallEvent:
    """The start or the end of a call.

    Attributes:
        address: address of the call, such as ``agent[1]/reader``.
        component: name of its component.
        state: ``started``, ``finished`` or ``failed``.
        outputs: the outputs, once finished.
        failure: the failure, if it failed.
        usage: the usage, once finished or failed.
        seconds: the duration, once finished or failed.
    """

    kind: ClassVar[Literal["call"]] = "call"
    address: str
    component: str
    state: Literal["started", "finished", "failed"]
    outputs: Mapping[str, object] = field(default_factory=dict)
    failure: Failure | None = None
    usage: Usage = NO_USAGE
    seconds: float = 0.0

    def to_json(self) -> dict[str, object]:
        """Return the event as JSON types."""
        names = ("address", "component", "state")
        found: dict[str, object] = {name: getattr(self, name) for name in names}
        if self.state == "started":
            return found
        found |= {"usage": self.usage.to_json(), "seconds": round(self.seconds, 6)}
        if self.failure is not None:
            return found | {"error": {"type": self.failure.kind, "message": self.failure.message}}
        return found | {"outputs": to_readable_values(self.outputs)}


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """A piece of the text of a model; the engine decides its size.

    A call that is tried again starts its text again, with a higher ``attempt``. The outputs of the
    finished call are authoritative.
    """

    kind: ClassVar[Literal["token"]] = "token"
    piece: TextPiece

    @property
    def text(self) -> str:
        """The piece."""
        return self.piece.text

    def to_json(self) -> dict[str, object]:
        """Return the event as JSON types."""
        names = ("address", "component", "text", "attempt", "request")
        return {name: getattr(self.piece, name) for name in names}


@dataclass(frozen=True, slots=True)
class OutputEvent:
    """The outputs of the system."""

    kind: ClassVar[Literal["output"]] = "output"
    outputs: Mapping[str, object]

    def to_json(self) -> dict[str, object]:
        """Return the event as JSON types."""
        return {"outputs": to_readable_values(self.outputs)}


@dataclass(frozen=True, slots=True)
class UsageEvent:
    """The usage of the run; the last event."""

    kind: ClassVar[Literal["usage"]] = "usage"
    usage: Usage

    def to_json(self) -> dict[str, object]:
        """Return the event as JSON types."""
        return {"usage": self.usage.to_json()}


@dataclass(frozen=True, slots=True)
class ErrorEvent:
    """The failure of the run, in place of its outputs."""

    kind: ClassVar[Literal["error"]] = "error"
    failure: Failure

    def to_json(self) -> dict[str, object]:
        """Return the event as JSON types."""
        return {"error": {"type": self.failure.kind, "message": self.failure.message}}


Event = CallEvent | TokenEvent | OutputEvent | UsageEvent | ErrorEvent


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
        ...     print("".join(event.text for event in events if isinstance(event, TokenEvent)))
        ...     print([event.kind for event in events if event.kind != "token"])
        >>> asyncio.run(show())
        the Rímac
        ['call', 'call', 'output', 'usage']
    """
    find = resolve_engines(system, engines)
    values = check_inputs(system, inputs)
    executor = Executor(for_system(find, system), seed=seed)
    try:
        async with contextlib.aclosing(
            events_of(executor, system, values, sample=sample)
        ) as events:
            async for event in events:
                if not isinstance(event, Trace):
                    yield event
    finally:
        await executor.aclose()


async def events_of(
    executor: Executor,
    system: System,
    inputs: Mapping[str, object],
    *,
    example: str = "",
    sample: int = 0,
) -> AsyncGenerator[Event | Trace, None]:
    """Yield the events of a run on an executor, and last the trace; closing the iterator cancels the run."""
    queue = EventQueue()

    async def work() -> Trace:
        try:
            return await executor.run(
                system, inputs, example=example, sample=sample, listener=queue
            )
        finally:
            queue.end()

    task = asyncio.create_task(work())
    try:
        while (event := await queue.next()) is not None:
            yield event
        trace = await task
        if trace.failure is None:
            yield OutputEvent(trace.outputs)
        else:
            yield ErrorEvent(trace.failure)
        yield UsageEvent(trace.usage)
        yield trace
    finally:
        task.cancel()
        # an error of the run was raised above, unless the consumer has stopped
        with contextlib.suppress(asyncio.CancelledError, CompoundError):
            await task


class EventQueue:
    """A `RunListener` that queues events."""

    def __init__(self) -> None:
        self._events: asyncio.Queue[Event | None] = asyncio.Queue()

    def on_start(self, address: str, component: str) -> None:
        """Queue the start of a call."""
        self._events.put_nowait(CallEvent(address, component, "started"))

    def on_text(self, piece: TextPiece) -> None:
        """Queue a piece of text."""
        self._events.put_nowait(TokenEvent(piece))

    def on_call(self, call: Call) -> None:
        """Queue the end of a call."""
        state: Literal["finished", "failed"] = "finished" if call.failure is None else "failed"
        result = (call.outputs, call.failure, call.usage, call.seconds)
        self._events.put_nowait(CallEvent(call.address, call.component, state, *result))

    def end(self) -> None:
        """Queue the end of the events."""
        self._events.put_nowait(None)

    async def next(self) -> Event | None:
        """Return the next event; ``None`` after the last one."""
        return await self._events.get()
