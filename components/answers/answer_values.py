"""Values in a model's text: numbers, labels, lists and JSON, among the words around them."""

from __future__ import annotations

import json
import math
import re
import types
from collections.abc import Iterator, Sequence
from datetime import date, datetime
from enum import Enum
from typing import Annotated, Any, Literal, Union, cast, get_args, get_origin

from compound.components.answers.answer_lists import list_items
from compound.components.answers.answer_types import (
    is_plain,
    is_text,
    labels_of,
    mixes_text,
    takes_any_text,
    without_annotation,
)
from compound.evaluation.metrics.text import is_negated
from compound.graph.configuration import canonical_json
from compound.graph.types import accepts, convert, format_type

TRUE, FALSE = {"yes", "true", "1"}, {"no", "false", "0"}
# The search for JSON in a text of n characters reads at most SCAN_FACTOR * n + SCAN_FLOOR characters.
SCAN_FACTOR, SCAN_FLOOR = 16, 100_000
# A sign directly after a word is a hyphen (GPT-4); commas count only between groups of three digits.
NUMBER = re.compile(
    r"(?:(?<!\w)[-+])?(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d*)?|(?<!\w)\.\d+)(?:[eE][-+]?\d+)?"
)
# What makes a number a part of something longer: a decimal comma, a fraction, a date, a range, an equation.
CONTINUATION = re.compile(
    r"(?:[.:_'’]|,\s?|[ \t]*[-/^*×÷·+=–—xX][-^*/]?[ \t]*|[ \t]+(?:or|to)[ \t]+|[ \t\u00a0\u202f]+)[-+]?\.?\d"
)
STRUCTURE_STARTS = ("{", '["', "[{")  # of an answer that is meant as JSON, also if it is incomplete
# A question that is repeated, or an alternative, before or instead of the decision.
UNDECIDED = re.compile(r"\s*\?|\s*(?:[/|]|\b(?:or|and)\b)\s*(?:yes|no|true|false|[01])\b", re.IGNORECASE)


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
    if kind is Any or (accepts(kind, raw) and not _has_constrained_text(kind)):
        return raw
    if origin is Annotated and is_plain(kind):
        return convert(kind, parse_value(raw, without_annotation(kind)))
    if labels := labels_of(kind):
        return _label(raw, labels) if origin is Literal else convert(kind, _member_value(raw, kind))
    if kind in (bool, int, float):
        return _bool(raw) if kind is bool else _number(raw, kind)
    if origin is list or kind is list:
        item = (get_args(kind) or (Any,))[0]
        return _list(raw, item) if is_plain(kind) else _structured_list(raw, kind, item)
    if origin in (Union, types.UnionType):
        return _union(raw, get_args(kind))
    return _from_json(raw, kind)


def _from_json_value(raw: object, kind: object, origin: object) -> object:
    if isinstance(raw, float) and not math.isfinite(raw):
        raise ValueError(f"{raw!r} is not a finite number")
    if accepts(kind, raw):
        return raw
    if isinstance(raw, int | float) and (kind is str or origin is Literal):
        return parse_value(canonical_json(raw), kind)  # {"year": 1999} although the field is declared as text
    return convert(kind, raw)


def _has_constrained_text(kind: object) -> bool:
    parts = get_args(kind) if get_origin(kind) in (Union, types.UnionType) else ()
    return any(is_text(part) and part is not str for part in parts) and not takes_any_text(kind)


def _constrained_text(raw: str, kind: object) -> object:
    """Return a text that fits its type; engines that enforce the type write it as a JSON string."""
    if not takes_any_text(kind):
        try:
            unquoted = json.loads(raw, strict=False)
        except (ValueError, RecursionError):
            unquoted = None
        if isinstance(unquoted, str) and accepts(kind, unquoted):
            return convert(kind, writable(unquoted))
    return convert(kind, raw)


def _label(raw: str, options: Sequence[object]) -> object:
    """Return the only option that occurs as whole words and is not negated; an exact match wins."""
    plain = raw.strip().strip("\"'`.*").lower()
    exact = [option for option in options if str(option).lower() == plain]
    longest_first = sorted((str(o).lower() for o in options if str(o)), key=len, reverse=True)
    words = re.finditer(rf"(?<!\w)(?:{'|'.join(map(re.escape, longest_first))})(?!\w)", raw.lower())
    found = {word.group() for word in words if not is_negated(raw, word.start())}
    named = exact or [o for o in options if str(o).lower() in found]
    if len(named) != 1:
        raise ValueError(
            f"{raw!r:.100} names {'none' if not named else 'several'} of {', '.join(map(str, options))}"
        )
    return named[0]


