"""The canvas, palette and style that all plots share, and the plots of scores and candidates.

Plots are drawn in the colours of `PALETTE`, which `use_page_colors` replaces by the variables of a
page.
"""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compound.core.errors import MissingExtra

if TYPE_CHECKING:
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

PALETTE = {
    "ink": "#1f2329",
    "muted": "#667080",
    "rule": "#d5dae1",
    "paper": "#fffffe",
    "accent": "#2458a8",
    "good": "#1b7d4a",
    "bad": "#b23a2f",
    "llm": "#e2ebfa",
    "retriever": "#e1f3e7",
    "choice": "#fcefd6",
    "function": "#eceff3",
    "flow": "#efe5f7",
    "other1": "#a85d1c",
    "other2": "#7b4fa4",
    "other3": "#0e7a82",
}
WIDE, TALL = 10.4, 3.3  # inches of a plot over the whole page
SMALL = 8.5
STYLE = Path(__file__).with_name("figures.mplstyle")


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
        mpl.rcParams.update(mpl.rc_params_from_file(STYLE, use_default_template=False))
        mpl.rcParams["svg.hashsalt"] = prefix
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


# --- scores and candidates ------------------------------------------------------------------------


def scores_svg(facts: Mapping[str, Any]) -> str:
    """Return the plot of each method's scores, and of the differences by example.

    Raises:
        MissingExtra: matplotlib is not installed.
    """
    methods = [row for row in facts["methods"] if row["valid"] or row["test"]]
    gains = sorted(row["difference"] for row in facts["examples"]["rows"])
    panels = 2 if facts["changes"] and gains else 1
    with figure_to_svg(WIDE, max(2.4, 0.55 * len(methods) + 1.4), "scores") as (figure, svg):
        axes = figure.subplots(1, panels, squeeze=False)[0]
        for split, label, up, color in (
            ("valid", "validation", 0.14, PALETTE["muted"]),
            ("test", "test", -0.14, PALETTE["accent"]),
        ):
            found = [(up - y, row[split]) for y, row in enumerate(methods) if row[split]]
            known = [(y, s["low"], s["high"]) for y, s in found if s["low"] is not None]
            axes[0].hlines(*columns_of(known, 3), color=color, linewidth=2.2, alpha=0.55)
            means, places = [score["mean"] for _, score in found], [y for y, _ in found]
            axes[0].plot(means, places, "o", color=color, markersize=6, label=label)
        names = [clip_name(row["method"]) for row in methods]
        axes[0].set_yticks([-y for y in range(len(names))], names, color=PALETTE["ink"])
        axes[0].set(ylim=(0.6 - len(names), 0.6), xlabel="score")
        axes[0].grid(visible=True, axis="x")
        axes[0].grid(visible=False, axis="y")
        figure.legend(loc="outside lower left", ncols=2)
        if panels == 2:
            colors = [PALETTE["bad" if g < 0 else "good" if g > 0 else "muted"] for g in gains]
            axes[1].bar(range(1, len(gains) + 1), gains, width=0.8, color=colors)
            axes[1].axhline(0, color=PALETTE["muted"], linewidth=0.9)
            axes[1].set(xlabel="examples, sorted", ylabel="score after minus before")
            use_integer_ticks(axes[1].xaxis)
    return svg[0]


def columns_of(rows: Sequence[Sequence[float]], number: int) -> list[list[float]]:
    """Return the columns of rows, which may be none."""
    return [[row[i] for row in rows] for i in range(number)]


FATES = {  # label, colour and marker; other fates are those of candidates that were not proposed
    "start": ("initial", "ink", "s"),
    "chosen": ("chosen", "good", "D"),
    "decided": ("compared on validation examples", "accent", "o"),
    "other": ("compared on train examples only", "muted", "o"),
}


def fate_of(candidate: Mapping[str, Any]) -> str:
    """Return the group of a candidate, a key of `FATES`."""
    groups = {"start": "start", "not proposed": "other", "proposed": "other"}
    return "chosen" if candidate["chosen"] else groups.get(candidate["fate"], "decided")


def candidates_svg(candidates: Mapping[str, Any]) -> str:
    """Return the plot of all candidates in order, and of their gain against their cost.

    Raises:
        MissingExtra: matplotlib is not installed.
    """
    with figure_to_svg(WIDE, TALL, "candidates") as (figure, svg):
        scores, costs = figure.subplots(1, 2, width_ratios=[1.5, 1])
        for group, (label, color, marker) in reversed(FATES.items()):
            rows = [row for row in candidates["rows"] if fate_of(row) == group]
            if not rows:
                continue
            main = group != "other"
            look: dict[str, Any] = {"color": PALETTE[color], "marker": marker, "linestyle": ""}
            look["markersize"] = 6.5 if main else 3.5
            known = [(r["number"], r["low"], r["high"]) for r in rows if r["low"] is not None]
            faint = 0.7 if main else min(0.25, 20 / len(rows))
            scores.vlines(*columns_of(known, 3), color=PALETTE[color], alpha=faint)
            points = [(row["number"], row["mean"]) for row in rows]
            scores.plot(*columns_of(points, 2), label=label, **look)
            gains = [(row["cost"], row["gain"]) for row in rows if row["gain"] is not None]
            costs.plot(*columns_of(gains, 2), **look)
        best = sorted((r["cost"], r["gain"]) for r in candidates["rows"] if r["on_front"])
        costs.step(*columns_of(best, 2), where="post", color=PALETTE["good"], linewidth=1.2)
        scores.set(xlabel="candidate, in the order of the search", ylabel="mean score (95 %)")
        use_integer_ticks(scores.xaxis)
        unit = {"usd": "US dollars"}.get(candidates["cost"], candidates["cost"])
        costs.set(xlabel=f"{unit} per request", ylabel="gain on the same examples")
        figure.legend(*scores.get_legend_handles_labels(), loc="outside lower center", ncols=4)
    return svg[0]
