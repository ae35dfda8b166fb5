"""Hook for tracers: spans around system runs, component calls and requests to engines.

No tracer is active by default, and a run then checks one variable per run, call and request. `activate` is
process-wide, like the instrumentations of OpenTelemetry; `compound.tracing` contains the implementation.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol, TypeVar

from compound.engine import Completion, Engine, Request
from compound.execution.outcomes import CallResult
from compound.execution.trace import Trace
from compound.graph.component import Component
from compound.graph.system import System

T = TypeVar("T")
Span = AbstractContextManager[Callable[[T], object]]
"""A span to enter; it yields a function that receives the result. An exception ends it as an error."""


@dataclass(frozen=True, slots=True)
class RunFacts:
    """Facts of a system run that are known at its start; ``fork`` is the address of a forked call."""

    system: System
    inputs: Mapping[str, object]
    example: str
    sample: int
    seed: int
    fork: str = ""


class Tracer(Protocol):
    """Records spans. Methods are called on the event loop and must not block."""

    def run(self, run: RunFacts) -> Span[Trace]:
        """Return the span of a system run."""
        ...

    def call(self, component: Component, address: str, inputs: Mapping[str, object]) -> Span[CallResult]:
        """Return the span of a component call."""
        ...

    def body(self, component: Component, address: str) -> Span[object]:
        """Return the span of a loop or map, which contains the spans of the calls of its body."""
        ...

    def request(self, engine: Engine, lm: str, request: Request) -> Span[Completion]:
        """Return the span of one request to an engine."""
        ...


_ACTIVE: Tracer | None = None


def active_tracer() -> Tracer | None:
    """Return the active tracer of the process, if any."""
    return _ACTIVE


def activate(tracer: Tracer | None) -> Tracer | None:
    """Set the active tracer of the process, and return the previous one."""
    global _ACTIVE
    previous, _ACTIVE = _ACTIVE, tracer
    return previous


async def within(span: Span[T], work: Awaitable[T]) -> T:
    """Await within a span, and pass the result to it."""
    with span as record:
        result = await work
        record(result)
        return result
