"""The report's section on local rewards: the accuracy of each head, whether it was used, and plots.

The data come from `compound.rewards.inspection`. Some plots follow OPTIMAS, section 5. Each
function in `PLOTS` accepts any matplotlib axes, so that papers can arrange the panels freely.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from pydantic import TypeAdapter

from compound.core.errors import CompoundError, MissingExtra
from compound.core.security.untrusted import UntrustedFolder
from compound.optimization.runs.directory import inconsistency_errors
from compound.report.figures import PALETTE, SMALL, clip_name, figure_to_svg, use_integer_ticks
from compound.report.record import to_strict_json
from compound.report.rendering import NONE, Block, Columns, Figure, Table, tabulate
from compound.report.text import count, interval, number, signed
from compound.rewards.inspection import FOLDER, HeadView, Inspection, Overview
from compound.rewards.model import NONE as NO_BACKBONE

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SHOWN = 3  # features per component in the table
FEATURES = 8  # bars per panel
MANY = 20  # above this many distinct values, group them
DOTS: dict[str, Any] = {
    "color": PALETTE["accent"],
    "alpha": 0.3,
    "markersize": 4,
    "markeredgewidth": 0,
}
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
HEADS: Columns = {
    "component": lambda head: str(head.component),
    "#held-out accuracy": lambda head: interval(head.accuracy.to_json()),
    "#pairs": lambda head: count(head.pairs),
    "#inputs": lambda head: count(head.accuracy.inputs),
    "#mean gap": lambda head: number(head.gap),
    "#calibration error": lambda head: number(head.error),
    "#rank correlation": lambda head: number(head.correlation),
    "#jobs using it": lambda head: f"{head.steered} of {head.jobs}",
    "reason not used": lambda head: head.why or NONE,
}
USES: Columns = {
    "component": lambda head: str(head.component),
    "#trust": lambda head: number(head.local.trust),
    "#slope": lambda head: number(head.local.slope),
    "#local evaluations": lambda head: count(head.local.evaluations),
    "#price": lambda head: number(head.local.price),
    "#global price": lambda head: number(head.local.global_price),
    "#runs saved": lambda head: f"{head.local.saved:.1f}",
}
USED = (
    "Use in the last joint search. The slope is the expected gain of the score per unit of the "
    "local reward, trust says how sure it is that the slope is positive, and prices are those of "
    "one evaluation, in system runs. Saved is what the same number of global evaluations would "
    "have cost in addition."
)
EXPLANATIONS: Columns = {
    "component": lambda head: str(head.component),
    "largest weights": lambda head: ", ".join(_largest_weights(head)),
    "#agreement": lambda head: interval(head.explanation.agreement.to_json()),
    "#accuracy": lambda head: interval(head.explanation.accuracy.to_json()),
}
EXPLAINED = (
    "A logistic regression on only the named features approximates each head's held-out ranking. "
    "Weights are log odds per standard deviation. Agreement is the share of held-out pairs that it "
    "orders like the head, accuracy the share that it orders like the global reward."
)


def reward_facts(path: str | Path) -> dict[str, Any] | None:
    """Return the facts on a run's local rewards as JSON types; ``None`` if it has none.

    If the records cannot be read, the reason is returned as ``problem``, and the rest of the report
    is still written.
    """
    if UntrustedFolder(path).kind(f"{FOLDER}/card.json") is None:
        return None
    try:
        with inconsistency_errors(path):
            return to_strict_json(asdict(Inspection.open(path).overview()))
    except CompoundError as error:
        return {"problem": str(error)}


def reward_blocks(facts: Mapping[str, Any]) -> list[Block]:
    """Return the section's blocks."""
    if "problem" in facts:
        return [f"The local rewards of this run cannot be read: {facts['problem']}."]
    overview = TypeAdapter(Overview).validate_python(facts)
    blocks: list[Block] = [_heads(overview), _how(overview)]
    if any(head.local for head in overview.heads):
        blocks += [use_table(overview.heads), USED]
    if explained := [head for head in overview.heads if head.explanation]:
        blocks += [tabulate(explained, EXPLANATIONS), EXPLAINED]
    return [*blocks, *_figures(overview.heads)]


