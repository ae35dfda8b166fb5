"""Measure how much the result of a search depends on its seed.

    python -m compound.benchmarks.measure.searches.spread benchmarks/atlas.yaml --runs FOLDER

Each method optimizes the system once per seed, with the budget in the file. All configurations found are
then evaluated on the same test examples, as in `compound.benchmarks.measure.searches.compare`. `joint` is the
method `search`; `separate` searches prompts and numbers in two jobs, each with sequential halving, as
`search` did before it became joint.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from compound.benchmarks.measure.searches.compare import EXAMPLES, Measurement
from compound.evaluation.statistics import UNIT, interval_of_means, paired_interval
from compound.graph.space import Choice, Demos, Float, Int, Text
from compound.graph.system import System
from compound.optimization.method import Job, Method, Optimizer
from compound.optimizers.scheduling.jobs import keys_of
from compound.optimizers.scheduling.scheduler import Uniform
from compound.optimizers.search.prompts import PromptSearch, PromptSettings
from compound.optimizers.search.sampling import NumberSearch
from compound.settings.optimize import OptimizeSettings
from compound.spec import Program
from compound.spec import load as load_program

OUTPUT = Path(__file__).parents[2] / "data" / "spread.json"
SEEDS = 10
METHODS: Mapping[str, str] = {
    "joint": "search",
    "separate": "compound.benchmarks.measure.searches.spread:separate",
}
PROMPTS_WEIGHT = 3.0  # prompt jobs spend system runs on bootstrapping before scoring any candidate


def separate(system: System, optimize: OptimizeSettings) -> Method:
    """One job for all texts and demonstrations, and one for all choices and numbers."""
    optimizers: Mapping[str, Optimizer] = {
        "prompts": PromptSearch.of(PromptSettings(), "search"),
        "numbers": NumberSearch(),
    }
    prompts, numbers = keys_of(system, Text, Demos), keys_of(system, Choice, Int, Float)
    jobs = [Job("prompts", prompts, weight=PROMPTS_WEIGHT)] if prompts else []
    jobs += [Job("numbers", numbers)] if numbers else []
    return Method("separate", optimizers, jobs, Uniform())


def main(arguments: Sequence[str] | None = None) -> None:
    """Run all methods with all seeds, and write the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("system", type=Path, help="the system's YAML file")
    parser.add_argument("--runs", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--seeds", type=int, default=SEEDS, help=f"number of seeds (default {SEEDS})")
    args = parser.parse_args(arguments)
    program = load_program(args.system)
    budget = program.optimize.budget.system_runs or math.inf
    measured = Measurement(program, args.runs, EXAMPLES)
    start = measured.score(program.system.configuration)
    means: dict[str, list[float]] = {name: [] for name in METHODS}
    for seed in range(args.seeds):
        for name, method in METHODS.items():
            scores = measured.run(method, budget, seed)["scores"]
            means[name].append(statistics.fmean(scores))
            print(seed, name, round(means[name][-1], 4), flush=True)
        if seed:
            write(program, len(start), statistics.fmean(start), means)


def write(program: Program, examples: int, start: float, means: Mapping[str, Sequence[float]]) -> None:
    """Write the results so far."""
    methods = {
        name: {
            "scores": [round(value, 4) for value in values],
            "mean": interval_of_means(values, bounds=UNIT).to_json(),
            "sd": round(statistics.stdev(values), 4),
            "worst": round(min(values), 4),
        }
        for name, values in means.items()
    }
    result = {
        "system": program.path.stem,
        "system_runs": program.optimize.budget.system_runs,
        "test_examples": examples,
        "start": round(start, 4),
        "methods": methods,
        "gain": paired_interval(means["separate"], means["joint"]).to_json(),
    }
    OUTPUT.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
