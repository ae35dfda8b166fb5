"""Hooks for observers of runs: spans of tracers, and the progress of a single run.

No tracer is active by default, and a run then checks one variable per run, call and request.
`activate` is process-wide, like the instrumentations of OpenTelemetry; `compound.execution.tracing`
contains the implementation. A `RunListener` belongs to one run.
"""

from __future__ import annotations

import threading
from asyncio import get_running_loop
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from compound.core.engine import Engine, Request
from compound.core.security.sanitize import StreamRedactor
from compound.execution.trace import Call
from compound.graph.component import Component
from compound.graph.system import System

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RunFacts:
    """Facts of a system run that are known at its start; ``fork`` is the address of a forked call."""

    system: System
    inputs: Mapping[str, object]
    example: str
    sample: int
    seed: int
    fork: str = ""


@dataclass(frozen=True, slots=True)
class CallFacts:
    """Facts of a component call; a ``body`` is a loop or map, around the calls of its body."""

    component: Component
    address: str
    inputs: Mapping[str, object] = field(default_factory=dict)
    body: bool = False


@dataclass(frozen=True, slots=True)
class RequestFacts:
    """Facts of one request to an engine."""

    engine: Engine
    lm: str
    request: Request


Facts = RunFacts | CallFacts | RequestFacts
Span = AbstractContextManager[Callable[[object], object]]
"""A span to enter; it yields a function that receives the result. An exception ends it as an error."""
Tracer = Callable[[Facts], Span]
"""Returns a span to record; called on the event loop, so it must not block."""

_ACTIVE: Tracer | None = None


def active_tracer() -> Tracer | None:
    """Return the active tracer of the process, if any."""
    return _ACTIVE


def activate(tracer: Tracer | None) -> Tracer | None:
    """Set the active tracer of the process, and return the previous one."""
    global _ACTIVE
    previous, _ACTIVE = _ACTIVE, tracer
    return previous


def traced(work: Awaitable[T], facts: Callable[[], Facts]) -> Awaitable[T]:
    """Return work that is done within a span if a tracer is active; it records the result."""
    return work if _ACTIVE is None else _within(_ACTIVE(facts()), work)


async def _within(span: Span, work: Awaitable[T]) -> T:
    with span as record:
        result = await work
        record(result)
        return result


@dataclass(frozen=True, slots=True)
class TextPiece:
    """A piece of a model's text.

    Attempts count from 1, and a later one starts the text again; requests within one count from 0.
    """

    address: str
    component: str
    text: str
    attempt: int = 1
    request: int = 0


class RunListener(Protocol):
    """Receives the progress of one run, on its event loop. Methods must not block."""

    def on_start(self, address: str, component: str) -> None:
        """Receive the start of a call."""
        ...

    def on_text(self, piece: TextPiece) -> None:
        """Receive a piece of text of a call, if the engine can stream."""
        ...

    def on_call(self, call: Call) -> None:
        """Receive a finished call."""
        ...


class TextRelay:
    """Relays the pieces of one request to the event loop, without registered keys.

    An engine may call the relay from any thread.
    """

    def __init__(self, emit: Callable[[str], None]) -> None:
        self._emit = emit
        self._redactor = StreamRedactor()
        self._loop, self._thread = get_running_loop(), threading.get_ident()
        self._open = True

    def __call__(self, piece: str) -> None:
        """Relay a piece."""
        if threading.get_ident() == self._thread:
            self._pass_on(piece)
        elif not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._pass_on, piece)

    def close(self, *, complete: bool) -> None:
        """Relay the text that was held back if the answer is complete, and drop later pieces."""
        rest = self._redactor.flush()
        if complete and self._open and rest:
            self._emit(rest)
        self._open = False

    def _pass_on(self, piece: str) -> None:
        text = self._redactor.feed(piece) if self._open else ""
        if text:
            self._emit(text)