def _heads(overview: Overview) -> Table:
    """Return the table of the components with the quality and the use of their rewards."""
    found = tabulate(overview.heads, HEADS)
    missing = [
        [
            m.component,
            *(NONE, count(m.pairs), NONE, number(m.gap), NONE, NONE, NONE),
            m.why or "no reward was learned",
        ]
        for m in overview.missing
    ]
    return replace(found, rows=[*found.rows, *missing])


def use_table(heads: Sequence[HeadView]) -> Table:
    """Return the table of what each local reward was used for, and what that saved."""
    return tabulate([head for head in heads if head.local], USES)


def _how(overview: Overview) -> str:
    reads = (
        "the numbers and labels of the template"
        if overview.backbone == NO_BACKBONE
        else f"text embeddings of {overview.backbone}"
    )
    trained = ", trained on these pairs" if overview.trained else ""
    return (
        f"Each head is a linear function of {reads}{trained}. Accuracy is the share of output "
        "pairs that it orders like the global reward, on held-out inputs: the mean over inputs "
        "with its 95 % confidence interval. Searches use a reward as far as it predicts the "
        "global one; weights are trained by it only if it is significantly better than chance. "
        "The gap is the mean difference between two outputs for an input, in the latest "
        "iteration; 0 if it is not significant. The correlation is Spearman's, of local with "
        "global rewards among the outputs of a call in held-out pairs."
    )


def _largest_weights(head: HeadView) -> list[str]:
    weights = head.explanation.weights[:SHOWN] if head.explanation else ()
    sole = has_one_field(head)
    return [f"{spoken(w.feature, sole=sole)} {signed(w.value)}" for w in weights]


def has_one_field(head: HeadView) -> bool:
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


# --- plots ----------------------------------------------------------------------------------------


def _figures(heads: Sequence[HeadView]) -> list[Block]:
    names = [name for name in CAPTIONS if name != "drift"] if heads else []
    if any(len(head.history) > 1 for head in heads):
        names.append("drift")
    first = "The figures are in report.html."
    try:
        return [
            Figure(
                name, CAPTIONS[name], svg=reward_svg(name, heads), instead="" if place else first
            )
            for place, name in enumerate(names)
        ]
    except MissingExtra as error:
        return [
            f"The figures need matplotlib, which is not installed: {error.hint}, then run "
            "`compound runs report` on this run."
        ]


