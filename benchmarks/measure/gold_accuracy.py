"""Compare training-time rewards that read gold answers with rewards that do not, on pairs of finished runs.

    python -m benchmarks.measure.gold_accuracy benchmarks/atlas.yaml runs/atlas/optimas-400-* \
        --set components.namer.llm.weights=null --set components.answerer.llm.weights=null --output
        gold.json

For each run directory of method `optimas` and each component, the script fits two cross-fitted
rewards (`compound.rewards.gains`) to the run's draws: one reads gold answers, as in the run, the
other only inputs and outputs. Folds, heads and backbone are the same. It writes the accuracy of
each on pairs of inputs that the head was not fitted to, pooled over the runs. Components whose
draws have no gold features, because no local reward guided their search, are left out.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from rich.progress import track

from compound.evaluation.statistics import Interval, cluster_mean_interval
from compound.graph.system import System
from compound.rewards.alignment import Accuracy, mean_accuracy
from compound.rewards.buffer import Entry
from compound.rewards.features import Template
from compound.rewards.gains import GOLD, fit_critic
from compound.rewards.inspection import Inspection
from compound.rewards.pairs import has_certain_downstream
from compound.yaml import load


def has_gold_features(entry: Entry) -> bool:
    """Return whether the outputs of a draw have gold features."""
    return any(name.startswith(GOLD) for c in entry.draw.candidates for name in c.signals)


def remove_gold_features(entries: Sequence[Entry]) -> list[Entry]:
    """Return draws whose candidates have no gold features."""
    found = []
    for entry in entries:
        candidates = tuple(
            replace(
                c, signals={name: x for name, x in c.signals.items() if not name.startswith(GOLD)}
            )
            for c in entry.draw.candidates
        )
        found.append(replace(entry, draw=replace(entry.draw, candidates=candidates)))
    return found


@dataclass
class Verdicts:
    """Whether rewards with and without gold answers order each pair correctly (1, or 0.5 if equal).

    Attributes:
        gold: the verdicts of the reward that reads gold answers.
        without: those of the other reward.
        inputs: the example of each pair; runs share examples.
    """

    gold: list[float] = field(default_factory=list)
    without: list[float] = field(default_factory=list)
    inputs: list[str] = field(default_factory=list)

    def summary(self) -> Comparison:
        """Return both accuracies, and their difference paired by input, with 95 % intervals over inputs."""
        groups: dict[str, list[float]] = defaultdict(list)
        for gold, without, name in zip(self.gold, self.without, self.inputs, strict=True):
            groups[name].append(gold - without)
        return Comparison(
            mean_accuracy(self.gold, self.inputs),
            mean_accuracy(self.without, self.inputs),
            cluster_mean_interval(groups.values(), bounds=(-1.0, 1.0)),
        )


@dataclass(frozen=True)
class Comparison:
    """Accuracies of rewards with and without gold answers, and their difference."""

    gold: Accuracy
    without: Accuracy
    difference: Interval

    def to_json(self) -> dict[str, object]:
        """Return the fields as JSON types."""
        return {name: getattr(self, name).to_json() for name in ("gold", "without", "difference")}


def add_verdicts(found: Verdicts, run: Inspection, system: System, component: str) -> None:
    """Fit both rewards to the draws of a run, and add their verdicts on inputs that the heads did not see."""
    entries, template = run.buffer.of(component), Template.of(system.components[component])
    certain = has_certain_downstream(system, component)
    gold, without = (
        fit_critic(used, template, run.model.backbone, certain=certain)
        for used in (entries, remove_gold_features(entries))
    )
    if gold and without:
        found.gold += [(np.sign(margin) + 1) / 2 for margin in gold.margins]
        found.without += [(np.sign(margin) + 1) / 2 for margin in without.margins]
        found.inputs += gold.inputs


def compare_rewards(system: System, runs: Sequence[Path]) -> dict[str, Comparison]:
    """Return the accuracies of both rewards by component, over the pairs of all runs."""
    pooled: dict[str, Verdicts] = defaultdict(Verdicts)
    for folder in track(runs, "fitting rewards"):
        run = Inspection.open(folder, system)
        for component in dict.fromkeys(
            e.draw.component for e in run.buffer.entries if has_gold_features(e)
        ):
            add_verdicts(pooled[component], run, system, component)
    return {
        component: verdicts.summary() for component, verdicts in pooled.items() if verdicts.inputs
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Fit both rewards to the draws of the given runs, and write one JSON file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("system", type=Path, help="the system's YAML file")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="an override that the runs used",
    )
    parser.add_argument("runs", type=Path, nargs="+", help="run directories of method optimas")
    parser.add_argument("--output", type=Path, default=Path("gold.json"))
    args = parser.parse_args(arguments)
    program = load(args.system, overrides=[tuple(entry.split("=", 1)) for entry in args.set])
    components = {
        name: each.to_json() for name, each in compare_rewards(program.system, args.runs).items()
    }
    found = {"runs": len(args.runs), "components": components}
    args.output.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
