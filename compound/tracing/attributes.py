"""Attributes of spans, by OpenTelemetry's semantic conventions for generative AI.

Attributes that the conventions do not define begin with ``compound.``. Texts of users and models are included
only if content is requested, since the conventions make them opt-in. They are free of registered keys, and
truncated like the messages of traces.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from urllib.parse import urlsplit

from compound.engine import Completion, Engine, Message, Request, ToolCall, ToolSpec, Usage
from compound.execution.exchange import truncate_text
from compound.execution.observers.spans import RunFacts
from compound.execution.outcomes import CallResult
from compound.execution.trace import Trace
from compound.graph.component import Component
from compound.graph.configuration import to_readable_values
from compound.security.sanitize import sanitize_text

Attribute = str | bool | int | float | list[str]
Attributes = dict[str, Attribute]

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

    >>> from compound import LiteLLM
    >>> model_name(LiteLLM("azure/gpt-4o"), "writer")
    ('azure.ai.openai', 'gpt-4o')
    """
    kind = engine.name.partition(":")[0]
    model = str(getattr(engine, "model", "") or lm)
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
    parts = [*([_text(completion.text)] if completion.text else []), *map(_call, completion.tool_calls)]
    answer = {"role": "assistant", "parts": parts}
    return found | {"gen_ai.output.messages": _json([{**answer, "finish_reason": completion.finish_reason}])}


def _usage(usage: Usage) -> Attributes:
    """Return totals under names of our own: backends add up the tokens of the requests themselves."""
    named = {name: value for name, value in usage.to_json().items() if isinstance(value, int | float)}
    return {f"compound.usage.{name}": value for name, value in named.items()}


def server_attributes(engine: Engine) -> dict[str, str | int]:
    """Return host and port of a server; never the user information or the path of its address."""
    address = getattr(engine, "api_base", None)
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
    return {"type": "tool_call", "id": call.id, "name": sanitize_text(call.name), "arguments": arguments}


def _tool(tool: ToolSpec) -> Mapping[str, object]:
    return {"type": "function", "name": tool.name, "description": truncate_text(tool.description)}


def _text(text: str) -> Mapping[str, str]:
    return {"type": "text", "content": truncate_text(sanitize_text(text))}


def _values(name: str, values: Mapping[str, object]) -> Attributes:
    return {name: truncate_text(sanitize_text(_json(to_readable_values(values))))}


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)
