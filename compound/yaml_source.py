"""A YAML file as plain data that remembers where every value stands.

PyYAML only scans: its events are turned into values here, by the rules of YAML 1.2 (``1e-6`` is a number,
``on`` and ``yes`` are texts). What YAML lets slip is refused by name: duplicate keys, tags, anchors and
aliases, several documents, numbers that are not finite, and files too deep or too large.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any, NoReturn

import yaml
from yaml.reader import Reader

from compound.document import Address, Document
from compound.errors import SpecError

MAX_BYTES, MAX_DEPTH, MAX_VALUES, MAX_DIGITS = 1_000_000, 40, 50_000, 100

NULL = re.compile(r"~|null|Null|NULL|\Z")
BOOL = re.compile(r"true|True|TRUE|false|False|FALSE")
INT = re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+")
FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
NOT_FINITE = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
_SURROGATE = re.compile("[\ud800-\udfff]")
_STANDARD_TAG = "tag:yaml.org,2002:"


def read(raw: bytes | str, name: str) -> Document:
    """Return the content of a YAML text; mistakes that leave the rest readable are noted in it.

    Raises:
        SpecError: the text is not YAML at all, or not one mapping.

    >>> document = read("system: demo\\nlimit: 1e-6\\nanswer: no\\n", "demo.yaml")
    >>> document.tree
    {'system': 'demo', 'limit': 1e-06, 'answer': 'no'}
    >>> document.label(("limit",))
    'demo.yaml:2:8'
    """
    document = Document(name, _decoded(raw, name))
    tree = _Reading(document).tree()
    if not isinstance(tree, dict):
        document.report((), f"a file must be a mapping such as `system: NAME`, but this is {_shape(tree)}")
        document.check()
    document.tree = tree
    return document


def read_value(text: str, label: str) -> Any:
    """Return one value of the command line, such as ``150`` or ``[1, 2]``; ``label`` opens its errors."""
    document = Document("", text, label)
    value = _Reading(document).tree() if text.strip() else ""
    document.check()
    return value


def scalar(text: str) -> Any:
    """Return what a plain (unquoted) scalar means; ``inf`` and ``nan`` come back as floats.

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


def _shape(tree: Any) -> str:
    return "empty" if tree is None else "a list" if isinstance(tree, list) else "a single value"


def _decoded(raw: bytes | str, name: str) -> str:
    """Return the text of a file, or raise with the place of the first byte that is no text."""
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
    """One pass over the events of a text."""

    def __init__(self, document: Document) -> None:
        self._document = document
        self._loader = yaml.SafeLoader(document.text)
        self._values = 0

    def tree(self) -> Any:
        """Return the first document's data."""
        tree = None
        event = self._next()
        while not isinstance(event, yaml.StreamEndEvent):
            if isinstance(event, yaml.DocumentStartEvent):
                if tree is not None:
                    self._stop(event, "a second document starts here; a file holds one")
                self._document.mark((), event.start_mark.index)
                tree = self._value(self._next(), ())
            event = self._next()
        return tree

    def _next(self) -> Any:
        try:
            return self._loader.get_event()  # type: ignore[no-untyped-call]
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            context = f" ({error.context})" if error.context else ""
            hint = "quote texts that hold any of [ ] { } , # or `: `"
            self._fail(mark.index if mark else 0, f"is not YAML: {error.problem}{context}", hint)
        except (yaml.YAMLError, ValueError, OverflowError) as error:
            self._fail(self._loader.index, f"is not YAML: {error}")

    def _stop(self, event: Any, what: str) -> NoReturn:
        self._fail(event.start_mark.index, what)

    def _fail(self, index: int, what: str, hint: str = "") -> NoReturn:
        self._document.mark((), index)
        self._document.report((), what, hint)
        self._document.check()
        raise AssertionError("check raises")

    def _value(self, event: Any, address: Address) -> Any:
        self._values += 1
        if len(address) > MAX_DEPTH or self._values > MAX_VALUES:
            limit = (
                f"deeper than {MAX_DEPTH} levels" if len(address) > MAX_DEPTH else f"over {MAX_VALUES} values"
            )
            self._stop(event, f"the file is too large: {limit}")
        self._document.mark(address, event.start_mark.index)
        self._refuse_extras(event, address)
        if isinstance(event, yaml.ScalarEvent):
            return self._scalar(event, address)
        if isinstance(event, yaml.SequenceStartEvent):
            return [
                self._value(item, (*address, i)) for i, item in enumerate(self._until(yaml.SequenceEndEvent))
            ]
        if isinstance(event, yaml.MappingStartEvent):
            return self._mapping(address)
        return None

    def _until(self, end: type[yaml.Event]) -> Iterator[Any]:
        while not isinstance(event := self._next(), end):
            yield event

    def _refuse_extras(self, event: Any, address: Address) -> None:
        wrong = ""
        if isinstance(event, yaml.AliasEvent):
            wrong = f"the alias *{event.anchor} is refused; repeat the value"
        elif event.anchor is not None:
            wrong = f"the anchor &{event.anchor} is refused; write the value where it is needed"
        elif event.tag is not None:
            wrong = f"the tag {event.tag.replace(_STANDARD_TAG, '!!')!r} is refused; remove it"
        if wrong:
            self._document.report(address, wrong)
            self._document.spoil(address)

    def _mapping(self, address: Address) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for event in self._until(yaml.MappingEndEvent):
            if not isinstance(event, yaml.ScalarEvent):
                self._stop(event, "a key must be a text; quote texts that begin with [ { or *")
            inside = (*address, event.value)
            if event.value in found:
                first = self._document.label(inside, key=True).split(":")[-2:]
                line = f"line {first[0]}, column {first[1]}"
                self._document.note(event.start_mark.index, inside, f"is given twice; first on {line}")
                _Skipping(self._document, self._loader).skip()
                continue
            self._document.mark(inside, event.start_mark.index, key=True)
            self._refuse_extras(event, inside)
            self._refuse_surrogates(event.value, inside)
            found[event.value] = self._value(self._next(), inside)
        return found

    def _scalar(self, event: yaml.ScalarEvent, address: Address) -> Any:
        self._refuse_surrogates(event.value, address)
        if event.style is not None:
            return event.value
        digits = INT.fullmatch(event.value) and len(event.value) > MAX_DIGITS
        value = None if digits else scalar(event.value)
        if digits or (isinstance(value, float) and not math.isfinite(value)):
            wrong = (
                f"has more than {MAX_DIGITS} digits"
                if digits
                else f"must be finite, but is {event.value:.20}"
            )
            self._document.report(address, f"a number {wrong}; quote it if it is a text")
            self._document.spoil(address)
            return None
        return value

    def _refuse_surrogates(self, text: str, address: Address) -> None:
        if _SURROGATE.search(text):
            self._document.report(address, "holds half a character (a lone surrogate); write the whole one")
            self._document.spoil(address)


class _Skipping(_Reading):
    """Reads over a value that is not wanted, still refusing what cannot be scanned."""

    def __init__(self, document: Document, loader: Any) -> None:
        self._document = document
        self._loader = loader

    def skip(self) -> None:
        """Read one value and forget it."""
        depth = 0
        while True:
            event = self._next()
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth == 0:
                return
