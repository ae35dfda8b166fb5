"""Where spans go: an endpoint, the variables of OpenTelemetry, an application's provider, the command line."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

import compound as cp
from compound.core.errors import DeclarationError
from compound.execution.observers import active_tracer
from compound.execution.tracing import setup
from compound.execution.tracing.setup import ANY_PROTOCOL, CONTENT, EXPORTER, PROTOCOL
from compound.testing import ScriptedLM
from otlp_collector import Collector, collector

VARIABLES = (
    EXPORTER,
    PROTOCOL,
    ANY_PROTOCOL,
    CONTENT,
    "OTEL_SERVICE_NAME",
    "OTEL_RESOURCE_ATTRIBUTES",
    "OTEL_EXPORTER_OTLP_ENDPOINT",
    "OTEL_EXPORTER_OTLP_HEADERS",
    "COMPOUND_OTEL",
)
RUN = ["call shout", "invoke_workflow demo"]
FILE = """
system: demo
inputs: {text: str}
components:
  shout: {function: {call: "shouting:shout"}, in: {text: $text}}
outputs: {loud: $shout}
"""


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def received() -> Iterator[Collector]:
    with collector() as found:
        yield found


def shout(text: str) -> str:
    return text.upper()


def run() -> None:
    system = cp.System("demo", outputs={"loud": cp.Function("shout", shout)(text=cp.Input("text"))})
    cp.run(system, {"text": "a"}, engines={"lm": ScriptedLM(["a"])})


def test_spans_arrive_at_an_endpoint_over_http(received: Collector) -> None:
    with cp.trace_with(endpoint=received.url):
        run()
    assert active_tracer() is None
    assert received.names == RUN
    assert received.paths == ["/v1/traces"]
    assert received.service == "compound"
    call, root = received.spans
    assert call.parent_span_id == root.span_id
    assert {a.key: a.value.string_value for a in root.attributes}["gen_ai.workflow.name"] == "demo"


def test_the_variables_of_opentelemetry_are_followed(
    received: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", received.url)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-team=search")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "answers")
    with cp.trace_with():
        run()
    assert received.names == RUN
    assert received.service == "answers"
    assert received.headers[0]["x-team"] == "search"


def test_a_service_name_among_the_resource_attributes_is_kept(
    received: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "service.name=answers,team=search")
    with cp.trace_with(endpoint=received.url):
        run()
    assert received.service == "answers"


def test_a_collector_that_does_not_answer_ends_no_run(caplog: pytest.LogCaptureFixture) -> None:
    with collector() as gone:
        pass
    with cp.trace_with(endpoint=gone.url):
        run()


def test_the_console_is_an_exporter(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(EXPORTER, "console")
    with cp.trace_with():
        run()
    assert '"name": "invoke_workflow demo"' in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        (EXPORTER, "zipkin", "possible: otlp, console, none"),
        (ANY_PROTOCOL, "grpc", "possible: http/protobuf"),
    ],
)
def test_what_is_not_supported_is_named(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, message: str
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(DeclarationError, match=f"{value} is not supported; {message}"):
        cp.trace_with()
    assert active_tracer() is None


def test_a_provider_and_an_endpoint_contradict_each_other() -> None:
    from opentelemetry.trace import NoOpTracerProvider

    with pytest.raises(DeclarationError, match="got both"):
        cp.trace_with(NoOpTracerProvider(), endpoint="http://127.0.0.1:4318")


def test_the_provider_of_the_application_is_used_if_there_is_one() -> None:
    code = """
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
import compound as cp
provider = TracerProvider()
trace.set_tracer_provider(provider)
with cp.trace_with() as tracing:
    assert tracing.provider is provider
assert provider.force_flush()  # it is not shut down: it belongs to the application
print("used")
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ran.stdout == "used\n", ran.stderr


class TestCommands:
    @pytest.fixture
    def file(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        (tmp_path / "shouting.py").write_text(
            "def shout(text: str) -> str:\n    return text.upper()\n"
        )
        (tmp_path / "system.yaml").write_text(FILE)
        monkeypatch.chdir(tmp_path)
        return tmp_path / "system.yaml"

    def test_an_option_switches_it_on(
        self, cli: Any, file: Path, received: Collector, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", received.url)
        assert cli("run", str(file), "text=a").out == "A\n"
        assert received.requests == []
        assert cli("run", str(file), "text=a", "--otel").out == "A\n"
        assert received.names == RUN

    def test_so_does_a_variable(
        self, cli: Any, file: Path, received: Collector, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", received.url)
        monkeypatch.setenv("COMPOUND_OTEL", "1")
        assert json.loads(cli("run", str(file), "text=a", "--json").out)["outputs"] == {"loud": "A"}
        assert received.names == RUN


@pytest.mark.parametrize(("answers", "seconds"), [(False, 0.0), (True, setup.CLOSE_SECONDS)])
def test_closing_does_not_wait_for_a_collector_that_is_gone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, answers: bool, seconds: float
) -> None:
    """A collector that hangs is waited for a bounded time; one that refuses connections is not."""
    hanging = Mock(**{"is_alive.return_value": True})
    monkeypatch.setattr(setup, "can_connect", lambda address: answers)
    monkeypatch.setattr(setup, "threading", SimpleNamespace(Thread=Mock(return_value=hanging)))
    with cp.trace_with(endpoint="http://127.0.0.1:9") as tracing:
        own = tracing._owned
    hanging.join.assert_called_once_with(seconds)
    assert "did not receive everything" in caplog.text
    assert ("no collector answers at http://127.0.0.1:9" in caplog.text) is not answers
    assert own is not None
    own.shutdown()
