"""Tracer that records OpenTelemetry spans."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from compound.engine import Completion, Engine, Request
from compound.errors import CallError
from compound.execution.exchange import truncate_text
from compound.execution.observers.spans import RunFacts
from compound.execution.outcomes import CallResult
from compound.execution.trace import Failure, Trace
from compound.graph.component import Component
from compound.security.sanitize import sanitize_text
from compound.tracing import attributes as to

if TYPE_CHECKING:
    from opentelemetry.trace import Span as OtelSpan
    from opentelemetry.trace import Tracer as OtelTracer

Set = Callable[[Callable[[], to.Attributes], "Failure | None"], None]
"""Sets computed attributes, and the failure of the span, if any."""


class SpanRecorder:
    """Records runs, calls and requests as nested spans; a `compound.execution.observers.spans.Tracer`.

    Args:
        tracer: an OpenTelemetry tracer.
        content: whether spans contain inputs, outputs, messages and error messages.
    """

    def __init__(self, tracer: OtelTracer, *, content: bool) -> None:
        self._tracer = tracer
        self._content = content

    @contextmanager
    def run(self, run: RunFacts) -> Iterator[Callable[[Trace], None]]:
        """Record a system run as ``invoke_workflow``."""
        name = f"invoke_workflow {run.system.name}"
        with self._span(name, lambda: to.run_attributes(run, content=self._content)) as put:
            yield lambda trace: put(lambda: to.trace_attributes(trace, content=self._content), trace.failure)

    @contextmanager
    def call(
        self, component: Component, address: str, inputs: Mapping[str, object]
    ) -> Iterator[Callable[[CallResult], None]]:
        """Record a component call."""
        start = lambda: to.call_attributes(component, address, inputs, content=self._content)  # noqa: E731
        with self._span(to.call_name(component, inputs), start) as put:
            yield lambda result: put(
                lambda: to.result_attributes(result, content=self._content), result.failure
            )

    @contextmanager
    def body(self, component: Component, address: str) -> Iterator[Callable[[object], None]]:
        """Record a loop or map, around the calls of its body."""
        start = lambda: to.call_attributes(component, address, {}, content=False)  # noqa: E731
        with self._span(to.call_name(component, {}), start) as put:
            yield lambda result: put(dict, result if isinstance(result, Failure) else None)

    @contextmanager
    def request(self, engine: Engine, lm: str, request: Request) -> Iterator[Callable[[Completion], None]]:
        """Record a request as ``chat``; of kind client, unless the model runs in this process."""
        start = lambda: to.request_attributes(engine, lm, request, content=self._content)  # noqa: E731
        name = f"chat {to.model_name(engine, lm)[1]}"
        with self._span(name, start, client=engine.remote) as put:
            yield lambda answer: put(lambda: to.completion_attributes(answer, content=self._content), None)

    @contextmanager
    def _span(self, name: str, start: Callable[[], to.Attributes], *, client: bool = False) -> Iterator[Set]:
        from opentelemetry.trace import SpanKind

        kind = SpanKind.CLIENT if client else SpanKind.INTERNAL
        # exceptions are recorded below: their messages may quote prompts and answers
        with self._tracer.start_as_current_span(
            name, kind=kind, record_exception=False, set_status_on_exception=False
        ) as span:
            _set(span, start)

            def put(attributes: Callable[[], to.Attributes], failure: Failure | None) -> None:
                _set(span, attributes)
                if failure is not None:
                    self._fail(span, failure.kind, failure.message)

            try:
                yield put
            except BaseException as error:
                kind_of = error.kind if isinstance(error, CallError) else type(error).__qualname__
                self._fail(span, kind_of, str(error))
                raise

    def _fail(self, span: OtelSpan, kind: str, message: str) -> None:
        from opentelemetry.trace import Status, StatusCode

        shown = truncate_text(sanitize_text(message)) if self._content else None
        span.set_attribute("error.type", kind)
        span.set_status(Status(StatusCode.ERROR, shown))


def _set(span: OtelSpan, attributes: Callable[[], to.Attributes]) -> None:
    """Set attributes of a sampled span; a value that cannot be described never ends a run."""
    if not span.is_recording():
        return
    try:
        span.set_attributes(attributes())
    except Exception:
        logging.getLogger("compound").warning("attributes of a span are missing", exc_info=True)
