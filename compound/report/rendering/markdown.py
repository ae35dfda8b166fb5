"""Render the report as Markdown; texts from the run are escaped to stay in their cell, item or fence."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import singledispatch

from compound.graph.draw import GraphDocument
from compound.graph.space import Demo, as_demos
from compound.report.facts.documents import RunFacts
from compound.report.facts.text import line, line_diff
from compound.report.rendering.blocks import Block, Change, Code, Examples, Figure, Pairs, Section
from compound.report.rendering.tables import Table

SPECIAL = re.compile(r"([\\`*_{}\[\]<>#|~$&!])")


def markdown(facts: RunFacts, sections: Sequence[Section]) -> str:
    """Return the report as Markdown."""
    parts = [
        f"# {escape(facts['system'])}: {escape(facts['title'])}",
        escape(facts["sentence"]),
        "\n".join(f"- {escape(note)}" for note in facts["notes"]),
    ]
    for section in sections:
        parts.append(f"## {section.title}")
        parts += [render_block(block) for block in section.blocks]
    return "\n\n".join(part for part in parts if part) + "\n"


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


@singledispatch
def render_block(block: Block) -> str:
    """Render a block of a section."""
    return escape(str(block))


@render_block.register
def _(block: Table) -> str:
    rule = ["---:" if i in block.numeric else "---" for i in range(len(block.headings))]
    rows = [[escape(cell) for cell in row] for row in (block.headings, *block.rows)]
    lines = [rows[0], rule, *rows[1:]]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


@render_block.register
def _(block: Code) -> str:
    return fenced(block.text, block.language)


@render_block.register
def _(block: Pairs) -> str:
    return "\n".join(f"- **{escape(name)}**: {escape(value)}" for name, value in block.items)


@render_block.register
def _(block: Figure) -> str:
    if block.graph:
        return fenced(mermaid(block.graph), "mermaid")
    return escape(block.missing or block.instead)


@render_block.register
def _(block: Change) -> str:
    name = f"**{escape(block.key)}**"
    if block.kind == "text":
        diff = line_diff(str(block.before or ""), str(block.after or ""))
        return f"{name}\n\n{fenced(chr(10).join(diff), 'diff')}"
    if block.kind == "demos":
        return f"{name}: {_demos(block)}"
    return f"{name}: {escape(line(block.before, 300))} → {escape(line(block.after, 300))}"


def _demos(block: Change) -> str:
    """Return the numbers of demonstrations, and each demonstration as kept, new or removed."""
    before, after = as_demos(block.before or ()), as_demos(block.after or ())
    lines = [f"{len(before)} → {len(after)} demonstrations\n"]
    lines += [f"{i}. {'kept' if d in before else 'new'}: {demo(d)}" for i, d in enumerate(after, 1)]
    lines += [f"- removed: {demo(d)}" for d in before if d not in after]
    return "\n".join(lines)


def demo(value: Demo) -> str:
    """Return a demonstration on one line."""
    sides = [
        ", ".join(f"{name}: {line(item, 200)}" for name, item in value[s].items())
        for s in ("inputs", "outputs")
    ]
    return " ⟶ ".join(escape(side) for side in sides)


@render_block.register
def _(block: Examples) -> str:
    lines = [f"### {block.title}\n"]
    for example in block.items:
        lines.append(f"- **{escape(block.heading(example))}**")
        for title, values in block.groups(example):
            shown = "; ".join(f"{name}: {line(value, 300)}" for name, value in values.items())
            lines.append(f"  - {title}: {escape(shown)}")
    return "\n".join(lines)


def mermaid(drawing: GraphDocument) -> str:
    """Return a graph as a Mermaid flow chart."""
    ids = {name: f"n{i}" for i, (name, _) in enumerate(drawing["nodes"])}
    lines = ["flowchart LR"]
    for name, kind in drawing["nodes"]:
        title = _label(name.lstrip("$"))
        lines.append(
            f'    {ids[name]}(["{title}"])'
            if kind == "input"
            else f'    {ids[name]}["{title}<br/>{_label(kind)}"]'
        )
    for a, b, ports in drawing["edges"]:
        lines.append(f'    {ids[a]} -->|"{_label(", ".join(ports))}"| {ids[b]}')
    for i, (name, label) in enumerate(drawing["outputs"].items()):
        origin = label.removeprefix("$").split(".")[0]
        source = ids.get(origin) or ids[f"${origin}"]
        lines.append(f'    {source} --> out{i}(["{_label(name)}"])')
    return "\n".join(lines)


def _label(text: str) -> str:
    """Escape text for use in Mermaid's quotes."""
    return " ".join(text.split()).replace("#", "#35;").replace('"', "#quot;").replace("<", "#lt;")
