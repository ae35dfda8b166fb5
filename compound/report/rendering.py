"""Render the facts of a report as Markdown, and as one HTML page without scripts.

``report.jinja`` and ``sweep.jinja`` state the sections once, with the macros of ``markdown.jinja``
or ``html.jinja``. Texts from a run are untrusted: Markdown macros escape them to stay in their
cell, item or fence, and the HTML environment escapes every value that is not `markupsafe.Markup`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, Undefined
from markupsafe import Markup

from compound.core.errors import MissingExtra
from compound.core.formatting import plural
from compound.graph.draw import GraphDocument, as_mermaid
from compound.graph.space import as_demos
from compound.report.figures import PALETTE, use_page_colors
from compound.report.text import (
    FORMATS,
    escape_invisible,
    line,
    line_diff,
    number,
    word_diff,
)

SPECIAL = re.compile(r"([\\`*_{}\[\]<>#|~$&!])")  # of Markdown
CONTEXT = 300  # characters to show at each end of an unchanged passage
LIMITS = re.compile(r"(.*?) (\[[−\d.,]+, [−\d.,]+\](?:, n = \d+)?)")  # at the end of a cell
NONE = "–"  # shown for a missing value
Columns = Mapping[str, str]


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


def tabulate(
    items: Iterable[Mapping[str, Any]], columns: Columns, *, drop_empty: bool = False
) -> Table:
    """Return a table with a row for each item.

    Args:
        items: the facts of each row.
        columns: for each heading, as in `table`, a Jinja2 expression over the facts of a row.
        drop_empty: whether to leave out columns without any value.

    >>> tabulate([{"n": 2000}], {"#examples": "n | count"}).rows
    [['2,000']]
    """
    cells = [_expression(column) for column in columns.values()]
    rows = [[str(cell(**item)) for cell in cells] for item in items]
    headings = [*columns]
    if drop_empty:
        filled = [i for i in range(len(headings)) if any(row[i] != NONE for row in rows)]
        headings = [headings[i] for i in filled]
        rows = [[row[i] for i in filled] for row in rows]
    return table(headings, rows)


@cache
def _expression(text: str) -> Callable[..., object]:
    return _environment(html=False).compile_expression(text)


@dataclass(frozen=True)
class Figure:
    """A figure: its SVG, or the reason why it is missing, and the graph if it shows one.

    ``instead`` replaces the figure in Markdown, which cannot show it.
    """

    name: str
    caption: str = ""
    svg: str = ""
    missing: str = ""
    graph: GraphDocument | None = None
    instead: str = "The plot is in report.html; the tables below hold its numbers."


def draw_figure(name: str, draw: Callable[[], str], **facts: Any) -> Figure:  # noqa: ANN401
    """Return a figure, without its picture if matplotlib is not installed."""
    try:
        return Figure(name, svg=draw(), **facts)
    except MissingExtra as error:
        missing = (
            "The figure needs matplotlib, which is not installed: "
            f"{error.hint}, then run `compound runs report` on this run."
        )
        return Figure(name, missing=missing, **facts)


def render_markdown(template: str, context: Mapping[str, Any], start: str) -> str:
    """Return a page of Markdown that begins with some text."""
    environment = _environment(html=False)
    found = environment.get_template(template).render(format="markdown.jinja", **context)
    return escape_invisible(re.sub(r"\n{3,}", "\n\n", f"{start}\n\n{found}").strip() + "\n")


def markdown_table(block: Table) -> str:
    """Return a table as Markdown."""
    macros: Any = _environment(html=False).get_template("markdown.jinja").module
    return str(macros.table(block)).strip()


def render_html(template: str, context: Mapping[str, Any]) -> str:
    """Return a page of HTML."""
    environment, titles = _environment(html=True), list[str]()
    get = environment.get_template
    body = get(template).render(format="html.jinja", titles=titles, **context)
    safe = Markup(body)  # nosec B704  # the templates escape its parts
    page = get("page.html").render(body=safe, titles=titles, palette=PALETTE, **context)
    return escape_invisible(f"{page.strip()}\n")


def escape(text: object) -> str:
    """Escape text so that Markdown shows it literally, on one line.

    >>> print(escape("a|b <i> `c`"))
    a\\|b \\<i\\> \\`c\\`
    """
    return SPECIAL.sub(r"\\\1", " ".join(str(text).split()))


def fenced(text: str, language: str = "") -> str:
    """Return text in a code fence that no line of the text can close."""
    longest = max([len(run) for run in re.findall("`+", text)], default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{text}\n{fence}"


@cache
def _environment(*, html: bool) -> Environment:
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=html,
        trim_blocks=True,
        lstrip_blocks=True,
    )  # nosec B701  # the macros of Markdown escape
    environment.filters |= {
        **{name: _of_known(form) for name, form in FORMATS.items()},
        "anchor": lambda title: title.lower().replace(" ", "-"),
        "cell": _cell,
        "fenced": fenced,
        "md": escape,
        "mermaid": as_mermaid,
        "picture": _picture,
        "plural": plural,
        "quoted": lambda name: f"{json.dumps(name, ensure_ascii=False)}: …",
        "squeeze": lambda text: type(text)(re.sub(r"[ \n]+", " ", text).strip()),
        "suffix": lambda text, end: f"{text}{end}",
    }
    environment.globals |= {
        "NONE": NONE,
        "demo_states": demo_states,
        "example_groups": example_groups,
        "example_heading": example_heading,
        "html_diff": _html_diff,
        "line_diff": line_diff,
        "outcome_of": outcome_of,
        "tabulate": tabulate,
        "verdict_of": verdict_of,
    }
    return environment


def verdict_of(known: str | None, over: Sequence[str], accepted: bool, note: str) -> str:
    """Return the verdict of a decision, and whether the candidate became the best configuration."""
    if over:
        return f"{known}, but over the limits"
    if known is None:  # without a comparison, or of an earlier version
        return "accepted" if accepted else note or "rejected"
    return f"{known}, kept" if accepted else known


def outcome_of(values: Mapping[str, object], note: str | None) -> str:
    """Return what a job proposed, with its note."""
    proposal, note = "; ".join(f"{k} = {brief(v)}" for k, v in values.items()), line(note or "")
    return f"{proposal} ({note})" if proposal and note else proposal or note or "no proposal"


def brief(value: object) -> str:
    """Format a value in a few words."""
    if isinstance(value, list) and value and all(isinstance(item, Mapping) for item in value):
        return f"{len(value)} demonstrations"
    return line(value, 60)


def _of_known(form: Callable[..., str]) -> Callable[..., str]:
    """Return a format for which an undefined value is a missing one."""
    return lambda value, *how: form(None if isinstance(value, Undefined) else value, *how)


def demo_states(before: object, after: object) -> list[tuple[str, Mapping[str, Any]]]:
    """Return the demonstrations of both sides, each ``kept``, ``new`` or ``removed``."""
    old, new = as_demos(before or ()), as_demos(after or ())
    found = [("kept" if demo in old else "new", demo) for demo in new]
    return [*found, *(("removed", demo) for demo in old if demo not in new)]


def example_heading(example: Mapping[str, Any], changed: bool) -> str:
    """Return an example's name with its scores."""
    before, now = (number(example[side].get("score")) for side in ("before", "after"))
    return f"{example['example']}: {before} → {now}" if changed else f"{example['example']}: {now}"


