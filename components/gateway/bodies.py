"""Read the body of a request: JSON of bounded depth, with the numbers that budgets depend on in their ranges.

An agent passes on what it receives from others. A body may reach the record and the budget only if
it cannot damage them: a negative limit of tokens would add to the budget, and a deep body cannot be
stored.

For engines that do not forward requests as they are, a field that changes the answer is either read
or rejected: an agent that asks for `top_p` must not be answered as if it had not.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import cast

from pydantic import ValidationError

from compound.components.gateway.documents import ROLES, Document, Route, format_kind, is_text
from compound.core.engine import Message, Role, ToolCall, ToolChoice, ToolSpec
from compound.core.errors import CallError
from compound.core.image import Image
from compound.core.security.sanitize import replace_surrogates
from compound.core.storage.records import is_deep
from compound.core.web.problems import HTTPProblem

MAX_DEPTH = 64  # of nested objects and lists
MAX_TOKENS = 10_000_000  # that a request may ask for
MAX_ANSWERS = 128
MAX_TEMPERATURE = 100
COUNTS = {
    "max_tokens": MAX_TOKENS,
    "max_completion_tokens": MAX_TOKENS,
    "max_output_tokens": MAX_TOKENS,
    "n": MAX_ANSWERS,
}
"""Fields that hold a positive whole number, and the largest one."""

UNSUPPORTED = "the engine {lm!r} cannot answer the request of the agent, which has {what}"
HINT = "use an engine of kind openai for such requests: it forwards them as they are"

KNOWN = (
    # what a request of an engine is made of, or what is rejected where it is read
    "model messages input instructions previous_response_id conversation temperature max_tokens "
    "max_completion_tokens max_output_tokens stop tools tool_choice functions parallel_tool_calls "
    "response_format text "
    # what does not change the answer; the seed is that of the run
    "seed user metadata store service_tier safety_identifier prompt_cache_key "
    "prompt_cache_retention prediction max_tool_calls stream stream_options"
)
"""Fields that a request may have with any value."""
DEFAULTS: Mapping[str, tuple[object, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "top_p": (1,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "modalities": (["text"],),
    "verbosity": ("medium",),
    "truncation": ("disabled",),
    "background": (False,),
    "include": ([], ["reasoning.encrypted_content"]),
}
"""Further fields, with the values that ask for nothing else than their absence does."""
FORMATS = ("text", "json_object", "json_schema")


def read_document(body: bytes) -> Document:
    """Return the body of a request.

    Raises:
        Problem: it is not a JSON object, nested too deeply, or a number is out of range.
    """
    try:
        found = json.loads(body, parse_constant=_refuse, parse_float=_finite)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise HTTPProblem(400, "not_json", "the body must be a JSON object")
    if is_deep(found, MAX_DEPTH):
        raise _invalid(f"the body is nested more than {MAX_DEPTH} levels deep")
    for name, most in COUNTS.items():
        value = found.get(name)
        if value is not None and not (type(value) is int and 1 <= value <= most):
            raise _invalid(
                f"{name} must be a whole number from 1 to {most:,}, but is {value!r:.40}"
            )
    heat = found.get("temperature")
    if heat is not None and not (type(heat) in (int, float) and 0 <= heat <= MAX_TEMPERATURE):
        raise _invalid(
            f"temperature must be a number from 0 to {MAX_TEMPERATURE}, but is {heat!r:.40}"
        )
    return cast("Document", replace_surrogates(found))


def check_fields(route: Route, document: Document, lm: str) -> None:
    """Check that a request has no field which would be dropped although it changes the answer.

    Raises:
        CallError: it has one; the agent is answered with status 400.

    >>> check_fields("chat/completions", {"messages": [], "top_p": 1.0, "user": "u"}, "lm")
    """
    for name, value in document.items():
        if name not in KNOWN.split() and value is not None and value not in DEFAULTS.get(name, ()):
            raise unsupported(lm, f"the field {name}: {json.dumps(value):.80}")
    text = document.get("text")
    if isinstance(text, dict) and text.get("verbosity") not in (None, "medium"):
        raise unsupported(lm, f"the field text.verbosity: {json.dumps(text['verbosity']):.80}")
    kind = format_kind(route, document)
    if kind not in FORMATS:
        raise unsupported(lm, f"the format {kind!r:.80}; possible are {', '.join(FORMATS)}")


def unsupported(lm: str, what: str) -> CallError:
    """Return the error of a request that an engine cannot answer."""
    return CallError(UNSUPPORTED.format(lm=lm, what=what), hint=HINT, kind="unsupported")


def malformed(message: str) -> CallError:
    """Return the error of a request that is not one of OpenAI's interface."""
    return CallError(message, kind="invalid_request")


def _refuse(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text:.40} is too large")
    return value


def _invalid(message: str) -> HTTPProblem:
    return HTTPProblem(400, "invalid_request", message)


