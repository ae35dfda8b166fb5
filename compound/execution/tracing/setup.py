"""Switch OpenTelemetry spans on and off."""

from __future__ import annotations

import logging
import os
import sys
import threading
from importlib import metadata
from types import TracebackType
from typing import TYPE_CHECKING, Self

from compound.core.errors import DISTRIBUTION, DeclarationError, raise_missing_extra
from compound.core.formatting import short_repr
from compound.core.narrowing import report_wrong_arguments
from compound.core.security.sanitize import remember_environment
from compound.core.web.addresses import can_connect
from compound.execution.observers import activate, active_tracer
from compound.execution.tracing.spans import SpanRecorder

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider as SdkProvider
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import TracerProvider

CONTENT = "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT"
EXPORTER, PROTOCOL = "OTEL_TRACES_EXPORTER", "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"
ANY_PROTOCOL = "OTEL_EXPORTER_OTLP_PROTOCOL"
WITH_CONTENT = ("true", "1", "span_only", "span_and_event")
CLOSE_SECONDS = 5.0
DEFAULT_COLLECTOR = "http://localhost:4318"


class Tracing:
    """Active tracing; leaving it as a context manager, or `close`, ends it.

    Attributes:
        provider: the tracer provider that receives the spans.
        content: whether spans contain messages, inputs and outputs.
        collector: the address of the receiver of an own provider, if it is known.
    """

    def __init__(
        self,
        provider: TracerProvider,
        *,
        content: bool,
        owned: SdkProvider | None,
        collector: str = "",
    ) -> None:
        self.provider, self.content, self.collector = provider, content, collector
        self._owned = owned
        try:
            version = metadata.version(DISTRIBUTION)
        except metadata.PackageNotFoundError:
            version = None
        self._tracer = SpanRecorder(provider.get_tracer("compound", version), content=content)
        self._previous = activate(self._tracer)

    def close(self) -> None:
        """End tracing, send what remains, and return to the tracing that was active before."""
        if active_tracer() is self._tracer:
            activate(self._previous)
        owned, self._owned = self._owned, None
        if owned is None:
            return
        # an exporter tries again for longer than anyone should wait for it
        ending = threading.Thread(target=owned.shutdown, daemon=True)
        ending.start()
        ending.join(CLOSE_SECONDS * (not self.collector or can_connect(self.collector)))
        if ending.is_alive():
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
    if provider is not None and not hasattr(provider, "get_tracer"):
        raise DeclarationError(
            f"trace_with accepts OpenTelemetry's providers, but got {short_repr(provider)}",
            hint="such as opentelemetry.sdk.trace.TracerProvider()",
        )
    if content is None:
        content = os.environ.get(CONTENT, "").strip().lower() in WITH_CONTENT
    remember_environment()  # so that no key named in the environment is exported
    try:
        found, owned = _tracer_provider(provider, endpoint)
    except ImportError as error:
        raise_missing_extra(error, "tracing")
        raise
    collector = _collector(endpoint) if owned is not None else ""
    if collector and not can_connect(collector):
        logging.getLogger("compound").warning(
            "OpenTelemetry: no collector answers at %s", collector
        )
    return Tracing(found, content=content, owned=owned, collector=collector)


def _collector(endpoint: str | None) -> str:
    """Return the address of the receiver; ``""`` if the environment names another exporter or address."""
    if endpoint is not None:
        return endpoint
    own = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"
    if os.environ.get(EXPORTER, "otlp") != "otlp" or own in os.environ:
        return ""
    return os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT") or DEFAULT_COLLECTOR


def _tracer_provider(
    given: TracerProvider | None, endpoint: str | None
) -> tuple[TracerProvider, SdkProvider | None]:
    """Return the provider that receives spans, and the same one if it was created here."""
    from opentelemetry import trace

    if given is None and endpoint is None:  # the application's, if it has set one
        found = trace.get_tracer_provider()
        given = None if isinstance(found, trace.ProxyTracerProvider) else found
    if given is not None:
        return given, None
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider as SdkProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    # arguments would replace the service name of the environment
    attributes = os.environ.get("OTEL_RESOURCE_ATTRIBUTES", "")
    named = "OTEL_SERVICE_NAME" in os.environ or "service.name=" in attributes
    made = SdkProvider(resource=Resource.create({} if named else {"service.name": "compound"}))
    if (exporter := _exporter(endpoint)) is not None:
        made.add_span_processor(BatchSpanProcessor(exporter))
    return made, made


def _exporter(endpoint: str | None) -> SpanExporter | None:
    """Return the exporter to an endpoint, or the one that the environment names; None for ``none``."""
    chosen = "otlp" if endpoint else os.environ.get(EXPORTER, "otlp").strip().lower()
    spoken = os.environ.get(PROTOCOL) or os.environ.get(ANY_PROTOCOL) or "http/protobuf"
    problem = ""
    if chosen not in {"otlp", "console", "none"}:
        problem = f"{EXPORTER}={chosen} is not supported; possible: otlp, console, none"
    elif chosen == "otlp" and endpoint is None and spoken != "http/protobuf":
        problem = f"{PROTOCOL}={spoken} is not supported; possible: http/protobuf"
    if problem:
        raise DeclarationError(
            problem, hint="for another one, pass a provider of your own to compound.trace_with"
        )
    if chosen == "none":
        return None
    if chosen == "console":
        from opentelemetry.sdk.trace.export import ConsoleSpanExporter

        return ConsoleSpanExporter(out=sys.stderr)  # results go to stdout
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    return OTLPSpanExporter(None if endpoint is None else f"{endpoint.rstrip('/')}/v1/traces")
