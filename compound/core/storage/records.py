"""JSON with checksums: documents, and line files in which each checksum covers all lines before it.

A checksum is the last member of its JSON object, named ``checksum``, and covers the bytes before
it; in a line file it also covers the checksum of the previous line, so that removed or swapped
lines are detected. Checksums detect damage, not forgery: anyone who changes a file deliberately can
recompute them. Files without checksums, from earlier versions, are read unchecked.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import BinaryIO

from compound.core.security.limits import DEPTH, LINE

NAME = "checksum"
DIGITS = 16
_LINE = re.compile(rb'(?:, )?"checksum": "([0-9a-f]{16})"\}\n\Z')
_DOCUMENT = re.compile(rb',?\n "checksum": "([0-9a-f]{16})"\n\}\n\Z')


class Damaged(ValueError):
    """The content read differs from what was written; the message describes how, without the location."""


@dataclass(frozen=True)
class Line:
    """One line of a record file."""

    value: dict[str, object]
    checksum: str
    end: int


def parse(
    text: bytes | str,
    parse_constant: Callable[[str], object] | None = None,
    *,
    unique: bool = False,
) -> object:
    """Parse JSON; with ``unique``, reject an object that has a name twice, of which one would be lost."""
    raw = text.encode(errors="replace") if isinstance(text, str) else text
    pairs = _unique_names if unique else None
    try:
        value = json.loads(text, parse_constant=parse_constant, object_pairs_hook=pairs)
    except Damaged:
        raise
    except RecursionError:
        raise Damaged(f"it is nested more than {DEPTH} levels deep") from None
    except ValueError as error:
        raise Damaged(f"it is not JSON ({error})") from None
    if raw.count(b"[") + raw.count(b"{") > DEPTH and is_deep(value):
        raise Damaged(f"it is nested more than {DEPTH} levels deep")
    return value


def _unique_names(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise Damaged(f"two values have the same name: {twice}")
    return found


def is_deep(value: object, levels: int = DEPTH) -> bool:
    """Return whether a JSON value has more levels than other functions can process.

    >>> is_deep([[1], {"a": 2}]), is_deep([[1], {"a": 2}], levels=1)
    (False, True)
    """
    level, depth = [value], 0
    while level and depth <= levels:
        containers = [item for item in level if isinstance(item, dict | list | tuple)]
        level = [
            x for item in containers for x in (item.values() if isinstance(item, dict) else item)
        ]
        depth += 1
    return depth > levels


def to_encodable_json(value: object, indent: int | None = None) -> str:
    """Return JSON that can be encoded as UTF-8; lone surrogates are escaped."""
    text = json.dumps(value, ensure_ascii=False, indent=indent)
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(value, indent=indent)
    return text


def to_line(record: Mapping[str, object], before: str = "") -> tuple[bytes, str]:
    """Return a record as a line with its checksum, and the checksum.

    >>> to_line({"event": "start"})
    (b'{"event": "start", "checksum": "6d044fb50f6e5c00"}\\n', '6d044fb50f6e5c00')
    """
    body = to_encodable_json(dict(record))[:-1].encode()
    found = _checksum(before.encode(), body)
    return body + (b", " if record else b"") + f'"{NAME}": "{found}"}}\n'.encode(), found


def read_lines(file: BinaryIO, before: str = "") -> Iterator[Line]:
    """Yield the records of a file; a last line without a line break is ignored.

    The file is at the start of a line, of which ``before`` is the checksum of the one before.

    Raises:
        Damaged: a line is damaged or not a JSON object; the message starts with its number.
    """
    checksum, end, number, most = before, 0, 0, LINE.bytes
    while raw := file.readline(most + 1):
        number += 1
        if not raw.endswith(b"\n"):
            if len(raw) > most:
                raise Damaged(f"{number}: the line is longer than {LINE}; {LINE.hint}")
            return
        end += len(raw)
        try:
            value, found = _parse_sealed_line(raw, checksum)
        except Damaged as error:
            raise Damaged(f"{number}: {error}") from None
        checksum = found
        yield Line(value, checksum, end)


def _parse_sealed_line(raw: bytes, before: str) -> tuple[dict[str, object], str]:
    match = _LINE.search(raw)
    if match is None:
        value, found = _parse_line(raw), ""
        if isinstance(value, dict) and NAME in value:
            raise Damaged("its checksum is misplaced")
        if before:
            raise Damaged("it has no checksum, but the previous line has one")
    else:
        found = match[1].decode()
        body = raw[: match.start()]
        if _checksum(before.encode(), body) != found:
            raise Damaged("it does not match its checksum: it or a previous line was changed")
        value = _parse_line(body + b"}")
    if not isinstance(value, dict):
        raise Damaged("it must be a JSON object")
    return value, found


def _parse_line(raw: bytes) -> object:
    try:
        return parse(raw)
    except Damaged as error:
        raise Damaged(f"not a JSON line: {error}") from None


def to_document(value: Mapping[str, object]) -> str:
    """Return a JSON document with its checksum as the last member.

    >>> print(to_document({"seed": 0}), end="")
    {
     "seed": 0,
     "checksum": "1676c829f0263237"
    }
    """
    text = to_encodable_json(dict(value), indent=1)
    body = text[:-2] if value else "{"
    comma = "," if value else ""
    return f'{body}{comma}\n "{NAME}": "{_checksum(body.encode())}"\n}}\n'


def read_document(raw: bytes) -> dict[str, object]:
    """Return the content of a document, without its checksum."""
    value = parse(raw)
    if not isinstance(value, dict):
        raise Damaged("it must hold a JSON object")
    if NAME in value:
        match = _DOCUMENT.search(raw)
        if match is None or _checksum(raw[: match.start()]) != match[1].decode():
            raise Damaged("it does not match its checksum: it was changed since it was written")
        del value[NAME]
    return value


def _checksum(*parts: bytes) -> str:
    hashed = hashlib.sha256()
    for part in parts:
        hashed.update(part)
    return hashed.hexdigest()[:DIGITS]
