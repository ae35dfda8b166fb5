"""Figures of local rewards, with a panel for each component, as SVG for the report and the notebook.

The data come from `compound.rewards.inspection.inspect`. Some figures follow OPTIMAS, section 5. Each
``draw_…`` function accepts any matplotlib axes, so that papers can arrange the panels freely.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from compound.report.figures.curve import finite, style_axes, use_integer_ticks
from compound.report.figures.graph import PALETTE, clip_name, figure_to_svg
from compound.rewards.inspection.explain import Attribution
from compound.rewards.inspection.views import HeadView, Overview, Point

if TYPE_CHECKING:
    from matplotlib.axes import Axes


COLUMNS = 3
WIDE, TALL = 3.4, 2.9  # inches of a panel
SMALL = 8.5
FEATURES = 8  # bars per panel
WORDS = 24  # bars of an attribution
MANY = 20  # above this many distinct values, group them
FORMS = {
    "words": "number of words",
    "characters": "number of characters",
    "lines": "line breaks",
    "repeats": "repeated words",
    "sentence": "ends like a sentence",
    "capital": "begins with a capital",
    "digits": "contains digits",
    "items": "number of items",
}

Draw = Callable[["Axes", HeadView], None]


def calibration_svg(heads: Sequence[HeadView]) -> str:
    """Return the calibration plot: predicted against observed probability of a correct ranking.
    Raises:
        MissingExtra: matplotlib is not installed.
    """
    return _panels("calibration", heads, draw_calibration)


def margins_svg(heads: Sequence[HeadView]) -> str:
    """Return the histograms of the held-out margins."""
    return _panels("margins", heads, draw_margins)


def alignment_svg(heads: Sequence[HeadView]) -> str:
    """Return the plot of local against global rewards (OPTIMAS, figure 5a)."""
    return _panels("alignment", heads, draw_alignment)


def length_svg(heads: Sequence[HeadView]) -> str:
    """Return the plot of local rewards against lengths, values or labels of outputs (OPTIMAS, figure 5c)."""
    return _panels("length", heads, draw_length)


def weights_svg(heads: Sequence[HeadView]) -> str:
    """Return the bar charts of the weights of the named features."""
    return _panels("weights", heads, draw_weights, wide=4.9, columns=2, tall=3.0)


def drift_svg(heads: Sequence[HeadView]) -> str:
    """Return the plot of accuracies over iterations."""
    return _panels("drift", heads, draw_drift, legend=True)


def steps_svg(overview: Overview) -> str:
    """Return the plot of the global reward over the decisions, with the changes (OPTIMAS, figure 4)."""
    with figure_to_svg(7.2, 3.4, "steps") as (figure, svg):
        draw_steps(figure.subplots(1, 1), overview)
        figure.tight_layout()
    return svg[0]


def attribution_svg(chosen: Attribution, rejected: Attribution) -> str:
    """Return the bar charts of the effect of each word of a pair on its rewards."""
    tall = 1.2 + 0.2 * min(WORDS, max(len(chosen.pieces), len(rejected.pieces), 1))
    with figure_to_svg(8.0, tall, "attribution") as (figure, svg):
        sides = figure.subplots(1, 2)
        sizes = [abs(piece.effect) for side in (chosen, rejected) for piece in side.pieces]
        for axes, side, name in zip(
            sides, (chosen, rejected), ("better output", "worse output"), strict=True
        ):
            draw_attribution(axes, side, 1.1 * max(sizes, default=0.0) or 1.0)
            reward = f"{side.reward:+.2f}".replace("-", "−")
            axes.set_title(f"{name}: reward {reward}", size=9.5, color=PALETTE["ink"], loc="left")
        figure.tight_layout()
    return svg[0]


def _panels(
    name: str,
    heads: Sequence[HeadView],
    draw: Draw,
    *,
    wide: float = WIDE,
    tall: float = TALL,
    columns: int = COLUMNS,
    legend: bool = False,
) -> str:
    """Draw a panel for each component."""
    across = max(1, min(columns, len(heads)))
    down = max(1, -(-len(heads) // across))
    per_row = {1: 1, 2: 2}.get(across, 4)  # entries of the legend that fit in a row
    foot = 0.1 + 0.2 * (4 // per_row) if legend else 0.0
    with figure_to_svg(wide * across, tall * down + foot, name) as (figure, svg):
        grid = figure.subplots(down, across, squeeze=False)
        for axes, head in zip(grid.flat, heads, strict=False):
            draw(axes, head)
            axes.set_title(clip_name(head.component), size=9.5, color=PALETTE["ink"], loc="left")
        for axes in grid.flat[len(heads) :]:
            axes.axis("off")
        figure.tight_layout(rect=(0, foot / (tall * down + foot), 1, 1), w_pad=2.0, h_pad=1.8)
        if legend and len(heads):
            handles, names = grid.flat[0].get_legend_handles_labels()
            figure.legend(handles, names, loc="lower center", ncols=per_row, frameon=False, fontsize=SMALL,
                          labelcolor=PALETTE["ink"])  # fmt: skip
    return svg[0]


def draw_calibration(axes: Axes, head: HeadView) -> None:
    """Draw predicted against observed probabilities; the diagonal is perfect calibration."""
    axes.plot([0.5, 1], [0.5, 1], color=PALETTE["muted"], linewidth=0.9, linestyle=(0, (4, 3)))
    axes.plot([b.stated for b in head.bins], [b.observed for b in head.bins], "o-", color=PALETTE["accent"],
              markersize=5.5, linewidth=1.3)  # fmt: skip
    axes.set(xlim=(0.49, 1.01), ylim=(min([0.4, *(b.observed - 0.04 for b in head.bins)]), 1.03))
    _label(axes, "predicted probability", "share ranked correctly")
    _note(axes, "" if head.error is None else f"mean error {head.error:.2f}", low=True)


def draw_margins(axes: Axes, head: HeadView) -> None:
    """Draw the histogram of the margins; outliers count in the outermost bars."""
    margins = np.asarray(head.margins)
    edge = max(1.0, float(np.quantile(np.abs(margins), 0.98))) if len(margins) else 1.0
    bins = np.linspace(-edge, edge, 25).tolist()
    shown = np.clip(margins, -edge, edge)
    for part, color in ((shown[margins < 0], "other1"), (shown[margins >= 0], "accent")):
        axes.hist(part, bins=bins, color=PALETTE[color], edgecolor=PALETTE["paper"], linewidth=0.6)
    axes.axvline(0, color=PALETTE["muted"], linewidth=0.9)
    axes.set_ylim(0, axes.get_ylim()[1] * 1.15)  # space for the note
    use_integer_ticks(axes.yaxis)
    _label(axes, "margin in log odds: wrong < 0 < right", "held-out pairs")
    _note(axes, f"{head.accuracy.mean:.0%} right")


def draw_alignment(axes: Axes, head: HeadView) -> None:
    """Draw each candidate's local and global reward, both minus the mean of the call, and their trend."""
    _scatter(axes, [(p.local, p.global_) for p in head.points])
    _label(axes, "local reward minus call mean", "global reward minus call mean")
    _note(axes, "" if head.correlation is None else f"rank correlation {head.correlation:.2f}", low=True)


