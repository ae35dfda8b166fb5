"""Switch OpenTelemetry spans and metrics on and off."""

from __future__ import annotations

import importlib
import logging
import os
import sys
import threading
import time
from collections.abc import Sequence
from importlib import metadata
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self

from compound.core.errors import DISTRIBUTION, DeclarationError, raise_missing_extra
from compound.core.formatting import short_repr
from compound.core.narrowing import report_wrong_arguments
from compound.core.security.sanitize import remember_environment
from compound.core.web.addresses import can_connect
from compound.execution.observers import activate, active_tracer
from compound.execution.tracing.spans import TelemetryRecorder

if TYPE_CHECKING:
    from opentelemetry.metrics import MeterProvider
    from opentelemetry.sdk.metrics import MeterProvider as SdkMeterProvider
    from opentelemetry.sdk.metrics.export import MetricExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider as SdkTracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import TracerProvider

CONTENT = "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT"
EXPORTER, PROTOCOL = "OTEL_TRACES_EXPORTER", "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"
METRICS, METRICS_PROTOCOL = "OTEL_METRICS_EXPORTER", "OTEL_EXPORTER_OTLP_METRICS_PROTOCOL"
ANY_PROTOCOL = "OTEL_EXPORTER_OTLP_PROTOCOL"
WITH_CONTENT = ("true", "1", "span_only", "span_and_event")
CLOSE_SECONDS = 5.0
DEFAULT_COLLECTOR = "http://localhost:4318"


