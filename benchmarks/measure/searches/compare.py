"""Compare methods on a system by the score of the configurations that they find, by system runs.

    python -m compound.benchmarks.measure.searches.compare benchmarks/atlas.yaml --runs FOLDER --output FILE

Each method optimizes the system once per budget and seed. All configurations found are then evaluated on the
same test examples, as are the initial configuration and two controls: the constant answer that is best on the
train split, and one direct call of the system's model. All runs share greedy completions
(`compound.benchmarks.measure.searches.completions`). Finished runs are kept, so an interrupted measurement
can be resumed; the file is rewritten after each seed.
"""

from __future__ import annotations

import argparse
import functools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from compound.api.optimize import optimize
from compound.api.result import read_result
from compound.api.sweeps.controls import CONSTANT, DIRECT, Control
from compound.api.sync import evaluate
from compound.benchmarks.measure.searches.completions import StoredCompletions
from compound.engine import Engine
from compound.evaluation.statistics import UNIT, interval_of_means, paired_interval
from compound.execution.cache import DiskCache
from compound.graph.configuration import Configuration
from compound.settings.common import BudgetSettings
from compound.spec import Program, load

METHODS = ("random", "search", "coordinate", "mipro", "optimas")
BUDGETS = (100, 200, 400)
SEEDS, EXAMPLES = 5, 100


@dataclass
class Measurement:
    """The runs of one system.

    Attributes:
        program: the system with its data and settings.
        folder: holds the runs and the shared completions.
        examples: number of test examples.
    """

    program: Program
    folder: Path
    examples: int
    _engines: Callable[[str], Engine] = field(init=False)

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        store = DiskCache(self.folder / "completions.sqlite")
        self._engines = functools.cache(lambda lm: StoredCompletions(self.program.find_engine(lm), store))

    def run(self, method: str, budget: float, seed: int) -> Mapping[str, Any]:
        """Return the test scores of the configuration that a method finds, and what finding it took."""
        folder = self.folder / f"{method.rpartition(':')[2]}-{budget:g}-{seed}"
        stored = folder / f"scores-{self.examples}.json"
        if not stored.exists():
            if not (folder / "best.json").exists():
                self._optimize(method, budget, seed, folder)
            result = read_result(folder)
            document = {
                "scores": self.score(result.best),
                "accepted": result.accepted,
                **{name: result.spent[name] for name in ("system_runs", "calls", "seconds")},
            }
            stored.write_text(json.dumps(document) + "\n", encoding="utf-8")
        found: Mapping[str, Any] = json.loads(stored.read_text(encoding="utf-8"))
        return found

    def _optimize(self, method: str, budget: float, seed: int, folder: Path) -> None:
        program = self.program
        assert program.data is not None
        assert program.metric is not None
        settings = program.optimize.model_copy(
            update={
                "method": method,
                "seed": seed,
                "baselines": (),
                "test_size": 2,
                "budget": BudgetSettings(system_runs=budget),
            }
        )
        optimize(
            program.system, program.data, program.metric, settings,
            run_dir=folder, engines=self._engines, folder=program.folder, text=program.text,
        )  # fmt: skip

    def score(self, configuration: Configuration) -> list[float]:
        """Return the test scores of a configuration."""
        program = self.program
        assert program.data is not None
        assert program.metric is not None
        evaluation = evaluate(
            program.system.bind(configuration), program.data, program.metric, "test",
            limit=self.examples, settings=program.optimize, engines=self._engines, cache=False,
        )  # fmt: skip
        return [round(score, 6) for score in evaluation.scores]

    def control(self, name: str) -> float | None:
        """Return the mean score of a control on the test examples, if it applies to the system."""
        settings = self.program.optimize.model_copy(update={"test_size": self.examples})
        control = Control(name, self.program, settings, self.folder)
        control.run()
        found = control.result
        return None if found is None or found["evaluation"] is None else found["evaluation"].mean


def summarize(runs: Sequence[Mapping[str, Any]], start: Sequence[float]) -> dict[str, object]:
    """Summarize the runs of a method with a budget: scores of seeds, and the gain over the start."""
    means = [fmean(run["scores"]) for run in runs]
    examples = [fmean(scores) for scores in zip(*(run["scores"] for run in runs), strict=True)]
    several = len(runs) > 1
    return {
        "scores": [round(mean, 4) for mean in means],
        "mean": interval_of_means(means, bounds=UNIT).to_json() if several else None,
        "gain": paired_interval(start, examples).to_json(),
        "accepted": [run["accepted"] for run in runs],
        **{name: round(fmean(run[name] for run in runs), 1) for name in ("system_runs", "calls", "seconds")},
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Run all methods with all budgets and seeds, and write the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("system", type=Path, help="the system's YAML file")
    parser.add_argument("--runs", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--output", type=Path, required=True, help="the JSON file to write")
    parser.add_argument("--methods", default=",".join(METHODS), help="comma-separated methods")
    parser.add_argument("--budgets", default=",".join(map(str, BUDGETS)), help="comma-separated system runs")
    parser.add_argument("--seeds", type=int, default=SEEDS, help=f"number of seeds (default {SEEDS})")
    parser.add_argument("--examples", type=int, default=EXAMPLES, help="number of test examples")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override an entry")
    args = parser.parse_args(arguments)
    overrides = [(key, value) for key, _, value in (each.partition("=") for each in args.set)]
    measured = Measurement(load(args.system, overrides=overrides), args.runs, args.examples)
    methods, budgets = args.methods.split(","), [int(budget) for budget in args.budgets.split(",")]
    start = measured.score(measured.program.system.configuration)
    controls = {name: measured.control(name) for name in (CONSTANT, DIRECT)}
    runs: dict[tuple[str, int], list[Mapping[str, Any]]] = {}
    for seed in range(args.seeds):
        for budget in budgets:
            for method in methods:
                found = measured.run(method, budget, seed)
                runs.setdefault((method, budget), []).append(found)
                print(seed, budget, method, round(fmean(found["scores"]), 4), flush=True)
        document = {
            "system": measured.program.path.stem,
            "lm": measured.program.system.lm,
            "test_examples": len(start),
            "start": round(fmean(start), 4),
            "controls": controls,
            "seeds": seed + 1,
            "methods": {
                name: {str(budget): summarize(runs[name, budget], start) for budget in budgets}
                for name in methods
            },
        }
        args.output.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
