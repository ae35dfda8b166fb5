"""Tracer that records OpenTelemetry spans.

Attributes follow OpenTelemetry's semantic conventions for generative AI; others begin with
``compound.``. Texts of users and models are included only if content is requested, since the
conventions make them opt-in. They are free of registered keys, and truncated like the messages of
traces.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from compound.core.engine import Completion, Engine, Request
from compound.core.errors import CallError
from compound.core.security.sanitize import sanitize_text
from compound.execution.exchange import truncate_text
from compound.execution.observers import RunFacts
from compound.execution.results import CallResult
from compound.execution.trace import Failure, Trace
from compound.graph.component import Component

if TYPE_CHECKING:
    from opentelemetry.trace import Span as OtelSpan
    from opentelemetry.trace import Tracer as OtelTracer
import json
from urllib.parse import urlsplit

from compound.core.engine import (
    Capabilities,
    Message,
    ToolCall,
    ToolSpec,
    Usage,
)
from compound.graph.configuration import to_readable_values

Attribute = str | bool | int | float | list[str]
Attributes = dict[str, Attribute]
Set = Callable[[Callable[[], Attributes], "Failure | None"], None]
"""Sets computed attributes, and the failure of the span, if any."""


class SpanRecorder:
    """Records runs, calls and requests as nested spans; a `compound.execution.observers.Tracer`."""

    def __init__(self, tracer: OtelTracer, *, content: bool) -> None:
        self._tracer = tracer
        self._content = content

    @contextmanager
    def run(self, run: RunFacts) -> Iterator[Callable[[Trace], None]]:
        """Record a system run as ``invoke_workflow``."""
        name = f"invoke_workflow {run.system.name}"
        with self._span(name, lambda: run_attributes(run, content=self._content)) as put:
            yield lambda trace: put(
                lambda: trace_attributes(trace, content=self._content), trace.failure
            )

    @contextmanager
    def call(
        self, component: Component, address: str, inputs: Mapping[str, object]
    ) -> Iterator[Callable[[CallResult], None]]:
        """Record a component call."""
        start = lambda: call_attributes(component, address, inputs, content=self._content)  # noqa: E731
        with self._span(call_name(component, inputs), start) as put:
            yield lambda result: put(
                lambda: result_attributes(result, content=self._content), result.failure
            )

    @contextmanager
    def body(self, component: Component, address: str) -> Iterator[Callable[[object], None]]:
        """Record a loop or map, around the calls of its body."""
        start = lambda: call_attributes(component, address, {}, content=False)  # noqa: E731
        with self._span(call_name(component, {}), start) as put:
            yield lambda result: put(dict, result if isinstance(result, Failure) else None)

    @contextmanager
    def request(
        self, engine: Engine, lm: str, request: Request
    ) -> Iterator[Callable[[Completion], None]]:
        """Record a request as ``chat``; of kind client, unless the model runs in this process."""
        start = lambda: request_attributes(engine, lm, request, content=self._content)  # noqa: E731
        name = f"chat {model_name(engine, lm)[1]}"
        with self._span(name, start, client=engine.remote) as put:
            yield lambda answer: put(
                lambda: completion_attributes(answer, content=self._content), None
            )

    @contextmanager
    def _span(
        self, name: str, start: Callable[[], Attributes], *, client: bool = False
    ) -> Iterator[Set]:
        from opentelemetry.trace import SpanKind

        kind = SpanKind.CLIENT if client else SpanKind.INTERNAL
        # exceptions are recorded below: their messages may quote prompts and answers
        with self._tracer.start_as_current_span(
            name, kind=kind, record_exception=False, set_status_on_exception=False
        ) as span:
            _set(span, start)

            def put(attributes: Callable[[], Attributes], failure: Failure | None) -> None:
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


def _set(span: OtelSpan, attributes: Callable[[], Attributes]) -> None:
    """Set attributes of a sampled span; a value that cannot be described never ends a run."""
    if not span.is_recording():
        return
    try:
        span.set_attributes(attributes())
    except Exception:
        logging.getLogger("compound").warning("attributes of a span are missing", exc_info=True)


OPERATION = "gen_ai.operation.name"
OPERATIONS: Mapping[str, tuple[str, str]] = {
    "retriever": ("retrieval", "gen_ai.data_source.id"),
    "tool": ("execute_tool", "gen_ai.tool.name"),
    "agent": ("invoke_agent", "gen_ai.agent.name"),
    "external_agent": ("invoke_agent", "gen_ai.agent.name"),
}
"""Operation and attribute of the component's name, by component kind; other kinds are no GenAI operation."""