class Tracing:
    """Active tracing; leaving it as a context manager, or `close`, ends it.

    Attributes:
        provider: the tracer provider that receives the spans.
        meters: the meter provider that receives the metrics, if they are on.
        content: whether spans contain messages, inputs and outputs.
        collector: the address of the receiver of own providers, if it is known.
    """

    def __init__(
        self,
        provider: TracerProvider,
        meters: MeterProvider | None,
        *,
        content: bool,
        owned: Sequence[SdkTracerProvider | SdkMeterProvider],
        collector: str = "",
    ) -> None:
        self.collector = collector
        self.provider, self.meters, self.content = provider, meters, content
        self._owned = tuple(owned)
        try:
            version = metadata.version(DISTRIBUTION)
        except metadata.PackageNotFoundError:
            version = None
        meter = None if meters is None else meters.get_meter("compound", version)
        self._tracer = TelemetryRecorder(
            provider.get_tracer("compound", version), meter, content=content
        )
        self._previous = activate(self._tracer)

    def close(self) -> None:
        """End tracing, send what remains, and return to the tracing that was active before."""
        if active_tracer() is self._tracer:
            activate(self._previous)
        owned, self._owned = self._owned, ()
        # an exporter tries again for longer than anyone should wait for it
        ending = [threading.Thread(target=provider.shutdown, daemon=True) for provider in owned]
        for thread in ending:
            thread.start()
        end = time.monotonic() + CLOSE_SECONDS * (not self.collector or can_connect(self.collector))
        for thread in ending:
            thread.join(max(0.0, end - time.monotonic()))
        if any(thread.is_alive() for thread in ending):
            logging.getLogger("compound").warning(
                "OpenTelemetry: the collector%s did not receive everything; the rest is not sent",
                f" at {self.collector}" if self.collector else "",
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        self.close()


@report_wrong_arguments
def trace_with(
    provider: TracerProvider | None = None,
    *,
    endpoint: str | None = None,
    content: bool | None = None,
    metrics: MeterProvider | bool | None = None,
) -> Tracing:
    """Record OpenTelemetry spans of every run, component call and model request of this process.

    Tracing is off until this function is called. Without arguments, the application's own tracer
    provider receives the spans if one is set globally; otherwise they are exported as the variables
    ``OTEL_*`` state, by default over OTLP/HTTP to ``http://localhost:4318``.

    Args:
        provider: tracer provider that receives the spans.
        endpoint: base address of an OTLP/HTTP receiver, such as ``http://localhost:4318``.
        content: whether spans contain messages, inputs, outputs and error messages; default: the
            variable ``OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT``, and otherwise no.
        metrics: a meter provider that receives metrics; ``True`` sends them where the spans go: to
            the endpoint, the application's global meter provider, or as the variables ``OTEL_*``
            state. Default: whether ``OTEL_METRICS_EXPORTER`` names an exporter.

    Returns:
        The active tracing, which can be used as a context manager. Spans that are not sent yet are
        sent when it is closed, or when the process exits.

    Raises:
        DeclarationError: both a provider and an endpoint are given, or the exporter that the
            environment names is unknown.
        MissingExtra: OpenTelemetry is not installed.
    """
    if provider is not None and endpoint is not None:
        raise DeclarationError(
            "trace_with accepts a provider or an endpoint, but got both",
            hint="the exporter of a provider has an endpoint of its own",
        )
    own = None if isinstance(metrics, bool) else metrics
    given: Sequence[tuple[object, str]] = ((provider, "get_tracer"), (own, "get_meter"))
    for each, needed in given:
        if each is not None and not hasattr(each, needed):
            raise DeclarationError(
                f"trace_with accepts OpenTelemetry's providers, but got {short_repr(each)}",
                hint="such as opentelemetry.sdk.trace.TracerProvider()",
            )
    if content is None:
        content = os.environ.get(CONTENT, "").strip().lower() in WITH_CONTENT
    remember_environment()  # so that no key named in the environment is exported
    try:
        found, owned = tracer_provider(provider, endpoint)
        meters, own_meters = meter_provider(metrics, endpoint)
    except ImportError as error:
        raise_missing_extra(error, "tracing")
        raise
    made = [provider for provider in (owned, own_meters) if provider is not None]
    collector = _collector(endpoint) if made else ""
    if collector and not can_connect(collector):
        logging.getLogger("compound").warning(
            "OpenTelemetry: no collector answers at %s", collector
        )
    return Tracing(found, meters, content=content, owned=made, collector=collector)


def _collector(endpoint: str | None) -> str:
    """Return the address of the receiver; ``""`` if the environment names several, or another exporter."""
    own = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT")
    exporters = [os.environ.get(EXPORTER, "otlp"), os.environ.get(METRICS, "none")]
    if endpoint is not None:
        return endpoint
    if "otlp" not in exporters or any(name in os.environ for name in own):
        return ""
    return os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT") or DEFAULT_COLLECTOR


def tracer_provider(
    given: TracerProvider | None, endpoint: str | None
) -> tuple[TracerProvider, SdkTracerProvider | None]:
    """Return the provider that receives spans, and the same one if it was created here."""
    from opentelemetry import trace

    if given is None and endpoint is None:  # the application's, if it has set one
        found = trace.get_tracer_provider()
        given = None if isinstance(found, trace.ProxyTracerProvider) else found
    if given is not None:
        return given, None
    from opentelemetry.sdk.trace import TracerProvider as SdkProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    made = SdkProvider(resource=_resource())
    exporter: SpanExporter | None = _exporter("trace", endpoint)
    if exporter is not None:
        made.add_span_processor(BatchSpanProcessor(exporter))
    return made, made


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
    from opentelemetry import metrics
    from opentelemetry.sdk.metrics import MeterProvider as SdkProvider
    from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader

    found: MeterProvider = metrics.get_meter_provider()
    if endpoint is None and isinstance(found, SdkProvider):  # the application's
        return found, None
    exporter: MetricExporter | None = _exporter("metric", endpoint)
    readers = [PeriodicExportingMetricReader(exporter)] if exporter is not None else []
    made = SdkProvider(readers, _resource())
    return made, made


def _exporter(signal: Literal["trace", "metric"], endpoint: str | None) -> Any:  # noqa: ANN401 - of two kinds
    """Return the exporter to an endpoint, or the one that the environment names; None for ``none``."""
    tracing = signal == "trace"
    variable, protocol = (EXPORTER, PROTOCOL) if tracing else (METRICS, METRICS_PROTOCOL)
    chosen = "otlp" if endpoint else os.environ.get(variable, "otlp").strip().lower()
    if chosen not in {"otlp", "console", "none"}:
        raise DeclarationError(
            f"{variable}={chosen} is not supported; possible: otlp, console, none",
            hint="for another exporter, pass a provider of your own to compound.trace_with",
        )
    spoken = os.environ.get(protocol) or os.environ.get(ANY_PROTOCOL) or "http/protobuf"
    if chosen == "otlp" and endpoint is None and spoken != "http/protobuf":
        raise DeclarationError(
            f"{protocol}={spoken} is not supported; possible: http/protobuf",
            hint="for another protocol, pass a provider of your own to compound.trace_with",
        )
    if chosen == "none":
        return None
    if chosen == "console":
        export = importlib.import_module(
            f"opentelemetry.sdk.{'trace' if tracing else 'metrics'}.export"
        )
        kind = export.ConsoleSpanExporter if tracing else export.ConsoleMetricExporter
        return kind(out=sys.stderr)  # results go to stdout
    otlp = importlib.import_module(f"opentelemetry.exporter.otlp.proto.http.{signal}_exporter")
    kind = otlp.OTLPSpanExporter if tracing else otlp.OTLPMetricExporter
    if endpoint is None:
        return kind()
    return kind(endpoint=f"{endpoint.rstrip('/')}/v1/{signal}s")


def _resource() -> Resource:
    """Return the resource of own providers: the service ``compound``, unless the environment names one."""
    from opentelemetry.sdk.resources import Resource

    # arguments would replace the service name of the environment
    attributes = os.environ.get("OTEL_RESOURCE_ATTRIBUTES", "")
    named = "OTEL_SERVICE_NAME" in os.environ or "service.name=" in attributes
    return Resource.create({} if named else {"service.name": "compound"})
