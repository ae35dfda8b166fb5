"""Blocks of a report's sections, rendered as Markdown and as one HTML page without scripts.

Texts from a run are untrusted. In Markdown they are escaped to stay in their cell, item or fence;
the template of the page escapes every value that is not `markupsafe.Markup`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compound.core.errors import MissingExtra
from compound.graph.draw import GraphDocument, as_mermaid
from compound.graph.space import as_demos
from compound.report.figures import PALETTE, use_page_colors
from compound.report.text import escape_invisible, line, line_diff, number, shown, word_diff

if TYPE_CHECKING:
    from jinja2 import Template
    from markupsafe import Markup

SPECIAL = re.compile(r"([\\`*_{}\[\]<>#|~$&!])")  # of Markdown
CONTEXT = 300  # characters to show at each end of an unchanged passage
LIMITS = re.compile(r"(.*?) (\[[−\d.,]+, [−\d.,]+\](?:, n = \d+)?)")  # at the end of a cell
NONE = "–"  # shown for a missing value
Columns = Mapping[str, Callable[[Any], str]]


@dataclass(frozen=True)
class Table:
    """Headings, rows, and the indices of numeric columns, which are aligned to the right."""

    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    numeric: frozenset[int]


def table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """Return a table; the prefix ``#`` of a heading marks a numeric column."""
    numeric = frozenset(i for i, heading in enumerate(headings) if heading.startswith("#"))
    return Table([heading.removeprefix("#") for heading in headings], rows, numeric)


def tabulate(items: Iterable[Any], columns: Columns, *, drop_empty: bool = False) -> Table:
    """Return a table with a row for each item.

    Args:
        items: the facts of each row.
        columns: for each heading, as in `table`, the function that formats the cell of an item.
        drop_empty: whether to leave out columns without any value.

    >>> tabulate([{"n": 2}], {"#count": lambda row: str(row["n"])}).rows
    [['2']]
    """
    rows = [[cell(item) for cell in columns.values()] for item in items]
    headings = [*columns]
    if drop_empty:
        filled = [i for i in range(len(headings)) if any(row[i] != NONE for row in rows)]
        headings = [headings[i] for i in filled]
        rows = [[row[i] for i in filled] for row in rows]
    return table(headings, rows)


@dataclass(frozen=True)
class Code:
    """A block of code."""

    language: str
    text: str


@dataclass(frozen=True)
class ChangedParameter:
    """A parameter that changed; the kind is ``text``, ``demos`` or ``value``."""

    key: str
    kind: str
    before: Any
    after: Any

    @property
    def texts(self) -> tuple[str, str]:
        """Both texts, ``""`` for a missing one."""
        return str(self.before or ""), str(self.after or "")

    @property
    def values(self) -> tuple[str, str]:
        """Both values on one line each."""
        return line(self.before, 300), line(self.after, 300)

    @property
    def demos(self) -> list[tuple[str, Mapping[str, Any]]]:
        """Demonstrations of both sides, each ``kept``, ``new`` or ``removed``."""
        before, after = as_demos(self.before or ()), as_demos(self.after or ())
        found = [("kept" if demo in before else "new", demo) for demo in after]
        return [*found, *(("removed", demo) for demo in before if demo not in after)]

    @property
    def demo_counts(self) -> str:
        """Numbers of demonstrations before and after."""
        return f"{len(self.before or ())} → {len(self.after or ())} demonstrations"


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


def draw_figure(name: str, caption: str, draw: Callable[[], str]) -> Figure:
    """Return a figure, without its picture if matplotlib is not installed."""
    try:
        return Figure(name, caption, svg=draw())
    except MissingExtra as error:
        missing = (
            "The figure needs matplotlib, which is not installed: "
            f"{error.hint}, then run `compound runs report` on this run."
        )
        return Figure(name, caption, missing=missing)


@dataclass(frozen=True)
class ExampleCards:
    """Examples with their scores and outputs, before only if the configuration changed."""

    title: str
    items: Sequence[Mapping[str, Any]]
    changed: bool

    def heading(self, example: Mapping[str, Any]) -> str:
        """Return an example's name with its scores."""
        before, now = (number(example[side].get("score")) for side in ("before", "after"))
        return (
            f"{example['example']}: {before} → {now}"
            if self.changed
            else f"{example['example']}: {now}"
        )

    def groups(self, example: Mapping[str, Any]) -> list[tuple[str, Mapping[str, str]]]:
        """Return an example's inputs, gold and outcomes that are not empty."""
        after = example["after"]
        groups = {
            "input": example["inputs"],
            "gold": example["gold"],
            "before": _outcome(example["before"]) if self.changed else {},
            "after" if self.changed else "output": _outcome(after),
            "messages": after.get("messages", {}),
        }
        return [(title, values) for title, values in groups.items() if values]


def _outcome(side: Mapping[str, Any]) -> dict[str, str]:
    """Return the outputs, the failure and the metric's feedback."""
    extra = {name: text for name in ("failure", "feedback") if (text := side.get(name))}
    return {**side.get("outputs", {}), **extra}


@dataclass(frozen=True)
class Pairs:
    """Names with values."""

    items: Mapping[str, str]


@dataclass(frozen=True)
class Bullets:
    """A list of sentences."""

    items: Sequence[str]


Block = str | Table | Code | ChangedParameter | Figure | ExampleCards | Pairs | Bullets


