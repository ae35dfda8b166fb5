"""Spans of OpenTelemetry: their tree, attributes, errors, and what they never contain."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

import compound as cp
from compound.core.errors import RateLimited, TransientError
from compound.core.security.sanitize import remember_secret
from compound.execution.budget import Budget, Meter
from compound.execution.cache import MemoryCache
from compound.execution.exchange import MAX_CHARACTERS
from compound.execution.observers import active_tracer
from compound.execution.tracing.setup import CONTENT
from compound.testing import ScriptedLM

SECRET = "sk-a-key-for-the-test-of-spans"


class Spans:
    """A provider that keeps spans, and access to them by name."""

    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        self.provider = TracerProvider(shutdown_on_exit=False)
        self.provider.add_span_processor(SimpleSpanProcessor(self.exporter))

    @property
    def all(self) -> tuple[ReadableSpan, ...]:
        return tuple(self.exporter.get_finished_spans())

    def named(self, name: str) -> list[ReadableSpan]:
        return [span for span in self.all if span.name == name]

    def one(self, name: str) -> ReadableSpan:
        (span,) = self.named(name)
        return span

    def parent(self, span: ReadableSpan) -> str:
        names = {s.context.span_id: s.name for s in self.all if s.context is not None}
        return names[span.parent.span_id] if span.parent is not None else ""

    def text(self) -> str:
        return "\n".join(span.to_json() for span in self.all)


@pytest.fixture
def spans() -> Iterator[Spans]:
    found = Spans()
    yield found
    found.provider.shutdown()


def chain() -> cp.System:
    writer = cp.LLM(
        "writer", prompt="Write.", system="Be brief.", temperature=0.5, max_tokens=9, stop=("END",)
    )
    draft = writer(question=cp.Input("question"))
    length = cp.Function("measure", len_of)(text=draft)
    return cp.System("essay", outputs={"draft": draft, "length": length}, lm="lm")


def len_of(text: str) -> int:
    return len(text)


def attributes(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


def run(
    system: cp.System, reply: Any, executor: cp.Executor | None = None, **inputs: Any
) -> cp.Trace:
    executor = executor or cp.Executor({"lm": ScriptedLM(reply)})
    return asyncio.run(executor.run(system, inputs or {"question": "Why?"}, example="e1", sample=2))


def test_a_run_contains_its_calls_and_they_contain_their_requests(spans: Spans) -> None:
    with cp.trace_with(spans.provider):
        trace = run(chain(), ["So it is."])
    assert active_tracer() is None
    assert [spans.parent(span) for span in spans.all] == [
        "call writer",
        "invoke_workflow essay",
        "invoke_workflow essay",
        "",
    ]
    root = attributes(spans.one("invoke_workflow essay"))
    assert root["gen_ai.operation.name"] == "invoke_workflow"
    assert root["gen_ai.workflow.name"] == "essay"
    assert (root["compound.example"], root["compound.sample"]) == ("e1", 2)
    assert root["compound.configuration"] == trace.configuration
    assert root["compound.usage.completion_tokens"] == trace.usage.completion_tokens == 3
    call = attributes(spans.one("call writer"))
    assert (call["compound.component.kind"], call["compound.address"]) == ("llm", "writer")
    assert call["compound.reused"] is False


def test_a_request_has_the_attributes_of_the_conventions(spans: Spans) -> None:
    with cp.trace_with(spans.provider):
        run(chain(), ["So it is."])
    request = spans.one("chat lm")
    assert request.kind is SpanKind.CLIENT
    found = attributes(request)
    seed = found.pop("gen_ai.request.seed")
    assert 0 <= seed < 2**63
    assert found == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "scripted",
        "gen_ai.request.model": "lm",
        "gen_ai.request.max_tokens": 9,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.stop_sequences": ("END",),
        "gen_ai.response.finish_reasons": ("stop",),
        "gen_ai.usage.input_tokens": 6,
        "gen_ai.usage.output_tokens": 3,
        "compound.usage.cost": 0.0,
        "compound.lm": "lm",
    }


def test_a_model_of_this_process_is_not_a_remote_service(spans: Spans) -> None:
    with cp.trace_with(spans.provider):
        run(chain(), None, cp.Executor({"lm": ScriptedLM(["a"], remote=False)}))
    assert spans.one("chat lm").kind is SpanKind.INTERNAL


def test_texts_are_left_out_unless_requested(spans: Spans, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(CONTENT, raising=False)
    with cp.trace_with(spans.provider) as tracing:
        run(chain(), ["So it is."])
    assert not tracing.content
    assert "Why?" not in spans.text()
    assert "So it is" not in spans.text()
    assert "Be brief" not in spans.text()


@pytest.mark.parametrize(
    "given", [{"content": True}, {"variable": "true"}, {"variable": "SPAN_ONLY"}]
)
def test_content_has_the_messages_as_sent(
    spans: Spans, monkeypatch: pytest.MonkeyPatch, given: dict[str, Any]
) -> None:
    if "variable" in given:
        monkeypatch.setenv(CONTENT, given["variable"])
    with cp.trace_with(spans.provider, content=given.get("content")):
        run(chain(), ["So it is."])
    found = attributes(spans.one("chat lm"))
    assert json.loads(found["gen_ai.system_instructions"]) == [
        {"type": "text", "content": "Be brief."}
    ]
    (message,) = json.loads(found["gen_ai.input.messages"])
    assert message["role"] == "user"
    assert message["parts"][0]["content"].startswith("Write.\n\nQuestion: Why?")
    assert json.loads(found["gen_ai.output.messages"]) == [
        {
            "role": "assistant",
            "parts": [{"type": "text", "content": "So it is."}],
            "finish_reason": "stop",
        }
    ]
    assert json.loads(attributes(spans.one("call measure"))["compound.outputs"]) == {"output": 9}
    assert json.loads(attributes(spans.one("invoke_workflow essay"))["compound.inputs"]) == {
        "question": "Why?"
    }


def test_keys_and_long_texts_do_not_leave_the_process(spans: Spans) -> None:
    remember_secret(SECRET)
    long = "x" * (3 * MAX_CHARACTERS)
    with cp.trace_with(spans.provider, content=True):
        run(chain(), [f"the key is {SECRET}"], question=f"{SECRET} {long}")
    assert SECRET not in spans.text()
    for span in spans.all:
        for value in attributes(span).values():
            assert len(str(value)) < 1.1 * MAX_CHARACTERS + 500


def test_a_failure_has_its_kind_and_no_text(spans: Spans) -> None:
    node = cp.LLM("judge", output=bool, retries=0, reasks=0)(cp.Input("question"))
    judge = cp.System("judge", outputs={"holds": node}, lm="lm")
    with cp.trace_with(spans.provider):
        run(judge, ["Perhaps, said the model."])
    for name in ("call judge", "invoke_workflow judge"):
        span = spans.one(name)
        assert span.status.status_code is StatusCode.ERROR
        assert attributes(span)["error.type"] == "parse"
    assert spans.one("chat lm").status.status_code is StatusCode.UNSET
    assert "Perhaps" not in spans.text()


def test_each_attempt_is_a_request(spans: Spans) -> None:
    async def at_once(_: float) -> None: ...

    replies: list[Any] = [TransientError("gone"), RateLimited("wait", retry_after=0.0), "fine"]
    executor = cp.Executor({"lm": ScriptedLM(replies)}, sleep=at_once)
    with cp.trace_with(spans.provider, content=True):
        trace = run(chain(), None, executor)
    assert trace.failure is None
    kinds = [attributes(span).get("error.type") for span in spans.named("chat lm")]
    assert kinds == ["transient", "rate_limit", None]
    assert spans.named("chat lm")[0].status.description == "gone"
    assert attributes(spans.one("call writer"))["compound.attempts"] == 2


def test_an_exception_ends_the_spans_it_passes(spans: Spans) -> None:
    limited = cp.Executor({"lm": ScriptedLM(["a"] * 9)}).with_meter(Meter(Budget(calls=0)))
    with cp.trace_with(spans.provider), pytest.raises(cp.CompoundError):
        run(chain(), None, limited)
    assert attributes(spans.one("invoke_workflow essay"))["error.type"] == "BudgetExhausted"


def test_a_cached_call_is_marked_and_makes_no_request(spans: Spans) -> None:
    executor = cp.Executor({"lm": ScriptedLM(["a"])}, cache=MemoryCache())
    run(chain(), None, executor)
    with cp.trace_with(spans.provider):
        run(chain(), None, executor)
    found = attributes(spans.one("call writer"))
    assert found["compound.reused"] is True
    assert "compound.usage.calls" not in found
    assert not spans.named("chat lm")


def test_a_fork_has_spans_of_the_calls_it_executes(spans: Spans) -> None:
    executor = cp.Executor({"lm": ScriptedLM(["a", "b"])})
    trace = run(chain(), None, executor)
    with cp.trace_with(spans.provider):
        asyncio.run(executor.fork(chain(), trace, "writer", outputs={"output": "longer"}))
    assert [span.name for span in spans.all] == ["call measure", "invoke_workflow essay"]
    assert attributes(spans.all[-1])["compound.fork"] == "writer"


def test_calls_of_a_loop_are_inside_it(spans: Spans) -> None:
    item = cp.Function("shout", shout)(item=cp.Input("item"))
    body = cp.System("body", outputs={"loud": item})
    mapped = cp.Map("each", body, over="item")(item=cp.Input("items", list[str]))
    system = cp.System("mapping", outputs={"all": mapped})
    with cp.trace_with(spans.provider):
        run(system, [], items=["a", "b"])
    inside = spans.named("call shout")
    assert {attributes(span)["compound.address"] for span in inside} == {
        "each[0]/shout",
        "each[1]/shout",
    }
    assert {spans.parent(span) for span in inside} == {"call each"}
    assert spans.parent(spans.one("call each")) == "invoke_workflow mapping"


@cp.tool
def multiply(a: int, b: int) -> int:
    """Multiply."""
    return a * b


def test_the_span_of_a_tool_call_names_the_tool(spans: Spans) -> None:
    agent = cp.Agent("clerk", [multiply], max_turns=3)
    system = cp.System("sums", {"answer": agent(question=cp.Input("question"))}, lm="lm")
    replies = [
        '{"tool": "multiply", "arguments": {"a": 2, "b": 3}}',
        '{"tool": "unknown", "arguments": {}}',
        '{"answer": "6"}',
    ]
    with cp.trace_with(spans.provider):
        trace = run(system, replies)
    called = attributes(spans.one("execute_tool multiply"))
    (record,) = (c.inputs["call"] for c in trace.calls if c.address == "clerk[0]/tools[0]/call")
    assert isinstance(record, dict)
    assert called["gen_ai.operation.name"] == "execute_tool"
    assert called["gen_ai.tool.name"] == "multiply"
    assert called["gen_ai.tool.call.id"] == record["id"]
    assert called["compound.component"] == "clerk_call"
    invented = attributes(
        spans.one("execute_tool clerk_call")
    )  # the model's text is not part of the span
    assert invented["gen_ai.tool.name"] == "clerk_call"
    assert attributes(spans.one("invoke_agent clerk"))["gen_ai.agent.name"] == "clerk"


def shout(item: str) -> str:
    return item.upper()


async def test_concurrent_runs_keep_their_calls_apart(spans: Spans) -> None:
    executor = cp.Executor({"lm": ScriptedLM(lambda text: "a", latency=0.01)})

    with cp.trace_with(spans.provider):
        runs = (executor.run(chain(), {"question": str(i)}, example=str(i)) for i in range(8))
        await asyncio.gather(*runs)
    traces = {s.context.trace_id for s in spans.all if s.context is not None}
    assert len(traces) == 8
    for trace in traces:
        names = sorted(
            s.name for s in spans.all if s.context is not None and s.context.trace_id == trace
        )
        assert names == ["call measure", "call writer", "chat lm", "invoke_workflow essay"]


def test_a_run_is_inside_the_span_of_the_application(spans: Spans) -> None:
    with (
        cp.trace_with(spans.provider),
        spans.provider.get_tracer("app").start_as_current_span("handle request"),
    ):
        cp.run(chain(), {"question": "Why?"}, engines={"lm": ScriptedLM(["a"])})
    assert spans.parent(spans.one("invoke_workflow essay")) == "handle request"


def test_an_indescribable_value_ends_no_run(spans: Spans, caplog: pytest.LogCaptureFixture) -> None:
    node = cp.Function("make", unprintable)(x=cp.Input("x"))
    system = cp.System("odd", outputs={"y": node})
    with cp.trace_with(spans.provider, content=True):
        assert run(system, [], x="1").failure is None
    assert "attributes of a span are missing" in caplog.text
    assert spans.named("call make")


def unprintable(x: str) -> object:
    return Unprintable()


class Unprintable:
    def __repr__(self) -> str:
        raise ValueError("no text")


def test_nested_tracing_returns_to_the_outer_one(spans: Spans) -> None:
    inner = Spans()
    with cp.trace_with(spans.provider):
        with cp.trace_with(inner.provider):
            run(chain(), ["a"])
        run(chain(), ["a"])
    assert len(inner.all) == len(spans.all) == 4
    inner.provider.shutdown()
