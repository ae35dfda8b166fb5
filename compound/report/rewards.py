"""The report's section on local rewards: the accuracy of each head, whether it was used, and plots.

The data come from `compound.rewards.inspection`. Some plots follow OPTIMAS, section 5. Each
function in `PLOTS` accepts any matplotlib axes, so that papers can arrange the panels freely.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from pydantic import TypeAdapter

from compound.report.figures import PALETTE, SMALL, clip_name, figure_to_svg, use_integer_ticks
from compound.report.rendering import Columns, Figure, Table, draw_figure, tabulate
from compound.report.text import signed
from compound.rewards.gains import GOLD
from compound.rewards.inspection import HeadView, Overview

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SHOWN = 6  # features per component in the table
MANY = 20  # above this many distinct values, group them
DOTS: dict[str, Any] = {"color": PALETTE["accent"], "alpha": 0.3, "markersize": 4, "mew": 0}
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


USES: Columns = {
    "component": "component",
    "#trust": "local.trust | number",
    "#slope": "local.slope | number",
    "#local evaluations": "local.evaluations | count",
    "#price": "local.price | number",
    "#global price": "local.global_price | number",
    "#runs saved": "'%.1f' | format(local.evaluations * (local.global_price - local.price))",
}


def use_table(heads: Sequence[Mapping[str, Any]]) -> Table:
    """Return the table of what each local reward was used for, and what that saved."""
    return tabulate([head for head in heads if head["local"]], USES)


def weights_of(weights: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the names of the features with the largest weights, each with its weight."""
    sole = has_one_field([weight["feature"] for weight in weights])
    return [f"{spoken(w['feature'], sole=sole)} {signed(w['value'])}" for w in weights[:SHOWN]]


def has_one_field(features: Iterable[str]) -> bool:
    """Return whether all features belong to the same output field."""
    return len(set(map(_field, features))) <= 1


def _field(feature: str) -> str:
    return re.split(r" in |[.=*^]", feature, maxsplit=1)[0]


def spoken(feature: str, *, sole: bool = False) -> str:
    """Return a feature's name in plain words.

    >>> spoken("output.words"), spoken("output in plan", sole=True), spoken("y*x")
    ('output: number of words', 'words also in plan', 'y*x')
    >>> spoken("gold:writer.text.answer.covers")
    'gold answer: covers'
    """
    if feature.startswith(GOLD):
        *_, answer, relation = feature.rsplit(".", 2)
        return f"gold {clip_name(answer, 14)}: {relation}"
    field, inside, other = feature.partition(" in ")
    if inside:
        words = f"words also in {clip_name(other, 18)}"
    else:
        field, dot, form = feature.partition(".")
        if not dot or form not in FORMS:
            return clip_name(feature, 28)
        words = FORMS[form]
    return words if sole else f"{clip_name(field, 14)}: {words}"


# --- plots ----------------------------------------------------------------------------------------


def reward_figures(facts: Mapping[str, Any] | None) -> list[Figure]:
    """Return the figures of the local rewards of a run, from `reward_facts`."""
    if not facts or "problem" in facts:
        return []
    heads = TypeAdapter(Overview).validate_python(facts).heads
    found: list[Figure] = []
    for name in PLOTS if heads else ():
        instead = "" if found else "The figures are in report.html."
        found.append(draw_figure(name, partial(reward_svg, name, heads), instead=instead))
    missing = [figure for figure in found if figure.missing]
    return missing[:1] or found


def reward_svg(name: str, heads: Sequence[HeadView]) -> str:
    """Return a plot of local rewards with a panel for each component.

    Args:
        name: ``calibration``, ``alignment`` (OPTIMAS, figure 5a) or ``length`` (figure 5c).
        heads: the rewards, from `compound.rewards.inspection.Inspection`.

    Raises:
        MissingExtra: matplotlib is not installed.
    """
    across = max(1, min(3, len(heads)))
    down = max(1, -(-len(heads) // across))
    with figure_to_svg(3.4 * across, 3.0 * down, name) as (figure, svg):
        grid = figure.subplots(down, across, squeeze=False)
        for axes, head in zip(grid.flat, heads, strict=False):
            PLOTS[name](axes, head)
            axes.set_title(clip_name(head.component))
        for axes in grid.flat[len(heads) :]:
            axes.axis("off")
    return svg[0]


def _calibration(axes: Axes, head: HeadView) -> None:
    axes.plot([0.5, 1], [0.5, 1], color=PALETTE["muted"], linewidth=0.9, linestyle=(0, (4, 3)))
    stated, observed = [b.stated for b in head.bins], [b.observed for b in head.bins]
    axes.plot(stated, observed, "o-", color=PALETTE["accent"], markersize=5.5, linewidth=1.3)
    axes.set(xlim=(0.49, 1.01), ylim=(min([0.4, *(share - 0.04 for share in observed)]), 1.03))
    axes.set(xlabel="predicted probability", ylabel="share ranked correctly")
    _note(axes, "" if head.error is None else f"mean error {head.error:.2f}", low=True)


def _alignment(axes: Axes, head: HeadView) -> None:
    _scatter(axes, [(point.local, point.global_) for point in head.points])
    axes.set(xlabel="local reward minus call mean", ylabel="global reward minus call mean")
    known = head.correlation is not None
    _note(axes, f"rank correlation {head.correlation:.2f}" if known else "", low=True)


def _length(axes: Axes, head: HeadView) -> None:
    if head.measure == "label":
        _by_label(axes, head)
    else:
        _scatter(axes, [(point.x, point.local) for point in head.points])
    if head.measure == "words":
        use_integer_ticks(axes.xaxis)
    names = {"words": "words of the output", "value": "the output", "label": ""}
    axes.set(xlabel=names[head.measure], ylabel="local reward minus call mean")


def _by_label(axes: Axes, head: HeadView) -> None:
    for place in range(len(head.labels)):
        found = [point.local for point in head.points if point.x == place]
        axes.plot([place] * len(found), found, "o", **DOTS)
        if found:
            mean = sum(found) / len(found)
            axes.plot([place - 0.3, place + 0.3], [mean, mean], color=PALETTE["ink"], linewidth=1.8)
    names = [clip_name(label.partition("=")[2], 16) for label in head.labels]
    turn: dict[str, Any] = {"rotation": 30, "ha": "right"} if sum(map(len, names)) > 24 else {}
    axes.set_xticks(range(len(names)), names, **turn)
    axes.set_xlim(-0.6, len(names) - 0.4)


def _scatter(axes: Axes, points: Sequence[tuple[float, float]]) -> None:
    if points:
        data = np.array(points)
        axes.plot(*data.T, "o", **DOTS)
        axes.plot(*trend(data).T, "o-", color=PALETTE["ink"], markersize=4.5, linewidth=1.5)


def trend(points: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """Return means by the value of the first coordinate, or in five equal parts if it has many.

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


def _note(axes: Axes, text: str, *, low: bool = False) -> None:
    x, y, ha, va = (0.98, 0.04, "right", "bottom") if low else (0.02, 0.96, "left", "top")
    axes.text(x, y, text, transform=axes.transAxes, size=SMALL, ha=ha, va=va)


PLOTS: Mapping[str, Callable[[Axes, HeadView], None]] = {
    "calibration": _calibration,
    "alignment": _alignment,
    "length": _length,
}
