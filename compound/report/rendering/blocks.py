"""Blocks of the sections of a report; each output format renders every kind of block."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from compound.graph.draw import GraphDocument
from compound.report.facts.documents import ExampleFacts, Side
from compound.report.facts.text import number
from compound.report.rendering.tables import Table

SIDES: tuple[Literal["before"], Literal["after"]] = ("before", "after")


@dataclass(frozen=True)
class Code:
    """A block of code."""

    language: str
    text: str


@dataclass(frozen=True)
class Change:
    """A parameter that changed; the kind is ``text``, ``demos`` or ``value``."""

    key: str
    kind: str
    before: object
    after: object


@dataclass(frozen=True)
class Figure:
    """A figure: its SVG, or the reason why it is missing, and the graph if it shows one.

    ``instead`` replaces the figure in Markdown, which cannot show it.
    """

    name: str
    caption: str
    svg: str = ""
    missing: str = ""
    graph: GraphDocument | None = None
    instead: str = "The plot is in report.html; the tables below hold its numbers."


@dataclass(frozen=True)
class Examples:
    """Examples with their scores and outputs; ``before`` is shown only if the configuration changed."""

    title: str
    items: Sequence[ExampleFacts]
    changed: bool

    def heading(self, example: ExampleFacts) -> str:
        """Return an example's name with its scores."""
        before, now = (number(example[side].get("score")) for side in SIDES)
        scores = f"{before} → {now}" if self.changed else now
        return f"{example['example']}: {scores}"

    def groups(self, example: ExampleFacts) -> list[tuple[str, Mapping[str, str]]]:
        """Return an example's inputs, gold and outcomes as names with values; empty ones are left out."""
        groups: list[tuple[str, Mapping[str, str]]] = [
            ("input", example["inputs"]),
            ("gold", example["gold"]),
        ]
        if self.changed:
            groups.append(("before", _outcome(example["before"])))
        groups.append(("after" if self.changed else "output", _outcome(example["after"])))
        groups.append(("messages", example["after"].get("messages", {})))
        return [(title, values) for title, values in groups if values]


def _outcome(side: Side) -> dict[str, str]:
    """Return the outputs, the failure and the metric's feedback."""
    extra = {"failure": side.get("failure"), "feedback": side.get("feedback")}
    return {**side.get("outputs", {}), **{name: text for name, text in extra.items() if text}}


@dataclass(frozen=True)
class Pairs:
    """Names with values."""

    items: Sequence[tuple[str, str]]


Block = str | Table | Code | Change | Figure | Examples | Pairs


@dataclass(frozen=True)
class Section:
    """A heading with the blocks under it."""

    title: str
    blocks: Sequence[Block]
