"""Curves of training by step: a small plot for each quantity."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from statistics import fmean
from typing import TYPE_CHECKING, Any

import numpy as np

from compound.report.figures import PALETTE, WIDE, clip_name, figure_to_svg, use_integer_ticks
from compound.report.record import Facts
from compound.report.training import Step, by_component, get_number

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ROW = 2.25  # inches, height of a row of panels
SMOOTH = 0.1  # window of the moving mean, as a share of a job's steps
COLORS = ("accent", "other1", "other3", "other2", "good")
Dashes = str | tuple[float, tuple[float, ...]]  # a matplotlib line style
DASHES: tuple[Dashes, ...] = ("-", (0, (4, 1.5)), (0, (1.2, 1.2)))  # of components of one colour
THRESHOLD: tuple[str, Dashes] = (PALETTE["good"], (0, (3, 1.5)))
FEW = 4  # up to this number of lines per panel, draw single steps as well as moving means

Points = list[tuple[float, float]]


@dataclass(frozen=True)
class Panel:
    """One small plot."""

    title: str  # the quantity and its unit
    facts: tuple[str, ...]  # names of the numbers to draw; the second one is dashed
    by_component: bool = True
    low: float | None = 0.0  # limits of the axis; ``None`` follows the data
    high: float | None = None
    moving: bool = False  # hidden if all values are zero: the method does not use the number


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


def training_svg(jobs: Sequence[Facts], name: str = "training") -> str:
    """Return the SVG of the training curves of a method's consecutive jobs.

    Raises:
        MissingExtra: matplotlib is not installed.
    """
    panels = panels_with_data(jobs)
    components = list(dict.fromkeys(name for job in jobs for name in job["components"]))
    across = columns(len(panels))
    down = -(-len(panels) // across)
    looks = {clip_name(name): _look(components, name) for name in components}
    if _has_threshold(jobs):
        looks["threshold"] = THRESHOLD
    with figure_to_svg(WIDE, ROW * down + 0.2 * (1 + len(looks) // 5), name) as (figure, svg):
        grid = figure.subplots(down, across, squeeze=False)
        for place, axes in enumerate(grid.flat):
            if place >= len(panels):
                axes.axis("off")
                continue
            _draw(axes, panels[place], jobs, components)
            _separate(axes, jobs, WIDE / across, named=place < across)
            if place + across >= len(panels):
                axes.set_xlabel("training step")
        from matplotlib.lines import Line2D

        handles = [
            Line2D([], [], color=color, linestyle=dashes) for color, dashes in looks.values()
        ]
        figure.legend(handles, looks, ncols=min(5, len(looks)) or 1, loc="outside lower center")
    return svg[0]


def panels_with_data(jobs: Sequence[Facts]) -> list[Panel]:
    """Return the panels that have data."""
    return [panel for panel in PANELS if _has_data(jobs, panel)]


def _has_data(jobs: Sequence[Facts], panel: Panel) -> bool:
    found = [y for job in jobs for fact in panel.facts for y in _values(job, panel, fact)]
    return any(found) if panel.moving else bool(found)


def _values(job: Facts, panel: Panel, fact: str) -> list[float]:
    """Return the values of a number in a job, over all components."""
    names = job["components"] if panel.by_component else [None]
    return [y for name in names for _, y in curve(job["steps"], fact, name)]


def curve(steps: Sequence[Step], fact: str, component: str | None = None) -> Points:
    """Return a number by step, of a component or of the whole step; steps without it are skipped.

    >>> curve([{"reward": 0.5}, {"reward": None}, {"reward": 1.0}], "reward")
    [(0, 0.5), (2, 1.0)]
    """
    own = [by_component(s).get(component, {}) if component is not None else s for s in steps]
    return [(at, y) for at, step in enumerate(own) if (y := get_number(step, fact)) is not None]


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


def _starts(jobs: Sequence[Facts]) -> list[int]:
    """Return the first step of each job in the figure, and the step after the last job."""
    starts = [1]
    for job in jobs:
        starts.append(starts[-1] + len(job["steps"]))
    return starts


def _look(names: Sequence[str], component: str | None) -> tuple[str, Dashes]:
    if component is None:
        return PALETTE["ink"], "-"
    place = names.index(component)
    return PALETTE[COLORS[place % len(COLORS)]], DASHES[place // len(COLORS) % len(DASHES)]


def _draw(axes: Axes, panel: Panel, jobs: Sequence[Facts], names: Sequence[str]) -> None:
    """Draw moving means, single steps if there are few lines, and thresholds."""
    components = names if panel.by_component else [None]
    few = len(components) * len(panel.facts) <= FEW
    for start, job in zip(_starts(jobs), jobs, strict=False):
        half = round(SMOOTH * len(job["steps"])) // 2
        for component, fact in product(components, panel.facts):
            points = [(start + at, y) for at, y in curve(job["steps"], fact, component)]
            if not points:
                continue
            xs, ys = [x for x, _ in points], [y for _, y in points]
            color, dashes = _look(names, component)
            if fact == "threshold":
                look: dict[str, Any] = {"drawstyle": "steps-mid", "linewidth": 1.3}
                color, dashes = THRESHOLD
            else:
                if half and few:
                    axes.plot(xs, ys, color=color, linewidth=0.7, alpha=0.3)
                ys = [y for _, y in moving_mean(points, half)]
                dashes = DASHES[1] if fact != panel.facts[0] else dashes
                look = {"marker": "o", "markersize": 3.5} if len(xs) == 1 else {}
                look["linewidth"] = 1.7
            axes.plot(xs, ys, color=color, linestyle=dashes, **look)
    axes.set_title(panel.title, pad=18 if len(jobs) > 1 else 6)  # above the numbers of the jobs
    end = _starts(jobs)[-1] - 1
    axes.set_xlim(1 - max(0.5, 0.02 * end), end + max(0.5, 0.02 * end))
    use_integer_ticks(axes.xaxis)
    if panel.low is not None:
        drawn = (float(np.max(each.get_ydata())) for each in axes.get_lines())
        top = panel.high or 1.08 * (max(drawn, default=0.0) or 1.0)
        axes.set_ylim(panel.low - 0.03 * (panel.high or 0), top * 1.03)


def _separate(axes: Axes, jobs: Sequence[Facts], wide: float, *, named: bool) -> None:
    """Draw a vertical line between jobs, with the numbers of the jobs above if they fit."""
    starts = _starts(jobs) if len(jobs) > 1 else []
    for start in starts[1:-1]:
        axes.axvline(start - 0.5, color=PALETTE["muted"], linewidth=0.8, alpha=0.7)
    for start, end, job in zip(starts, starts[1:], jobs, strict=False):
        room = 0.85 * wide * (end - start) / (starts[-1] - 1)
        text = f"job {job['number']}" if room > 0.42 else str(job["number"]) if room > 0.16 else ""
        place: dict[str, Any] = {"xytext": (0, 2), "textcoords": "offset points", "ha": "center"}
        if named and text:
            at, across = ((start + end - 1) / 2, 1), axes.get_xaxis_transform()
            axes.annotate(text, at, xycoords=across, size=7.5, color=PALETTE["muted"], **place)


def _has_threshold(jobs: Sequence[Facts]) -> bool:
    return any(curve(job["steps"], "threshold") for job in jobs)


def caption(jobs: Sequence[Facts]) -> str:
    """Return the caption of the figure."""
    parts = [
        "Metrics by training step: thick lines are moving means over a tenth of a job's steps; "
        "thin lines, in panels with few lines, are single steps."
    ]
    if _has_threshold(jobs):
        parts.append("Attempts with a reward of at least the threshold are kept.")
    if len(jobs) > 1:
        parts.append("Vertical lines separate the jobs.")
    if _has_data(jobs, CLIPPED):
        parts.append(
            "Clipped tokens: solid above the upper bound (positive advantage), dashed below the "
            "lower bound (negative advantage)."
        )
    elif any(_values(job, CLIPPED, "high") for job in jobs):
        parts.append("No token was clipped.")
    return " ".join(parts)
