"""Values in a model's text: numbers, labels, lists and JSON, among the words around them."""

from __future__ import annotations

import json
import math
import re
import types
from collections.abc import Callable, Sequence
from datetime import date, datetime
from enum import Enum
from functools import partial
from typing import Annotated, Any, Literal, Union, cast, get_args, get_origin

from compound.components.answers.answer_types import (
    answer_format,
    is_plain,
    is_text,
    labels_of,
    mixes_text,
    takes_any_text,
    without_annotation,
)
from compound.components.answers.answer_words import (
    NO_JSON,
    check_cut,
    json_of,
    list_items,
    plain_text,
    read_bool,
    read_label,
    read_number,
    read_union,
)
from compound.core.security.sanitize import replace_surrogates
from compound.execution.answer_text import json_values
from compound.graph.configuration import canonical_json
from compound.graph.types import Port, accepts, convert, format_type, reads_decimals

STRUCTURE_STARTS = ("{", '["', "[{")  # of an answer that is meant as JSON, also if it is incomplete


def parse_value(raw: object, kind: object) -> object:
    """Convert a model's text for a value to ``kind``.

    >>> parse_value("about 3.5 km", float), parse_value("Yes.", bool), parse_value("- a\\n- b", list[str])
    (3.5, True, ['a', 'b'])
    >>> parse_value("'No'", Literal["yes", "no"])
    'no'
    """
    origin = get_origin(kind)
    if not isinstance(raw, str):
        return _from_json_value(raw, kind, origin)
    if origin in (Union, types.UnionType) and _is_none(raw, get_args(kind)):
        return None
    if mixes_text(kind) or (is_text(kind) and kind is not str):
        return (_structured_or_text if mixes_text(kind) else _constrained_text)(raw, kind)
    if origin in (Union, types.UnionType):
        return _union(raw, kind)
    if kind is Any or accepts(kind, raw):
        return raw
    if origin is Annotated and is_plain(kind):
        return convert(kind, parse_value(raw, without_annotation(kind)))
    if labels := labels_of(kind):
        return (
            read_label(plain_text(raw), labels)
            if origin is Literal
            else convert(kind, _member_value(raw, kind))
        )
    if kind in (bool, int, float):
        text = plain_text(raw)
        return read_bool(text) if kind is bool else read_number(text, format_type(kind))
    if origin is list or kind is list:
        item = (get_args(kind) or (Any,))[0]
        return _list(raw, item) if is_plain(kind) else _structured_list(raw, kind, item)
    return _from_json(raw, kind)


def check_complete(raw: str, kind: object, value: object) -> None:
    """Check that a text that was cut at the maximum length certainly holds the whole value of a type.

    Raises:
        ValueError: the value may be incomplete.
    """
    if isinstance(value, str) and (takes_any_text(kind) or mixes_text(kind)):
        return
    is_list = get_origin(kind) is list or kind is list
    form = "json" if not is_plain(kind) else "list" if is_list else "words"
    enforced = answer_format({"output": Port(kind)}, "text")
    labels = enforced.choices if enforced else ()
    if "yes" in labels and isinstance(value, bool):
        labels = (*labels, "true", "false")
    check_cut(raw, form, value, partial(parse_value, kind=kind), labels)


class WrittenFloat(float):
    """A number of JSON with the text that it was written as, from which pydantic makes decimals."""

    __slots__ = ("text",)

    def __init__(self, text: str) -> None:
        self.text = text

    def __str__(self) -> str:
        return self.text


def float_reader(kind: object) -> Callable[[str], float]:
    """Return the type of the numbers in JSON that `convert` makes a type's values of."""
    return WrittenFloat if reads_decimals(kind) else float


def _from_json_value(raw: object, kind: object, origin: object) -> object:
    if isinstance(raw, WrittenFloat) and not reads_decimals(kind):
        raw = float(raw)
    if isinstance(raw, float) and not math.isfinite(raw):
        raise ValueError(f"{raw!r} is not a finite number")
    if accepts(kind, raw):
        return raw
    if isinstance(raw, int | float) and (kind is str or origin is Literal):
        # {"year": 1999} although the field is declared as text
        return parse_value(canonical_json(raw), kind)
    return convert(kind, raw)


def _constrained_text(raw: str, kind: object) -> object:
    """Return a text that fits its type; engines that enforce the type write it as a JSON string."""
    if not takes_any_text(kind):
        unquoted = json_of(raw)
        if isinstance(unquoted, str) and accepts(kind, unquoted):
            return convert(kind, writable(unquoted))
    return convert(kind, raw)


