"""Compare methods on a system by the score of the configurations that they find, by system runs.

    python -m benchmarks.measure.searches.compare benchmarks/atlas.yaml --runs FOLDER --output FILE

Each method optimizes the system once per budget and seed. All configurations found are then
evaluated on the same test examples, as are the initial configuration and two controls: the constant
answer that is best on the train split, and one direct call of the system's model. All runs share
greedy completions (`benchmarks.measure.searches.completions`). The file is rewritten after each
run, and runs that it holds are not made again, so that a measurement can be interrupted and
extended by methods, budgets and seeds.

With `--from FOLDER/optimas-240-{seed}`, runs start from the finished run with the next higher seed,
the last one from the lowest: with its configurations and rewards. Their rows are named `optimas,
warm`.
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

from benchmarks.measure.searches.completions import StoredCompletions
from compound.api.optimize import run_optimization
from compound.api.result import read_result
from compound.api.sweeps.controls import CONSTANT, DIRECT, Control
from compound.api.sync import evaluate
from compound.core.engine import Engine
from compound.core.errors import DataError
from compound.evaluation.statistics import UNIT, interval_of_means, paired_interval
from compound.execution.cache import DiskCache
from compound.graph.configuration import Configuration
from compound.optimization.settings.base import BudgetSettings
from compound.yaml import Program, load

METHODS = ("random", "search", "mipro", "optimas")
BUDGETS = (100, 200, 400)
SEEDS, EXAMPLES = 5, 100
MAX_SEEDS = 100


@dataclass
class Measurement:
    """The runs of one system.

    Attributes:
        program: the system with its data and settings.
        folder: holds the runs and the shared completions.
        examples: number of test examples.
        earlier: the directory of the run to start from, by seed.
    """

    program: Program
    folder: Path
    examples: int
    earlier: Callable[[int], Path] | None = None
    _engines: Callable[[str], Engine] = field(init=False)

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        store = DiskCache(self.folder / "completions.sqlite")
        self._engines = functools.cache(
            lambda lm: StoredCompletions(self.program.find_engine(lm), store)
        )

    @property
    def engine(self) -> str:
        """Name of the system's engine, which includes the number format of a local model."""
        lm = self.program.system.lm
        return self._engines(lm).name if lm else ""

    def run(self, method: str, budget: float, seed: int) -> Mapping[str, Any]:
        """Return the test scores and numbers of the configuration that a method finds, and what it took."""
        warm = "-warm" if self.earlier else ""
        folder = self.folder / f"{method.rpartition(':')[2]}{warm}-{budget:g}-{seed}"
        stored = folder / f"scores-{self.examples}.json"
        if not stored.exists():
            if not (folder / "best.json").exists():
                self._optimize(method, budget, seed, folder)
            result = read_result(folder)
            document = {
                "scores": self.score(result.best),
                "accepted": result.accepted,
                "numbers": {
                    key: round(value, 4)
                    for key, value in result.best.items()
                    if isinstance(value, int | float)
                },
                **({"earlier": self.earlier(seed).name} if self.earlier else {}),
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
                "test_size": 2,
                "budget": BudgetSettings(system_runs=budget),
            }
        )
        run_optimization(
            program.system,
            program.data,
            program.metric,
            settings,
            run_dir=folder,
            engines=self._engines,
            folder=program.folder,
            text=program.text,
            start_from=self.earlier(seed) if self.earlier else None,
        )

    def score(self, configuration: Configuration) -> list[float]:
        """Return the test scores of a configuration."""
        program = self.program
        assert program.data is not None
        assert program.metric is not None
        evaluation = evaluate(
            program.system.bind(configuration),
            program.data,
            program.metric,
            "test",
            limit=self.examples,
            settings=program.optimize,
            engines=self._engines,
            cache=False,
        )
        return [round(score, 4) for score in evaluation.scores]

    def control(self, name: str) -> float | None:
        """Return the mean score of a control on the test examples, if it applies to the system."""
        settings = self.program.optimize.model_copy(update={"test_size": self.examples})
        control = Control(name, self.program, settings, self.folder)
        evaluation = control.run()["evaluation"]
        return None if evaluation is None else evaluation.mean


