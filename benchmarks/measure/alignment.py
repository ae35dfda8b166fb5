"""Measure the value of good local rewards on a real system, and the inputs they require (OPTIMAS, figure 6).

    python -m benchmarks.measure.alignment benchmarks/atlas.yaml runs/atlas --component answerer

From the pairs of a finished run of method `optimas`, the script learns rewards of one component on
some of the inputs, in part with shuffled labels, and evaluates them on the others. Each reward then
takes one step: it chooses, among the settings that the run sampled outputs with, the one with the
highest mean local reward on validation inputs. The global reward of every setting is measured once,
on the same inputs. Calls are cached next to the output file.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

import numpy as np
from rich.progress import track
from scipy import stats

from compound.core.example import CallValues, Example
from compound.evaluation.evaluate import EvaluationRules, evaluate_all
from compound.execution.cache import DiskCache
from compound.execution.executor import Executor
from compound.execution.rng import generator
from compound.graph.configuration import canonical_json
from compound.graph.system import System
from compound.report.figures import PALETTE, figure_to_svg, with_background
from compound.rewards.alignment import NO_PAIRS, accuracy
from compound.rewards.buffer import PairBuffer
from compound.rewards.features import Embedder
from compound.rewards.fit import PairTexts
from compound.rewards.heads import MIN_INPUTS, Matrix, fit
from compound.rewards.inspection import Inspection
from compound.rewards.model import LocalReward, RewardModel, Vector
from compound.yaml import Program, load

if TYPE_CHECKING:
    from matplotlib.axes import Axes


WRONG = (0.0, 0.25, 0.5, 0.75, 1.0)  # shares of inputs with shuffled labels
SHARES = (0.125, 0.25, 0.5, 0.75, 1.0)  # shares of the training inputs to use
SPLITS = 10
HELD_OUT = 0.3  # share of the inputs that evaluate the rewards


@dataclass(frozen=True)
class Pairs:
    """Pairs of one component with their features, for repeated learning.

    Attributes:
        texts: the pairs as input texts of the reward model.
        reward: the run's local reward, whose feature map is used.
        backbone: the model that computes the features.
        chosen, rejected: features of shape ``(pairs, features)``.
        gaps: the difference of the global rewards of each pair, by which it is weighted.
    """

    texts: PairTexts
    reward: LocalReward
    backbone: Embedder
    chosen: Matrix
    rejected: Matrix
    gaps: Vector

    @staticmethod
    def of(run: Inspection, component: str) -> Pairs:
        """Read the pairs of a run."""
        texts, reward, backbone = run.texts(component), run.reward(component), run.model.backbone
        rows = reward.features.matrix([*texts.chosen, *texts.rejected], backbone)
        n = len(texts.chosen)
        gaps = np.array([pair.gap for pair, _, _ in run.buffer.weighted_pairs(component)])
        return Pairs(texts, reward, backbone, rows[:n], rows[n:], gaps)

    @property
    def inputs(self) -> list[str]:
        """Distinct inputs, in the order of the pairs."""
        return list(dict.fromkeys(self.texts.inputs))

    def learn(
        self, seen: Sequence[str], unseen: Sequence[str], wrong: float, seed: int
    ) -> LocalReward:
        """Learn a reward from some inputs, and evaluate it on others.

        Args:
            seen: the training inputs.
            unseen: the held-out inputs.
            wrong: the share of the training inputs with shuffled labels.
            seed: the seed of the shuffling.
        """
        rng = generator("wrong labels", seed)
        shuffled = {name for name in self.inputs if rng.random() < wrong}
        names = np.array(self.texts.inputs)
        kept = np.flatnonzero(np.isin(names, [*seen, *unseen]))
        held_out = np.isin(names[kept], list(unseen))
        flipped = np.array([name in shuffled for name in names[kept]]) & ~held_out
        flipped &= rng.random(len(kept)) < 0.5
        a, b = self.chosen[kept], self.rejected[kept]
        a, b = np.where(flipped[:, None], b, a), np.where(flipped[:, None], a, b)
        head = fit(
            a[~held_out],
            b[~held_out],
            names[kept][~held_out].tolist(),
            recency=self.gaps[kept][~held_out].tolist(),
            soft=self.reward.features.soft,
        ).head
        margins = head.rewards(a[held_out]) - head.rewards(b[held_out])
        judged = accuracy(margins, names[kept][held_out].tolist()) if held_out.any() else NO_PAIRS
        return LocalReward(self.reward.features, head, 1.0, judged)

    def split(self, seed: int) -> tuple[list[str], list[str]]:
        """Split the inputs into training and held-out inputs."""
        order = [self.inputs[i] for i in generator("apart", seed).permutation(len(self.inputs))]
        count = max(1, round(HELD_OUT * len(order)))
        return order[count:], order[:count]


def by_data(pairs: Pairs) -> list[dict[str, float]]:
    """Return the accuracy of rewards learned from parts of the inputs (OPTIMAS, figure 6c)."""
    rows = []
    for seed in range(SPLITS):
        seen, apart = pairs.split(seed)
        for count in sorted({max(MIN_INPUTS, round(share * len(seen))) for share in SHARES}):
            if count <= len(seen):
                found = pairs.learn(seen[:count], apart, 0.0, seed)
                rows.append({"inputs": count, "seed": seed, "accuracy": found.accuracy.mean})
    return rows


@dataclass(frozen=True)
class Choice:
    """Settings of the component, its calls with them, and the mean global reward of those runs."""

    settings: Mapping[str, object]
    calls: Sequence[CallValues]
    value: float


def settings_drawn(
    buffer: PairBuffer, component: str, system: System
) -> list[Mapping[str, object]]:
    """Return the settings that outputs were sampled with, limited to parameters of the system.

    Components without other variation were sampled at another temperature, which may not be a
    parameter.
    """
    drawn_with = [c.settings for entry in buffer.of(component) for c in entry.draw.candidates]
    return [
        settings
        for settings in {
            canonical_json(settings): settings for settings in [{}, *drawn_with]
        }.values()
        if all(f"{component}.{key}" in system.parameters for key in settings)
    ]


async def choices(
    program: Program,
    run: Inspection,
    component: str,
    examples: Sequence[Example],
    executor: Executor,
) -> list[Choice]:
    """Evaluate the settings that the run sampled outputs with, starting with the initial ones.

    Settings with failed calls are omitted, because mean rewards are comparable only on the same
    inputs.
    """
    assert program.metric is not None
    distinct = settings_drawn(run.buffer, component, program.system)
    systems = [
        program.system.bind({f"{component}.{key}": value for key, value in settings.items()})
        for settings in distinct
    ]
    found: dict[str, list[CallValues]] = {system.configuration.digest: [] for system in systems}
    evaluations = await evaluate_all(
        executor,
        systems,
        examples,
        program.metric,
        rules=EvaluationRules(concurrency=program.optimize.concurrency),
        on_trace=lambda _, trace: found[trace.configuration].extend(
            (call.inputs, call.outputs)
            for call in trace.calls_of(component)
            if call.failure is None
        ),
    )
    made = [
        Choice(settings, found[system.configuration.digest], evaluation.mean)
        for settings, system, evaluation in zip(distinct, systems, evaluations, strict=True)
    ]
    return [choice for choice in made if choice.calls and len(choice.calls) == len(made[0].calls)]


def by_alignment(pairs: Pairs, component: str, among: Sequence[Choice]) -> list[dict[str, float]]:
    """Return the accuracy of rewards, and the global reward of their choices (OPTIMAS, figures 6a, 6b)."""
    rows = []
    for seed in track(range(SPLITS), "choosing"):
        seen, apart = pairs.split(seed)
        for wrong in WRONG:
            reward = pairs.learn(seen, apart, wrong, seed)
            model = RewardModel("", pairs.backbone, {component: reward})
            means = [float(model.rewards(component, choice.calls).mean()) for choice in among]
            chosen = among[int(np.argmax(means))]
            rows.append(
                {
                    "wrong": wrong,
                    "seed": seed,
                    "accuracy": reward.accuracy.mean,
                    "global": chosen.value,
                }
            )
    return rows


class Drawn(TypedDict):
    """Measurements of one run and component that the figure shows."""

    steps: list[dict[str, float]]
    start: float
    data: list[dict[str, float]]


class Measured(Drawn):
    """All measurements of one run and component."""

    system: str
    component: str
    inputs: int
    pairs: int
    examples: int
    choices: list[float]
    rank_correlation: dict[str, float]


async def measured(args: argparse.Namespace) -> Measured:
    """Measure one component of a run."""
    program = load(args.system, overrides=[tuple(entry.split("=", 1)) for entry in args.set])
    run = Inspection.open(args.run, program.system)
    pairs = Pairs.of(run, args.component)
    assert program.data is not None
    examples = program.data.examples("valid", list(program.system.inputs), limit=args.examples)
    executor = Executor(program.find_engine, cache=DiskCache(args.output.with_suffix(".sqlite")))
    try:
        among = await choices(program, run, args.component, examples, executor)
    finally:
        await executor.aclose()
    steps = by_alignment(pairs, args.component, among)
    correlation = stats.spearmanr([r["accuracy"] for r in steps], [r["global"] for r in steps])
    return {
        "system": program.system.name,
        "component": args.component,
        "inputs": len(pairs.inputs),
        "pairs": len(pairs.texts.inputs),
        "examples": len(examples),
        "start": among[0].value,
        "choices": [choice.value for choice in among],
        "steps": steps,
        "data": by_data(pairs),
        "rank_correlation": {"mean": float(correlation.statistic), "p": float(correlation.pvalue)},
    }


def figure(found: Drawn) -> str:
    """Draw accuracy against the global reward of one step, and against the number of inputs."""
    with figure_to_svg(7.6, 3.2, "alignment-quality") as (page, svg):
        left, right = page.subplots(1, 2)
        steps = found["steps"]
        left.axhline(found["start"], color=PALETTE["muted"], linewidth=0.9, linestyle=":")
        for share in WRONG:
            rows = [row for row in steps if row["wrong"] == share]
            x, y = (np.array([row[key] for row in rows]) for key in ("accuracy", "global"))
            left.plot(
                x, y, "o", color=PALETTE["accent"], alpha=0.3, markersize=4, markeredgewidth=0
            )
            left.plot(x.mean(), y.mean(), "o", color=PALETTE["ink"], markersize=5)
            left.annotate(
                f"{share:.0%}",
                (x.mean(), y.mean()),
                xytext=(6, 5),
                textcoords="offset points",
                fontsize=8,
                color=PALETTE["muted"],
            )
        left.set_title(
            "one step, by the share of shuffled labels", size=9.5, color=PALETTE["ink"], loc="left"
        )
        _axes(left, "ranking accuracy on other inputs", "global reward of the choice")
        counts = sorted({row["inputs"] for row in found["data"]})
        means = [
            np.mean([r["accuracy"] for r in found["data"] if r["inputs"] == count])
            for count in counts
        ]
        x, y = (np.array([row[key] for row in found["data"]]) for key in ("inputs", "accuracy"))
        right.plot(x, y, "o", color=PALETTE["accent"], alpha=0.3, markersize=4, markeredgewidth=0)
        right.plot(counts, means, "o-", color=PALETTE["ink"], markersize=4.5, linewidth=1.5)
        right.set_title("by the number of inputs", size=9.5, color=PALETTE["ink"], loc="left")
        _axes(right, "inputs learned from", "ranking accuracy on other inputs")
    return svg[0]


def _axes(axes: Axes, x: str, y: str) -> None:
    axes.set_xlabel(x, size=8.5, color=PALETTE["muted"])
    axes.set_ylabel(y, size=8.5, color=PALETTE["muted"])


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure one component of one run, and write a JSON file and a figure next to it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("system", type=Path, help="the system's YAML file")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="an override that the run used",
    )
    parser.add_argument("run", type=Path, help="a run directory of method optimas")
    parser.add_argument(
        "--component", required=True, help="the component whose local reward is measured"
    )
    parser.add_argument(
        "--examples", type=int, default=40, help="number of validation examples (default 40)"
    )
    parser.add_argument("--output", type=Path, default=Path("alignment.json"))
    args = parser.parse_args(arguments)
    found = asyncio.run(measured(args))
    args.output.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    args.output.with_suffix(".svg").write_text(
        with_background(figure(found)) + "\n", encoding="utf-8"
    )
    print(json.dumps({k: v for k, v in found.items() if k not in ("steps", "data")}, indent=1))


if __name__ == "__main__":
    main()