def draw_length(axes: Axes, head: HeadView) -> None:
    """Draw each candidate's local reward by length, value or label."""
    if head.measure == "label":
        _by_label(axes, head.points, head.labels)
    else:
        _scatter(axes, [(p.x, p.local) for p in head.points])
    if head.measure == "words":
        use_integer_ticks(axes.xaxis)
    names = {"words": "words of the output", "value": "the output", "label": ""}
    _label(axes, names[head.measure], "local reward minus call mean")


def _by_label(axes: Axes, points: Sequence[Point], labels: Sequence[str]) -> None:
    for place in range(len(labels)):
        found = [p.local for p in points if p.x == place]
        axes.plot([place] * len(found), found, "o", color=PALETTE["accent"], alpha=0.3, markersize=4,
                  markeredgewidth=0)  # fmt: skip
        if found:
            mean = sum(found) / len(found)
            axes.plot([place - 0.3, place + 0.3], [mean, mean], color=PALETTE["ink"], linewidth=1.8)
    names = [clip_name(label.partition("=")[2], 16) for label in labels]
    crowded = sum(map(len, names)) > 24
    axes.set_xticks(
        range(len(labels)), names, rotation=30 if crowded else 0, ha="right" if crowded else "center"
    )
    axes.set_xlim(-0.6, len(labels) - 0.4)


