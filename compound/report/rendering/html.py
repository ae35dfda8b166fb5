"""Render the report as a single HTML page with inline style and figures, without scripts or external files.

All strings that are not `Markup` are escaped when they are added to an element, so texts from the run cannot
inject HTML.
"""

from __future__ import annotations

import html
import re
from collections.abc import Mapping, Sequence
from functools import singledispatch

from compound.graph.space import as_demos
from compound.report.facts.documents import ExampleFacts, RunFacts
from compound.report.facts.text import line, shown, word_diff
from compound.report.figures.graph import use_page_colors
from compound.report.rendering.blocks import Block, Change, Code, Examples, Figure, Pairs, Section
from compound.report.rendering.style import STYLE
from compound.report.rendering.tables import Table

POLICY = "default-src 'none'; style-src 'unsafe-inline'"
VIEW = "width=device-width, initial-scale=1"
CONTEXT = 300  # characters to show at each end of an unchanged passage
VOID = ("meta",)


class Markup(str):
    """String that is already HTML."""

    __slots__ = ()


def tag(name: str, /, *children: str, **attributes: str) -> Markup:
    """Return an element; children and attributes are escaped unless they are `Markup`.

    >>> tag("p", "a < b", tag("b", "!"), class_="x")
    '<p class="x">a &lt; b<b>!</b></p>'
    """
    inner = "".join(child if isinstance(child, Markup) else html.escape(child) for child in children)
    given = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{html.escape(v)}"' for key, v in attributes.items()
    )
    return Markup(f"<{name}{given}>" if name in VOID else f"<{name}{given}>{inner}</{name}>")


def page(facts: RunFacts, sections: Sequence[Section]) -> str:
    """Return the report as an HTML page."""
    title = f"{facts['system']}: {facts['title']}"
    head = tag(
        "head", tag("meta", charset="utf-8"), tag("meta", name="viewport", content=VIEW),
        tag("meta", http_equiv="Content-Security-Policy", content=POLICY),
        tag("meta", name="color-scheme", content="light dark"),
        tag("title", title), tag("style", Markup(STYLE)),
    )  # fmt: skip
    links = [tag("a", part.title, href=f"#{_anchor(part)}") for part in sections]
    body = tag("body", _header(facts), tag("nav", *links), tag("main", *map(_section, sections)))
    return f"<!DOCTYPE html>\n{tag('html', head, body, lang='en')}\n"


def _header(facts: RunFacts) -> Markup:
    about = f"{facts['system']} · method {facts['method']} · seed {facts['seed']}"
    notes = [tag("li", note) for note in facts["notes"]]
    return tag(
        "header", tag("p", about, class_="about"), tag("h1", facts["title"].capitalize()),
        tag("p", facts["sentence"], class_=f"lead {facts['verdict']}"),
        *([tag("ul", *notes, class_="notes")] if notes else []),
    )  # fmt: skip


def _anchor(section: Section) -> str:
    return section.title.lower().replace(" ", "-")


def _section(section: Section) -> Markup:
    return tag("section", tag("h2", section.title), *map(element, section.blocks), id=_anchor(section))


@singledispatch
def element(block: Block) -> Markup:
    """Render a block of a section."""
    return tag("p", str(block))


@element.register
def _(block: Table) -> Markup:
    def row(name: str, cells: Sequence[str]) -> Markup:
        return tag(
            "tr",
            *(
                tag(name, *_cell(cell), **({"class_": "number"} if column in block.numeric else {}))
                for column, cell in enumerate(cells)
            ),
        )

    head = tag("thead", row("th", block.headings))
    body = tag("tbody", *(row("td", cells) for cells in block.rows))
    return tag("div", tag("table", head, body), class_="wide", tabindex="0")


def _cell(text: str) -> list[str]:
    """Return the text of a cell, with the limits of an interval on a separate line."""
    mean, bracket, limits = text.partition(" [")
    interval = re.fullmatch(r"[−\d.,]+, [−\d.,]+\](, n = \d+)?", limits)
    return [mean, tag("span", bracket.strip() + limits, class_="limits")] if interval else [text]


@element.register
def _(block: Code) -> Markup:
    return tag("pre", tag("code", block.text))


@element.register
def _(block: Pairs) -> Markup:
    return _list(dict(block.items))


def _list(values: Mapping[str, str]) -> Markup:
    """Return names with values."""
    return tag("dl", *(tag("div", tag("dt", name), tag("dd", value)) for name, value in values.items()))


@element.register
def _(block: Figure) -> Markup:
    if block.missing:
        return tag("p", block.missing, class_="missing")
    svg = tag("div", _sized(use_page_colors(block.svg), block.name), class_="wide", tabindex="0")
    return tag("figure", svg, tag("figcaption", block.caption), class_=block.name)


def _sized(svg: str, name: str) -> Markup:
    """Scale the picture with the page down to the smallest readable size, below which it scrolls."""
    found = re.search(r'width="([\d.]+)pt" height="[\d.]+pt"', svg)
    wide = float(found[1]) * 4 / 3 if found else 800
    size = f'style="max-width:{wide:.0f}px;min-width:{0.8 * wide:.0f}px" role="img" aria-label="{name}"'
    return Markup(svg.replace(found[0], size) if found else svg)


@element.register
def _(block: Change) -> Markup:
    name = tag("h3", tag("code", block.key))
    if block.kind == "text":
        return tag("div", name, text_diff(str(block.before or ""), str(block.after or "")), class_="change")
    if block.kind == "demos":
        return tag("div", name, _demos(block), class_="change")
    old, new = (tag(side, line(value, 300)) for side, value in (("del", block.before), ("ins", block.after)))
    return tag("div", name, tag("p", old, " → ", new), class_="change")


def text_diff(before: str, after: str) -> Markup:
    """Return a diff of two texts with deletions struck through and insertions marked."""
    names = {"old": "del", "new": "ins", "same": "span"}
    pieces = [(kind, _context(text) if kind == "same" else text) for kind, text in word_diff(before, after)]
    return tag("div", *(tag(names[kind], text) for kind, text in pieces), class_="text")


def _context(text: str) -> str:
    """Omit the middle of a long unchanged text."""
    left_out = len(text) - 2 * CONTEXT
    if left_out < CONTEXT:
        return text
    return f"{text[:CONTEXT]} … {left_out:,} unchanged characters … {text[-CONTEXT:]}"


def _demos(block: Change) -> Markup:
    """Return the demonstrations, each marked as kept, new or removed."""
    before, after = as_demos(block.before or ()), as_demos(block.after or ())
    rows = [("kept" if d in before else "new", d) for d in after]
    rows += [("removed", d) for d in before if d not in after]
    arrow = tag("span", "→", class_="to")
    items = [
        tag(
            "li",
            tag("span", state, class_="state"),
            _shown(d["inputs"]),
            arrow,
            _shown(d["outputs"]),
            class_=state,
        )
        for state, d in rows
    ]
    title = tag("p", f"{len(before)} → {len(after)} demonstrations")
    return tag("div", title, tag("ol", *items, class_="demos"))


def _shown(values: Mapping[str, object]) -> Markup:
    return _list({name: shown(value) for name, value in values.items()})


@element.register
def _(block: Examples) -> Markup:
    cards = [_card(block, example) for example in block.items]
    return tag("div", tag("h3", block.title), *cards, class_="examples")


def _card(block: Examples, example: ExampleFacts) -> Markup:
    groups = [
        tag("div", tag("h5", title), _list(values), class_=f"side {title}")
        for title, values in block.groups(example)
    ]
    return tag("article", tag("h4", block.heading(example)), tag("div", *groups, class_="sides"))
