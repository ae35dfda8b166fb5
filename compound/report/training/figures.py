"""Training curves: small multiples over steps, with a line for each component."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import TYPE_CHECKING

import numpy as np

from compound.report.facts.documents import Step, TrainedJob
from compound.report.figures.curve import style_axes, use_integer_ticks
from compound.report.figures.graph import PALETTE, clip_name, figure_to_svg
from compound.report.training.steps import by_component, get_number

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


WIDE = 10.4  # inches
ROW = 2.25  # inches, height of a row of panels
SMALL = 8.5
SMOOTH = 0.1  # window of the moving mean, as a share of a job's steps
COLORS = ("accent", "other1", "other3", "other2", "good")
Dashes = str | tuple[float, tuple[float, ...]]  # a matplotlib line style
DASHES: tuple[Dashes, ...] = ("-", (0, (4, 1.5)), (0, (1.2, 1.2)))  # distinguish components of one colour
THRESHOLD: tuple[str, Dashes] = (PALETTE["good"], (0, (3, 1.5)))
TURN = 4.0  # dash length of coinciding lines, in line widths
FEW = 4  # up to this number of lines per panel, draw single steps as well as moving means
LETTER = 0.08  # inches, width of a letter of the legend

Points = list[tuple[float, float]]
Jobs = Sequence[TrainedJob]


@dataclass(frozen=True)
class Panel:
    """One small plot.

    Attributes:
        title: the quantity and its unit.
        facts: names of the numbers to draw; the second one is dashed.
        by_component: whether to draw separate lines for each component.
        low, high: limits of the axis; ``None`` follows the data.
        moving: whether to hide the panel if all values are zero, because the method does not use the number.
    """

    title: str
    facts: tuple[str, ...]
    by_component: bool = True
    low: float | None = 0.0
    high: float | None = None
    moving: bool = False


REWARD = Panel("Mean reward of rollouts", ("reward", "threshold"), by_component=False, low=None)
CLIPPED = Panel("Clipped tokens (share)", ("high", "low"), moving=True)
PANELS = (
    REWARD,
    Panel("Reward by component", ("reward",), low=None),
    Panel("Entropy (nats per token)", ("entropy",)),
    Panel("Answer length (tokens)", ("length",)),
    Panel("Similarity of answers", ("similarity",), high=1.0),
    Panel("KL to the old policy", ("kl",), moving=True),
    Panel("KL to the base model", ("base_kl",), moving=True),
    CLIPPED,
    Panel("Skipped groups (share)", ("skipped",), by_component=False, high=1.0),
    Panel("Kept attempts (share)", ("kept",), by_component=False, high=1.0),
)


@dataclass(frozen=True)
class Line:
    """A line of a panel: a number of one job, for one component or for all."""

    points: Points
    steps: int
    color: str
    dashes: Dashes
    second: bool


def training_svg(jobs: Jobs, name: str = "training") -> str:
    """Return the SVG of the training curves of a method's consecutive jobs.

    Args:
        jobs: the jobs, from `compound.report.training.steps.method_training`.
        name: the prefix of the ids in the SVG; must be unique on a page.

    Raises:
        MissingExtra: matplotlib is not installed.
    """
    panels, names, looks = panels_with_data(jobs), _components(jobs), _looks(jobs)
    across = columns(len(panels))
    down = -(-len(panels) // across)
    head, foot = (0.2 if len(jobs) > 1 else 0.0), 0.2 * _legend_rows(looks) + 0.15
    tall = ROW * down + head + foot
    with figure_to_svg(WIDE, tall, name) as (figure, svg):
        grid = figure.subplots(down, across, squeeze=False)
        for place, axes in enumerate(grid.flat):
            if place >= len(panels):
                axes.axis("off")
                continue
            _draw(axes, panels[place], jobs, names)
            _finish(axes, panels[place], jobs, high=place < across and len(jobs) > 1)
            if place + across >= len(panels):
                axes.set_xlabel("training step", size=SMALL, color=PALETTE["ink"])
        figure.tight_layout(rect=(0, foot / tall, 1, 1), w_pad=1.6, h_pad=1.2)
        for place, axes in enumerate(grid.flat[: len(panels)]):
            _separate(axes, jobs, WIDE / across, named=place < across)
        _legend(figure, looks)
    return svg[0]


def panels_with_data(jobs: Jobs) -> list[Panel]:
    """Return the panels that have data."""
    return [panel for panel in PANELS if _has(jobs, panel)]


def _has(jobs: Jobs, panel: Panel) -> bool:
    found = [y for job in jobs for fact in panel.facts for _, y in _every(job, panel, fact)]
    return any(found) if panel.moving else bool(found)


def _every(job: TrainedJob, panel: Panel, fact: str) -> Points:
    """Return the points of a number in a job, over all components."""
    names = job["components"] if panel.by_component else [None]
    return [point for name in names for point in curve(job["steps"], fact, name)]


def curve(steps: Sequence[Step], fact: str, component: str | None = None) -> Points:
    """Return a number by step, of a component or of the whole step; steps without it are skipped.

    >>> curve([{"reward": 0.5}, {"reward": None}, {"reward": 1.0}], "reward")
    [(0, 0.5), (2, 1.0)]
    """
    own = [by_component(step).get(component, {}) if component is not None else step for step in steps]
    return [(at, value) for at, step in enumerate(own) if (value := get_number(step, fact)) is not None]


def moving_mean(points: Points, half: int) -> Points:
    """Return the centred moving mean over each point and up to ``half`` points on either side.

    >>> moving_mean([(0, 1.0), (1, 2.0), (2, 6.0)], 1)
    [(0, 1.5), (1, 3.0), (2, 4.0)]
    """
    values = [y for _, y in points]
    return [(x, fmean(values[max(0, i - half) : i + half + 1])) for i, (x, _) in enumerate(points)]


def columns(panels: int) -> int:
    """Return the number of columns for a number of panels.

    >>> [columns(n) for n in (1, 3, 4, 6, 7, 8, 9)]
    [1, 3, 4, 3, 4, 4, 3]
    """
    return 4 if panels in (4, 7, 8) or panels > 9 else min(panels, 3)


def _components(jobs: Jobs) -> list[str]:
    return list(dict.fromkeys(name for job in jobs for name in job["components"]))


def _starts(jobs: Jobs) -> list[int]:
    """Return the first step of each job in the figure, and the step after the last job."""
    starts = [1]
    for job in jobs:
        starts.append(starts[-1] + len(job["steps"]))
    return starts


def _lines(panel: Panel, jobs: Jobs, names: Sequence[str]) -> Iterator[Line]:
    for start, job in zip(_starts(jobs), jobs, strict=False):
        for component in names if panel.by_component else [None]:
            color, dashes = _look(names, component)
            for place, fact in enumerate(panel.facts):
                found = [(start + at, y) for at, y in curve(job["steps"], fact, component)]
                if found:
                    yield Line(
                        found, len(job["steps"]), color, DASHES[1] if place else dashes, second=place > 0
                    )


def _look(names: Sequence[str], component: str | None) -> tuple[str, Dashes]:
    if component is None:
        return PALETTE["ink"], "-"
    place = names.index(component)
    return PALETTE[COLORS[place % len(COLORS)]], DASHES[place // len(COLORS) % len(DASHES)]


def _draw(axes: Axes, panel: Panel, jobs: Jobs, names: Sequence[str]) -> None:
    """Draw moving means, thin lines for single steps if there are few lines, and thresholds unsmoothed."""
    lines = dash_coincident(list(_lines(panel, jobs, names)))
    some = len({(line.color, line.dashes) for line in lines}) <= FEW
    for line in lines:
        if panel is REWARD and line.second:
            color, dashes = THRESHOLD
            axes.plot(*zip(*line.points, strict=True), color=color, linestyle=dashes, linewidth=1.3,
                      drawstyle="steps-mid")  # fmt: skip
            continue
        half = round(SMOOTH * line.steps) // 2
        if half and some:
            axes.plot(*zip(*line.points, strict=True), color=line.color, linewidth=0.7, alpha=0.3)
        marker = "o" if len(line.points) == 1 else None
        axes.plot(*zip(*moving_mean(line.points, half), strict=True), color=line.color,
                  linestyle=line.dashes, linewidth=1.7, marker=marker, markersize=3.5)  # fmt: skip


def dash_coincident(lines: Sequence[Line]) -> list[Line]:
    """Return the lines with alternating dashes for those that coincide, so that all remain visible."""
    groups: dict[tuple[tuple[float, float], ...], list[Line]] = {}
    for line in lines:
        groups.setdefault(tuple(line.points), []).append(line)
    return [
        line if len(group) == 1 else replace(line, dashes=(place * TURN, (TURN, TURN * (len(group) - 1))))
        for group in groups.values()
        for place, line in enumerate(group)
    ]


def _finish(axes: Axes, panel: Panel, jobs: Jobs, *, high: bool) -> None:
    """Set title and limits; ``high`` leaves space below the title for the numbers of the jobs."""
    style_axes(axes)
    axes.set_title(panel.title, size=9.5, color=PALETTE["ink"], loc="left", pad=18 if high else 6)
    end = _starts(jobs)[-1] - 1
    axes.set_xlim(1 - max(0.5, 0.02 * end), end + max(0.5, 0.02 * end))
    use_integer_ticks(axes.xaxis)
    if panel.low is not None:
        drawn = (float(np.max(line.get_ydata())) for line in axes.get_lines())
        top = panel.high or 1.08 * (max(drawn, default=0.0) or 1.0)
        axes.set_ylim(panel.low - 0.03 * (panel.high or 0), top * 1.03)


def _separate(axes: Axes, jobs: Jobs, wide: float, *, named: bool) -> None:
    """Draw a vertical line between jobs, with the numbers of the jobs above if they fit."""
    if len(jobs) < 2:
        return
    starts = _starts(jobs)
    for start in starts[1:-1]:
        axes.axvline(start - 0.5, color=PALETTE["muted"], linewidth=0.8, alpha=0.7)
    for start, end, job in zip(starts, starts[1:], jobs, strict=False):
        room = 0.85 * wide * (end - start) / (starts[-1] - 1)
        text = f"job {job['number']}" if room > 0.42 else str(job["number"]) if room > 0.16 else ""
        if named and text:
            axes.text((start + end - 1) / 2, 1.02, text, transform=axes.get_xaxis_transform(), size=7.5,
                      ha="center", va="bottom", color=PALETTE["muted"])  # fmt: skip


def _looks(jobs: Jobs) -> dict[str, tuple[str, Dashes]]:
    """Return the colour and dashes of each entry of the legend."""
    names = _components(jobs)
    looks = {clip_name(name): _look(names, name) for name in names}
    return {**looks, "threshold": THRESHOLD} if _has_threshold(jobs) else looks


def _legend_rows(looks: Mapping[str, tuple[str, Dashes]]) -> int:
    return max(1, math.ceil(sum(LETTER * len(name) + 0.6 for name in looks) / WIDE))


def _legend(figure: Figure, looks: Mapping[str, tuple[str, Dashes]]) -> None:
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], color=c, linestyle=dashes, linewidth=1.7) for c, dashes in looks.values()]
    figure.legend(handles, list(looks), ncols=math.ceil(len(looks) / _legend_rows(looks)) or 1,
                  loc="lower center", frameon=False, fontsize=SMALL, labelcolor=PALETTE["ink"],
                  handlelength=2.4, columnspacing=1.8)  # fmt: skip


def _has_threshold(jobs: Jobs) -> bool:
    return any(curve(job["steps"], "threshold") for job in jobs)


def caption(jobs: Jobs) -> str:
    """Return the caption of the figure."""
    parts = ["Metrics by training step: thick lines are moving means over a tenth of a job's steps; thin "
             "lines, in panels with few lines, are single steps."]  # fmt: skip
    if _has_threshold(jobs):
        parts.append("Attempts with a reward of at least the threshold are kept.")
    if len(jobs) > 1:
        parts.append("Vertical lines separate the jobs.")
    if CLIPPED in panels_with_data(jobs):
        parts.append("Clipped tokens: solid above the upper bound (positive advantage), dashed below the "
                     "lower bound (negative advantage).")  # fmt: skip
    elif any(_every(job, CLIPPED, "high") for job in jobs):
        parts.append("No token was clipped.")
    return " ".join(parts)
