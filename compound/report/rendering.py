"""Render the facts of a report as Markdown, and as one HTML page without scripts.

``report.jinja`` and ``sweep.jinja`` state the sections once, with the macros of ``markdown.jinja``
or ``html.jinja``. Texts from a run are untrusted: Markdown macros escape them to stay in their
cell, item or fence, and the HTML environment escapes every value that is not `markupsafe.Markup`.
"""

from __future__ import annotations

import json
import re
import shlex
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from html import escape as html_escape
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, Undefined
from markupsafe import Markup

from compound.components.fields import format_inputs, format_value
from compound.core.errors import MissingExtra
from compound.core.formatting import NO_LIMIT, cut, plural
from compound.graph.draw import GraphDocument, as_mermaid
from compound.graph.space import Demo, as_demos
from compound.report.figures import PALETTE, use_page_colors
from compound.report.text import (
    FORMATS,
    align_columns,
    count,
    escape_invisible,
    line,
    line_diff,
    money,
    number,
    shown,
    word_diff,
    wrapped,
)

SPECIAL = re.compile(r"([\\`*_{}\[\]<>#|~$&!])")  # of Markdown
SHORT = 80  # characters of a value in a table of examples
CONTEXT = 300  # characters to show at each end of an unchanged passage
LIMITS = re.compile(r"(.*?) (\[[−\d.,]+, [−\d.,]+\](?:, n = \d+)?)")  # at the end of a cell
NONE = "–"  # shown for a missing value
MOMENT = "%Y-%m-%d %H:%M:%S UTC"
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

    ``alt`` describes the picture for readers who do not see it.
    ``instead`` replaces the figure in Markdown, which cannot show it.
    """

    name: str
    alt: str = ""
    caption: str = ""
    svg: str = ""
    missing: str = ""
    graph: GraphDocument | None = None
    instead: str = "The plot is in report.html; the tables hold its numbers."


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


def render_markdown(template: str, context: Mapping[str, Any]) -> str:
    """Return a page of Markdown."""
    return render_text(template, {**context, "format": "markdown.jinja"}) + "\n"


def render_text(template: str, context: Mapping[str, Any]) -> str:
    """Return a text for a terminal; empty lines separate its blocks."""
    found = _environment(html=False).get_template(template).render(**context)
    return escape_invisible(re.sub(r"\n{3,}", "\n\n", found).strip())


def aligned(block: Table, headings: Sequence[str] = (), width: int = NO_LIMIT) -> str:
    """Return a table as lines for a terminal, with the columns of some headings, in their order."""
    names = [heading.partition(",")[0] for heading in block.headings]
    kept = [names.index(name) for name in headings or names if name in names]
    rows = [[row[i] for i in kept] for row in (block.headings, *block.rows)]
    return "\n".join(align_columns(rows, width))


def markdown_table(block: Table) -> str:
    """Return a table as Markdown."""
    macros: Any = _environment(html=False).get_template("markdown.jinja").module
    return str(macros.table(block)).strip()


def render_html(template: str, context: Mapping[str, Any]) -> str:
    """Return a page of HTML."""
    get, titles = _environment(html=True).get_template, list[str]()
    context = {**context, "titles": titles, "figure_numbers": list[str]()}
    body = get(template).render(format="html.jinja", **context)
    safe = Markup(body)  # nosec B704  # the templates escape its parts
    page = get("page.html").render(body=safe, palette=PALETTE, **context)
    return escape_invisible(f"{page.strip()}\n")


def render_svg(template: str, context: Mapping[str, Any]) -> str:
    """Return a drawing."""
    return _environment(html=True).get_template(template).render(palette=PALETTE, **context)


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
        "amount": _amount,
        "anchor": lambda title: title.lower().replace(" ", "-"),
        "at_most": lambda value: "no limit" if value is None else count(value),
        "brief": brief,
        "cell": _cell,
        "cut": cut,
        "demo": _demo,
        "demo_line": _demo_line,
        "fenced": fenced,
        "md": escape,
        "mermaid": as_mermaid,
        "moment": lambda at: time.strftime(MOMENT, time.gmtime(at)) if at else "",
        "picture": _picture,
        "plural": plural,
        "quoted": lambda name: f"{json.dumps(name, ensure_ascii=False)}: …",
        "repr": repr,
        "shell": shlex.quote,
        "short": lambda value: f"{value:.3g}",
        "spelled": _spelled,
        "squeeze": lambda text: type(text)(re.sub(r"[ \n]+", " ", text).strip()),
        "wrapped": wrapped,
        "suffix": lambda text, end: f"{text}{end}",
    }
    environment.globals |= {
        "NONE": NONE,
        "aligned": aligned,
        "answers": _answers,
        "demo_states": demo_states,
        "first_text": lambda values: _first(values, 160),
        "has_calls": lambda row: any(run.get("calls") for run in row["runs"].values()),
        "html_diff": _html_diff,
        "line_diff": line_diff,
        "passages": passages,
        "tabulate": tabulate,
        "values_of": values_of,
        "verdict_of": verdict_of,
    }
    return environment


def _amount(value: float | None, unit: str) -> str:
    if value is None:
        return "no limit"
    exact = {"tokens": count, "dollars": money}
    return exact[unit](value) if unit in exact else f"{value:.3g}"


def _spelled(values: Mapping[str, object], mark: str = " = ") -> str:
    return ", ".join(f"{name}{mark}{shown(value)}" for name, value in values.items())


def verdict_of(known: str | None, over: Sequence[str], accepted: bool, note: str) -> str:
    """Return the verdict of a decision, and whether the candidate became the best configuration."""
    if over:
        return f"{known}, but over the limits"
    if known is None:  # without a comparison, or of an earlier version
        return "accepted" if accepted else note or "rejected"
    return f"{known}, kept" if accepted else known


def values_of(values: Mapping[str, object]) -> str:
    """Return values by their names, each in a few words."""
    return "; ".join(f"{name} = {brief(value)}" for name, value in values.items())


def brief(value: object) -> str:
    """Format a value in a few words."""
    if isinstance(value, list) and value and all(isinstance(item, Mapping) for item in value):
        return plural(len(value), "demonstration")
    return line(value, 60)


def _of_known(form: Callable[..., str]) -> Callable[..., str]:
    """Return a format for which an undefined value is a missing one."""
    return lambda value, *how: form(None if isinstance(value, Undefined) else value, *how)


def demo_states(before: object, after: object) -> list[tuple[str, Demo]]:
    """Return the demonstrations of both sides, each ``kept``, ``new`` or ``removed``."""
    old, new = as_demos(before or ()), as_demos(after or ())
    found = [("kept" if demo in old else "new", demo) for demo in new]
    return [*found, *(("removed", demo) for demo in old if demo not in new)]


def _demo(demo: Demo) -> str:
    """Format a demonstration as a prompt shows it."""
    return f"{format_inputs(demo['inputs'])}\n{format_inputs(demo['outputs'])}"


def _demo_line(demo: Demo) -> str:
    """Format a demonstration on one line: the inputs that are texts, if there are any, and the outputs."""
    texts = {name: value for name, value in demo["inputs"].items() if isinstance(value, str)}
    return line(_demo({**demo, "inputs": texts or demo["inputs"]}), 999)


def passages(value: object) -> list[tuple[str, str]]:
    """Return score and text of each passage that a retriever returned; empty for other values.

    >>> passages([{"title": "Peru", "text": "Lima is its capital.", "score": 2.5}])
    [('2.500', 'Peru: Lima is its capital.')]
    """
    items = value if isinstance(value, list) else []
    if not all(isinstance(item, Mapping) and "text" in item for item in items):
        return []
    scores = (item.get("score") for item in items)
    shown = (number(score) if isinstance(score, int | float) else "" for score in scores)
    return [*zip(shown, map(format_value, ([item] for item in items)), strict=True)]


def _answers(row: Mapping[str, Any]) -> dict[str, str]:
    """Return the gold value and the outcomes of an example, each in a few words."""
    outputs = [name for run in row["runs"].values() for name in run.get("outputs", ())]
    found = {k: v for k, v in row["gold"].items() if k in outputs} or row["gold"]
    gold = {"gold": _first(found)} if found else {}
    several = len(row["runs"]) > 1
    outcomes = {name if several else "output": _outcome(run) for name, run in row["runs"].items()}
    return {**gold, **outcomes}


def _first(values: Mapping[str, object], limit: int = SHORT) -> str:
    return line(next(iter(values.values())), limit) if values else NONE


def _outcome(run: Mapping[str, Any]) -> str:
    if failure := run.get("failure"):
        kind, message = failure
        return f"failed: {kind}: {line(message, SHORT)}"
    return _first(run.get("outputs", {}))


def _cell(text: str) -> tuple[str, str]:
    """Split a cell into its text and the limits of an interval, for a separate line."""
    found = LIMITS.fullmatch(text)
    return (found[1], found[2]) if found else (text, "")


def _html_diff(before: str, after: str) -> list[tuple[str, str]]:
    """Return the pieces of a diff as elements with their text; long unchanged ones are cut."""
    names, pieces = {"old": "del", "new": "ins", "same": "span"}, list[tuple[str, str]]()
    for kind, text in word_diff(before, after):
        left_out = len(text) - 2 * CONTEXT if kind == "same" else 0
        cut = f"{text[:CONTEXT]} … {left_out:,} unchanged characters … {text[-CONTEXT:]}"
        pieces.append((names[kind], cut if left_out >= CONTEXT else text))
    return pieces


def _picture(block: Figure) -> Markup:
    """Return the SVG, scaled with the page down to the smallest readable size."""
    svg = use_page_colors(block.svg)
    found = re.search(r'width="([\d.]+)pt" height="[\d.]+pt"', svg)
    wide = float(found[1]) * 4 / 3 if found else 800
    size = f'style="max-width:{wide:.0f}px;min-width:{0.8 * wide:.0f}px"'
    size += f' role="img" aria-label="{html_escape(block.alt or block.name)}"'
    drawn = svg.replace(found[0], size) if found else svg
    return Markup(drawn)  # nosec B704  # drawn by this package, which escapes the texts
