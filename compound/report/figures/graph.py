"""Draw the graph of a system as SVG, with the palette and canvas that all figures share.

Figures are drawn in the colours of `PALETTE`, which `use_page_colors` replaces by the variables of a page.
"""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from compound.errors import MissingExtra
from compound.graph.draw import GraphDocument
from compound.report.figures.graph_layout import Box, Layout, Route, layout

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


PALETTE = {
    "ink": "#1f2329",
    "muted": "#667080",
    "rule": "#d5dae1",
    "paper": "#fffffe",
    "accent": "#2458a8",
    "good": "#1b7d4a",
    "llm": "#e2ebfa",
    "retriever": "#e1f3e7",
    "choice": "#fcefd6",
    "function": "#eceff3",
    "flow": "#efe5f7",
    "other1": "#a85d1c",
    "other2": "#7b4fa4",
    "other3": "#0e7a82",
}
FILL = {
    "llm": "llm",
    "retriever": "retriever",
    "selector": "choice",
    "hyperparameter": "choice",
    "loop": "flow",
    "map": "flow",
}
OTHERS = ("other1", "other2", "other3")

LETTER = 0.078  # inches, width of a letter of a node's name
SMALL = 0.062  # inches, width of a letter of an edge's label
ROW, TALL = 0.78, 0.46  # inches, distance of rows and height of a node


def graph_svg(drawing: GraphDocument) -> str:
    """Return the SVG of a graph, given as by `compound.graph.draw.as_document`.

    Raises:
        MissingExtra: matplotlib is not installed.
    """
    plan = layout(drawing)
    wide, columns = _columns(plan)
    tall = ROW * (plan.rows - 1) + TALL + 0.2
    with figure_to_svg(wide, tall, "graph") as (figure, svg):
        axes = figure.add_axes((0, 0, 1, 1))
        axes.set(xlim=(0, wide), ylim=(-tall / 2, tall / 2))
        axes.axis("off")
        for route in plan.routes:
            _draw_route(axes, plan, route, columns)
        for box in plan.boxes:
            _draw_box(axes, box, columns)
    return svg[0]


def _name(box: Box) -> str:
    return clip_name(box.name.lstrip("$=") if box.kind in ("input", "output") else box.name)


def clip_name(text: str, limit: int = 24) -> str:
    """Truncate a name for a drawing."""
    return text if len(text) <= limit else text[: limit - 1] + "…"


def _width(box: Box) -> float:
    return max(0.8, LETTER * len(_name(box)) + 0.3, SMALL * len(box.kind) + 0.3)


def _columns(plan: Layout) -> tuple[float, list[tuple[float, float]]]:
    """Return the width of the drawing, and the centre and width of each layer."""
    widths = [max([_width(b) for b in plan.boxes if b.layer == i], default=0.2) for i in range(plan.layers)]
    place = {box.name: box.layer for box in plan.boxes}
    columns, x = [], 0.05
    for i, width in enumerate(widths):
        labels = [len(clip_name(route.label)) for route in plan.routes if place[route.target] == i]
        x += max([0.55, *(SMALL * length + 0.42 for length in labels)]) if i else 0
        columns.append((x + width / 2, width))
        x += width
    return x + 0.05, columns


def _draw_box(axes: Axes, box: Box, columns: Sequence[tuple[float, float]]) -> None:
    """Draw a node: inputs and outputs as pills, selected values dashed, loops and maps with a shadow."""
    from matplotlib.patches import FancyBboxPatch

    outside = box.kind in ("input", "output")
    middle, y, width, tall = columns[box.layer][0], box.row * ROW, _width(box), TALL * (0.7 if outside else 1)
    corner = (middle - width / 2, y - tall / 2)
    style = f"round,pad=0,rounding_size={tall / 2 if outside else 0 if box.kind == 'function' else 0.08}"
    look: dict[str, Any] = {
        "facecolor": PALETTE["paper" if outside else FILL.get(box.kind, "function")],
        "edgecolor": PALETTE["muted"],
        "linestyle": (0, (3, 2)) if FILL.get(box.kind) == "choice" else "solid",
        "linewidth": 1.0,
    }
    if FILL.get(box.kind) == "flow":
        axes.add_patch(FancyBboxPatch((corner[0] + 0.05, corner[1] - 0.05), width, tall, style, **look))
    axes.add_patch(FancyBboxPatch(corner, width, tall, style, **look))
    up = 0.0 if outside else 0.075
    axes.text(middle, y + up, _name(box), size=9.5, ha="center", va="center", color=PALETTE["ink"])
    if not outside:
        axes.text(middle, y - 0.105, box.kind, size=7.5, ha="center", va="center", color=PALETTE["muted"])