def summarize(runs: Sequence[Mapping[str, Any]], start: Sequence[float]) -> dict[str, Any]:
    """Summarize the runs of a method with a budget: scores of seeds, and the gain over the start."""
    means = [fmean(run["scores"]) for run in runs]
    examples = [fmean(scores) for scores in zip(*(run["scores"] for run in runs), strict=True)]
    several = len(runs) > 1
    return {
        "scores": [round(mean, 4) for mean in means],
        "mean": interval_of_means(means, bounds=UNIT).to_json() if several else None,
        "gain": paired_interval(start, examples).to_json(),
        "accepted": [run["accepted"] for run in runs],
        **{
            name: round(fmean(run[name] for run in runs), 1)
            for name in ("system_runs", "calls", "seconds")
        },
    }


def read_document(path: Path, measured: Measurement) -> dict[str, Any]:
    """Return the document of a file, or a new one with the start and the controls.

    Raises:
        DataError: the file is about another system, model or number of examples.
    """
    system = measured.program.system
    facts = {
        "system": measured.program.path.stem,
        "identity": system.identity,
        "lm": system.lm,
        "engine": measured.engine,
        "examples": measured.examples,
    }
    if path.exists():
        document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if differing := [name for name, value in facts.items() if document.get(name) != value]:
            name = differing[0]
            raise DataError(
                f"{path} holds runs with {name} {document.get(name)!r}, not {facts[name]!r}",
                hint="name another file with --output",
            )
        return document
    controls = {name: measured.control(name) for name in (CONSTANT, DIRECT)}
    return {
        **facts,
        "start": measured.score(system.configuration),
        "controls": controls,
        "runs": {},
    }


def earlier_run(pattern: str, seed: int) -> Path:
    """Return the run with another seed to start from: the next higher one, otherwise the lowest.

    Raises:
        SystemExit: no run with another seed is finished.
    """
    runs = {n: Path(pattern.format(seed=n)) for n in range(MAX_SEEDS) if n != seed}
    finished = [n for n, folder in runs.items() if (folder / "best.json").exists()]
    if not finished:
        raise SystemExit(f"no run {pattern} with a seed other than {seed} is finished")
    return runs[min((n for n in finished if n > seed), default=finished[0])]


def main(arguments: Sequence[str] | None = None) -> None:
    """Make all runs that the file lacks, and write it after each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("system", type=Path, help="the system's YAML file")
    parser.add_argument("--runs", type=Path, required=True, help="folder of the runs")
    parser.add_argument(
        "--output", type=Path, required=True, help="the JSON file to write or extend"
    )
    parser.add_argument("--methods", default=",".join(METHODS), help="comma-separated methods")
    parser.add_argument(
        "--budgets", default=",".join(map(str, BUDGETS)), help="comma-separated system runs"
    )
    parser.add_argument(
        "--seeds", default=f"0-{SEEDS - 1}", help="first and last seed, such as 0-4"
    )
    parser.add_argument("--examples", type=int, default=EXAMPLES, help="number of test examples")
    parser.add_argument(
        "--from", dest="earlier", help="runs to start from, with {seed} for the seed"
    )
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="override an entry"
    )
    args = parser.parse_args(arguments)
    overrides = [(key, value) for key, _, value in (each.partition("=") for each in args.set)]
    first, _, last = args.seeds.partition("-")
    seeds = range(int(first), int(last or first) + 1)
    measured = Measurement(load(args.system, overrides=overrides), args.runs, args.examples)
    if args.earlier:
        measured.earlier = functools.partial(earlier_run, args.earlier)
    document = read_document(args.output, measured)
    for seed in seeds:
        for budget in args.budgets.split(","):
            for method in args.methods.split(","):
                name = f"{method}, warm" if args.earlier else method
                known = document["runs"].setdefault(name, {}).setdefault(budget, {})
                if str(seed) not in known:
                    known[str(seed)] = measured.run(method, float(budget), seed)
                    args.output.write_text(json.dumps(document) + "\n", encoding="utf-8")
                print(seed, budget, name, round(fmean(known[str(seed)]["scores"]), 4), flush=True)


if __name__ == "__main__":
    main()
