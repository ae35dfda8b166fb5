"""Tool calls that a model wrote as text, in any of the spellings that models are trained with."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Collection, Iterator
from typing import Any

from compound.errors import ParseError
from compound.execution.calls.answer_text import answer_part, json_values

NAMES = ("tool", "name", "action", "function", "tool_name", "function_name", "recipient_name", "call")
ARGUMENTS = ("arguments", "parameters", "args", "action_input", "input", "tool_input", "kwargs", "params")
WRAPPERS = (  # whose value is a call, or several
    "function", "tool_call", "function_call", "tool_calls", "functionCall", "toolCall", "tool_uses", "tools",
    "tool", "action", "call",
)  # fmt: skip
FORM = '{"tool": <name>, "arguments": {<argument>: <value>}}'
MARKS = re.compile(
    r"\s*(?:<\|?tool_?calls?|<tool_code>|<function|<invoke\b|<\|python_tag\|>|\[TOOL_CALLS\]|functools\[|<｜tool"
    r"|<\|channel\|>commentary to=)",
    re.IGNORECASE,
)
Call = tuple[str, str]
"""The name of a tool, and its arguments as JSON text."""


def read_calls(text: str, offered: Collection[str]) -> tuple[Call, ...]:
    """Return the calls of the offered tools in a text, or ``()`` if it is an answer.

    >>> read_calls('{"name": "add", "parameters": {"a": 1}}', ["add"])
    (('add', '{"a": 1}'),)
    >>> read_calls("add(a=1)", ["add"]), read_calls('{"name": "Ada"}', ["add"])
    ((('add', '{"a": 1}'),), ())

    Raises:
        ParseError: the text names an offered tool, or starts like a call, but cannot be read as one.
    """
    try:
        body = answer_part(text).strip() if text.strip() else ""
    except ValueError as error:
        raise ParseError(str(error)) from None
    values = json_values(body)
    calls = [call for value in _values(body, values) for call in _calls(value, offered)]
    calls = calls or list(_marked(body, offered)) or list(_python(body, offered))
    if not calls and _is_attempt(body, values, offered):
        raise ParseError(f"this is no readable call of a tool: {body!r:.200}; to call one, write {FORM}")
    return tuple(calls)


def unknown_call(text: str) -> Call | None:
    """Return the call that a text is if it is one JSON object with nothing but a name and arguments.

    >>> unknown_call('{"name": "sub", "arguments": {}}'), unknown_call('{"name": "Ada", "age": 3}')
    (('sub', '{}'), None)
    """
    body = re.sub(r"\A```\w*\n(.*)```\Z", r"\1", text.strip(), flags=re.DOTALL)
    value = _loaded(body)
    if not isinstance(value, dict) or not value.keys() <= {*NAMES, *ARGUMENTS, "id", "type"}:
        return None
    name = next((value[key] for key in NAMES if isinstance(value.get(key), str)), None)
    return None if name is None or value.keys().isdisjoint(ARGUMENTS) else (name, _arguments(value))


def _loaded(text: str) -> object:
    try:
        return json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return None


def _values(body: str, values: list[tuple[object, int, int]]) -> Iterator[object]:
    """Yield the JSON values of a text, or else the one with Python's quotation marks.

    A value inside an incomplete one is a call only if it has arguments.
    """
    for value, start, _ in values:
        if "{" not in body[:start] or (isinstance(value, dict) and not value.keys().isdisjoint(ARGUMENTS)):
            yield value
    start, end = body.find("{"), body.rfind("}")
    if not values and 0 <= start < end:
        try:
            yield ast.literal_eval(body[start : end + 1])
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            return


def _calls(value: object, offered: Collection[str]) -> Iterator[Call]:
    """Yield the calls of offered tools that a value is."""
    if isinstance(value, list):
        for item in value:
            if isinstance(item, dict) and not item.keys().isdisjoint([*ARGUMENTS, *WRAPPERS, *offered]):
                yield from _calls(item, offered)
    if not isinstance(value, dict):
        return
    for key in WRAPPERS:
        if isinstance(value.get(key), (dict, list)):
            yield from _calls(value[key], offered)
    named = (value[key].removeprefix("functions.") for key in NAMES if isinstance(value.get(key), str))
    name = next((name for name in named if name in offered), None)
    if name is None and not value.keys().isdisjoint(ARGUMENTS):  # under another key
        name = next((item for item in value.values() if isinstance(item, str) and item in offered), None)
    if name is not None:
        yield name, _arguments(value)
    elif all(isinstance(item, str) != (key in offered) for key, item in value.items()):
        yield from ((key, _json(item)) for key, item in value.items() if isinstance(item, dict))


def _arguments(value: dict[str, Any]) -> str:
    """Return the arguments of a call; without a member for them, they are its other members."""
    found = next((value[key] for key in ARGUMENTS if key in value), None)
    if found is None and value.keys().isdisjoint(ARGUMENTS):
        found = {key: item for key, item in value.items() if key not in (*NAMES, "id", "type")}
    return found if isinstance(found, str) and found.strip() else _json(found or {})


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)


def _marked(body: str, offered: Collection[str]) -> Iterator[Call]:
    """Yield calls whose name is outside of the JSON of their arguments, or that are XML."""
    name = "|".join(map(re.escape, offered)) or r"(?!)"
    begin = r"\[TOOL_CALLS\]\s*|(?:\bto=|<\|tool_call_begin\|>)(?:functions\.)?|tool▁sep｜>"
    begin += r"|^\W*Action\W+|<tool_call>\s*"
    for found in re.finditer(
        rf"(?:{begin})({name})\b[^{{}}]{{0,80}}?(?=\{{)", body, re.MULTILINE | re.IGNORECASE
    ):
        if values := json_values(body[found.end() :])[:1]:
            yield found[1], _json(values[0][0])
    for xml in re.finditer(
        rf"<(function|invoke)(?:=| name=\")({name})\"?>(.*?)</\1>", body, re.DOTALL | re.IGNORECASE
    ):
        pairs = re.findall(r"<parameter(?:=| name=\")(\w+)\"?>\s*(.*?)\s*</parameter>", xml[3], re.DOTALL)
        given = {key: item if (value := _loaded(item)) is None else value for key, item in pairs}
        inner = _loaded(xml[3])
        yield xml[2], _json(inner if isinstance(inner, dict) else given)


def _python(body: str, offered: Collection[str]) -> Iterator[Call]:
    """Yield the calls of a text that is a Python call with keywords, or a list of them."""
    source = re.sub(r"\A```\w*\n(.*)```\Z", r"\1", body, flags=re.DOTALL)
    source = re.sub(r"<\|?[\w/]+\|?>", "", source).strip("` ;\n")
    try:
        tree = ast.parse(source, mode="eval").body
        for node in tree.elts if isinstance(tree, ast.List) else [tree]:
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "print" and len(node.args) == 1:
                node = node.args[0]  # noqa: PLW2901
            if not isinstance(node, ast.Call) or node.args or any(part.arg is None for part in node.keywords):
                continue
            name = (
                ast.unparse(node.func).removeprefix("functions.").removeprefix("tools.").removesuffix(".call")
            )
            if name in offered:
                yield name, _json({str(part.arg): ast.literal_eval(part.value) for part in node.keywords})
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return


def _is_attempt(body: str, values: list[tuple[object, int, int]], offered: Collection[str]) -> bool:
    """Return whether a text without a readable call starts like one, or names a tool where a call would."""
    if MARKS.match(body):
        return True
    rest, last = "", 0
    for _, start, end in values:  # what is complete JSON is an answer
        rest, last = rest + body[last:start], end
    rest += body[last:]
    name = "|".join(map(re.escape, offered)) or r"(?!)"
    keys = "|".join(NAMES)
    if re.search(rf"[{{,]\s*[\"']?(?:{keys})[\"']?\s*[:=]\s*[\"']?(?:functions\.)?(?:{name})\b", rest):
        return True
    line = r"^[^\w\n]*(?:action|tool|function|name|call)(?:[ _]name)?\s*[:=]\W*(?:functions\.)?"
    if re.search(rf"{line}(?:{name})\W*$", rest, re.MULTILINE | re.IGNORECASE):
        return True
    if re.search(rf"<(?:{name})\b[^<>]*>|<[^<>]{{1,40}}[=\"' ](?:{name})\b|>\s*(?:{name})\s*<", body):
        return True
    before = r"\W*(?:\w+\W{1,3}){0,4}?"  # such as "I will call"
    if re.match(rf"\W*(?:{name})\s*[{{\[]|{before}(?:{name})\s+(?:with\s+)?\w+\s*=", body):
        return True
    if re.match(rf"{before}[`\[]*(?:print\()?(?:functions\.|tools\.)?(?:{name})(?:\.call)?\s*\(", rest):
        return ")" not in rest or rest.rstrip("`;].… \n").endswith(")")
    members = "|".join(("tool", "arguments", "action_input", "parameters", "tool_calls"))
    return re.match(rf"(?:```\w*\s*)?\{{\s*[\"']?(?:{members})[\"']?\s*:", rest) is not None
