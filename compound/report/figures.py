"""The canvas, palette and style that all plots share, and the plot of scores by iteration.

Plots are drawn in the colours of `PALETTE`, which `use_page_colors` replaces by the variables of a
page.
"""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from compound.core.errors import MissingExtra

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
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
OTHERS = ("other1", "other2", "other3")
WIDE, TALL = 10.4, 4.7  # inches of a plot over the whole page
SMALL = 8.5
STYLE = {
    "axes.axisbelow": True,
    "axes.edgecolor": PALETTE["rule"],
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.labelcolor": PALETTE["ink"],
    "axes.labelsize": SMALL,
    "axes.spines.left": False,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlecolor": PALETTE["ink"],
    "axes.titlelocation": "left",
    "axes.titlesize": 9.5,
    "figure.constrained_layout.use": True,
    "grid.color": PALETTE["rule"],
    "grid.linewidth": 0.7,
    "legend.fontsize": SMALL,
    "legend.frameon": False,
    "legend.labelcolor": PALETTE["ink"],
    "text.color": PALETTE["ink"],
    "text.parse_math": False,
    "svg.fonttype": "none",
    "xtick.labelcolor": PALETTE["muted"],
    "xtick.labelsize": SMALL,
    "xtick.major.size": 0,
    "ytick.labelcolor": PALETTE["muted"],
    "ytick.labelsize": SMALL,
    "ytick.major.size": 0,
}


@contextmanager
def figure_to_svg(width: float, height: float, prefix: str) -> Iterator[tuple[Figure, list[str]]]:
    """Yield a figure to draw on, and a list that receives its SVG at the end.

    Text stays text, ids start with ``prefix`` to be unique on a page, and nothing external is
    referenced. Styles are reset to matplotlib's defaults, because a ``matplotlibrc`` in the working
    directory may be untrusted and can run LaTeX on every text.

    Raises:
        MissingExtra: matplotlib is not installed.
    """
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
    except ImportError:
        raise MissingExtra("the report's figures", "matplotlib", "report") from None
    nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    file, svg = io.StringIO(), list[str]()
    with mpl.rc_context(), warnings.catch_warnings():
        mpl.rcdefaults()
        mpl.rcParams.update({**STYLE, "svg.hashsalt": prefix})
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
    """Return an SVG with its colours replaced by the variables of a page."""
    names = {value: name for name, value in PALETTE.items()}
    return re.sub("|".join(names), lambda found: f"var(--{names[found[0]]})", svg)


def clip_name(text: str, limit: int = 24) -> str:
    """Truncate a name for a drawing."""
    return text if len(text) <= limit else text[: limit - 1] + "…"


def use_integer_ticks(axis: Axis) -> None:
    """Restrict the ticks of an axis to integers."""
    from matplotlib.ticker import MaxNLocator

    locator = axis.get_major_locator()
    assert isinstance(locator, MaxNLocator)  # the locator of a linear scale
    locator.set_params(integer=True)


def draw_interval(axes: Axes, x: float, limits: Mapping[str, Any], color: str) -> None:
    """Draw the interval of a score as a vertical line, if its limits are known."""
    if limits["low"] is not None and limits["high"] is not None:
        axes.plot([x, x], [limits["low"], limits["high"]], color=color, linewidth=1.2, alpha=0.75)


# --- scores by iteration --------------------------------------------------------------------------


def curve_svg(facts: Mapping[str, Any]) -> str:
    """Return the plot of a run's scores, with the test scores on the right if there are any.

    Raises:
        MissingExtra: matplotlib is not installed.
    """
    curves = [curve for curve in facts["curves"] if curve["start"]]
    tests = [(row["method"], row["test"]) for row in facts["methods"] if row["test"]]
    widths = [5.2, 1.0] if tests else [1.0]
    with figure_to_svg(WIDE, TALL, "curve") as (figure, svg):
        panels = figure.subplots(1, len(widths), sharey=True, squeeze=False, width_ratios=widths)
        axes = panels[0, 0]
        for place, curve in reversed(list(enumerate(curves))):
            _draw_curve(axes, curve, _color(place), main=place == 0)
        axes.set(xlim=(0, 1.02 * max([1.0, *(curve["end"] for curve in curves)])))
        axes.set(xlabel="system runs spent on the search", ylabel="score")
        if tests:
            _draw_tests(panels[0, 1], tests)
        handles, names = axes.get_legend_handles_labels()
        figure.legend(handles[::-1], names[::-1], loc="outside lower center", ncols=5)
    return svg[0]


