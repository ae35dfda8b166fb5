"""Arguments of an HTTP operation as parts of its path, its query and its headers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from urllib.parse import quote

from compound.errors import CallError

DELIMITERS = {"spaceDelimited": " ", "pipeDelimited": "|"}  # of lists in the query; others have commas


@dataclass(frozen=True)
class Place:
    """Where an argument is sent.

    Attributes:
        name: its name there.
        where: ``path``, ``query``, ``header``, ``body`` for a member of the body, or ``whole`` for the body.
        style: how a list or an object is written, in the words of OpenAPI; ``json`` as JSON text.
        explode: whether the items of a list, or the members of an object, are parameters of their own.
    """

    name: str
    where: str
    style: str = "form"
    explode: bool = True

    @property
    def identity(self) -> list[object]:
        """What determines how the argument is sent."""
        usual = (self.style, self.explode) == ("form", True)
        return [self.name, self.where, *([] if usual else [self.style, self.explode])]

    def query(self, value: object) -> list[tuple[str, str]]:
        """Return the names and values in the query of an argument."""
        if self.style == "json" or not isinstance(value, list | dict):
            return [(self.name, _plain(value))]
        if isinstance(value, list):
            items = [_plain(item) for item in value if item is not None]
            if self.explode and self.style == "form":
                return [(self.name, item) for item in items]
            return [(self.name, DELIMITERS.get(self.style, ",").join(items))] if items else []
        if self.style == "deepObject":
            return list(_deep(self.name, value))
        members = [(str(name), _plain(item)) for name, item in value.items() if item is not None]
        return members if self.explode else [(self.name, ",".join(part for pair in members for part in pair))]


def _plain(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _deep(name: str, value: object) -> Iterator[tuple[str, str]]:
    """Yield the members of an object as ``name[member]``.

    >>> list(_deep("filter", {"age": {"min": 3}, "tags": ["a", "b"]}))
    [('filter[age][min]', '3'), ('filter[tags]', 'a'), ('filter[tags]', 'b')]
    """
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _deep(f"{name}[{key}]", item)
    elif value is not None:
        yield from ((name, _plain(item)) for item in (value if isinstance(value, list) else [value]))


def _simple(value: object) -> str:
    """Return the text of an argument in a path or a header, where the items of a list have commas."""
    return ",".join(map(_plain, value)) if isinstance(value, list) else _plain(value)


def as_path_part(name: str, value: object) -> str:
    """Return an argument as a part of a path.

    Raises:
        CallError: it would lead to another path.

    >>> as_path_part("id", "a/b"), as_path_part("ids", [1, 2])
    ('a%2Fb', '1%2C2')
    """
    text = _simple(value)
    if value is None or text in ("", ".", ".."):
        raise CallError(f"{name} must not be {'null' if value is None else repr(text)}")
    return quote(text, safe="")


def as_header(name: str, value: object) -> str:
    """Return an argument as the value of a header.

    Raises:
        CallError: it could be read as more than a value.
    """
    text = _simple(value)
    if not text.isprintable() or not text.isascii():
        raise CallError(f"{name} must consist of printable ASCII characters")
    return text