def read_messages(route: Route, document: Document, lm: str) -> tuple[Message, ...]:
    """Return the messages of a request: texts, images, tool calls and their results.

    Raises:
        CallError: the request has other content.
    """
    if document.get("previous_response_id") or document.get("conversation"):
        raise unsupported(lm, "a reference to an earlier response, which is not stored")
    messages: list[Message] = []
    instructions = document.get("instructions")
    if isinstance(instructions, str) and instructions:
        messages.append(Message("system", instructions))
    given = document.get("messages" if route == "chat/completions" else "input")
    if isinstance(given, str):
        return (*messages, Message("user", given))
    if not isinstance(given, list) or not given:
        raise malformed("the request has no messages")
    for item in given:
        message = _message(item, lm)
        earlier = messages[-1] if messages else None
        if (
            item.get("type") == "function_call"
            and earlier is not None
            and earlier.role == "assistant"
        ):
            messages[-1] = replace(earlier, tool_calls=(*earlier.tool_calls, *message.tool_calls))
        else:
            messages.append(message)
    return tuple(messages)


def read_tools(document: Document, lm: str) -> tuple[tuple[ToolSpec, ...], ToolChoice]:
    """Return the functions that a request declares, and whether the model may call them.

    Raises:
        CallError: the request has tools of a provider, or demands a call.

    >>> read_tools({"tools": [{"type": "function", "name": "now"}], "tool_choice": "none"}, "lm")
    ((ToolSpec(name='now', description='', parameters='{"type": "object", "properties": {}}'),), 'none')
    """
    if document.get("functions"):
        raise unsupported(lm, "functions, which tools have replaced")
    tools = _list(document, "tools")
    choice = document.get("tool_choice") or "auto"
    if choice not in ("auto", "none"):  # a demanded function is an object
        raise unsupported(
            lm, f"the tool_choice {json.dumps(choice):.80}; possible are auto and none"
        )
    return tuple(_tool(tool, lm) for tool in tools), "none" if choice == "none" else "auto"


def _list(document: Document, name: str) -> list[object]:
    """Return a list of a request; empty if it is absent."""
    found = document.get(name) or []
    if not isinstance(found, list):
        raise malformed(f"{name} of the request is not a list")
    return found


def _tool(tool: object, lm: str) -> ToolSpec:
    kind = tool.get("type") if isinstance(tool, dict) else None
    if not isinstance(tool, dict) or kind != "function":
        raise unsupported(lm, f"a tool of kind {kind!r}")
    function = tool.get("function", tool)
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str) or not name:
        raise malformed("a tool of the request has no name")
    parameters = function.get("parameters") or {"type": "object", "properties": {}}
    if not isinstance(parameters, dict):
        raise malformed(f"the parameters of the tool {name!r:.100} are not a JSON schema")
    return ToolSpec(name, str(function.get("description") or ""), json.dumps(parameters))


def _message(item: object, lm: str) -> Message:
    if not isinstance(item, dict):
        raise unsupported(lm, f"a message of kind {type(item).__name__!r}")
    if item.get("type") == "function_call":
        return Message("assistant", "", (_call(item.get("call_id"), item),))
    if item.get("type") == "function_call_output":
        return Message(
            "tool", _plain(item.get("output"), lm), tool_call_id=str(item.get("call_id", ""))
        )
    role = str(item.get("role"))
    if role == "tool":
        return Message(
            "tool", _plain(item.get("content"), lm), tool_call_id=str(item.get("tool_call_id", ""))
        )
    if role not in ROLES:
        raise unsupported(lm, f"a message of kind {item.get('type') or item.get('role')!r}")
    calls = [
        _call(call.get("id"), call.get("function"))
        for call in _list(item, "tool_calls")
        if isinstance(call, dict)
    ]
    if item.get("content") is None and calls:
        return Message("assistant", "", tuple(calls))
    return Message(ROLES[role], _content(item.get("content"), ROLES[role], lm), tuple(calls))


def _call(known: object, function: object) -> ToolCall:
    found: Mapping[str, object] = function if isinstance(function, dict) else {}
    return ToolCall(str(known), str(found.get("name")), str(found.get("arguments", "{}")))


def _plain(content: object, lm: str) -> str:
    found = _content(content, "tool", lm)
    if not isinstance(found, str):
        raise unsupported(lm, "an image as the result of a tool")
    return found


def _content(content: object, role: Role, lm: str) -> str | tuple[str | Image, ...]:
    """Return the content of a message: a text, or texts and images."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise unsupported(lm, f"a message of the {role} without text")
    parts = [_part(part, lm) for part in content]
    texts = [part for part in parts if isinstance(part, str)]
    return "".join(texts) if len(texts) == len(parts) else tuple(parts)


def _part(part: object, lm: str) -> str | Image:
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    if isinstance(part, dict) and is_text(part):
        return str(part.get("text", ""))
    if not isinstance(part, dict) or kind not in ("image_url", "input_image"):
        raise unsupported(lm, f"content of kind {kind!r}")
    url = part.get("image_url")
    url = url.get("url") if isinstance(url, dict) else url
    if not isinstance(url, str) or not url.startswith("data:"):
        raise unsupported(lm, "an image that is not a data URL")
    try:
        return Image.model_validate(url)
    except ValidationError as error:
        raise malformed(
            f"an image of the request cannot be read: {error.errors()[0]['msg']}"
        ) from None
