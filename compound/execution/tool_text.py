"""Tool calls in text, for engines that do not take tools themselves.

The tools are described in the first message, and the model answers with one JSON object, which
engines enforce where they can (`Request.format`):

- ``{"tool": "search", "arguments": {"query": "tallest mountain"}}`` calls a tool.
- ``{"answer": "K2"}`` is the final answer: a text, or the JSON value that `Request.format` asks for.

Earlier answers of the model are shown in the same form, and results of tools as messages of the
user. Calls in other spellings are read, too (`compound.execution.answer_text.read_calls`); any
other answer is a final answer.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from compound.core.engine import AnswerFormat, Completion, Message, Request, ToolCall, ToolSpec
from compound.core.errors import ParseError
from compound.execution.answer_text import answer_part, read_calls

TOOL, ARGUMENTS, ANSWER = "tool", "arguments", "answer"
LITERAL = ("enum", "const", "default", "examples")  # keys of a schema that hold values
MOST_STARTS = 16  # braces of an answer at which its object may start


def to_text(request: Request) -> Request:
    """Return the request with its tools, tool calls and their results as text.

    >>> from compound.core.engine import ToolSpec
    >>> schema = '{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}'
    >>> request = Request((Message("user", "Half of 8?"),), tools=(ToolSpec("halve", "Halve a.", schema),))
    >>> print(to_text(request).messages[0].text)
    You can use tools. Reply with one JSON object and nothing else.
    To call a tool: {"tool": <name>, "arguments": {<argument>: <value>}}
    To finish: {"answer": <the final answer>}
    Tools:
    - halve: Halve a.
      Arguments: {"properties": {"a": {"type": "integer"}}, "required": ["a"], "type": "object"}
    <BLANKLINE>
    Half of 8?
    """
    offered = request.tools if request.may_call else ()
    messages = _merged([_plain(message, request) for message in request.messages])
    # equal in all turns of an agent
    messages[0] = _prefixed(messages[0], _instructions(request.tools))
    return replace(
        request,
        messages=tuple(messages),
        format=_format(offered, request.format),
        tools=(),
        tool_choice="auto",
    )


def from_text(request: Request, completion: Completion) -> Completion:
    """Return the answer to a request that `to_text` converted, with its tool call or its final answer.

    Raises:
        ParseError: the answer is a tool call or a final answer that was cut at ``max_tokens``.
    """
    found = _object(completion.text)
    if found is not None and _is_value(found, request):
        return completion
    calls = calls_of(completion.text, [tool.name for tool in request.tools])
    if found is not None and not calls and ANSWER in found and TOOL not in found:
        answer = found[ANSWER]  # complete, wherever the text was cut
        text = answer if isinstance(answer, str) else _json(answer)
        return replace(completion, text=text, finish_reason="stop")
    if found is None and not calls:
        if completion.finish_reason == "length" and completion.text.lstrip().startswith(
            ("{", "```")
        ):
            raise ParseError(
                f"the answer was cut at max_tokens={request.max_tokens}: {completion.text.strip()!r:.300}"
            )
        return completion
    if found is not None and not calls and isinstance(found.get(TOOL), str):
        arguments = found.get(ARGUMENTS, {})
        given = arguments if isinstance(arguments, str) else _json(arguments)
        calls = (ToolCall("call_1", found[TOOL], given),)
    if not calls or request.tool_choice == "none":
        return completion
    return replace(completion, finish_reason="tool_calls", tool_calls=calls)


def calls_of(text: str, offered: Sequence[str]) -> tuple[ToolCall, ...]:
    """Return the calls of offered tools in a text; one that cannot be read is left to the component."""
    try:
        found = read_calls(text, offered)
    except ParseError:
        return ()
    return tuple(ToolCall(f"call_{i}", *call) for i, call in enumerate(found, 1))


def _is_value(found: Mapping[str, Any], request: Request) -> bool:
    """Return whether an object is the final answer itself, whose type has a field ``answer`` or ``tool``."""
    schema = json.loads(request.format.schema) if request.format and request.format.schema else {}
    if "$ref" in schema:
        schema = schema.get("$defs", {}).get(schema["$ref"].rpartition("/")[2], {})
    fields, required = schema.get("properties", {}), set(schema.get("required", ()))
    if TOOL in found:
        return (
            TOOL in fields
            and ARGUMENTS not in found
            and found[TOOL] not in {t.name for t in request.tools}
        )
    if ANSWER not in fields:
        return False
    inner = found[ANSWER]
    is_wrapped = isinstance(inner, dict) and required <= inner.keys()
    return len(found) > 1 or (required <= {ANSWER} and not is_wrapped)


def is_call(text: str) -> bool:
    """Return whether an answer is a tool call in text.

    >>> is_call('{"tool": "now", "arguments": {}}'), is_call("The tool is new.")
    (True, False)
    """
    found = _object(text)
    return found is not None and found.get(TOOL) is not None


def _instructions(tools: tuple[ToolSpec, ...]) -> str:
    if not tools:
        return f'Reply with one JSON object and nothing else: {{"{ANSWER}": <the final answer>}}'
    lines = [
        "You can use tools. Reply with one JSON object and nothing else.",
        f'To call a tool: {{"{TOOL}": <name>, "{ARGUMENTS}": {{<argument>: <value>}}}}',
        f'To finish: {{"{ANSWER}": <the final answer>}}',
        "Tools:",
    ]
    for tool in tools:
        lines.append(f"- {tool.name}: {tool.description}")
        lines.append(
            f"  Arguments: {json.dumps(_untitled(json.loads(tool.parameters)), sort_keys=True)}"
        )
    return "\n".join(lines)


def _untitled(schema: Any) -> Any:  # noqa: ANN401 - JSON
    """Remove the titles of a schema, which repeat the names; an argument may be named ``title``."""
    if isinstance(schema, list):
        return [_untitled(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: value if key in LITERAL else _untitled(value)
        for key, value in schema.items()
        if key != "title" or not isinstance(value, str)
    }


def _plain(message: Message, request: Request) -> Message:
    """Return a message without tool calls, in the roles of a plain chat."""
    if message.role == "tool":
        names = {call.id: call.name for earlier in request.messages for call in earlier.tool_calls}
        name = names.get(message.tool_call_id, "the tool")
        return Message("user", f"Result of {name}:\n{message.text}")
    if message.tool_calls:
        if is_call(message.text):  # the model's own text
            return Message("assistant", message.text)
        calls = [_json({TOOL: c.name, ARGUMENTS: _value(c.arguments)}) for c in message.tool_calls]
        return Message("assistant", "\n".join(filter(None, [message.text, *calls])))
    if message.role == "assistant":
        is_json = request.format is not None and bool(request.format.schema)
        return replace(
            message, content=_json({ANSWER: _value(message.text) if is_json else message.text})
        )
    return message


def _merged(messages: list[Message]) -> list[Message]:
    """Merge consecutive messages of the user: some chat templates require alternating roles."""
    found: list[Message] = []
    for message in messages:
        if found and found[-1].role == message.role == "user":
            found[-1] = _joined(found[-1], message)
        else:
            found.append(message)
    return found


def _joined(first: Message, second: Message) -> Message:
    if isinstance(first.content, str) and isinstance(second.content, str):
        return replace(first, content=f"{first.content}\n\n{second.content}")
    both = [(m.content,) if isinstance(m.content, str) else m.content for m in (first, second)]
    return replace(first, content=(*both[0], *both[1]))


def _prefixed(message: Message, text: str) -> Message:
    if isinstance(message.content, str):
        return replace(message, content=f"{text}\n\n{message.content}")
    return replace(message, content=(text, *message.content))


def _format(offered: tuple[ToolSpec, ...], answer: AnswerFormat | None) -> AnswerFormat:
    definitions: dict[str, Any] = {}
    options = [_call_schema(tool, number, definitions) for number, tool in enumerate(offered)]
    options.append(_fields({ANSWER: _answer_schema(answer, definitions)}))
    schema: dict[str, Any] = options[0] if len(options) == 1 else {"anyOf": options}
    return AnswerFormat(schema=_json({**schema, "$defs": definitions} if definitions else schema))


def _call_schema(tool: ToolSpec, number: int, definitions: dict[str, Any]) -> dict[str, Any]:
    arguments = _hoisted(json.loads(tool.parameters), f"t{number}_", definitions)
    # small models invent arguments where they may
    if isinstance(arguments.get("properties"), dict):
        arguments = {"additionalProperties": False, **arguments}
    return _fields({TOOL: {"type": "string", "enum": [tool.name]}, ARGUMENTS: arguments})


def _answer_schema(answer: AnswerFormat | None, definitions: dict[str, Any]) -> object:
    if answer is None:
        return {"type": "string"}
    if answer.choices:
        return {"type": "string", "enum": list(answer.choices)}
    return _hoisted(json.loads(answer.schema), "answer_", definitions)


def _fields(properties: Mapping[str, object]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def _hoisted(schema: Any, prefix: str, definitions: dict[str, Any]) -> Any:  # noqa: ANN401 - JSON
    """Move the definitions of a schema to those of the enclosing schema, under names with a prefix."""
    if isinstance(schema, list):
        return [_hoisted(item, prefix, definitions) for item in schema]
    if not isinstance(schema, dict):
        return schema
    found: dict[str, Any] = {}
    for key, value in schema.items():
        if key in ("$defs", "definitions") and isinstance(value, dict):
            for name, part in value.items():
                definitions[prefix + name] = _hoisted(part, prefix, definitions)
        elif key == "$ref" and isinstance(value, str):
            found[key] = f"#/$defs/{prefix}{value.rpartition('/')[2]}"
        elif key in LITERAL:
            found[key] = value
        else:
            found[key] = _hoisted(value, prefix, definitions)
    return found


def _object(text: str) -> dict[str, Any] | None:
    """Return the JSON object of an answer, which may be in a code block; ``None`` if there is none.

    Thoughts before the answer may contain drafts of it, which do not count.
    """
    try:
        body = answer_part(text).strip()
    except ValueError:
        return None
    if body.startswith("```"):
        body = body.partition("\n")[2].rpartition("```")[0] or body
    decoder, start = json.JSONDecoder(strict=False), body.find("{")
    for _ in range(MOST_STARTS if start > 0 else 1):  # words before the object may have braces, too
        if start < 0:
            break
        try:
            value, end = decoder.raw_decode(body, start)
        except (ValueError, RecursionError):
            value, end = None, start + 1
        if isinstance(value, dict) and (ANSWER in value or TOOL in value):
            return value
        start = body.find("{", end)
    return None


def _value(text: str) -> object:
    try:
        return json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return text


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)
