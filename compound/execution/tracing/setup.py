"""Switch OpenTelemetry spans and metrics on and off."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Sequence
from importlib import metadata
from types import TracebackType
from typing import TYPE_CHECKING, Self

from compound.core.errors import DISTRIBUTION, DeclarationError, MissingExtra, raise_missing_extra
from compound.core.formatting import short_repr
from compound.core.narrowing import report_wrong_arguments
from compound.core.security.sanitize import remember_environment
from compound.core.web.addresses import can_connect
from compound.execution.observers import Tracer, activate, active_tracer
from compound.execution.tracing.metrics import (
    METRICS,
    CombinedTracer,
    MetricRecorder,
    chosen_exporter,
    meter_provider,
    resource,
)
from compound.execution.tracing.spans import SpanRecorder

if TYPE_CHECKING:
    from opentelemetry.metrics import MeterProvider
    from opentelemetry.sdk.metrics import MeterProvider as SdkMeterProvider
    from opentelemetry.sdk.trace import TracerProvider as SdkTracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import TracerProvider

CONTENT = "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT"
EXPORTER, PROTOCOL = "OTEL_TRACES_EXPORTER", "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"
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
        self._tracer: Tracer = SpanRecorder(
            provider.get_tracer("compound", _version()), content=content
        )
        if meters is not None:
            metrics = MetricRecorder(meters.get_meter("compound", _version()))
            self._tracer = CombinedTracer(self._tracer, metrics)
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
        found = provider or (_global_provider() if endpoint is None else None)
        owned = _new_provider(endpoint) if found is None else None
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
    return Tracing(
        found or _present(owned), meters, content=content, owned=made, collector=collector
    )


def _collector(endpoint: str | None) -> str:
    """Return the address of the receiver; ``""`` if the environment names several, or another exporter."""
    own = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT")
    exporters = [os.environ.get(EXPORTER, "otlp"), os.environ.get(METRICS, "none")]
    if endpoint is not None:
        return endpoint
    if "otlp" not in exporters or any(name in os.environ for name in own):
        return ""
    return os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT") or DEFAULT_COLLECTOR


def _version() -> str | None:
    try:
        return metadata.version(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        return None


def _present(provider: SdkTracerProvider | None) -> TracerProvider:
    if provider is None:
        raise MissingExtra("tracing", "opentelemetry-sdk", "otel")
    return provider


def _global_provider() -> TracerProvider | None:
    """Return the application's provider, or None if it has set none."""
    from opentelemetry import trace

    found: TracerProvider = trace.get_tracer_provider()
    return None if isinstance(found, trace.ProxyTracerProvider) else found


def _new_provider(endpoint: str | None) -> SdkTracerProvider:
    """Return a provider that exports as the environment states."""
    from opentelemetry.sdk.trace import TracerProvider as SdkProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    made = SdkProvider(resource=resource())
    exporter = _exporter(endpoint)
    if exporter is not None:
        made.add_span_processor(BatchSpanProcessor(exporter))
    return made


def _exporter(endpoint: str | None) -> SpanExporter | None:
    """Return the exporter to an endpoint, or the one that the environment names; None for ``none``."""
    chosen = chosen_exporter(EXPORTER, PROTOCOL, endpoint)
    if chosen == "none":
        return None
    if chosen == "console":
        from opentelemetry.sdk.trace.export import ConsoleSpanExporter

        return ConsoleSpanExporter(out=sys.stderr)  # results go to stdout
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    if endpoint is None:
        return OTLPSpanExporter()
    return OTLPSpanExporter(endpoint=f"{endpoint.rstrip('/')}/v1/traces")
