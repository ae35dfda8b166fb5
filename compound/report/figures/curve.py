"""Draw the score by iteration: the best score of each method against the system runs spent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from compound.evaluation.evaluate import Summary
from compound.report.facts.documents import Curve, DecidedPoint, Point, RunFacts, TrainPoint
from compound.report.figures.graph import OTHERS, PALETTE, clip_name, figure_to_svg

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis


WIDE, TALL = 10.4, 4.7  # inches
SMALL = 8.5
LABEL_ROW = 0.065  # height of a row of labels, as a share of the figure
LETTER = 0.0092  # width of a letter, as a share of the figure


def curve_svg(facts: RunFacts) -> str:
    """Return the plot of a run's facts, with the test scores on the right if there are any.

    Raises:
        MissingExtra: matplotlib is not installed.
    """
    curves = [curve for curve in facts["curves"] if curve["start"]]
    tests = [(row["method"], test) for row in facts["methods"] if (test := row["test"])]
    end = 1.02 * max([1.0, *(curve["end"] for curve in curves)])
    labels = _labels(curves[0], end) if curves else []
    with figure_to_svg(WIDE, TALL, "curve") as (figure, svg):
        head = 0.05 + LABEL_ROW * (1 + max([label.row for label in labels], default=-1))
        room = {"left": 0.06, "right": 0.99, "bottom": 0.19, "top": 1 - head, "wspace": 0.05}
        grid = {"width_ratios": [5.2, 1.0], **room}
        if tests:
            axes, side = figure.subplots(1, 2, sharey=True, gridspec_kw=grid)
            _tests(side, tests)
        else:
            axes = figure.subplots(1, 1, gridspec_kw=room)
        for number, curve in reversed(list(enumerate(curves))):
            _draw(axes, curve, _color(number), main=number == 0)
        for label in labels:
            _annotate(axes, label)
        axes.set_xlim(0, end)
        axes.set_xlabel("system runs spent on the search", size=9, color=PALETTE["ink"])
        axes.set_ylabel("score", size=9, color=PALETTE["ink"])
        style_axes(axes)
        handles, names = axes.get_legend_handles_labels()
        figure.legend(handles[::-1], names[::-1], loc="lower center", ncols=5, frameon=False, fontsize=SMALL,
                      labelcolor=PALETTE["ink"], handlelength=1.8, columnspacing=1.8)  # fmt: skip
    return svg[0]


def _color(number: int) -> str:
    return PALETTE["accent"] if number == 0 else PALETTE[OTHERS[(number - 1) % len(OTHERS)]]


def _draw(axes: Axes, curve: Curve, color: str, *, main: bool) -> None:
    """Draw a method: the line of its best score, and for the main method every comparison."""
    start, name = curve["start"][0], curve["method"]
    accepted = [d for d in curve["decisions"] if d["accepted"]]
    kept = [start, *map(_point, accepted)]
    xs, ys = [p["at"] for p in kept], [p["mean"] for p in kept]
    end = max(curve["end"], xs[-1])
    axes.plot([*xs, end], [*ys, ys[-1]], drawstyle="steps-post", color=color, linewidth=1.8 if main else 1.2,
              linestyle="-" if main else (0, (5, 2)), label=f"best so far: {clip_name(name)}")  # fmt: skip
    if not main:
        axes.plot(xs[1:], ys[1:], "o", color=color, markersize=4)
        return
    rejected = [_point(d) for d in curve["decisions"] if not d["accepted"]]
    _points(axes, kept, color, color, "validation, accepted")
    _points(axes, rejected, PALETTE["muted"], PALETTE["paper"], "validation, rejected")
    _trained(axes, curve["train"])


def _point(decided: DecidedPoint) -> Point:
    """Return the candidate's score at a decision."""
    after = decided["after"]
    return {"at": decided["at"], "mean": after["mean"], "low": after["low"], "high": after["high"]}


def _points(axes: Axes, points: Sequence[Point], color: str, fill: str, label: str) -> None:
    """Draw means with their 95 % intervals."""
    if not points:
        return
    for point in points:
        if (limits := finite(point["low"], point["high"])) is not None:
            axes.plot([point["at"]] * 2, limits, color=color, linewidth=1.1, alpha=0.75)
    axes.plot([p["at"] for p in points], [p["mean"] for p in points], "o", color=color, markersize=6.5,
              markerfacecolor=fill, markeredgewidth=1.3, label=f"{label} (95 %)", zorder=4)  # fmt: skip


