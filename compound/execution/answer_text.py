"""Parts of a model's text: the answer after its thoughts, the JSON values in it, and tool calls.

Tool calls that a model wrote as text are read in any of the spellings that models are trained with.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Collection, Iterator
from typing import Any

from compound.core.errors import ParseError

_THOUGHTS = (
    r"(?:\w+[:_|])?think thinking thoughts? reason reasoning reflection rationale analysis "
    r"scratchpad cot (?:inner|internal)_monologue"
)
# Marks of the beginning and the end of thoughts, as regular expressions.
THOUGHTS = [
    *((rf"<\|?{name}\|?\s*>", rf"<\|?/{name}\|?\s*>") for name in _THOUGHTS.split()),
    (r"\[THINK\]", r"\[/THINK\]"),
    (r"◁think▷", r"◁/think▷"),
    (r"<\|begin_of_thought\|>", r"<\|end_of_thought\|>"),
    (r"<\|START_THINKING\|>", r"<\|END_THINKING\|>"),
    (r"<\|inner_prefix\|>", r"<\|inner_suffix\|>"),
    (r"<\|channel>thought\b", r"<channel\|>"),
    (r"<unused94>thought\b", r"<unused95>"),
    (
        r"(?:<\|start\|>assistant)?<\|channel\|>(?:analysis|commentary)(?! to=).{0,60}?<\|message\|>",
        r"<\|end\|>|(?=<\|channel\|>final)",
    ),
]
BLOCKS = [
    (re.compile(begin, re.IGNORECASE), re.compile(end, re.IGNORECASE)) for begin, end in THOUGHTS
]
BEGIN = re.compile(
    "^(?:" + "|".join(begin for begin, _ in THOUGHTS) + ")", re.IGNORECASE | re.MULTILINE
)
END = re.compile("|".join(end for _, end in THOUGHTS[:-1]), re.IGNORECASE)
# What may mark the answer itself. A server that drops special tokens leaves the names of the
# channels.
FINAL = re.compile(
    r"\A(?:analysis(?=\S).*assistantfinal|(?:<\|start\|>assistant)?<\|channel\|>final.{0,60}?<\|message\|>"
    r"|<\|START_RESPONSE\|>|<\|begin_of_solution\|>)",
    re.DOTALL,
)
FINAL_END = re.compile(r"(?:\s*<\|(?:return|end|END_RESPONSE|end_of_solution)\|>)+\s*\Z")

# Keys of a call: of its name, of its arguments, and those whose value is a call, or several.
_KEYS = (
    "tool name action function tool_name function_name recipient_name call",
    "arguments parameters args action_input input tool_input kwargs params",
    "function tool_call function_call tool_calls functionCall toolCall tool_uses tools tool action call",
)
NAMES, ARGUMENTS, WRAPPERS = (keys.split() for keys in _KEYS)
FORM = '{"tool": <name>, "arguments": {<argument>: <value>}}'
MARKS = re.compile(
    r"\s*(?:<\|?tool_?calls?|<tool_code>|<function|<invoke\b|<\|python_tag\|>|\[TOOL_CALLS\]|functools\[|<｜tool"
    r"|<\|channel\|>commentary to=)",
    re.IGNORECASE,
)
WrittenCall = tuple[str, str]
"""The name of a tool, and its arguments as JSON text."""


def after_thoughts(text: str) -> str:
    """Return the text after the blocks of thoughts that it begins with.

    >>> after_thoughts("<think>4?</think>5"), after_thoughts("Between <b> and </b>")
    ('5', 'Between <b> and </b>')

    Raises:
        ValueError: a block does not end, or nothing follows.
    """
    rest = text.lstrip()
    while block := next((pair for pair in BLOCKS if pair[0].match(rest)), None):
        ends = [mark for mark in block[1].finditer(rest) if mark.start()]
        end = next((mark for mark in ends if not _is_quoted(rest, mark)), ends[0] if ends else None)
        if end is None:
            raise ValueError(f"the thoughts do not end in {text!r:.200}")
        rest = rest[end.end() :].lstrip()
    rest = FINAL_END.sub("", FINAL.sub("", rest))
    if text.strip() and not rest.strip():
        raise ValueError(f"no answer follows the thoughts in {text!r:.200}")
    return rest if len(rest) < len(text.lstrip()) else text


def answer_part(text: str) -> str:
    """Return the part of a text that is the answer of a type: without any thoughts before it.

    The template of a chat may write the beginning of the thoughts, so that the text has only their
    end. A mark in a JSON value, in quotation marks, or as an item of a list is content.

    >>> answer_part("4 or 5?</think>5"), answer_part('["<think>", "</think>"]')
    ('5', '["<think>", "</think>"]')

    Raises:
        ValueError: thoughts do not end, or nothing follows.
    """
    rest = after_thoughts(text)
    marks = [m for m in (*END.finditer(rest), *BEGIN.finditer(rest)) if not _is_content(rest, m)]
    spans = [(start, end) for _, start, end in json_values(rest)] if marks else []
    marks = [m for m in marks if not any(start < m.start() < end for start, end in spans)]
    if not marks:
        return rest
    last = max(marks, key=lambda mark: mark.start())
    after = rest[last.end() :]
    if BEGIN.match(last.group()) or not after.strip():
        raise ValueError(f"no answer follows the thoughts in {text!r:.200}")
    return after


def _is_content(text: str, mark: re.Match[str]) -> bool:
    line = text[: mark.start()].rpartition("\n")[2]
    return (
        _is_quoted(text, mark) or re.fullmatch(r"[ \t]*(?:[-*•]|\d+[.)])[ \t]*", line) is not None
    )


def _is_quoted(text: str, mark: re.Match[str]) -> bool:
    before = text[: mark.start()][-1:]
    return before in ("'", '"', "`") and text.startswith(before, mark.end())


def label_pattern(label: str) -> str:
    """Return the pattern of a label that is no part of a longer word or number, and has no other suffix.

    >>> [word for word in ("C", "C++", "C-", "(C)") if re.search(label_pattern("C"), word)]
    ['C', '(C)']
    """
    before = r"(?<![\w.<>-])(?<!\d,)" if label[0].isdecimal() else r"(?<!\w)(?<!\w-)"
    after = r"(?![\w+#])(?!-(?!-))(?<!\d(?=,\d))(?!(?<=\d)\.(?!0+(?!\d))\d)(?<!\d(?=%))"
    return before + re.escape(label) + after


def json_values(
    text: str, begin: str = r"[{\[]", parse_float: Callable[[str], float] = float
) -> list[tuple[object, int, int]]:
    """Return the outermost JSON objects and arrays in a text and their places, with bounded work.

    Texts in them may have line breaks that are not escaped, as models write them.
    """
    decoder = json.JSONDecoder(strict=False, parse_float=parse_float)
    found: list[tuple[object, int, int]] = []
    left, last = 16 * len(text) + 100_000, 0
    for match in re.finditer(begin, text):
        if match.start() < last:
            continue
        try:
            value, last = decoder.raw_decode(text, match.start())
        except (ValueError, RecursionError) as error:
            left -= getattr(error, "pos", len(text))  # its line is counted from the beginning
        else:
            found.append((value, match.start(), last))
        if left < 0:
            break
    return found


def read_calls(text: str, offered: Collection[str]) -> tuple[WrittenCall, ...]:
    """Return the calls of the offered tools in a text, or ``()`` if it is an answer.

    >>> read_calls('{"name": "add", "parameters": {"a": 1}}', ["add"])
    (('add', '{"a": 1}'),)
    >>> read_calls("add(a=1)", ["add"]), read_calls('{"name": "Ada"}', ["add"])
    ((('add', '{"a": 1}'),), ())

    Raises:
        ParseError: the text names an offered tool, or starts like a call, but cannot be read as
            one.
    """
    try:
        body = answer_part(text).strip() if text.strip() else ""
    except ValueError as error:
        raise ParseError(str(error)) from None
    values = json_values(body)
    calls = [call for value in _values(body, values) for call in _calls(value, offered)]
    calls = calls or list(_marked(body, offered)) or list(_python(body, offered))
    if not calls and _is_attempt(body, values, offered):
        raise ParseError(
            f"this is no readable call of a tool: {body!r:.200}; to call one, write {FORM}"
        )
    return tuple(calls)


def unknown_call(text: str) -> WrittenCall | None:
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
        if "{" not in body[:start] or (
            isinstance(value, dict) and not value.keys().isdisjoint(ARGUMENTS)
        ):
            yield value
    start, end = body.find("{"), body.rfind("}")
    if not values and 0 <= start < end:
        try:
            yield ast.literal_eval(body[start : end + 1])
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            return


def _calls(value: object, offered: Collection[str]) -> Iterator[WrittenCall]:
    """Yield the calls of offered tools that a value is."""
    if isinstance(value, list):
        for item in value:
            if isinstance(item, dict) and not item.keys().isdisjoint(
                [*ARGUMENTS, *WRAPPERS, *offered]
            ):
                yield from _calls(item, offered)
    if not isinstance(value, dict):
        return
    for key in WRAPPERS:
        if isinstance(value.get(key), (dict, list)):
            yield from _calls(value[key], offered)
    named = (
        value[key].removeprefix("functions.") for key in NAMES if isinstance(value.get(key), str)
    )
    name = next((name for name in named if name in offered), None)
    if name is None and not value.keys().isdisjoint(ARGUMENTS):  # under another key
        name = next(
            (item for item in value.values() if isinstance(item, str) and item in offered), None
        )
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


def _marked(body: str, offered: Collection[str]) -> Iterator[WrittenCall]:
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
        pairs = re.findall(
            r"<parameter(?:=| name=\")(\w+)\"?>\s*(.*?)\s*</parameter>", xml[3], re.DOTALL
        )
        given = {key: item if (value := _loaded(item)) is None else value for key, item in pairs}
        inner = _loaded(xml[3])
        yield xml[2], _json(inner if isinstance(inner, dict) else given)


def _python(body: str, offered: Collection[str]) -> Iterator[WrittenCall]:
    """Yield the calls of a text that is a Python call with keywords, or a list of them."""
    source = re.sub(r"\A```\w*\n(.*)```\Z", r"\1", body, flags=re.DOTALL)
    source = re.sub(r"<\|?[\w/]+\|?>", "", source).strip("` ;\n")
    try:
        tree = ast.parse(source, mode="eval").body
        for node in tree.elts if isinstance(tree, ast.List) else [tree]:
            if (
                isinstance(node, ast.Call)
                and ast.unparse(node.func) == "print"
                and len(node.args) == 1
            ):
                node = node.args[0]  # noqa: PLW2901
            if (
                not isinstance(node, ast.Call)
                or node.args
                or any(part.arg is None for part in node.keywords)
            ):
                continue
            name = (
                ast.unparse(node.func)
                .removeprefix("functions.")
                .removeprefix("tools.")
                .removesuffix(".call")
            )
            if name in offered:
                yield (
                    name,
                    _json({str(part.arg): ast.literal_eval(part.value) for part in node.keywords}),
                )
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
    if re.search(
        rf"[{{,]\s*[\"']?(?:{keys})[\"']?\s*[:=]\s*[\"']?(?:functions\.)?(?:{name})\b", rest
    ):
        return True
    line = r"^[^\w\n]*(?:action|tool|function|name|call)(?:[ _]name)?\s*[:=]\W*(?:functions\.)?"
    if re.search(rf"{line}(?:{name})\W*$", rest, re.MULTILINE | re.IGNORECASE):
        return True
    if re.search(
        rf"<(?:{name})\b[^<>]*>|<[^<>]{{1,40}}[=\"' ](?:{name})\b|>\s*(?:{name})\s*<", body
    ):
        return True
    before = r"\W*(?:\w+\W{1,3}){0,4}?"  # such as "I will call"
    if re.match(rf"\W*(?:{name})\s*[{{\[]|{before}(?:{name})\s+(?:with\s+)?\w+\s*=", body):
        return True
    if re.match(
        rf"{before}[`\[]*(?:print\()?(?:functions\.|tools\.)?(?:{name})(?:\.call)?\s*\(", rest
    ):
        return ")" not in rest or rest.rstrip("`;].… \n").endswith(")")
    members = "|".join(("tool", "arguments", "action_input", "parameters", "tool_calls"))
    return re.match(rf"(?:```\w*\s*)?\{{\s*[\"']?(?:{members})[\"']?\s*:", rest) is not None