def _color(place: int) -> str:
    return PALETTE["accent" if place == 0 else OTHERS[(place - 1) % len(OTHERS)]]


def _draw_curve(axes: Axes, curve: Mapping[str, Any], color: str, *, main: bool) -> None:
    """Draw a method: the line of its best score, and for the main method every comparison."""
    decided = [{**d, **d["after"], "name": str(d["decision"])} for d in curve["decisions"]]
    kept = [{**curve["start"][0], "name": ""}, *(d for d in decided if d["accepted"])]
    rejected = [{**d, "name": f"({d['name']})"} for d in decided if not d["accepted"]]
    xs, ys = [point["at"] for point in kept], [point["mean"] for point in kept]
    axes.plot(
        [*xs, max(curve["end"], xs[-1])],
        [*ys, ys[-1]],
        drawstyle="steps-post",
        color=color,
        linewidth=1.8 if main else 1.2,
        linestyle="-" if main else (0, (5, 2)),
        label=f"best so far: {clip_name(curve['method'])}",
    )
    if main:
        _draw_points(axes, kept, color, color, "validation, accepted (95 %)")
        _draw_points(
            axes, rejected, PALETTE["muted"], PALETTE["paper"], "validation, rejected (95 %)"
        )
        _draw_train(axes, curve["train"])
    else:
        axes.plot(xs[1:], ys[1:], "o", color=color, markersize=4)


def _draw_points(
    axes: Axes, points: Sequence[Mapping[str, Any]], color: str, fill: str, label: str
) -> None:
    """Draw scores with their intervals and the numbers of their decisions."""
    for point in points:
        draw_interval(axes, point["at"], point, color)
        top = point["mean"] if point["high"] is None else point["high"]
        place: dict[str, Any] = {"xytext": (0, 4), "textcoords": "offset points", "ha": "center"}
        axes.annotate(point["name"], (point["at"], top), size=SMALL, color=color, **place)
    if points:
        xs, ys = [point["at"] for point in points], [point["mean"] for point in points]
        look: dict[str, Any] = {"markersize": 6.5, "markerfacecolor": fill, "markeredgewidth": 1.3}
        axes.plot(xs, ys, "o", color=color, label=label, zorder=4, **look)


def _draw_train(axes: Axes, comparisons: Sequence[Mapping[str, Any]]) -> None:
    """Draw each job's comparison on train examples as a stem from before to after."""
    look: dict[str, Any] = {"color": PALETTE["muted"], "linewidth": 0.9}
    for point in comparisons:
        axes.plot([point["at"]] * 2, [point["before"], point["after"]], **look)
        axes.plot(point["at"], point["before"], "_", markersize=7, **look)
    if found := [point for point in comparisons if point["proposed"]]:
        xs, ys = [point["at"] for point in found], [point["after"] for point in found]
        label = "train: incumbent, proposal"
        axes.plot(xs, ys, "^", markersize=4.5, color=PALETTE["muted"], label=label)


def _draw_tests(axes: Axes, rows: Sequence[tuple[str, Mapping[str, Any]]]) -> None:
    """Draw the test scores, with a column for each method."""
    for x, (_, test) in enumerate(rows):
        color = PALETTE["muted"] if x == 0 else _color(x - 1)
        draw_interval(axes, x, test, color)
        axes.plot(x, test["mean"], "s", color=color, markersize=6)
    axes.set(xlim=(-0.6, len(rows) - 0.4), title="test split")
    names = [clip_name(method, 14) for method, _ in rows]
    axes.set_xticks(range(len(rows)), names, rotation=35, ha="right", rotation_mode="anchor")
