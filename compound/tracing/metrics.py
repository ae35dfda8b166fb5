"""OpenTelemetry metrics of runs and of requests to models.

The names and buckets of ``gen_ai.client.*`` are those of the semantic conventions for generative AI. No
attribute holds a text of a user or a model, nor an example, so that the number of series is bounded by the
models and systems of the application.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, TypeVar

from compound.engine import Completion, Engine, Request
from compound.errors import CallError
from compound.execution.observers.spans import RunFacts, Span, Tracer
from compound.execution.outcomes import CallResult
from compound.execution.trace import Failure, Trace
from compound.graph.component import Component
from compound.tracing.attributes import OPERATION, model_name, server_attributes

if TYPE_CHECKING:
    from opentelemetry.metrics import Meter

TOKENS, DURATION = "gen_ai.client.token.usage", "gen_ai.client.operation.duration"
RUNS, CALLS = "compound.runs", "compound.calls"
TOKEN_BUCKETS = [float(4**power) for power in range(14)]
SECOND_BUCKETS = [0.01 * 2**power for power in range(14)]
Labels = dict[str, "str | bool | int | float"]
T = TypeVar("T")


class MetricRecorder:
    """Records runs, calls and requests as metrics; a `compound.execution.observers.spans.Tracer`.

    Args:
        meter: an OpenTelemetry meter.
    """

    def __init__(self, meter: Meter) -> None:
        self._tokens = meter.create_histogram(
            TOKENS,
            "{token}",
            "Tokens of a request",
            explicit_bucket_boundaries_advisory=TOKEN_BUCKETS,
        )
        self._seconds = meter.create_histogram(
            DURATION, "s", "Duration of a request", explicit_bucket_boundaries_advisory=SECOND_BUCKETS
        )
        self._runs = meter.create_counter(RUNS, "{run}", "System runs that ended")
        self._calls = meter.create_counter(CALLS, "{call}", "Component calls that ended")

    @contextmanager
    def run(self, run: RunFacts) -> Iterator[Callable[[Trace], None]]:
        """Count a system run."""
        labels: Labels = {"gen_ai.workflow.name": run.system.name, "compound.forked": bool(run.fork)}
        with _ending(labels, lambda: self._runs.add(1, labels)):
            yield lambda trace: _note(labels, trace.failure)

    @contextmanager
    def call(
        self, component: Component, address: str, inputs: Mapping[str, object]
    ) -> Iterator[Callable[[CallResult], None]]:
        """Count a component call."""
        labels: Labels = {"compound.component": component.name, "compound.component.kind": component.kind}

        def record(result: CallResult) -> None:
            labels["compound.reused"] = result.reused
            _note(labels, result.failure)

        with _ending(labels, lambda: self._calls.add(1, labels)):
            yield record

    @contextmanager
    def body(self, component: Component, address: str) -> Iterator[Callable[[object], None]]:
        """Count nothing: the calls of a loop or map are counted themselves."""
        yield lambda result: None

    @contextmanager
    def request(self, engine: Engine, lm: str, request: Request) -> Iterator[Callable[[Completion], None]]:
        """Record the duration and the tokens of a request."""
        provider, model = model_name(engine, lm)
        labels: Labels = {
            OPERATION: "chat", "gen_ai.provider.name": provider, "gen_ai.request.model": model,
            **server_attributes(engine),
        }  # fmt: skip
        started = time.perf_counter()

        def record(completion: Completion) -> None:
            usage = completion.usage
            for kind, tokens in (("input", usage.prompt_tokens), ("output", usage.completion_tokens)):
                self._tokens.record(tokens, {**labels, "gen_ai.token.type": kind})

        with _ending(labels, lambda: self._seconds.record(time.perf_counter() - started, labels)):
            yield record


class CombinedTracer:
    """Passes runs, calls and requests to several tracers, the first one outermost."""

    def __init__(self, *tracers: Tracer) -> None:
        self._tracers = tracers

    def run(self, run: RunFacts) -> Span[Trace]:
        """Return the spans of a system run."""
        return _joined([tracer.run(run) for tracer in self._tracers])

    def call(self, component: Component, address: str, inputs: Mapping[str, object]) -> Span[CallResult]:
        """Return the spans of a component call."""
        return _joined([tracer.call(component, address, inputs) for tracer in self._tracers])

    def body(self, component: Component, address: str) -> Span[object]:
        """Return the spans of a loop or map."""
        return _joined([tracer.body(component, address) for tracer in self._tracers])

    def request(self, engine: Engine, lm: str, request: Request) -> Span[Completion]:
        """Return the spans of a request."""
        return _joined([tracer.request(engine, lm, request) for tracer in self._tracers])


@contextmanager
def _joined(spans: Sequence[Span[T]]) -> Iterator[Callable[[T], None]]:
    with ExitStack() as stack:
        records = [stack.enter_context(span) for span in spans]

        def record(result: T) -> None:
            for each in records:
                each(result)

        yield record


@contextmanager
def _ending(labels: Labels, record: Callable[[], None]) -> Iterator[None]:
    """Record at the end; an exception is named in the labels."""
    try:
        yield
    except BaseException as error:
        labels["error.type"] = error.kind if isinstance(error, CallError) else type(error).__qualname__
        raise
    finally:
        record()


def _note(labels: Labels, failure: Failure | None) -> None:
    if failure is not None:
        labels["error.type"] = failure.kind