@dataclass(frozen=True)
class Section:
    """A heading with the blocks under it."""

    title: str
    blocks: Sequence[Block]

    @property
    def anchor(self) -> str:
        """Id of the section on a page."""
        return self.title.lower().replace(" ", "-")


# --- rendering ------------------------------------------------------------------------------------


def markdown_page(title: str, lead: Sequence[Block], sections: Sequence[Section]) -> str:
    """Return a page: the title, the leading blocks, and the sections."""
    parts = [f"# {escape(title)}", *map(render_block, lead)]
    for section in sections:
        parts += [f"## {escape(section.title)}", *map(render_block, section.blocks)]
    return escape_invisible("\n\n".join(part for part in parts if part) + "\n")


def escape(text: str) -> str:
    """Escape text so that Markdown shows it literally, on one line.

    >>> print(escape("a|b <i> `c`"))
    a\\|b \\<i\\> \\`c\\`
    """
    return SPECIAL.sub(r"\\\1", " ".join(text.split()))


def fenced(text: str, language: str = "") -> str:
    """Return text in a code fence that no line of the text can close."""
    longest = max([len(run) for run in re.findall("`+", text)], default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{text}\n{fence}"


def render_block(block: Block) -> str:
    """Render a block of a section."""
    match block:
        case Table():
            return _table(block)
        case Code():
            return fenced(block.text, block.language)
        case Pairs():
            pairs = block.items.items()
            return "\n".join(f"- **{escape(name)}**: {escape(value)}" for name, value in pairs)
        case Bullets():
            return "\n".join(f"- {escape(item)}" for item in block.items)
        case Figure():
            if block.graph:
                return fenced(as_mermaid(block.graph), "mermaid")
            return escape(block.missing or block.instead)
        case ChangedParameter():
            return _change(block)
        case ExampleCards():
            return _examples(block)
        case _:
            return escape(block)


def _table(block: Table) -> str:
    rule = ["---:" if i in block.numeric else "---" for i in range(len(block.headings))]
    rows = [[escape(cell) for cell in row] for row in (block.headings, *block.rows)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (rows[0], rule, *rows[1:]))


def _change(block: ChangedParameter) -> str:
    name = f"**{escape(block.key)}**"
    if block.kind == "text":
        return f"{name}\n\n{fenced(chr(10).join(line_diff(*block.texts)), 'diff')}"
    if block.kind == "value":
        return f"{name}: {' → '.join(map(escape, block.values))}"
    lines = [f"{name}: {block.demo_counts}\n"]
    for place, (state, demo) in enumerate(block.demos, 1):
        bullet = "-" if state == "removed" else f"{place}."
        lines.append(f"{bullet} {state}: {_values(demo['inputs'])} ⟶ {_values(demo['outputs'])}")
    return "\n".join(lines)


def _values(values: Mapping[str, Any]) -> str:
    return escape(", ".join(f"{name}: {line(value, 200)}" for name, value in values.items()))


def _examples(block: ExampleCards) -> str:
    lines = [f"### {block.title}\n"]
    for example in block.items:
        lines.append(f"- **{escape(block.heading(example))}**")
        for title, values in block.groups(example):
            shown = "; ".join(f"{name}: {line(value, 300)}" for name, value in values.items())
            lines.append(f"  - {title}: {escape(shown)}")
    return "\n".join(lines)


def html_page(facts: Mapping[str, Any], sections: Sequence[Section]) -> str:
    """Return the report as an HTML page."""
    text = _template().render(facts=facts, sections=sections, palette=PALETTE)
    return escape_invisible(f"{text.lstrip()}\n")


@cache
def _template() -> Template:
    from jinja2 import Environment, StrictUndefined

    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"cell": _cell, "diff": _diff, "picture": _picture, "shown": shown}
    environment.tests["of"] = lambda block, name: type(block).__name__ == name
    return environment.from_string(Path(__file__).with_name("page.html").read_text("utf-8"))


def _cell(text: str) -> tuple[str, str]:
    """Split a cell into its text and the limits of an interval, for a separate line."""
    found = LIMITS.fullmatch(text)
    return (found[1], found[2]) if found else (text, "")


def _diff(texts: tuple[str, str]) -> list[tuple[str, str]]:
    """Return the pieces of a diff as elements with their text."""
    names = {"old": "del", "new": "ins", "same": "span"}
    return [
        (names[kind], _context(text) if kind == "same" else text)
        for kind, text in word_diff(*texts)
    ]


def _context(text: str) -> str:
    """Omit the middle of a long unchanged text."""
    left_out = len(text) - 2 * CONTEXT
    if left_out < CONTEXT:
        return text
    return f"{text[:CONTEXT]} … {left_out:,} unchanged characters … {text[-CONTEXT:]}"


def _picture(block: Figure) -> Markup:
    """Return the SVG, scaled with the page down to the smallest readable size."""
    from markupsafe import Markup

    svg = use_page_colors(block.svg)
    found = re.search(r'width="([\d.]+)pt" height="[\d.]+pt"', svg)
    wide = float(found[1]) * 4 / 3 if found else 800
    size = f'style="max-width:{wide:.0f}px;min-width:{0.8 * wide:.0f}px"'
    size += f' role="img" aria-label="{block.name}"'
    drawn = svg.replace(found[0], size) if found else svg
    return Markup(drawn)  # nosec B704  # drawn by this package, which escapes the texts