def _member_value(raw: str, kind: object) -> object:
    """Return the value of the only member that is named, by its value or, if that is no text, by its name."""
    labels = labels_of(kind)
    try:
        return read_label(raw, labels)
    except ValueError:
        names = {
            member.name: member.value
            for member in cast("type[Enum]", without_annotation(kind))
            if not isinstance(member.value, str)
        }
        if not names:
            raise
        return names[str(read_label(raw, list(names)))]


def _list(raw: str, item: object) -> list[object]:
    name = (
        "any" if item is Any or is_text(item) else format_type(item) if is_plain(item) else "json"
    )
    return [parse_value(writable(part), item) for part in list_items(raw, name)]


def _structured_list(raw: str, kind: object, item: object) -> object:
    """Return the items of one JSON array, or of one JSON value in each line."""
    try:
        return _from_json(raw, kind)
    except ValueError:
        if raw.lstrip().startswith(("[", "`")):
            raise
    return _list(raw, item)


def _is_none(raw: str, options: Sequence[object]) -> bool:
    return type(None) in options and raw.strip().lower() in ("", "none", "null")


def _union(raw: str, kind: object) -> object:
    """Return the value of a union: JSON, whose option pydantic chooses, or words of only one option."""
    options = [option for option in get_args(kind) if option is not type(None)]
    if re.search(r"[{\[]", raw) and not (takes_any_text(kind) or all(map(is_plain, options))):
        return _from_json(raw, kind)
    readers = [
        (
            "str" if is_text(option) and takes_any_text(option) else format_type(option),
            partial(parse_value, kind=option),
        )
        for option in options
    ]
    return read_union(raw, readers)


def _from_json(raw: str, kind: object) -> object:
    """Convert the last JSON value of a text that fits, alone or among other text, such as a code block."""
    if kind in (date, datetime) and re.fullmatch(r"\W*\d+(?:\.\d*)?\W*", raw):
        # pydantic would read it as seconds since 1970
        raise ValueError(f"{raw!r:.100} is not {format_type(kind)}")
    values, rest = _json_values(raw, kind)
    problem, failed = "", set[str]()
    for value in reversed(values):
        keys = value.keys() if isinstance(value, dict) else ()
        try:
            found = convert(kind, writable(value))
        except ValueError as error:
            problem, failed = problem or str(error), failed.union(keys)
            continue
        if not failed.isdisjoint(keys) or re.search(r'\{\s*"|\[\s*[{"]', rest):
            problem = problem or f"{raw!r:.100} has incomplete JSON after the last complete one"
            break  # an earlier draft
        return found
    if not problem and not re.search(r"[{\[]", raw):
        try:
            return convert(kind, raw)  # such as a date without quotes
        except ValueError as error:
            problem = str(error)
    raise ValueError(
        problem or f"{raw!r:.100} holds no complete JSON for {format_type(kind)}"
    ) from None


def _structured_or_text(raw: str, kind: object) -> object:
    """Convert an answer that is JSON, or has an object that fits the type; any other answer is a text."""
    text = raw.strip()
    fenced = re.fullmatch(r"```\w*\n(.*)```", text, re.DOTALL)
    body = (fenced[1] if fenced else text).strip()
    (values, _), whole = _json_values(body, kind), json_of(body) is not NO_JSON
    problem = ""
    for value in reversed(values):
        if not whole and isinstance(value, list):
            continue  # brackets in a text, such as a citation
        try:
            return convert(kind, writable(value))
        except ValueError as error:
            problem = problem or str(error)
    if body.startswith(STRUCTURE_STARTS) or (whole and isinstance(values[0], list)):
        raise ValueError(problem or f"{raw!r:.100} holds no complete JSON for {format_type(kind)}")
    return convert(kind, raw)


def _json_values(text: str, kind: object) -> tuple[list[object], str]:
    """Return a text as JSON, or else the outermost objects and arrays in it, and the text after them."""
    read = float_reader(kind)
    try:
        return [json.loads(text, strict=False, parse_float=read)], ""
    except (ValueError, RecursionError):
        values = json_values(text, parse_float=read)
    return [value for value, _, _ in values], text[values[-1][2] :] if values else text


def writable(value: object) -> object:
    """Replace lone surrogates (``\\ud800``), which cannot be encoded as UTF-8.

    Raises:
        ValueError: the value is nested too deeply.
    """
    try:
        return replace_surrogates(value)
    except RecursionError:
        raise ValueError("the JSON is nested too deeply") from None
