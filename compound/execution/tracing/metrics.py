"""OpenTelemetry metrics of runs and of requests to models.

The names and buckets of ``gen_ai.client.*`` are those of the semantic conventions for generative
AI. No attribute holds a text of a user or a model, nor an example, so that the number of series is
bounded by the models and systems of the application.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, TypeVar

from compound.core.engine import Completion, Engine, Request
from compound.core.errors import CallError
from compound.execution.observers import RunFacts, Span, Tracer
from compound.execution.results import CallResult
from compound.execution.trace import Failure, Trace
from compound.execution.tracing.spans import OPERATION, model_name, server_attributes
from compound.graph.component import Component

if TYPE_CHECKING:
    from opentelemetry.metrics import Meter
import os
import sys
from typing import TYPE_CHECKING

from compound.core.errors import DeclarationError

if TYPE_CHECKING:
    from opentelemetry.metrics import MeterProvider
    from opentelemetry.sdk.metrics import MeterProvider as SdkMeterProvider
    from opentelemetry.sdk.metrics.export import MetricExporter
    from opentelemetry.sdk.resources import Resource


TOKENS, DURATION = "gen_ai.client.token.usage", "gen_ai.client.operation.duration"
RUNS, CALLS = "compound.optimization.runs", "compound.calls"
TOKEN_BUCKETS = [float(4**power) for power in range(14)]
SECOND_BUCKETS = [0.01 * 2**power for power in range(14)]
Labels = dict[str, "str | bool | int | float"]
T = TypeVar("T")


class MetricRecorder:
    """Records runs, calls and requests as metrics; a `compound.execution.observers.Tracer`."""

    def __init__(self, meter: Meter) -> None:
        self._tokens = meter.create_histogram(
            TOKENS,
            "{token}",
            "Tokens of a request",
            explicit_bucket_boundaries_advisory=TOKEN_BUCKETS,
        )
        self._seconds = meter.create_histogram(
            DURATION,
            "s",
            "Duration of a request",
            explicit_bucket_boundaries_advisory=SECOND_BUCKETS,
        )
        self._runs = meter.create_counter(RUNS, "{run}", "System runs that ended")
        self._calls = meter.create_counter(CALLS, "{call}", "Component calls that ended")

    @contextmanager
    def run(self, run: RunFacts) -> Iterator[Callable[[Trace], None]]:
        """Count a system run."""
        labels: Labels = {
            "gen_ai.workflow.name": run.system.name,
            "compound.forked": bool(run.fork),
        }
        with _ending(labels, lambda: self._runs.add(1, labels)):
            yield lambda trace: _note(labels, trace.failure)

    @contextmanager
    def call(
        self, component: Component, address: str, inputs: Mapping[str, object]
    ) -> Iterator[Callable[[CallResult], None]]:
        """Count a component call."""
        labels: Labels = {
            "compound.component": component.name,
            "compound.component.kind": component.kind,
        }

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
    def request(
        self, engine: Engine, lm: str, request: Request
    ) -> Iterator[Callable[[Completion], None]]:
        """Record the duration and the tokens of a request."""
        provider, model = model_name(engine, lm)
        labels: Labels = {
            OPERATION: "chat",
            "gen_ai.provider.name": provider,
            "gen_ai.request.model": model,
            **server_attributes(engine),
        }
        started = time.perf_counter()

        def record(completion: Completion) -> None:
            usage = completion.usage
            for kind, tokens in (
                ("input", usage.prompt_tokens),
                ("output", usage.completion_tokens),
            ):
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

    def call(
        self, component: Component, address: str, inputs: Mapping[str, object]
    ) -> Span[CallResult]:
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
        labels["error.type"] = (
            error.kind if isinstance(error, CallError) else type(error).__qualname__
        )
        raise
    finally:
        record()


def _note(labels: Labels, failure: Failure | None) -> None:
    if failure is not None:
        labels["error.type"] = failure.kind


METRICS, METRICS_PROTOCOL = "OTEL_METRICS_EXPORTER", "OTEL_EXPORTER_OTLP_METRICS_PROTOCOL"
ANY_PROTOCOL = "OTEL_EXPORTER_OTLP_PROTOCOL"


def chosen_exporter(variable: str, protocol: str, endpoint: str | None) -> str:
    """Return the exporter of a signal: ``otlp`` for an endpoint, otherwise the one that a variable names."""
    if endpoint is not None:
        return "otlp"
    chosen = os.environ.get(variable, "otlp").strip().lower()
    if chosen not in {"otlp", "console", "none"}:
        raise DeclarationError(
            f"{variable}={chosen} is not supported; possible: otlp, console, none",
            hint="for another exporter, pass a provider of your own to compound.trace_with",
        )
    spoken = os.environ.get(protocol) or os.environ.get(ANY_PROTOCOL) or "http/protobuf"
    if chosen == "otlp" and spoken != "http/protobuf":
        raise DeclarationError(
            f"{protocol}={spoken} is not supported; possible: http/protobuf",
            hint="for another protocol, pass a provider of your own to compound.trace_with",
        )
    return chosen


def resource() -> Resource:
    """Return the resource of own providers: the service ``compound``, unless the environment names one."""
    from opentelemetry.sdk.resources import Resource

    # arguments would replace the service name of the environment
    named = "OTEL_SERVICE_NAME" in os.environ or "service.name=" in os.environ.get(
        "OTEL_RESOURCE_ATTRIBUTES", ""
    )
    return Resource.create({} if named else {"service.name": "compound"})


def meter_provider(
    given: MeterProvider | bool | None, endpoint: str | None
) -> tuple[MeterProvider | None, SdkMeterProvider | None]:
    """Return the provider that receives metrics, if any, and the same one if it was created here."""
    if given is None:
        given = os.environ.get(METRICS, "none").strip().lower() != "none"
    if given is False:
        return None, None
    if given is not True:
        return given, None
    if endpoint is None and (found := _global_provider()) is not None:
        return found, None
    made = _new_provider(endpoint)
    return made, made


def _global_provider() -> MeterProvider | None:
    """Return the application's provider, or None if it has set none."""
    from opentelemetry import metrics
    from opentelemetry.sdk.metrics import MeterProvider as SdkProvider

    found: MeterProvider = metrics.get_meter_provider()
    return found if isinstance(found, SdkProvider) else None


def _new_provider(endpoint: str | None) -> SdkMeterProvider:
    """Return a provider that exports as the environment states."""
    from opentelemetry.sdk.metrics import MeterProvider as SdkProvider
    from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader

    exporter = _exporter(endpoint)
    readers = [PeriodicExportingMetricReader(exporter)] if exporter is not None else []
    return SdkProvider(readers, resource())


def _exporter(endpoint: str | None) -> MetricExporter | None:
    chosen = chosen_exporter(METRICS, METRICS_PROTOCOL, endpoint)
    if chosen == "none":
        return None
    if chosen == "console":
        from opentelemetry.sdk.metrics.export import ConsoleMetricExporter

        return ConsoleMetricExporter(out=sys.stderr)  # results go to stdout
    from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter

    if endpoint is None:
        return OTLPMetricExporter()
    return OTLPMetricExporter(endpoint=f"{endpoint.rstrip('/')}/v1/metrics")
