"""Draw the learning curves of the toy tasks.

    python -m benchmarks.measure.learning_figure --output docs/figures/learning.svg

Reads ``benchmarks/data/learning_curves.json``. A line is the score of sampled rollouts, averaged
over seeds and smoothed over a tenth of the steps; a dot is the greedy score of the trained system.
Random rewards do not reflect the score, so that control's line connects its first score to its
last.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, TypedDict

from compound.report.figures import PALETTE, figure_to_svg, with_background
from compound.report.training import moving_mean

if TYPE_CHECKING:
    from matplotlib.axes import Axes


SOURCE = Path(__file__).parents[1] / "data" / "learning_curves.json"
TITLES = {
    "chain": "Three agents in a row",
    "conversation": "An agent that asks (Prompt-R1)",
    "planning": "A planner and workers (MyGO)",
}
COLORS = ("accent", "other1", "other2", "other3", "good", "ink")
CONTROLS = {"frozen": (0, (1, 1.5)), "shuffled": (0, (4, 2)), "flipped": (0, (6, 2, 1, 2))}
WIDE, TALL, SMALL = 10.4, 3.6, 8.5


class Found(TypedDict):
    """Results of one training in `benchmarks.measure.learning_curves` that the figure shows."""

    task: str
    method: str
    control: str
    chance: float
    optimum: float
    before: dict[str, float]
    after: dict[str, float]
    curve: list[float]


def learning_svg(found: Sequence[Found]) -> str:
    """Draw one panel per task, with methods in colours and controls in grey."""
    with figure_to_svg(WIDE, TALL, "learning") as (figure, svg):
        panels = figure.subplots(1, len(TITLES), sharey=True)
        for axes, (task, title) in zip(panels, TITLES.items(), strict=True):
            _panel(axes, [one for one in found if one["task"] == task], title)
        panels[0].set_ylabel("reward", size=SMALL, color=PALETTE["ink"])
    return svg[0]


def _panel(axes: Axes, found: Sequence[Found], title: str) -> None:
    """Draw the means over the seeds of a task."""
    lines = sorted(
        dict.fromkeys((one["method"], one["control"]) for one in found), key=lambda line: line[1]
    )
    methods = [method for method, control in lines if not control]
    for method, control in lines:
        own = [one for one in found if (one["method"], one["control"]) == (method, control)]
        color = (
            PALETTE["muted"] if control else PALETTE[COLORS[methods.index(method) % len(COLORS)]]
        )
        points = _mean([_scores(one) for one in own])
        smooth = moving_mean(points, max(1, len(points) // 20))
        steps, scores = zip(*smooth, strict=True)
        axes.plot(
            steps,
            scores,
            color=color,
            linewidth=1.1 if control else 1.6,
            linestyle=CONTROLS.get(control, "-"),
            label=control or method,
        )
        end = fmean(one["after"]["score"] for one in own)
        axes.plot([len(points) * 1.03], [end], "o", color=color, markersize=4, clip_on=False)
    if found:
        axes.axhline(found[0]["optimum"], color=PALETTE["muted"], linewidth=0.6)
        axes.axhline(found[0]["chance"], color=PALETTE["muted"], linewidth=0.6)
    axes.set_title(title, size=SMALL + 1, color=PALETTE["ink"], loc="left")
    axes.set_xlabel("training step", size=SMALL, color=PALETTE["ink"])
    axes.set_ylim(-0.03, 1.06)
    axes.tick_params(labelsize=SMALL)
    axes.legend(
        fontsize=SMALL - 1,
        frameon=False,
        labelcolor=PALETTE["ink"],
        loc="center right",
        handlelength=2.4,
    )


def _scores(found: Found) -> list[float]:
    """Return the score of rollouts by step, which in controls differs from the reward."""
    curve = found["curve"]
    if found["control"] == "flipped":
        return [1.0 - reward for reward in curve]
    if found["control"] == "shuffled":
        first, last = found["before"]["score"], found["after"]["score"]
        return [first + (last - first) * step / len(curve) for step in range(len(curve))]
    return curve


def _mean(curves: Sequence[Sequence[float]]) -> list[tuple[float, float]]:
    """Return the mean of curves at every step that all of them contain."""
    steps = min(map(len, curves))
    return [(float(step + 1), fmean(curve[step] for curve in curves)) for step in range(steps)]


def main(arguments: Sequence[str] | None = None) -> None:
    """Draw the figure."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--output", type=Path, default=Path("learning.svg"), help="the file to write"
    )
    args = parser.parse_args(arguments)
    found = json.loads(SOURCE.read_text(encoding="utf-8"))
    args.output.write_text(
        with_background(learning_svg(list(found.values()))) + "\n", encoding="utf-8"
    )


if __name__ == "__main__":
    main()
