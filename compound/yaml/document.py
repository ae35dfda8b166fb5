"""Content of a YAML file with the position of every value, and the errors found in it.

Errors are reported by address, such as ``("optimize", "budget")``, which the document maps to a
line. Errors inside a value that could not be read are dropped, so that one error gives one message.
"""

from __future__ import annotations

import bisect
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from compound.core.errors import CompoundError, PlacedProblem, SpecError

Address = tuple[str | int, ...]
_PLAIN_KEY = re.compile(r"[\w$.:/-]{1,60}\Z")


@dataclass(frozen=True)
class _Place:
    """Position of an entry in the file (group 0) or among the overrides (group 1)."""

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
    """Tree of plain values with their positions and the errors found.

    >>> document = Document("a.yaml", "x: 1")
    >>> document.mark(("x",), 3)
    >>> document.report(("x",), "must be a string", "quote it")
    >>> document.check()
    Traceback (most recent call last):
    compound.core.errors.SpecError: a.yaml:1:4: x: must be a string; quote it
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
        self._unreadable: set[Address] = set()

    def mark(self, address: Address, index: int, *, key: bool = False) -> None:
        """Record where a value, or its key, starts in the text."""
        (self._keys if key else self._values)[address] = self._place_of(index)

    def label(self, address: Address, *, key: bool = False) -> str:
        """Return ``file:line:column`` of a value or of its key."""
        return self._place(address, key).label

    def at(self, address: Address) -> object:
        """Return the value at an address, or None."""
        value: Any = self.tree
        for part in address:
            if not _holds(value, part):
                return None
            value = value[part]
        return value

    def has(self, address: Address) -> bool:
        """Return whether the file has a value at an address."""
        return address in self._values

    def is_override(self, address: Address) -> bool:
        """Return whether a value comes from the command line."""
        return self._place(address, False).group == 1

    def override(self, address: Address, value: object, label: str, order: int) -> None:
        """Set a value from the command line; ``label`` names its origin in messages."""
        parent: Any = self.tree
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
            self._problems.append(
                _Problem(place, f"{label}: there is no {format_address(address)} to set", address)
            )
            return
        inside = [a for a in self._values if a[: len(address)] == address]
        for old in inside:
            del self._values[old]
            self._keys.pop(old, None)
        self._keys[address] = self._values[address] = place
        self._unreadable = {old for old in self._unreadable if old[: len(address)] != address}
        self._problems = [old for old in self._problems if old.address[: len(address)] != address]

    def report(self, address: Address, what: str, hint: str = "", *, key: bool = False) -> None:
        """Report an error at an address, unless it lies inside a value that could not be read."""
        if any(address[:depth] in self._unreadable for depth in range(len(address) + 1)):
            return
        self._add(self._place(address, key), address, f"{what}; {hint}" if hint else what)

    def report_error(self, address: Address, error: CompoundError, *, key: bool = False) -> None:
        """Report an exception as an error at an address."""
        self.report(address, error.message, error.hint, key=key)

    def report_at(self, index: int, address: Address, what: str) -> None:
        """Report an error at a position of the text."""
        self._add(self._place_of(index), address, what)

    def mark_unreadable(self, address: Address) -> None:
        """Mark a value as unreadable: later errors inside it follow from that and are dropped."""
        self._unreadable.add(address)

    def has_errors(self, address: Address = ()) -> bool:
        """Return whether an error was reported at or inside an address."""
        return any(problem.address[: len(address)] == address for problem in self._problems)

    def check(self) -> None:
        """Raise `SpecError` with all errors, in the order of the file, if there are any."""
        if self._problems:
            in_order = sorted(
                self._problems, key=lambda p: (p.place.group, p.place.line, p.place.column)
            )
            raise SpecError(dict.fromkeys(problem.text for problem in in_order))

    def _add(self, place: _Place, address: Address, what: str) -> None:
        where = f"{format_address(address)}: " if address else ""
        text = PlacedProblem(" ".join(f"{place.label}: {where}{what}".split()))
        if place.group == 0 and not self._label:
            text.lines, text.column = self._lines_to(place.line), place.column - 1
        self._problems.append(_Problem(place, text, address))

    def _lines_to(self, number: int) -> list[tuple[int, str]]:
        """Return a line with its number, after the last line above it with text if it is empty."""
        found: list[tuple[int, str]] = []
        for place in range(number, 0, -1):
            start, end = [*self._starts, len(self.text)][place - 1 : place + 1]
            line = self.text[start:end].rstrip("\r\n")
            if line.strip() or not found:
                found.insert(0, (place, line))
            if line.strip():
                break
        return found

    def _place(self, address: Address, key: bool) -> _Place:
        """Return the position of an address, or of its nearest ancestor that has one."""
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


def format_address(address: Iterable[str | int]) -> str:
    """Return an address as dotted text.

    >>> format_address(("components", "searcher", "k", 0)), format_address(("a b",))
    ('components.searcher.k.0', "'a b'")
    """
    parts = [str(part) for part in address]
    return ".".join(part if _PLAIN_KEY.match(part) else repr(part[:60]) for part in parts)


def format_value(value: object) -> str:
    """Return a value in the words of YAML, shortened to 60 characters.

    >>> format_value(True), format_value("a"), format_value(None), format_value([1, 2])
    ('true', "'a'", 'null', '[1, 2]')
    """
    if value is None or isinstance(value, bool):
        return str({None: "null", True: "true", False: "false"}[value])
    text = repr(value)
    return text if len(text) <= 60 else text[:59] + "…"


def _holds(parent: Any, part: str | int) -> bool:  # noqa: ANN401 - a value of a file
    if isinstance(parent, list):
        return isinstance(part, int) and part < len(parent)
    return isinstance(parent, dict) and part in parent
