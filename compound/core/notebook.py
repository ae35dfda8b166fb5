"""HTML of bounded size for notebooks, in which all texts are escaped.

Texts of models and data may be hostile: they cannot inject elements, are not read as formulas, and
are cut.
"""

from __future__ import annotations

import html
import importlib
import sys
from collections.abc import Callable, Iterable, Sequence
from itertools import islice

MAX_ROWS = 20
MAX_TEXT = 300  # characters of a cell
MAX_LINES = 60  # lines of a preformatted text
DRAWING = "compound.report.graph:draw"  # of higher layers, so found by name
TEXT = "compound.graph.draw:as_text"
# notebooks read $…$ in HTML as formulas, except in elements of these classes
_PLAIN = 'class="tex2jax_ignore mathjax_ignore"'
_CELL = 'style="text-align:left;vertical-align:top;white-space:pre-wrap;overflow-wrap:anywhere"'


def escape(text: object, longest: int = MAX_TEXT) -> str:
    """Return a text for HTML, cut to a length, without characters that no page can show.

    >>> escape("<b>\\x00" + "x" * 400)[:20], len(escape("x" * 400))
    ('&lt;b&gt;�xxxxxxxxxx', 300)
    """
    shown = str(text)
    shown = shown if len(shown) <= longest else shown[: longest - 1] + "…"
    printable = "".join(c if c.isprintable() or c in "\n\t" else "�" for c in shown)
    return html.escape(printable)


def table(
    headings: Sequence[str], rows: Iterable[Sequence[object]], total: int | None = None
) -> str:
    """Return a table of at most `MAX_ROWS` rows."""
    waiting = iter(rows)
    kept = list(islice(waiting, MAX_ROWS))
    left = total - len(kept) if total is not None else sum(1 for _ in waiting)
    head = "".join(f"<th {_CELL}>{escape(name)}</th>" for name in headings)
    body = "".join(
        f"<tr>{''.join(f'<td {_CELL}>{escape(cell)}</td>' for cell in row)}</tr>" for row in kept
    )
    more = f'<tr><td colspan="{len(headings)}">… {left:,} more</td></tr>' if left > 0 else ""
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}{more}</tbody></table>"


def block(title: str, *parts: str, facts: Iterable[tuple[str, object]] = ()) -> str:
    """Return a title with facts, above parts that are HTML already."""
    listed = [
        f"{escape(name)} {escape(value)}" for name, value in islice(facts, MAX_ROWS) if value != ""
    ]
    line = f"<div>{' · '.join(listed)}</div>" if listed else ""
    return f"<div {_PLAIN}><div><b>{escape(title)}</b></div>{line}{''.join(parts)}</div>"


def preformatted(lines: Sequence[str]) -> str:
    """Return lines of text as they are."""
    more = [f"… {len(lines) - MAX_LINES:,} more lines"] if len(lines) > MAX_LINES else []
    return f"<pre>{'<br>'.join(escape(line) for line in [*lines[:MAX_LINES], *more])}</pre>"


def system_svg(system: object) -> str:
    """Return the drawing of a system."""
    return _found(DRAWING)(system, "svg")


def system_text(name: str, system: object) -> str:
    """Return the nodes of a system as text."""
    return block(f"System {name}", preformatted(_found(TEXT)(system).split("\n")))


def _found(place: str) -> Callable[..., str]:
    module, _, name = place.partition(":")
    found: Callable[..., str] = getattr(importlib.import_module(module), name)
    return found


def in_notebook() -> bool:
    """Return whether this code runs in the kernel of a notebook."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return getattr(shell, "kernel", None) is not None
