"""Examples, scores, and the metric protocol."""

from __future__ import annotations

from collections.abc import Awaitable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar, runtime_checkable

from compound.core.formatting import short_repr

Values = Mapping[str, object]  # values of ports or settings, by name
CallValues = tuple[Values, Values]  # inputs and outputs of one call


@dataclass(frozen=True, slots=True)
class Score:
    """Score of one output.

    ``value`` is the number to maximize, ``feedback`` text for optimizers that use it, ``parts``
    named sub-scores for the report.
    """

    value: float
    feedback: str = ""
    parts: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, repr=False)
class Example:
    """One row of data: the system's ``inputs`` and the metric's reference values (``gold``).

    ``place`` starts messages on the row, such as ``data/dev.jsonl:3``.
    """

    id: str
    inputs: Values
    gold: Values = field(default_factory=dict)
    place: str = field(default="", compare=False, kw_only=True)

    def __repr__(self) -> str:
        return (
            f"Example({self.id!r}, inputs={short_repr(self.inputs)}, gold={short_repr(self.gold)})"
        )


@runtime_checkable
class Metric(Protocol):
    """Scores the outputs of a system against an example; `score` may return an awaitable."""

    @property
    def name(self) -> str:
        """Short name for tables."""
        ...

    def score(self, outputs: Values, example: Example) -> Score | Awaitable[Score]:
        """Return a `Score`, or an awaitable of one."""
        ...


Copied = TypeVar("Copied")
CONTAINERS = frozenset((dict, list, set))  # their subclasses may copy otherwise


def copy_containers(value: Copied) -> Copied:
    """Return a value with copied dictionaries, lists and sets; other objects are shared.

    >>> row = {"tags": ["a"]}
    >>> copy_containers(row)["tags"].append("b"), row
    (None, {'tags': ['a']})
    """
    kind: object = type(value)
    copied: Any = value
    if kind is dict:
        copied = copied.copy()
        for key, item in copied.items():
            if type(item) in CONTAINERS:
                copied[key] = copy_containers(item)
    elif kind is list:
        copied = [copy_containers(item) for item in copied]
    elif kind is set:
        copied = copied.copy()
    found: Copied = copied
    return found