PROVIDERS: Mapping[str, str] = {
    "azure": "azure.ai.openai",
    "azure_ai": "azure.ai.inference",
    "bedrock": "aws.bedrock",
    "gemini": "gcp.gemini",
    "hosted_vllm": "vllm",
    "mistral": "mistral_ai",
    "ollama_chat": "ollama",
    "vertex_ai": "gcp.vertex_ai",
    "watsonx": "ibm.watsonx.ai",
    "xai": "x_ai",
}
"""Provider names of the conventions, by litellm's name where they differ."""


def run_attributes(run: RunFacts, *, content: bool) -> Attributes:
    """Return the attributes of a system run at its start."""
    found: Attributes = {
        OPERATION: "invoke_workflow",
        "gen_ai.workflow.name": run.system.name,
        "compound.system": run.system.identity,
        "compound.configuration": run.system.configuration.digest,
        "compound.example": sanitize_text(run.example),
        "compound.sample": run.sample,
        "compound.seed": run.seed,
    }
    if run.fork:
        found["compound.fork"] = run.fork
    return found | (_values("compound.inputs", run.inputs) if content else {})


def trace_attributes(trace: Trace, *, content: bool) -> Attributes:
    """Return the attributes of a finished system run."""
    found: Attributes = {**_usage(trace.usage), "compound.system_runs": trace.equivalents}
    return found | (_values("compound.outputs", trace.outputs) if content else {})


def call_name(component: Component, inputs: Mapping[str, object]) -> str:
    """Return the name of a call's span, such as ``retrieval searcher`` or ``execute_tool search``."""
    operation, _ = OPERATIONS.get(component.kind, ("call", ""))
    return f"{operation} {_operated(component, inputs)}"


def _operated(component: Component, inputs: Mapping[str, object]) -> str:
    """Return the name of what a call uses: that of the called tool, otherwise that of the component.

    A name that the model invented is text of the model, and not used.
    """
    return _tool_call(component, inputs).get("tool", component.name)


def _tool_call(component: Component, inputs: Mapping[str, object]) -> Mapping[str, str]:
    """Return the record of the tool call that a component executes; empty for other components."""
    call = inputs.get("call") if component.kind == "tool" else None
    return call if isinstance(call, Mapping) else {}


def call_attributes(
    component: Component, address: str, inputs: Mapping[str, object], *, content: bool
) -> Attributes:
    """Return the attributes of a component call at its start."""
    found: Attributes = {
        "compound.component": component.name,
        "compound.component.kind": component.kind,
        "compound.address": address,
    }
    if component.kind in OPERATIONS:
        operation, named = OPERATIONS[component.kind]
        found |= {OPERATION: operation, named: _operated(component, inputs)}
    if call_id := _tool_call(component, inputs).get("id"):
        found |= {
            "gen_ai.tool.call.id": truncate_text(sanitize_text(call_id)),
            "gen_ai.tool.type": "function",
        }
    return found | (_values("compound.inputs", inputs) if content else {})


def result_attributes(result: CallResult, *, content: bool) -> Attributes:
    """Return the attributes of a finished component call."""
    found: Attributes = {
        "compound.reused": result.reused,
        "compound.attempts": result.attempts,
        **(_usage(result.usage) if not result.reused else {}),
    }
    return found | (_values("compound.outputs", result.outputs) if content else {})


def model_name(engine: Engine, lm: str) -> tuple[str, str]:
    """Return the provider and the name of a model, as the conventions spell them.

    >>> from compound.engines import LiteLLM
    >>> model_name(LiteLLM("azure/gpt-4o"), "writer")
    ('azure.ai.openai', 'gpt-4o')
    """
    kind = engine.name.partition(":")[0]
    model = str(Capabilities(engine).model or lm)
    if kind != "litellm":
        return kind, model
    provider, _, name = model.partition("/")
    return PROVIDERS.get(provider, provider), name or model


