"""Messages, tools, answers and answer formats in the JSON of OpenAI's chat API, which most servers take.

The root of a JSON schema given as the response format must be an object, so other answers are
wrapped in one and unwrapped afterwards.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from compound.core.engine import (
    AnswerFormat,
    FinishReason,
    Message,
    OnText,
    Request,
    ToolCall,
    ToolSpec,
    Usage,
)

MAX_CALLS = 64  # tool calls of an answer that are read
TEXT_PARTS = ("text", "output_text")  # types of the parts of a content that are text


def messages_to_json(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return messages as JSON.

    >>> from compound.core.engine import ToolCall
    >>> calls = (ToolCall("call_1", "add", '{"a": 1}'),)
    >>> messages_to_json([Message("user", "Hi"), Message("assistant", "", calls)])[1]["tool_calls"][0]["id"]
    'call_1'
    """
    return [_message_to_json(message) for message in messages]


def _message_to_json(message: Message) -> dict[str, Any]:
    found: dict[str, Any] = {"role": message.role, "content": _content(message)}
    if message.tool_calls:
        found["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in message.tool_calls
        ]
    if message.role == "tool":
        found["tool_call_id"] = message.tool_call_id
    return found


def _content(message: Message) -> str | list[dict[str, Any]]:
    if isinstance(message.content, str):
        return message.content
    return [
        {"type": "text", "text": part}
        if isinstance(part, str)
        else {"type": "image_url", "image_url": {"url": part.data_url}}
        for part in message.content
    ]


def request_to_json(request: Request) -> dict[str, Any]:
    """Return the fields of a request that all providers take, with the cue in the last message."""
    stop = {"stop": list(request.stop)} if request.stop else {}
    return {
        "messages": messages_to_json(request.cued),
        "max_tokens": request.max_tokens,
        "temperature": request.temperature,
        "seed": request.seed % 2**31,
        **stop,
    }


def tools_to_json(tools: Sequence[ToolSpec]) -> list[dict[str, Any]]:
    """Return the declarations of tools as JSON.

    >>> tools_to_json([ToolSpec("now", "Return the time.", '{"type": "object", "properties": {}}')])
    [{'type': 'function', 'function': {'name': 'now', 'description': 'Return the time.', \
'parameters': {'type': 'object', 'properties': {}}}}]
    """
    return [
        {
            "type": "function",
            "function": {
                "name": tool.name,
                "description": tool.description,
                "parameters": json.loads(tool.parameters),
            },
        }
        for tool in tools
    ]


def calls_from_json(found: object) -> tuple[ToolCall, ...]:
    """Return the tool calls of an answer; entries that are no call of a function are left out."""
    if not isinstance(found, Sequence) or isinstance(found, str | bytes):
        return ()
    calls = []
    for number, entry in enumerate(found[:MAX_CALLS], 1):
        function = _field(entry, "function")
        name, arguments = _field(function, "name"), _field(function, "arguments")
        if isinstance(name, str) and name:
            text = arguments if isinstance(arguments, str) else json.dumps(arguments or {})
            given = _field(entry, "id")
            known = given if isinstance(given, str) and given else f"call_{number}"
            calls.append(ToolCall(known, name, text))
    return tuple(calls)


