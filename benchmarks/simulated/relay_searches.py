"""Compare methods on simulated systems with the price structure of real ones, whose optimum is known.

    python -m benchmarks.simulated.relay_searches [METHOD ...]

The systems are relays (`benchmarks.simulated.relays`), with a few tuned steps at the beginning,
whose candidates a local evaluation compares for a fraction of a run, before an expensive tail, and
a system whose tuned steps call no model (`benchmarks.simulated.heads`). For each system, method and
number of system runs, the file ``benchmarks/data/relay_searches.json`` has the expected score of
the configuration that the search found, as a share of the optimum's, for 20 seeds. Runs of the
initial evaluation and of the decision are additional to the stated ones, and the acceptance test
has no influence.

Without local rewards, `optimas` is `search`. Its other controls are rewards fitted to `shuffled`
scores, and `blind` ones, which do not read the gold answers. `judge` is blind, with ratings by a
model that is right for `RIGHT` of the outputs. These three are measured with the `SMALL` budgets of
the relays.

Finished methods and systems are kept, so an interrupted measurement can be resumed; to measure a
method again, remove its entry from the file.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.simulated.heads import Head
from benchmarks.simulated.relays import Relay
from compound.api.description import describe, open_run
from compound.core.engine import Engine
from compound.core.loops import run_blocking
from compound.core.narrowing import entry
from compound.evaluation.metrics.custom import custom
from compound.evaluation.statistics import UNIT, interval_of_means
from compound.graph.configuration import component_of
from compound.graph.registry.engines import find_engine
from compound.optimization.loop.loop import OptimizationLoop
from compound.optimization.method import Problem
from compound.optimization.runs.recorder import Event, Recorder
from compound.optimization.settings.optimize import OptimizeSettings, make_settings
from compound.optimizers.methods import method
from compound.testing import ScriptedLM

OUTPUT = Path(__file__).parents[1] / "data" / "relay_searches.json"
SEEDS, TRAIN, VALID = 20, 200, 5
BUDGETS = (50, 130, 200, 400)
BUDGETS_OF_HEAD = (100, 200, 400)
SMALL = (50, 130)
RIGHT = 0.8  # share of the outputs that the judge rates by the expected result, and not at random
SYSTEMS: Mapping[str, Callable[[int], Relay | Head]] = {
    "4 calls, 1 tuned": lambda seed: Relay(4, 1, seed=seed),
    "4 calls, 2 tuned": lambda seed: Relay(4, 2, seed=seed),
    "6 calls, 3 tuned": lambda seed: Relay(6, 3, seed=seed),
    "cheap head": Head,
}  # by seed
HEAD = "cheap head"
NO_BACKBONE = {"backbone": {"model": "none"}}
ABLATIONS = "benchmarks.simulated.ablations"
METHODS: Mapping[str, tuple[str, Mapping[str, object]]] = {
    "optimas": ("optimas", NO_BACKBONE),
    "search": ("search", {}),
    "shuffled": (f"{ABLATIONS}:shuffled", NO_BACKBONE),
    "blind": ("optimas", {**NO_BACKBONE, "gold": False}),
    "judge": ("optimas", {**NO_BACKBONE, "gold": False, "judge": "judge"}),
    "llm_selector": ("llm_selector", {}),
    "random": ("random", {}),
}


def settings_of(name: str, runs: int, seed: int) -> OptimizeSettings:
    """Return the settings of a run; the budget adds one evaluation at the start and one for the decision."""
    chosen, own = METHODS[name]
    return make_settings(
        {
            "method": chosen,
            "seed": seed,
            "valid_size": VALID,
            "iterations": 50,
            "budget": {"system_runs": runs + 2 * VALID},
            **({chosen: dict(own)} if own else {}),
        }
    )


def share(system: str, name: str, runs: int, seed: int) -> float:
    """Return the expected score of the configuration found, as a share of the optimum's."""
    world = SYSTEMS[system](seed)
    problem = problem_of(world, settings_of(name, runs, seed))
    with tempfile.TemporaryDirectory() as folder:
        events = _run(problem, Path(folder) / "run")
    values: dict[str, object] = {}
    for event in events:
        if event["event"] == "job":
            values |= event["values"]
    return value_of(world, values) / world.optimum()[1]


