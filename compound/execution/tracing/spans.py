"""Tracer that records OpenTelemetry spans.

Attributes follow OpenTelemetry's semantic conventions for generative AI; others begin with
``compound.``. Texts of users and models are included only if content is requested, since the
conventions make them opt-in. They are free of registered keys, and truncated like the messages of
traces.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from compound.core.engine import (
    Capabilities,
    Completion,
    Engine,
    Message,
    Request,
    ToolCall,
    ToolSpec,
    Usage,
)
from compound.core.errors import CallError
from compound.core.security.sanitize import sanitize_text
from compound.execution.exchange import truncate_text
from compound.execution.observers import Facts, RequestFacts, RunFacts
from compound.execution.trace import CallResult, Failure, Trace
from compound.graph.component import Component
from compound.graph.configuration import to_readable_values

if TYPE_CHECKING:
    from opentelemetry.trace import Span as OtelSpan
    from opentelemetry.trace import Tracer as OtelTracer

Attribute = str | bool | int | float | list[str]
Attributes = dict[str, Attribute]
OPERATION = "gen_ai.operation.name"


class SpanRecorder:
    """Records runs, calls and requests as nested spans; a `compound.execution.observers.Tracer`.

    With ``content``, spans contain inputs, outputs, messages and error messages.
    """

    def __init__(self, tracer: OtelTracer, *, content: bool) -> None:
        self._tracer, self._content = tracer, content

    @contextmanager
    def __call__(self, facts: Facts) -> Iterator[Callable[[object], None]]:
        """Record what runs in the block, and the result that the yielded function is given."""
        from opentelemetry.trace import SpanKind

        # a model in this process is no other service
        client = isinstance(facts, RequestFacts) and facts.engine.remote
        kind = SpanKind.CLIENT if client else SpanKind.INTERNAL
        # exceptions are recorded below: their messages may quote prompts and answers
        with self._tracer.start_as_current_span(
            span_name(facts), kind=kind, record_exception=False, set_status_on_exception=False
        ) as span:
            _set(span, lambda: start_attributes(facts, content=self._content))

            def record(result: object) -> None:
                _set(span, lambda: end_attributes(result, content=self._content))
                failure = getattr(result, "failure", result)
                if isinstance(failure, Failure):
                    self._fail(span, failure.kind, failure.message)

            try:
                yield record
            except BaseException as error:
                named = error.kind if isinstance(error, CallError) else type(error).__qualname__
                self._fail(span, named, str(error))
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


def span_name(facts: Facts) -> str:
    """Return the name of a span, such as ``retrieval searcher`` or ``execute_tool search``."""
    if isinstance(facts, RunFacts):
        return f"invoke_workflow {facts.system.name}"
    if isinstance(facts, RequestFacts):
        return f"chat {model_name(facts.engine, facts.lm)[1]}"
    operation, _ = OPERATIONS.get(facts.component.kind, ("call", ""))
    return f"{operation} {_operated(facts.component, facts.inputs)}"


def start_attributes(facts: Facts, *, content: bool) -> Attributes:
    """Return the attributes that are known at the start."""
    if isinstance(facts, RequestFacts):
        return _request_attributes(facts, content=content)
    if isinstance(facts, RunFacts):
        found: Attributes = {
            OPERATION: "invoke_workflow",
            "gen_ai.workflow.name": facts.system.name,
            "compound.system": facts.system.identity,
            "compound.configuration": facts.system.configuration.digest,
            "compound.example": sanitize_text(facts.example),
            "compound.sample": facts.sample,
            "compound.seed": facts.seed,
        }
        if facts.fork:
            found["compound.fork"] = facts.fork
    else:
        component = facts.component
        found = {
            "compound.component": component.name,
            "compound.component.kind": component.kind,
            "compound.address": facts.address,
        }
        if component.kind in OPERATIONS:
            operation, named = OPERATIONS[component.kind]
            found |= {OPERATION: operation, named: _operated(component, facts.inputs)}
        if call_id := _tool_call(component, facts.inputs).get("id"):
            found["gen_ai.tool.call.id"] = truncate_text(sanitize_text(call_id))
            found["gen_ai.tool.type"] = "function"
    if content and facts.inputs:
        found |= _values("compound.inputs", facts.inputs)
    return found


def end_attributes(result: object, *, content: bool) -> Attributes:
    """Return the attributes of a result."""
    if isinstance(result, Completion):
        return _completion_attributes(result, content=content)
    if isinstance(result, Trace):
        found: Attributes = {**_usage(result.usage), "compound.system_runs": result.equivalents}
    elif isinstance(result, CallResult):
        found = {"compound.reused": result.reused, "compound.attempts": result.attempts}
        found |= {} if result.reused else _usage(result.usage)
    else:
        return {}
    return found | (_values("compound.outputs", result.outputs) if content else {})


def _operated(component: Component, inputs: Mapping[str, object]) -> str:
    """Return the name of what a call uses: that of the called tool, otherwise that of the component.

    A name that the model invented is text of the model, and not used.
    """
    return _tool_call(component, inputs).get("tool", component.name)


def _tool_call(component: Component, inputs: Mapping[str, object]) -> Mapping[str, str]:
    """Return the record of the tool call that a component executes; empty for other components."""
    call = inputs.get("call") if component.kind == "tool" else None
    return call if isinstance(call, Mapping) else {}


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


def _request_attributes(facts: RequestFacts, *, content: bool) -> Attributes:
    request = facts.request
    provider, model = model_name(facts.engine, facts.lm)
    found: Attributes = {
        OPERATION: "chat",
        "gen_ai.provider.name": provider,
        "gen_ai.request.model": model,
        **_server(facts.engine),
        "gen_ai.request.max_tokens": request.max_tokens,
        "gen_ai.request.temperature": float(request.temperature),
        "gen_ai.request.seed": request.seed,
        "compound.lm": facts.lm,
    }
    if request.stop:
        found["gen_ai.request.stop_sequences"] = list(request.stop)
    return found | (_messages(request) if content else {})


def _completion_attributes(completion: Completion, *, content: bool) -> Attributes:
    found: Attributes = {
        "gen_ai.response.finish_reasons": [completion.finish_reason],
        "gen_ai.usage.input_tokens": completion.usage.prompt_tokens,
        "gen_ai.usage.output_tokens": completion.usage.completion_tokens,
    }
    if not completion.usage.unpriced:
        found["compound.usage.cost"] = completion.usage.cost
    if content:
        text = [_text(completion.text)] if completion.text else []
        parts = [*text, *map(_call, completion.tool_calls)]
        answer = {"role": "assistant", "parts": parts, "finish_reason": completion.finish_reason}
        found["gen_ai.output.messages"] = _json([answer])
    return found


def _usage(usage: Usage) -> Attributes:
    """Return totals under names of our own: backends add up the tokens of the requests themselves."""
    return {f"compound.usage.{name}": value for name, value in asdict(usage).items()}


def _server(engine: Engine) -> Attributes:
    """Return host and port of a server; never the user information or the path of its address."""
    address = Capabilities(engine).api_base
    if not isinstance(address, str):
        return {}
    try:
        parts = urlsplit(address)
        port = parts.port or {"http": 80, "https": 443}.get(parts.scheme)
    except ValueError:
        return {}
    found: Attributes = {"server.address": parts.hostname} if parts.hostname else {}
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