def _draw_route(axes: Axes, plan: Layout, route: Route, columns: Sequence[tuple[float, float]]) -> None:
    """Draw an edge as a smooth arrow, labelled with its ports near the end."""
    from matplotlib.patches import FancyArrowPatch
    from matplotlib.path import Path

    boxes = {box.name: box for box in plan.boxes}
    source, target = boxes[route.source], boxes[route.target]
    points = [(columns[source.layer][0] + _width(source) / 2, source.row * ROW)]
    for layer, row in route.through:
        middle, width = columns[int(layer)]
        points += [(middle - width / 2, row * ROW), (middle + width / 2, row * ROW)]
    points.append((columns[target.layer][0] - _width(target) / 2, target.row * ROW + _arrival(plan, route)))
    vertices, codes = [points[0]], [Path.MOVETO]
    for (x0, y0), (x1, y1) in pairwise(points):
        half = (x1 - x0) / 2
        vertices += [(x0 + half, y0), (x1 - half, y1), (x1, y1)]
        codes += [Path.CURVE4] * 3
    arrow: dict[str, Any] = {
        "arrowstyle": "-|>",
        "mutation_scale": 11,
        "linewidth": 1.0,
        "color": PALETTE["muted"],
    }
    axes.add_patch(FancyArrowPatch(path=Path(vertices, codes), **arrow))
    (x0, y0), (x1, y1) = points[-2:]
    part = 0.56  # label past the middle, so that two edges crossing in the middle have separate labels
    y = y0 + (y1 - y0) * part * part * (3 - 2 * part)
    behind = {"facecolor": PALETTE["paper"], "edgecolor": "none", "pad": 1.0}
    axes.text(x0 + (x1 - x0) * part - 0.04, y, clip_name(route.label), size=7.5, ha="center", va="center",
              color=PALETTE["muted"], bbox=behind if route.label else None)  # fmt: skip


def _arrival(plan: Layout, route: Route) -> float:
    """Return the offset at which an edge meets its node, where several edges spread over the side."""
    rows = {box.name: box.row for box in plan.boxes}
    arriving = [r for r in plan.routes if r.target == route.target]
    arriving.sort(key=lambda r: r.through[-1][1] if r.through else rows[r.source])
    step = min(0.13, 0.7 * TALL / len(arriving))
    return step * (arriving.index(route) - (len(arriving) - 1) / 2)


@contextmanager
def figure_to_svg(width: float, height: float, prefix: str) -> Iterator[tuple[Figure, list[str]]]:
    """Yield a figure to draw on, and a list that receives its SVG at the end.

    Text stays text, ids start with ``prefix`` to be unique on a page, and nothing external is referenced.
    Styles are reset to matplotlib's defaults, because a ``matplotlibrc`` in the working directory may be
    untrusted and can run LaTeX on every text.
    """
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
    except ImportError:
        raise MissingExtra("the report's figures", "matplotlib", "report") from None
    rules = {"svg.fonttype": "none", "svg.hashsalt": prefix, "text.parse_math": False}
    nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    file, svg = io.StringIO(), list[str]()
    with mpl.rc_context(), warnings.catch_warnings():
        mpl.rcdefaults()
        mpl.rcParams.update(rules)
        warnings.filterwarnings("ignore", message="Glyph .* missing")  # the reader's fonts draw it
        figure = Figure(figsize=(width, height))
        yield figure, svg
        figure.savefig(file, format="svg", transparent=True, metadata=nothing)
    text = file.getvalue()
    text = text[text.index("<svg") :]
    svg.append(re.sub(r'( id="|href="#|url\(#)', rf"\g<1>{prefix}-", text).strip())


def with_background(svg: str) -> str:
    """Return an SVG with a background, for use as a file.

    >>> with_background('<svg width="1"><g/></svg>')
    '<svg width="1"><rect width="100%" height="100%" fill="#fffffe"/><g/></svg>'
    """
    end = svg.index(">") + 1
    return f'{svg[:end]}<rect width="100%" height="100%" fill="{PALETTE["paper"]}"/>{svg[end:]}'


def use_page_colors(svg: str) -> str:
    """Return an SVG with its colours replaced by the page's variables (``--ink``, ``--paper`` …)."""
    names = {value: name for name, value in PALETTE.items()}
    return re.sub("|".join(names), lambda found: f"var(--{names[found[0]]})", svg)