def _scatter(axes: Axes, points: Sequence[tuple[float, float]]) -> None:
    """Draw points and their trend."""
    if not points:
        return
    data = np.array(points)
    axes.plot(*data.T, "o", color=PALETTE["accent"], alpha=0.3, markersize=4, markeredgewidth=0)
    axes.plot(*trend(data).T, "o-", color=PALETTE["ink"], markersize=4.5, linewidth=1.5)


def trend(points: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """Return means of points by the value of the first coordinate, or in five equal parts if it has many.

    A value with fewer than three points gets no mean.

    >>> trend([(1, 0.0), (1, 2.0), (1, 4.0), (2, 5.0), (2, 5.0), (2, 5.0), (3, 9.0)]).tolist()
    [[1.0, 2.0], [2.0, 5.0]]
    """
    data = np.asarray(points, float)
    values, counts = np.unique(data[:, 0], return_counts=True)
    if len(values) <= MANY:
        parts = [data[data[:, 0] == value] for value in values[counts >= 3]]
    else:
        parts = np.array_split(data[np.argsort(data[:, 0], kind="stable")], 5)
    return np.array([part.mean(axis=0) for part in parts]).reshape(-1, 2)


def draw_weights(axes: Axes, head: HeadView) -> None:
    """Draw the largest weights with their intervals, the largest on top."""
    found = head.explanation
    if found is None:
        axes.axis("off")
        axes.text(0, 0.5, "no named feature distinguishes the outputs", size=SMALL, color=PALETTE["muted"])
        return
    shown = found.weights[:FEATURES][::-1]
    names = [spoken(weight.feature, sole=sole(head)) for weight in shown]
    for place, weight in enumerate(shown):
        color = PALETTE["accent" if weight.value > 0 else "other1"]
        axes.barh(place, weight.value, color=color, height=0.62, alpha=0.85)
        axes.plot([weight.low, weight.high], [place, place], color=PALETTE["ink"], linewidth=1.1)
    axes.axvline(0, color=PALETTE["muted"], linewidth=0.9)
    axes.set_yticks(range(len(shown)), names)
    axes.set_ylim(min(0, len(shown) - 4) - 0.6, len(shown) - 0.4)
    alike, right = f"{found.agreement.mean:.0%}", f"{found.accuracy.mean:.0%}"
    about = f"agreement {alike}, accuracy {right} (head {head.accuracy.mean:.0%})"
    _label(axes, f"weight; {about}", "", across=False)
    axes.xaxis.label.set_fontsize(SMALL - 0.5)


def sole(head: HeadView) -> bool:
    """Return whether all features belong to the same output field."""
    weights = head.explanation.weights if head.explanation else ()
    return len({_field(weight.feature) for weight in weights}) <= 1


def _field(feature: str) -> str:
    for mark in (" in ", ".", "=", "*", "^"):
        if mark in feature:
            return feature.partition(mark)[0]
    return feature


def spoken(feature: str, *, sole: bool = False) -> str:
    """Return a feature's name in plain words.

    >>> spoken("output.words"), spoken("output in plan", sole=True), spoken("y*x")
    ('output: number of words', 'words also in plan', 'y*x')
    """
    field, inside, other = feature.partition(" in ")
    if inside:
        words = f"words also in {clip_name(other, 18)}"
    else:
        field, dot, form = feature.partition(".")
        if not dot or form not in FORMS:
            return clip_name(feature, 28)
        words = FORMS[form]
    return words if sole else f"{clip_name(field, 14)}: {words}"


def draw_drift(axes: Axes, head: HeadView) -> None:
    """Draw the accuracy over iterations: cross-validated, and on new pairs with earlier rewards."""
    color, when = PALETTE["accent"], [judged.iteration for judged in head.history]
    axes.plot(when, [j.accuracy.mean for j in head.history], "-", color=color, linewidth=1.6,
              label="cross-validated (95 %)")  # fmt: skip
    known = [
        (j.iteration, limits) for j in head.history if (limits := finite(j.accuracy.low, j.accuracy.high))
    ]
    axes.fill_between([at for at, _ in known], [low for _, (low, _) in known],
                      [high for _, (_, high) in known], color=color, alpha=0.15, linewidth=0)  # fmt: skip
    axes.plot([], [], "s", color=PALETTE["other1"], markersize=4.5, label="on new pairs, by earlier rewards")
    for judged in head.drift or ():
        axes.plot(judged.iteration, judged.accuracy.mean, "s", color=PALETTE["other1"],
                  markersize=min(8.0, 3.0 + 0.7 * judged.accuracy.inputs))  # fmt: skip
    axes.axhline(0.5, color=PALETTE["muted"], linewidth=0.9, linestyle=(0, (1, 2)), label="chance")
    lowest = [j.accuracy.mean for j in (*head.history, *(head.drift or ()))]
    axes.set_ylim(min([0.4, *(value - 0.06 for value in lowest)]), 1.05)
    use_integer_ticks(axes.xaxis)
    axes.set_xlim(0.7, max([2, *when, *(j.iteration for j in head.drift or ())]) + 0.3)
    _label(axes, "iteration", "pairs ranked correctly")
    inputs = sum(j.accuracy.inputs for j in head.drift or ())
    right = sum(j.accuracy.mean * j.accuracy.inputs for j in head.drift or ())
    _note(axes, f"new pairs: {right / inputs:.0%} right" if inputs else "", low=True)


def draw_steps(axes: Axes, overview: Overview) -> None:
    """Draw the validation score after each accepted change, labelled with the changed components."""
    steps = overview.steps
    end = max([1, overview.decisions, *(step.at for step in steps)])
    if steps:
        xs, ys = [*(s.at for s in steps), end], [*(s.mean for s in steps), steps[-1].mean]
        axes.plot(xs, ys, drawstyle="steps-post", color=PALETTE["accent"], linewidth=1.3, alpha=0.45)
    for step in steps:
        if limits := finite(step.low, step.high):
            axes.plot([step.at] * 2, limits, "_-", color=PALETTE["accent"], linewidth=1.3)
        axes.plot(step.at, step.mean, "o", color=PALETTE["accent"], markersize=6)
        if step.components:
            names = "\n".join(clip_name(name, 18) for name in step.components)
            axes.annotate(names, (step.at, step.mean), (7, -6), textcoords="offset points", size=SMALL,
                          va="top", color=PALETTE["ink"])  # fmt: skip
    axes.set_xlim(-0.15 * end / 3, end + 0.12 * end)
    use_integer_ticks(axes.xaxis)
    _label(axes, "decision on the validation split", "global reward (validation, 95 %)")


def draw_attribution(axes: Axes, side: Attribution, limit: float) -> None:
    """Draw the loss of reward without each word, in reading order, for the strongest words of a long text."""
    ranked = sorted(range(len(side.pieces)), key=lambda i: -abs(side.pieces[i].effect))[:WORDS]
    shown = [side.pieces[i] for i in sorted(ranked, reverse=True)]
    for place, piece in enumerate(shown):
        color = PALETTE["accent" if piece.effect > 0 else "other1"]
        axes.barh(place, piece.effect, color=color, height=0.7, alpha=0.85)
    axes.axvline(0, color=PALETTE["muted"], linewidth=0.9)
    axes.set_yticks(range(len(shown)), [clip_name(piece.text) for piece in shown])
    axes.set(xlim=(-limit, limit), ylim=(-0.7, max(len(shown), 3) - 0.3))
    _label(axes, "effect on the reward, in log odds", "", across=False)


def _label(axes: Axes, x: str, y: str, *, across: bool = True) -> None:
    axes.set_xlabel(x, size=SMALL, color=PALETTE["ink"])
    axes.set_ylabel(y, size=SMALL, color=PALETTE["ink"])
    style_axes(axes)
    if not across:
        axes.grid(visible=False, axis="y")
        axes.tick_params(axis="y", labelcolor=PALETTE["ink"])


def _note(axes: Axes, text: str, *, low: bool = False) -> None:
    """Write a note into a corner of the panel."""
    x, y, ha, va = (0.98, 0.04, "right", "bottom") if low else (0.02, 0.96, "left", "top")
    axes.text(x, y, text, transform=axes.transAxes, size=SMALL, color=PALETTE["ink"], ha=ha, va=va)
