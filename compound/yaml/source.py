"""Parse a YAML file into plain data with the position of every value, and apply overrides.

PyYAML only scans; its events become values by the rules of YAML 1.2 (``1e-6`` is a number, ``on``
and ``yes`` are strings). Some valid YAML is rejected: duplicate keys, tags, anchors and aliases,
multiple documents, numbers that are not finite, and files that are too deep or too large.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from typing import NoReturn, cast

import yaml
from yaml.reader import Reader

from compound.core.errors import SpecError
from compound.yaml.document import Address, Document

MAX_BYTES, MAX_DEPTH, MAX_VALUES, MAX_DIGITS = 1_000_000, 40, 50_000, 100

_SURROGATE = re.compile("[\ud800-\udfff]")
_STANDARD_TAG = "tag:yaml.org,2002:"


def read(raw: bytes | str, name: str) -> Document:
    """Parse a YAML text; errors that leave the rest readable are reported in the document.

    Raises:
        SpecError: the text is not valid YAML, or not a mapping.

    >>> document = read("system: demo\\nlimit: 1e-6\\nanswer: no\\n", "demo.yaml")
    >>> document.tree
    {'system': 'demo', 'limit': 1e-06, 'answer': 'no'}
    >>> document.label(("limit",))
    'demo.yaml:2:8'
    """
    document = Document(name, _decoded(raw, name))
    tree = _Reading(document).tree()
    if not isinstance(tree, dict):
        found = (
            "empty" if tree is None else "a list" if isinstance(tree, list) else "a single value"
        )
        document.report((), f"a file must be a mapping such as `system: NAME`, but this is {found}")
        document.check()
    document.tree = tree
    return document


def read_value(text: str, label: str) -> object:
    """Parse a value of the command line, such as ``150`` or ``[1, 2]``; ``label`` starts its errors.

    >>> read_value("[1, 1e-6, on]", "--set a.b=[1, 1e-6, on]")
    [1, 1e-06, 'on']
    """
    character = Reader.NON_PRINTABLE.search(text)
    if character:
        raise SpecError(
            [f"{label!a}: holds the control character U+{ord(character.group()):04X}; remove it"]
        )
    document = Document("", text, label)
    value = _Reading(document).tree() if text.strip() else ""
    document.check()
    return value


def _decoded(raw: bytes | str, name: str) -> str:
    """Return the text of a file, or raise with the position of the first invalid byte or character."""
    size = len(raw)
    if size > MAX_BYTES:
        raise SpecError([f"{name}:1:1: the file has {size} bytes; at most {MAX_BYTES} are read"])
    text, wrong = raw, ""
    if isinstance(raw, bytes):
        try:
            text = raw.decode("utf-8")
        except UnicodeDecodeError as error:
            text = raw[: error.start].decode("utf-8")
            wrong = f"is not UTF-8 (byte 0x{raw[error.start]:02x}); save the file as UTF-8"
    assert isinstance(text, str)
    text = text.removeprefix("\ufeff")
    character = Reader.NON_PRINTABLE.search(text)
    if character:
        wrong = f"holds the control character U+{ord(character.group()):04X}; remove it"
    if wrong:
        document = Document(name, text)
        document.mark((), character.start() if character else len(text))
        document.report((), wrong)
        document.check()
    return text


class _Reading:
    """Parser of one text, in one pass over its events."""

    def __init__(self, document: Document) -> None:
        self._document = document
        self._loader = yaml.SafeLoader(document.text)
        self._values = 0

    def tree(self) -> object:
        """Return the data of the text, which must be a single document."""
        tree, documents = None, 0
        event = self._next()
        while not isinstance(event, yaml.StreamEndEvent):
            if isinstance(event, yaml.DocumentStartEvent):
                documents += 1
                if documents > 1:
                    self._stop(event, "a second document starts here; a file holds one")
                self._document.mark((), _start(event))
                tree = self._value(self._next(), ())
            event = self._next()
        return tree

    def _next(self) -> yaml.Event:
        try:
            return cast("yaml.Event", self._loader.get_event())  # type: ignore[no-untyped-call]
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            self._fail(mark.index if mark else 0, *_explained(error))
        except yaml.YAMLError as error:
            self._fail(self._loader.index, f"is not YAML: {error}")
        except (ValueError, OverflowError):  # PyYAML lets these escape from `chr` and `int`
            self._fail(
                self._loader.index,
                "is not YAML: a number in an escape or directive is out of range",
            )

    def _stop(self, event: yaml.Event, what: str) -> NoReturn:
        self._fail(_start(event), what)

    def _fail(self, index: int, what: str, hint: str = "") -> NoReturn:
        self._document.mark((), index)
        self._document.report((), what, hint)
        self._document.check()
        raise AssertionError("check raises")

    def _value(self, event: yaml.Event, address: Address) -> object:
        self._values += 1
        if len(address) > MAX_DEPTH:
            self._stop(event, f"the file is deeper than {MAX_DEPTH} levels")
        if self._values > MAX_VALUES:
            self._stop(event, f"the file has more than {MAX_VALUES} values")
        self._document.mark(address, _start(event))
        self._check_extras(event, address)
        if isinstance(event, yaml.ScalarEvent):
            return self._scalar(event, address)
        if isinstance(event, yaml.SequenceStartEvent):
            return [
                self._value(item, (*address, i))
                for i, item in enumerate(self._until(yaml.SequenceEndEvent))
            ]
        if isinstance(event, yaml.MappingStartEvent):
            return self._mapping(address)
        return None

    def _until(self, end: type[yaml.Event]) -> Iterator[yaml.Event]:
        while not isinstance(event := self._next(), end):
            yield event

    def _check_extras(self, event: yaml.Event, address: Address) -> None:
        anchor, tag = getattr(event, "anchor", None), getattr(event, "tag", None)
        if isinstance(event, yaml.AliasEvent):
            self._document.report(
                address, f"the alias *{anchor} is not supported", "repeat the value"
            )
            self._document.mark_unreadable(address)
        elif anchor is not None:
            hint = "write the value wherever it is needed"
            self._document.report(address, f"the anchor &{anchor} is not supported", hint)
        elif tag is not None:
            self._document.report(
                address,
                f"the tag {tag.replace(_STANDARD_TAG, '!!')!r} is not supported",
                "remove it",
            )
            self._document.mark_unreadable(address)

    def _mapping(self, address: Address) -> dict[str, object]:
        found: dict[str, object] = {}
        for event in self._until(yaml.MappingEndEvent):
            if not isinstance(event, yaml.ScalarEvent):
                self._stop(event, "a key must be a string; quote strings that begin with [ { or *")
            inside = (*address, event.value)
            if event.value in found:
                line, column = self._document.label(inside, key=True).split(":")[-2:]
                twice = f"is a duplicate key; first defined on line {line}, column {column}"
                self._document.report_at(_start(event), inside, twice)
                self._skip()
                continue
            self._document.mark(inside, _start(event), key=True)
            if self._is_half(event.value, inside):
                self._skip()
                continue
            self._check_extras(event, inside)
            found[event.value] = self._value(self._next(), inside)
        return found

    def _skip(self) -> None:
        depth = 0
        while True:
            event = self._next()
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(
                event, yaml.CollectionEndEvent
            )
            if depth == 0:
                return

    def _scalar(self, event: yaml.ScalarEvent, address: Address) -> object:
        if self._is_half(event.value, address):
            return None
        if event.style is not None:
            return event.value
        if INT.fullmatch(event.value) and len(event.value) > MAX_DIGITS:
            self._refuse(address, f"a number must have at most {MAX_DIGITS} digits")
            return None
        value = scalar(event.value)
        if isinstance(value, float) and not math.isfinite(value):
            self._refuse(address, f"a number must be finite, but is {event.value:.20}")
            return None
        return value

    def _refuse(self, address: Address, what: str) -> None:
        self._document.report(address, what, "quote it if it is a string")
        self._document.mark_unreadable(address)

    def _is_half(self, text: str, address: Address) -> bool:
        """Report ``\\0``, and halves of characters such as ``\\ud800``; return whether there are any."""
        half = _SURROGATE.search(text) is not None
        if half:
            self._document.report(
                address, "contains a lone surrogate (half a character)", "write the whole character"
            )
            self._document.mark_unreadable(address)
        if "\0" in text:
            self._document.report(address, "contains a NUL character", "remove \\0")
            self._document.mark_unreadable(address)
        return half or "\0" in text


def _explained(error: yaml.MarkedYAMLError) -> tuple[str, str]:
    problem, context = str(error.problem), error.context or ""
    start = f" from line {error.context_mark.line + 1}" if error.context_mark and context else ""
    hint = ""
    if "'\\t'" in problem:
        hint = "indent with spaces"
    elif "flow" in context or "mapping values" in problem:
        hint = "quote strings that hold any of [ ] { } , # or `: `"
    return f"is not YAML: {problem}" + (f" ({context}{start})" if context else ""), hint


def _start(event: yaml.Event) -> int:
    return event.start_mark.index if event.start_mark else 0


NULL = re.compile(r"~|null|Null|NULL|\Z")
BOOL = re.compile(r"true|True|TRUE|false|False|FALSE")
INT = re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+")
FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
NOT_FINITE = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")


def scalar(text: str) -> object:
    """Return the value of a plain (unquoted) scalar; ``inf`` and ``nan`` are returned as floats.

    >>> [scalar(text) for text in ("1e-6", "on", "true", "012", "0x10", "~", "1_000", ".5")]
    [1e-06, 'on', True, 12, 16, None, '1_000', 0.5]
    """
    if NULL.fullmatch(text):
        return None
    if BOOL.fullmatch(text):
        return text.lower() == "true"
    if INT.fullmatch(text):
        return int(text, 0) if text[:2] in ("0o", "0x") else int(text)
    if FLOAT.fullmatch(text):
        return float(text)
    return math.nan if NOT_FINITE.fullmatch(text) else text


def apply(document: Document, overrides: Sequence[tuple[str, str]]) -> None:
    """Set each value in the document; errors are labelled with the text of the override.

    >>> from compound.yaml.source import read
    >>> document = read("system: demo", "demo.yaml")
    >>> apply(document, [("optimize.seed", "7")])
    >>> document.tree, document.label(("optimize", "seed"))
    ({'system': 'demo', 'optimize': {'seed': 7}}, '--set optimize.seed=7')
    """
    problems: list[str] = []
    for number, (key, text) in enumerate(overrides):
        label = f"--set {key}={text}" if key.isprintable() else f"--set {key!a}=…"
        address = _address(document, key)
        if "" in address or len(address) > MAX_DEPTH or not key.isprintable():
            problems.append(f"{label}: must name an entry such as optimize.seed")
            continue
        try:
            value = read_value(text, label)
        except SpecError as error:
            problems += error.problems
            continue
        document.override(address, value, label, number)
    if problems:
        raise SpecError(problems)


def _address(document: Document, key: str) -> Address:
    """Return a dotted key as an address; a number is an index where the file has a list."""
    address: Address = ()
    for part in key.split("."):
        index = part.isdecimal() and isinstance(document.at(address), list)
        address = (*address, int(part) if index else part)
    return address