def plain_message(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a message, or the delta of a stream, with its content as text; thoughts and images are left out.

    >>> thought = {"type": "thinking", "thinking": "A capital …"}
    >>> plain_message({"role": "assistant", "content": [thought, {"type": "text", "text": "Lima"}]})
    {'role': 'assistant', 'content': 'Lima'}
    """
    content = message.get("content")
    if content is None or isinstance(content, str):
        return message
    parts = content if isinstance(content, list) else [content]
    plain = {**message, "content": "".join(_part_text(part, *TEXT_PARTS) for part in parts)}
    if refusal := "".join(_part_text(part, "refusal") for part in parts):
        plain["refusal"] = refusal
    return plain


def _part_text(part: object, *kinds: str) -> str:
    """Return the text of a part of one of the given types, or ``""``."""
    if isinstance(part, str):
        return part if "text" in kinds else ""
    if not isinstance(part, Mapping) or part.get("type", "text") not in kinds:
        return ""
    text = part.get("refusal" if "refusal" in kinds else "text")
    text = text.get("value") if isinstance(text, Mapping) else text
    return text if isinstance(text, str) else ""


def plain_answer(document: object) -> object:
    """Return an answer, or a chunk of a stream, in the form that clients of the API expect.

    Contents in parts become texts, and numbers of tokens that are not whole numbers are left out.
    Documents of other APIs are returned as they are.
    """
    if not isinstance(document, Mapping) or not isinstance(document.get("choices"), list):
        return document
    plain = {**document, "choices": [_plain_choice(choice) for choice in document["choices"]]}
    if "usage" in document:
        plain["usage"] = _whole_counts(document["usage"])
    return plain


def streamed_refusal(chunk: object) -> str:
    """Return the text that a chunk of a stream adds to the model's refusal to answer."""
    choices = chunk.get("choices") if isinstance(chunk, Mapping) else None
    first = choices[0] if isinstance(choices, list) and choices else None
    refusal = _field(_field(first, "delta"), "refusal")
    return refusal if isinstance(refusal, str) else ""


def _plain_choice(choice: object) -> object:
    if not isinstance(choice, Mapping):
        return choice
    found = {
        name: choice[name] for name in ("message", "delta") if isinstance(choice.get(name), Mapping)
    }
    return {**choice, **{name: plain_message(message) for name, message in found.items()}}


def _whole_counts(usage: object) -> object:
    """Return a usage report without numbers of tokens that are not whole, or contradict another."""
    if not isinstance(usage, Mapping):
        return None
    found = {
        name: _whole_counts(value) if name.endswith("_details") else value
        for name, value in usage.items()
        if not name.endswith("_tokens") or type(value) is int
    }
    if (total := usage.get("total_tokens")) is not None and type(total) is not int:
        found.pop("completion_tokens", None)  # it may be less than what the total says
    details, cached = found.get("prompt_tokens_details"), found.pop("cache_read_input_tokens", None)
    if cached is not None and _field(details, "cached_tokens") in (None, cached):
        # litellm bills the larger one of the two as a discount
        found["cache_read_input_tokens"] = cached
    return found


def tokens_reported(used: object, worst: Usage, *, answered: bool) -> tuple[int, int]:
    """Return the prompt and completion tokens of a usage report, with the worst case for missing numbers.

    The larger reading of an inconsistent report counts: some providers count reasoning tokens only
    in the total or in the details. Impossible numbers are corrected later, where the request is
    charged. If there is an answer, a report of no completion tokens counts as missing.

    >>> used = {"prompt_tokens": 9, "completion_tokens": 2, "total_tokens": 20}
    >>> tokens_reported(used, Usage(), answered=True)
    (9, 11)
    """
    prompt = _first_field(used, "prompt_tokens", "input_tokens") or worst.prompt_tokens
    completion = _first_field(used, "completion_tokens", "output_tokens")
    if completion is None or (answered and completion == 0):
        completion = worst.completion_tokens
    if type(prompt) is int and type(completion) is int and prompt > 0 and completion >= 0:
        details = _first_field(used, "completion_tokens_details", "output_tokens_details")
        total, thoughts = _field(used, "total_tokens"), _field(details, "reasoning_tokens")
        hidden = 0 if total is None else worst.completion_tokens
        if type(total) is int:
            hidden = total - prompt
        completion = max(completion, hidden, thoughts if type(thoughts) is int else 0)
    return prompt, completion  # type: ignore[return-value]  # checked where it is charged


def _first_field(value: object, *names: str) -> object:
    return next((found for name in names if (found := _field(value, name)) is not None), None)


def _field(value: object, name: str) -> object:
    return value.get(name) if isinstance(value, Mapping) else getattr(value, name, None)


def cut_at_stop(text: str, stops: Sequence[str]) -> str:
    """Return the text before the first stop string; some servers ignore them, or limit their number."""
    return text[: min((at for stop in stops if (at := text.find(stop)) >= 0), default=len(text))]


class ReportedText:
    """Reports the pieces of a growing text that are final.

    An incomplete character and what may be the start of a stop string are held back until the text
    is complete; a stop string and what follows it are never reported.
    """

    def __init__(self, stops: Sequence[str], on_text: OnText) -> None:
        self._stops, self._on_text, self._shown = stops, on_text, ""
        self._held_back = max(map(len, stops), default=1) - 1

    def update(self, text: str, *, complete: bool = False) -> None:
        """Report what a text adds to the earlier ones."""
        final = cut_at_stop(text, self._stops)
        if final == text and not complete:
            final = text.rstrip("\N{REPLACEMENT CHARACTER}")
            final = final[: max(0, len(final) - self._held_back)]
        if final.startswith(self._shown) and len(final) > len(self._shown):
            piece, self._shown = final[len(self._shown) :], final
            self._on_text(piece)


def finish_reason(reason: object, calls: Sequence[ToolCall]) -> FinishReason:
    """Return why an answer ended."""
    if reason == "length":
        return "length"
    return "tool_calls" if calls else "stop"


WRAPPED = "answer"  # name of the property that holds an answer that is no object
NAME = "answer"  # name of the schema, which the API requires
# In strict mode OpenAI takes no others, and rejects a request that has them.
STRICT_KEYWORDS = frozenset(
    (
        *("type", "properties", "required", "additionalProperties", "items", "enum", "const"),
        *("anyOf", "$ref", "$defs", "description", "pattern", "format", "minimum", "maximum"),
        *("exclusiveMinimum", "exclusiveMaximum", "multipleOf", "minItems", "maxItems"),
        *("minLength", "maxLength"),
    )
)


def response_format(answer: AnswerFormat) -> dict[str, object]:
    """Return the request field ``response_format`` of a format.

    >>> response_format(AnswerFormat(choices=("yes", "no")))["json_schema"]["schema"]["properties"]
    {'answer': {'type': 'string', 'enum': ['yes', 'no']}}
    """
    schema = _schema(answer)
    if not _is_object(schema):
        definitions = {"$defs": schema.pop("$defs")} if "$defs" in schema else {}
        wrapped = {"type": "object", "properties": {WRAPPED: schema}, "required": [WRAPPED]}
        schema = {**wrapped, "additionalProperties": False, **definitions}
    described = {"name": NAME, "schema": schema, "strict": is_strict(schema)}
    return {"type": "json_schema", "json_schema": described}


def unwrap(text: str, answer: AnswerFormat) -> str:
    """Return the answer from the object that `response_format` wrapped it in; other texts are unchanged.

    >>> unwrap('{"answer": "yes"}', AnswerFormat(choices=("yes", "no")))
    'yes'
    """
    try:
        value = None if _is_object(_schema(answer)) else json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return text
    if not isinstance(value, dict) or value.keys() != {WRAPPED}:
        return text
    inner = value[WRAPPED]
    return inner if isinstance(inner, str) else json.dumps(inner, ensure_ascii=False)


def is_strict(schema: object) -> bool:
    """Return whether a schema is in the subset that OpenAI's strict mode takes.

    >>> is_strict({"type": "object", "properties": {}, "required": [], "additionalProperties": False})
    True
    >>> is_strict({"type": "object", "additionalProperties": {"type": "integer"}})
    False
    """
    if not isinstance(schema, Mapping):
        return isinstance(schema, bool)
    if not schema.keys() <= STRICT_KEYWORDS:
        return False
    if _is_object(schema):
        is_closed = schema.get("additionalProperties") is False
        if not is_closed or {*schema.get("properties", {})} != {*schema.get("required", ())}:
            return False
    parts = [*schema.get("properties", {}).values(), *schema.get("$defs", {}).values()]
    parts += [*schema.get("anyOf", ()), *([schema["items"]] if "items" in schema else [])]
    return all(map(is_strict, parts))


def _schema(answer: AnswerFormat) -> dict[str, Any]:
    if answer.choices:
        return {"type": "string", "enum": list(answer.choices)}
    schema: dict[str, Any] = json.loads(answer.schema)
    return schema


def _is_object(schema: Mapping[str, object]) -> bool:
    return schema.get("type") == "object"