def example_groups(example: Mapping[str, Any], changed: bool) -> dict[str, Mapping[str, str]]:
    """Return an example's inputs, gold and outcomes that are not empty."""
    after = example["after"]
    groups = {
        "input": example["inputs"],
        "gold": example["gold"],
        "before": _outcome(example["before"]) if changed else {},
        "after" if changed else "output": _outcome(after),
        "messages": after.get("messages", {}),
    }
    return {title: values for title, values in groups.items() if values}


def _outcome(side: Mapping[str, Any]) -> dict[str, str]:
    """Return the outputs, the failure and the metric's feedback."""
    extra = {name: text for name in ("failure", "feedback") if (text := side.get(name))}
    return {**side.get("outputs", {}), **extra}


def _cell(text: str) -> tuple[str, str]:
    """Split a cell into its text and the limits of an interval, for a separate line."""
    found = LIMITS.fullmatch(text)
    return (found[1], found[2]) if found else (text, "")


def _html_diff(before: object, after: object) -> list[tuple[str, str]]:
    """Return the pieces of a diff as elements with their text; long unchanged ones are cut."""
    names = {"old": "del", "new": "ins", "same": "span"}
    return [
        (names[kind], _context(text) if kind == "same" else text)
        for kind, text in word_diff(str(before), str(after))
    ]


def _context(text: str) -> str:
    left_out = len(text) - 2 * CONTEXT
    if left_out < CONTEXT:
        return text
    return f"{text[:CONTEXT]} … {left_out:,} unchanged characters … {text[-CONTEXT:]}"


def _picture(block: Figure) -> Markup:
    """Return the SVG, scaled with the page down to the smallest readable size."""
    svg = use_page_colors(block.svg)
    found = re.search(r'width="([\d.]+)pt" height="[\d.]+pt"', svg)
    wide = float(found[1]) * 4 / 3 if found else 800
    size = f'style="max-width:{wide:.0f}px;min-width:{0.8 * wide:.0f}px"'
    size += f' role="img" aria-label="{block.name}"'
    drawn = svg.replace(found[0], size) if found else svg
    return Markup(drawn)  # nosec B704  # drawn by this package, which escapes the texts
