"""Metrics of OpenTelemetry: values, labels, failures, and that they are off unless asked for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import compound as cp
from compound.core.errors import DeclarationError, ParseError
from compound.execution.tracing.setup import METRICS, meter_provider
from compound.testing import ScriptedLM

SECRET = "a question that no metric may show"


class Metrics:
    """A meter provider with a reader, and its data points by metric."""

    def __init__(self) -> None:
        self.reader = InMemoryMetricReader()
        self.provider = MeterProvider([self.reader], shutdown_on_exit=False)

    def points(self) -> Mapping[str, list[Any]]:
        data = self.reader.get_metrics_data()
        if data is None:
            return {}
        (resource,) = data.resource_metrics
        return {m.name: list(m.data.data_points) for s in resource.scope_metrics for m in s.metrics}


@pytest.fixture
def metrics() -> Iterator[Metrics]:
    found = Metrics()
    yield found
    found.provider.shutdown()


def qa() -> cp.System:
    answerer = cp.LLM("answerer", prompt=cp.Text("Answer."))
    return cp.System("qa", {"answer": answerer(question=cp.Input("question"))}, lm="lm")


def run(lm: ScriptedLM) -> cp.Trace:
    return cp.run(qa(), {"question": SECRET}, engines={"lm": lm}, check=False)


def test_tokens_durations_and_counts(metrics: Metrics) -> None:
    with cp.trace_with(TracerProvider(), metrics=metrics.provider):
        usages = [run(ScriptedLM(["Lima is the capital."])).usage for _ in range(2)]
    points = metrics.points()
    tokens = {p.attributes["gen_ai.token.type"]: p for p in points["gen_ai.client.token.usage"]}
    assert tokens["input"].count == 2
    assert tokens["input"].sum == sum(usage.prompt_tokens for usage in usages)
    assert tokens["output"].sum == sum(usage.completion_tokens for usage in usages)
    assert tokens["input"].explicit_bounds[:3] == (1, 4, 16)
    (duration,) = points["gen_ai.client.operation.duration"]
    assert duration.count == 2
    assert duration.explicit_bounds[:2] == (0.01, 0.02)
    assert dict(duration.attributes) == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "scripted",
        "gen_ai.request.model": "lm",
    }
    (runs,) = points["compound.optimization.runs"]
    assert (runs.value, runs.attributes["gen_ai.workflow.name"]) == (2, "qa")
    (calls,) = points["compound.calls"]
    assert (calls.value, calls.attributes["compound.component"]) == (2, "answerer")


@pytest.mark.parametrize("reported", [-5, 10**9, float("nan")], ids=str)
def test_impossible_usage_is_recorded_as_it_is_charged(metrics: Metrics, reported: Any) -> None:
    """In metrics and spans of requests, as in those of calls and in the budget."""
    exporter, provider = InMemorySpanExporter(), TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    answer = cp.ext.Completion(
        "Lima", usage=cp.ext.Usage(calls=1, prompt_tokens=reported, completion_tokens=1)
    )
    with cp.trace_with(provider, metrics=metrics.provider):
        charged = run(ScriptedLM([answer])).usage
    assert 0 < charged.prompt_tokens < 10**9
    tokens = {
        p.attributes["gen_ai.token.type"]: p for p in metrics.points()["gen_ai.client.token.usage"]
    }
    assert tokens["input"].sum == charged.prompt_tokens
    (request,) = [s.attributes for s in exporter.get_finished_spans() if s.name == "chat lm"]
    assert request is not None
    assert request["gen_ai.usage.input_tokens"] == charged.prompt_tokens
    provider.shutdown()


def test_failures_are_counted_by_kind(metrics: Metrics) -> None:
    def fail(_: str) -> str:
        raise ParseError("no answer")

    with cp.trace_with(TracerProvider(), metrics=metrics.provider):
        failure = run(ScriptedLM(fail)).failure
    assert failure is not None
    points = metrics.points()
    for name in (
        "compound.optimization.runs",
        "compound.calls",
        "gen_ai.client.operation.duration",
    ):
        (point,) = points[name]
        assert point.attributes["error.type"] == failure.kind == ParseError.kind, name
    assert "gen_ai.client.token.usage" not in points


def test_no_text_is_part_of_a_metric(metrics: Metrics) -> None:
    with cp.trace_with(TracerProvider(), metrics=metrics.provider, content=True):
        run(ScriptedLM([SECRET]))
    assert SECRET not in str(metrics.points())


def test_metrics_are_off_unless_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(METRICS, raising=False)
    with cp.trace_with(TracerProvider()) as tracing:
        assert tracing.meters is None
    monkeypatch.setenv(METRICS, "none")
    assert meter_provider(None, None) == (None, None)
    monkeypatch.setenv(METRICS, "console")
    with cp.trace_with(TracerProvider(), metrics=False) as tracing:
        assert tracing.meters is None


def test_an_unknown_exporter_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(METRICS, "prometheus")
    with pytest.raises(DeclarationError, match="OTEL_METRICS_EXPORTER=prometheus is not supported"):
        cp.trace_with(TracerProvider())