def _member_value(raw: str, kind: object) -> object:
    """Return the value of the only member that is named, by its value or, if that is no text, by its name."""
    labels = labels_of(kind)
    try:
        return _label(raw, labels)
    except ValueError:
        names = {
            member.name: member.value
            for member in cast("type[Enum]", without_annotation(kind))
            if not isinstance(member.value, str)
        }
        if not names:
            raise
        return names[str(_label(raw, list(names)))]


def _bool(raw: str) -> bool:
    words = list(re.finditer(r"\w+", raw.lower()))
    first = words[0].group() if words else ""
    if first not in TRUE | FALSE:
        raise ValueError(f"{raw!r:.100} is neither yes nor no")
    rest = raw[words[0].end() :]
    denied = len(words) == 2 and words[1].group() in (FALSE if first in TRUE else TRUE)
    if denied or UNDECIDED.match(rest) or (first in ("0", "1") and CONTINUATION.match(rest)):
        raise ValueError(f"{raw!r:.100} does not decide between yes and no")
    return first in TRUE


def _number(raw: str, kind: object) -> object:
    plain = raw.replace("\N{MINUS SIGN}", "-")
    matches = list(NUMBER.finditer(plain))
    if not matches:
        raise ValueError(f"{raw!r:.100} holds no number")
    text = matches[0].group().replace(",", "")
    leads = not any(character.isalnum() for character in raw[: matches[0].start()])
    if not leads and len({match.group().replace(",", "") for match in matches}) > 1:
        raise ValueError(f"{raw!r:.100} holds several numbers and does not start with one")
    if CONTINUATION.match(plain, matches[0].end()):
        raise ValueError(f"{raw!r:.100} does not start with a single number")
    if kind is int and text.lstrip("+-").isdigit():
        return int(text)
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{raw!r:.100} is not a finite number")
    if kind is int:
        if not value.is_integer():
            raise ValueError(f"{raw!r:.100} is not a whole number")
        return int(value)
    return value


def _list(raw: str, item: object) -> list[object]:
    return [parse_value(writable(part), item) for part in list_items(raw)]


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


def _union(raw: str, options: Sequence[object]) -> object:
    for option in options:
        try:
            return parse_value(raw, option)
        except ValueError:
            continue
    raise ValueError(f"{raw!r:.100} is none of {', '.join(map(format_type, options))}")


def _from_json(raw: str, kind: object) -> object:
    """Convert the first JSON value of a text that fits, alone or among other text, such as a code block."""
    if kind in (date, datetime) and re.fullmatch(r"\W*\d+(?:\.\d*)?\W*", raw):
        raise ValueError(
            f"{raw!r:.100} is not {format_type(kind)}"
        )  # pydantic reads it as seconds since 1970
    problem = ""
    for value in _json_values(raw):
        try:
            return convert(kind, writable(value))
        except ValueError as error:
            problem = problem or str(error)
    if not problem and not re.search(r"[{\[]", raw):
        try:
            return convert(kind, raw)  # such as a date without quotes
        except ValueError as error:
            problem = str(error)
    raise ValueError(problem or f"{raw!r:.100} holds no complete JSON for {format_type(kind)}") from None


def _structured_or_text(raw: str, kind: object) -> object:
    """Convert an answer that is JSON, or has an object that fits the type; any other answer is a text."""
    text = raw.strip()
    fenced = re.fullmatch(r"```\w*\n(.*)```", text, re.DOTALL)
    body = (fenced[1] if fenced else text).strip()
    values, is_json = list(_json_values(body)), _is_json(body)
    problem = ""
    for value in values:
        if not is_json and isinstance(value, list):
            continue  # brackets in a text, such as a citation
        try:
            return convert(kind, writable(value))
        except ValueError as error:
            problem = problem or str(error)
    if body.startswith(STRUCTURE_STARTS) or (is_json and isinstance(values[0], list)):
        raise ValueError(problem or f"{raw!r:.100} holds no complete JSON for {format_type(kind)}")
    return convert(kind, raw)


def _is_json(text: str) -> bool:
    try:
        json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return False
    return True


def _json_values(text: str) -> Iterator[object]:
    """Yield the whole text as JSON, or else the outermost objects and arrays in it, with bounded work.

    Texts in it may have line breaks that are not escaped, as models write them.
    """
    try:
        yield json.loads(text, strict=False)
    except (ValueError, RecursionError):
        pass
    else:
        return
    decoder, end = json.JSONDecoder(strict=False), 0
    left = SCAN_FACTOR * len(text) + SCAN_FLOOR
    for match in re.finditer(r"[{\[]", text):
        if match.start() < end:
            continue
        try:
            value, end = decoder.raw_decode(text, match.start())
        except (ValueError, RecursionError) as error:
            left -= getattr(error, "pos", len(text))
        else:
            yield value
        if left < 0:
            return


def writable(value: object) -> object:
    """Replace lone surrogates (``\\ud800``), which cannot be encoded as UTF-8."""
    return json.loads(json.dumps(value, ensure_ascii=False).encode(errors="replace"))