def _trained(axes: Axes, comparisons: Sequence[TrainPoint]) -> None:
    """Draw each job's comparison on train examples as a stem from the incumbent's to the proposal's score."""
    color, wide = PALETTE["muted"], 0.9
    for point in comparisons:
        axes.plot([point["at"]] * 2, [point["before"], point["after"]], color=color, linewidth=wide)
        axes.plot(point["at"], point["before"], "_", markersize=7, color=color, linewidth=wide)
    found = [point for point in comparisons if point["proposed"]]
    if found:
        axes.plot([p["at"] for p in found], [p["after"] for p in found], "^", markersize=4.5,
                  color=PALETTE["muted"], label="train: incumbent, proposal")  # fmt: skip


@dataclass(frozen=True)
class _Label:
    """Label of a decision: its text, its position, its row above the plot, and the labelled point."""

    text: str
    middle: float
    row: int
    point: tuple[float, float]


def _labels(curve: Curve, end: float) -> list[_Label]:
    taken: list[float] = []
    labels = []
    for decided in curve["decisions"]:
        text = ", ".join(clip_name(key) for key in decided["changed"][:2])
        more = len(decided["changed"]) - 2
        text += f" +{more}" if more > 0 else ""
        text = text if decided["accepted"] else f"({text})"
        half = LETTER * len(text) / 2
        middle = min(max(decided["at"] / end, half), 1 - half)
        free = [row for row, right in enumerate(taken) if right < middle - half]
        row = free[0] if free else len(taken)
        taken[row : row + 1] = [middle + half + 0.02]
        high = decided["after"]["high"]
        point = (decided["at"], decided["after"]["mean"] if high is None else high)
        labels.append(_Label(text, middle * end, row, point))
    return labels


def _annotate(axes: Axes, label: _Label) -> None:
    """Write the label of a decision above the plot, with a thin line down to its point."""
    (x, y), top = label.point, 1.02 + label.row * LABEL_ROW * 1.35
    color = PALETTE["muted" if label.text.startswith("(") else "ink"]
    behind = {"facecolor": PALETTE["paper"], "edgecolor": "none", "pad": 0.8}
    across = axes.get_xaxis_transform()
    axes.plot([x, x], [y, y], alpha=0)  # extends the axis limits to the end of the interval
    axes.annotate("", (x, y), (x, top), xycoords="data", textcoords=across,
                  arrowprops={"arrowstyle": "-", "color": PALETTE["rule"], "linewidth": 0.8, "shrinkB": 0},
                  annotation_clip=False)  # fmt: skip
    axes.text(label.middle, top, label.text, transform=across, size=SMALL, color=color, ha="center",
              va="bottom", bbox=behind)  # fmt: skip


def _tests(axes: Axes, rows: Sequence[tuple[str, Summary]]) -> None:
    """Draw the test scores, with a column for each method."""
    for x, (_, test) in enumerate(rows):
        color = PALETTE["muted"] if x == 0 else _color(x - 1)
        if (limits := finite(test["low"], test["high"])) is not None:
            axes.plot([x, x], limits, color=color, linewidth=1.4)
        axes.plot(x, test["mean"], "s", color=color, markersize=6)
    axes.set_xlim(-0.6, len(rows) - 0.4)
    names = [clip_name(method, 14) for method, _ in rows]
    axes.set_xticks(range(len(rows)), names, rotation=35, ha="right", rotation_mode="anchor")
    axes.set_title("test split", size=9, color=PALETTE["ink"], pad=6)
    style_axes(axes)
    axes.tick_params(axis="y", labelleft=False)


def finite(low: float | None, high: float | None) -> list[float] | None:
    """Return the limits of an interval, or ``None`` if they are not finite."""
    return None if low is None or high is None else [low, high]


def use_integer_ticks(axis: Axis) -> None:
    """Restrict the ticks of an axis to integers."""
    from matplotlib.ticker import MaxNLocator

    locator = axis.get_major_locator()
    assert isinstance(locator, MaxNLocator)  # the locator of a linear scale
    locator.set_params(integer=True)


def style_axes(axes: Axes) -> None:
    """Remove all lines of the axes except the baseline and a faint grid."""
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(PALETTE["rule"])
    axes.grid(axis="y", color=PALETTE["rule"], linewidth=0.7)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=SMALL, color=PALETTE["rule"], labelcolor=PALETTE["muted"], length=0)
