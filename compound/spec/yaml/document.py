"""The content of a YAML file with the place of every value, and the mistakes found in it so far.

A mistake is noted by the address of what is wrong, ``("optimize", "budget")``; the document knows the line.
Mistakes inside a value that is already known to be wrong are not noted: one mistake, one message.
"""

from __future__ import annotations

import bisect
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol, TypeGuard

from compound.errors import CompoundError, SpecError

Address = tuple[str | int, ...]
_PLAIN_KEY = re.compile(r"[\w$.:/-]{1,60}\Z")


@dataclass(frozen=True)
class _Place:
    """Where something stands: in the file (group 0), or among the overrides (group 1)."""

    group: int
    line: int
    column: int
    label: str


@dataclass(frozen=True)
class _Problem:
    place: _Place
    text: str
    address: Address


class Document:
    """A tree of plain values, their places, and the problems found.

    >>> document = Document("a.yaml", "x: 1")
    >>> document.mark(("x",), 3)
    >>> document.report(("x",), "must be a text", "quote it")
    >>> document.check()
    Traceback (most recent call last):
    compound.errors.SpecError: a.yaml:1:4: x: must be a text; quote it
    """

    def __init__(self, name: str, text: str, label: str = "") -> None:
        self.name = name
        self.text = text
        self.tree: object = None
        self._label = label
        self._starts = [0, *(match.end() for match in re.finditer(r"\r\n|\n|\r", text))]
        self._values: dict[Address, _Place] = {}
        self._keys: dict[Address, _Place] = {}
        self._problems: list[_Problem] = []
        self._spoiled: set[Address] = set()

    def mark(self, address: Address, index: int, *, key: bool = False) -> None:
        """Say where a value, or its key, starts in the text."""
        (self._keys if key else self._values)[address] = self._place_of(index)

    def label(self, address: Address, *, key: bool = False) -> str:
        """Return ``file:line:column`` of a value or of its key."""
        return self._place(address, key).label

    def at(self, address: Address) -> object:
        """Return the value at an address, or None."""
        value: object = self.tree
        for part in address:
            if not _holds(value, part):
                return None
            value = value[part]
        return value

    def has(self, address: Address) -> bool:
        """Return whether the file says anything at an address."""
        return address in self._values

    def is_override(self, address: Address) -> bool:
        """Return whether a value comes from the command line."""
        return self._place(address, False).group == 1

    def override(self, address: Address, value: object, label: str, order: int) -> None:
        """Put a value of the command line into the tree; ``label`` says where it comes from."""
        parent: object = self.tree
        place = _Place(1, order, 0, label)
        for depth, part in enumerate(address[:-1], 1):
            if isinstance(parent, dict) and parent.get(str(part)) is None:
                parent[part] = {}
                self._keys[address[:depth]] = self._values[address[:depth]] = place
            if not _holds(parent, part):
                break
            parent = parent[part]
        last = address[-1]
        if isinstance(parent, dict) or _holds(parent, last):
            parent[last] = value
        else:
            self._problems.append(_Problem(place, f"{label}: there is no {dotted(address)} to set", address))
            return
        inside = [a for a in self._values if a[: len(address)] == address]
        for old in inside:
            del self._values[old]
            self._keys.pop(old, None)
        self._keys[address] = self._values[address] = place
        self._spoiled = {old for old in self._spoiled if old[: len(address)] != address}
        self._problems = [old for old in self._problems if old.address[: len(address)] != address]

    def report(self, address: Address, what: str, hint: str = "", *, key: bool = False) -> None:
        """Note a mistake at an address, unless it lies within a value already known to be wrong."""
        if any(address[:depth] in self._spoiled for depth in range(len(address) + 1)):
            return
        self._add(self._place(address, key), address, f"{what}; {hint}" if hint else what)

    def report_error(self, address: Address, error: CompoundError, *, key: bool = False) -> None:
        """Note what the core says of a value at an address."""
        self.report(address, error.message, error.hint, key=key)

    def note(self, index: int, address: Address, what: str) -> None:
        """Note a mistake at a position of the text."""
        self._add(self._place_of(index), address, what)

    def spoil(self, address: Address) -> None:
        """Say that a value could not be read: what is found wrong inside it follows from that."""
        self._spoiled.add(address)

    def wrong(self, address: Address = ()) -> bool:
        """Return whether any mistake was noted at or inside an address."""
        return any(problem.address[: len(address)] == address for problem in self._problems)

    def check(self) -> None:
        """Raise `SpecError` with every mistake, in the file's order, if there is any."""
        if self._problems:
            raise SpecError(dict.fromkeys(problem.text for problem in sorted(self._problems, key=_order)))

    def _add(self, place: _Place, address: Address, what: str) -> None:
        where = f"{dotted(address)}: " if address else ""
        line = " ".join(f"{place.label}: {where}{what}".split())
        self._problems.append(_Problem(place, line, address))

    def _place(self, address: Address, key: bool) -> _Place:
        """Return the place of an address, or of the nearest thing around it that has one."""
        for depth in range(len(address), -1, -1):
            part = address[:depth]
            value, name = self._values.get(part), self._keys.get(part)
            place = (name or value) if key or depth < len(address) else (value or name)
            if place is not None:
                return place
        return self._place_of(0)

    def _place_of(self, index: int) -> _Place:
        line = bisect.bisect_right(self._starts, index)
        column = index - self._starts[line - 1] + 1
        return _Place(0, line, column, self._label or f"{self.name}:{line}:{column}")


def dotted(address: Iterable[str | int]) -> str:
    """Return an address as one writes it.

    >>> dotted(("components", "searcher", "k", 0)), dotted(("a b",))
    ('components.searcher.k.0', "'a b'")
    """
    parts = [str(part) for part in address]
    return ".".join(part if _PLAIN_KEY.match(part) else repr(part[:60]) for part in parts)


def shown(value: object) -> str:
    """Return a value as YAML would say it, shortened.

    >>> shown(True), shown("a"), shown(None), shown([1, 2])
    ('true', "'a'", 'null', '[1, 2]')
    """
    if value is None or isinstance(value, bool):
        return str({None: "null", True: "true", False: "false"}[value])
    text = repr(value)
    return text if len(text) <= 60 else text[:59] + "…"


class _Container(Protocol):
    """A mapping or a list."""

    def __getitem__(self, part: str | int, /) -> object: ...
    def __setitem__(self, part: str | int, value: object, /) -> None: ...


def _holds(parent: object, part: str | int) -> TypeGuard[_Container]:
    if isinstance(parent, list):
        return isinstance(part, int) and part < len(parent)
    return isinstance(parent, dict) and part in parent


def _order(problem: _Problem) -> tuple[int, int, int]:
    place = problem.place
    return (place.group, place.line, place.column)