def problem_of(world: Relay | Head, settings: OptimizeSettings) -> Problem:
    """Return the problem of a search."""
    target, valid = world.system(), world.examples(VALID, "valid")
    made = method(settings.method, target, settings)
    # Without bounds of the scores, a search does not end because so few validation examples decide
    # nothing.
    metric = custom(world.score, thread="never")
    return Problem(target, world.examples(TRAIN), valid, [], metric, settings, made, _engine)


def _engine(lm: str) -> Engine:
    return ScriptedLM(_rate, name=lm) if lm == "judge" else find_engine(lm)


def _rate(message: str, rng: np.random.Generator) -> str:
    """Rate an output of a relay's step: 10 for the answer, and 0 otherwise, or at random."""
    right = re.search(r"answer: (\S+)\n", message), re.search(r"It wrote \w+: (\S+)\n", message)
    if rng.random() >= RIGHT:
        return str(rng.integers(11))
    return "10" if right[0] and right[1] and right[0][1] == right[1][1] else "0"


def _run(problem: Problem, folder: Path) -> list[Event]:
    events: list[Event] = []
    recorder = Recorder(
        open_run(folder, "", describe(problem)),
        listener=events.append,
    )
    try:
        run_blocking(OptimizationLoop(problem, recorder).run())
    finally:
        recorder.close()
    return events


def value_of(world: Relay | Head, values: Mapping[str, object]) -> float:
    """Return the expected score of a configuration, given by the values that differ from the initial ones."""
    if isinstance(world, Relay):
        return world.value({component_of(key): entry(values, key, int) for key in values})
    return world.value({key.split(".")[1]: value for key, value in values.items()})


def budgets_of(name: str, system: str) -> Sequence[int]:
    """Return the numbers of system runs that a method is measured with on a system."""
    if name in ("shuffled", "blind", "judge"):
        return () if system == HEAD else SMALL
    return BUDGETS_OF_HEAD if system == HEAD else BUDGETS


def missing(name: str, known: Mapping[str, Mapping[str, object]]) -> list[tuple[str, int]]:
    """Return the systems and numbers of system runs that a method is to be measured with."""
    wanted = ((system, runs) for system in SYSTEMS for runs in budgets_of(name, system))
    return [(system, runs) for system, runs in wanted if str(runs) not in known.get(system, {})]


def rows_of(name: str, known: Mapping[str, dict[str, object]]) -> dict[str, dict[str, object]]:
    """Measure a method with all systems and budgets, except the known ones."""
    found = {system: dict(rows) for system, rows in known.items()}
    with ProcessPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        for system, runs in missing(name, known):
            values = list(pool.map(partial(share, system, name, runs), range(SEEDS)))
            summary = interval_of_means(values, bounds=UNIT)
            rounded = [round(value, 4) for value in values]
            found.setdefault(system, {})[str(runs)] = {**summary.to_json(), "values": rounded}
            print(name, system, runs, summary, flush=True)
    return {
        system: {str(runs): found[system][str(runs)] for runs in budgets_of(name, system)}
        for system in SYSTEMS
        if budgets_of(name, system)
    }


def start(system: str) -> float:
    """Return the mean expected score of the initial configurations, as a share of the optimum's."""
    worlds = [SYSTEMS[system](seed) for seed in range(SEEDS)]
    return round(sum(value_of(world, {}) / world.optimum()[1] for world in worlds) / SEEDS, 4)


def main() -> None:
    """Measure the named methods, or all that are missing, and write the file after each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("methods", nargs="*", metavar="METHOD", help=f"one of {', '.join(METHODS)}")
    args = parser.parse_args()
    known = json.loads(OUTPUT.read_text(encoding="utf-8")) if OUTPUT.exists() else {"methods": {}}
    wanted = args.methods or [
        name for name in METHODS if missing(name, known["methods"].get(name, {}))
    ]
    for name in wanted:
        measured = {**known["methods"], name: rows_of(name, known["methods"].get(name, {}))}
        known = {
            "start": {system: start(system) for system in SYSTEMS},
            "methods": {each: measured[each] for each in METHODS if each in measured},
        }
        OUTPUT.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