def reward_svg(name: str, heads: Sequence[HeadView]) -> str:
    """Return a plot of local rewards with a panel for each component.

    Args:
        name: a name in `PLOTS`: ``calibration``, ``margins``, ``alignment`` (OPTIMAS, figure 5a),
            ``length`` (figure 5c), ``weights`` or ``drift``.
        heads: the rewards, from `compound.rewards.inspection.Inspection`.

    Raises:
        MissingExtra: matplotlib is not installed.
    """
    columns, wide = (2, 4.9) if name == "weights" else (3, 3.4)
    across = max(1, min(columns, len(heads)))
    down = max(1, -(-len(heads) // across))
    with figure_to_svg(wide * across, 3.0 * down, name) as (figure, svg):
        grid = figure.subplots(down, across, squeeze=False)
        for axes, head in zip(grid.flat, heads, strict=False):
            PLOTS[name](axes, head)
            axes.set_title(clip_name(head.component))
        for axes in grid.flat[len(heads) :]:
            axes.axis("off")
        if name == "drift" and heads:
            handles, names = grid.flat[0].get_legend_handles_labels()
            figure.legend(handles, names, loc="outside lower center", ncols=2)
    return svg[0]


def _calibration(axes: Axes, head: HeadView) -> None:
    axes.plot([0.5, 1], [0.5, 1], color=PALETTE["muted"], linewidth=0.9, linestyle=(0, (4, 3)))
    stated, observed = [b.stated for b in head.bins], [b.observed for b in head.bins]
    axes.plot(stated, observed, "o-", color=PALETTE["accent"], markersize=5.5, linewidth=1.3)
    axes.set(xlim=(0.49, 1.01), ylim=(min([0.4, *(share - 0.04 for share in observed)]), 1.03))
    axes.set(xlabel="predicted probability", ylabel="share ranked correctly")
    _note(axes, "" if head.error is None else f"mean error {head.error:.2f}", low=True)


def _margins(axes: Axes, head: HeadView) -> None:
    margins = np.asarray(head.margins)
    edge = max(1.0, float(np.quantile(np.abs(margins), 0.98))) if len(margins) else 1.0
    bins = np.linspace(-edge, edge, 25).tolist()
    shown = np.clip(margins, -edge, edge)
    for part, color in ((shown[margins < 0], "other1"), (shown[margins >= 0], "accent")):
        axes.hist(part, bins=bins, color=PALETTE[color], edgecolor=PALETTE["paper"], linewidth=0.6)
    axes.axvline(0, color=PALETTE["muted"], linewidth=0.9)
    axes.set_ylim(0, axes.get_ylim()[1] * 1.15)  # space for the note
    use_integer_ticks(axes.yaxis)
    axes.set(xlabel="margin in log odds: wrong < 0 < right", ylabel="held-out pairs")
    _note(axes, f"{head.accuracy.mean:.0%} right")


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
    """Draw points and their trend."""
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


def _weights(axes: Axes, head: HeadView) -> None:
    found = head.explanation
    if found is None:
        axes.axis("off")
        text = "no named feature distinguishes the outputs"
        axes.text(0, 0.5, text, size=SMALL, color=PALETTE["muted"])
        return
    shown, sole = found.weights[:FEATURES][::-1], has_one_field(head)  # the largest on top
    for place, weight in enumerate(shown):
        color = PALETTE["accent" if weight.value > 0 else "other1"]
        axes.barh(place, weight.value, color=color, height=0.62, alpha=0.85)
        axes.plot([weight.low, weight.high], [place, place], color=PALETTE["ink"], linewidth=1.1)
    axes.axvline(0, color=PALETTE["muted"], linewidth=0.9)
    names = [spoken(weight.feature, sole=sole) for weight in shown]
    axes.set_yticks(range(len(shown)), names, color=PALETTE["ink"])
    axes.set_ylim(min(0, len(shown) - 4) - 0.6, len(shown) - 0.4)
    alike, right = f"{found.agreement.mean:.0%}", f"{found.accuracy.mean:.0%}"
    about = f"agreement {alike}, accuracy {right} (head {head.accuracy.mean:.0%})"
    axes.set_xlabel(f"weight; {about}", size=SMALL - 0.5)
    axes.grid(visible=False)


def _drift(axes: Axes, head: HeadView) -> None:
    color, when = PALETTE["accent"], [judged.iteration for judged in head.history]
    means = [judged.accuracy.mean for judged in head.history]
    axes.plot(when, means, "-", color=color, linewidth=1.6, label="cross-validated (95 %)")
    limits = np.array(
        [(judged.accuracy.low, judged.accuracy.high) for judged in head.history], float
    )
    axes.fill_between(when, *limits.reshape(-1, 2).T, color=color, alpha=0.15, linewidth=0)
    axes.axhline(0.5, color=PALETTE["muted"], linewidth=0.9, linestyle=(0, (1, 2)), label="chance")
    use_integer_ticks(axes.xaxis)
    axes.set(xlim=(0.7, max([2, *when]) + 0.3), ylim=(min([0.4, *(m - 0.06 for m in means)]), 1.05))
    axes.set(xlabel="iteration", ylabel="pairs ranked correctly")


def _note(axes: Axes, text: str, *, low: bool = False) -> None:
    """Write a note into a corner of the panel."""
    x, y, ha, va = (0.98, 0.04, "right", "bottom") if low else (0.02, 0.96, "left", "top")
    axes.text(x, y, text, transform=axes.transAxes, size=SMALL, ha=ha, va=va)


PLOTS: Mapping[str, Callable[[Axes, HeadView], None]] = {
    "calibration": _calibration,
    "margins": _margins,
    "alignment": _alignment,
    "length": _length,
    "weights": _weights,
    "drift": _drift,
}
CAPTIONS = {
    "calibration": (
        "Calibration: predicted probability of the ranking of held-out pairs against the share "
        "ranked correctly, in five groups of equal size. Below the dashed line, the reward is "
        "overconfident."
    ),
    "margins": (
        "Held-out margins: reward of the better output minus that of the worse one. The outermost "
        "bars include all larger margins."
    ),
    "alignment": (
        "Local against global rewards of the outputs in held-out pairs, each minus the mean of its "
        "call, and their trend. Local rewards do not compare inputs, so only differences within a "
        "call are meaningful."
    ),
    "length": "Local rewards of the same outputs by their length, value or label, with means.",
    "weights": "Weights of the named features, with 95 % intervals over resampled inputs.",
    "drift": "Cross-validated accuracy each time the rewards were trained.",
}