def request_attributes(engine: Engine, lm: str, request: Request, *, content: bool) -> Attributes:
    """Return the attributes of a request to a model."""
    provider, model = model_name(engine, lm)
    found: Attributes = {
        OPERATION: "chat",
        "gen_ai.provider.name": provider,
        "gen_ai.request.model": model,
        "gen_ai.request.max_tokens": request.max_tokens,
        "gen_ai.request.temperature": float(request.temperature),
        "gen_ai.request.seed": request.seed,
        "compound.lm": lm,
    }
    if request.stop:
        found["gen_ai.request.stop_sequences"] = list(request.stop)
    return found | server_attributes(engine) | (_messages(request) if content else {})


def completion_attributes(completion: Completion, *, content: bool) -> Attributes:
    """Return the attributes of an answer."""
    found: Attributes = {
        "gen_ai.response.finish_reasons": [completion.finish_reason],
        "gen_ai.usage.input_tokens": completion.usage.prompt_tokens,
        "gen_ai.usage.output_tokens": completion.usage.completion_tokens,
    }
    if not completion.usage.unpriced:
        found["compound.usage.cost"] = completion.usage.cost
    if not content:
        return found
    parts = [
        *([_text(completion.text)] if completion.text else []),
        *map(_call, completion.tool_calls),
    ]
    answer = {"role": "assistant", "parts": parts}
    return found | {
        "gen_ai.output.messages": _json([{**answer, "finish_reason": completion.finish_reason}])
    }


def _usage(usage: Usage) -> Attributes:
    """Return totals under names of our own: backends add up the tokens of the requests themselves."""
    named = {
        name: value for name, value in usage.to_json().items() if isinstance(value, int | float)
    }
    return {f"compound.usage.{name}": value for name, value in named.items()}


def server_attributes(engine: Engine) -> dict[str, str | int]:
    """Return host and port of a server; never the user information or the path of its address."""
    address = Capabilities(engine).api_base
    if not isinstance(address, str):
        return {}
    try:
        parts = urlsplit(address)
        port = parts.port or {"http": 80, "https": 443}.get(parts.scheme)
    except ValueError:
        return {}
    found: dict[str, str | int] = {"server.address": parts.hostname} if parts.hostname else {}
    return found | ({"server.port": port} if found and port else {})


def _messages(request: Request) -> Attributes:
    system = [message for message in request.cued if message.role == "system"]
    others = [message for message in request.cued if message.role != "system"]
    found: Attributes = {"gen_ai.input.messages": _json([_message(message) for message in others])}
    if system:
        found["gen_ai.system_instructions"] = _json([_text(message.text) for message in system])
    if request.tools:
        found["gen_ai.tool.definitions"] = _json([_tool(tool) for tool in request.tools])
    return found


def _message(message: Message) -> Mapping[str, object]:
    if message.role == "tool":
        response = truncate_text(sanitize_text(message.text))
        part = {"type": "tool_call_response", "id": message.tool_call_id, "response": response}
        return {"role": "tool", "parts": [part]}
    text = [_text(message.text)] if message.text or not message.tool_calls else []
    return {"role": message.role, "parts": [*text, *map(_call, message.tool_calls)]}


def _call(call: ToolCall) -> Mapping[str, str]:
    arguments = truncate_text(sanitize_text(call.arguments))
    return {
        "type": "tool_call",
        "id": call.id,
        "name": sanitize_text(call.name),
        "arguments": arguments,
    }


def _tool(tool: ToolSpec) -> Mapping[str, object]:
    return {"type": "function", "name": tool.name, "description": truncate_text(tool.description)}


def _text(text: str) -> Mapping[str, str]:
    return {"type": "text", "content": truncate_text(sanitize_text(text))}


def _values(name: str, values: Mapping[str, object]) -> Attributes:
    return {name: truncate_text(sanitize_text(_json(to_readable_values(values))))}


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)
