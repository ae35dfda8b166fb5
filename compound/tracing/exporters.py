"""Exporters that the environment names, and the provider of metrics."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from compound.errors import DeclarationError

if TYPE_CHECKING:
    from opentelemetry.metrics import MeterProvider
    from opentelemetry.sdk.metrics import MeterProvider as SdkMeterProvider
    from opentelemetry.sdk.metrics.export import MetricExporter
    from opentelemetry.sdk.resources import Resource

METRICS, METRICS_PROTOCOL = "OTEL_METRICS_EXPORTER", "OTEL_EXPORTER_OTLP_METRICS_PROTOCOL"
ANY_PROTOCOL = "OTEL_EXPORTER_OTLP_PROTOCOL"


def chosen_exporter(variable: str, protocol: str, endpoint: str | None) -> str:
    """Return the exporter of a signal: ``otlp`` for an endpoint, otherwise the one that a variable names.

    Raises:
        DeclarationError: the exporter or its protocol is not supported.
    """
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
    """Return the provider that receives metrics, if any, and the same one if it was created here.

    Args:
        given: a provider, or whether to record metrics; ``None`` if the environment decides.
        endpoint: base address of an OTLP/HTTP receiver.
    """
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
