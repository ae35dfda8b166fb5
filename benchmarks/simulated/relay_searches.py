"""Compare methods on simulated systems with the price structure of real ones, whose optimum is known.

    python -m compound.benchmarks.simulated.relay_searches [METHOD ...]

The systems are relays (`compound.benchmarks.simulated.relays`), with a few tuned steps at the beginning,
whose candidates a local evaluation compares for a fraction of a run, before an expensive tail, and a system
whose tuned steps call no model (`compound.benchmarks.simulated.heads`). For each system,
method and number of system runs, the file ``benchmarks/data/relay_searches.json`` has the expected score of
the configuration that the search found, as a share of the optimum's, for 20 seeds. Runs of the initial
evaluation and of the decision are additional to the stated ones, and the acceptance test has no influence.

Ablations of `optimas`: `shuffled` (of the labels that the
reward is fitted to), `unguided` (no local reward). Finished methods and systems are kept, so an interrupted
measurement can be resumed; to measure a method again, remove its entry from the file.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import cast

from compound.api.description import describe, open_run
from compound.benchmarks.simulated.heads import Head
from compound.benchmarks.simulated.relays import Relay
from compound.concurrency.blocking import run_blocking
from compound.evaluation.metrics.custom import custom
from compound.evaluation.statistics import UNIT, interval_of_means
from compound.graph.configuration import component_of
from compound.loop.loop import OptimizationLoop
from compound.narrowing import entry
from compound.optimization.problem import Problem
from compound.optimizers.methods import method
from compound.registry.engines import find_engine
from compound.runs.events import Event
from compound.runs.recorder import Recorder
from compound.settings.optimize import OptimizeSettings, make_settings

OUTPUT = Path(__file__).parents[1] / "data" / "relay_searches.json"
SEEDS, TRAIN, VALID = 20, 200, 5
BUDGETS = (50, 130, 200, 400)
BUDGETS_OF_HEAD = (100, 200, 400)
SYSTEMS: Mapping[str, Callable[[int], Relay | Head]] = {
    "4 calls, 1 tuned": lambda seed: Relay(4, 1, seed=seed),
    "4 calls, 2 tuned": lambda seed: Relay(4, 2, seed=seed),
    "6 calls, 3 tuned": lambda seed: Relay(6, 3, seed=seed),
    "cheap head": Head,
}  # by seed
HEAD = "cheap head"
NO_BACKBONE = {"backbone": {"model": "none"}}
ABLATIONS = "compound.benchmarks.simulated.ablations"
METHODS: Mapping[str, tuple[str, Mapping[str, object]]] = {
    "optimas": ("optimas", NO_BACKBONE),
    "search": ("search", {}),
    "unguided": (f"{ABLATIONS}:unguided", NO_BACKBONE),
    "shuffled": (f"{ABLATIONS}:shuffled", NO_BACKBONE),
    "llm_selector": ("llm_selector", {}),
    "random": ("random", {}),
}


def settings_of(name: str, runs: int, seed: int) -> OptimizeSettings:
    """Return the settings of a run; the budget adds one evaluation at the start and one for the decision."""
    chosen, own = METHODS[name]
    return make_settings({
        "method": chosen, "seed": seed, "valid_size": VALID, "iterations": 50,
        "budget": {"system_runs": runs + 2 * VALID}, **({chosen: dict(own)} if own else {}),
    })  # fmt: skip


def share(system: str, name: str, runs: int, seed: int) -> float:
    """Return the expected score of the configuration found, as a share of the optimum's."""
    world = SYSTEMS[system](seed)
    settings, target = settings_of(name, runs, seed), world.system()
    made = method(settings.method, target, settings)
    valid = world.examples(VALID, "valid")
    # Without bounds of the scores, a search does not end because so few validation examples decide nothing.
    metric = custom(world.score, thread="never")
    problem = Problem(target, world.examples(TRAIN), valid, [], metric, settings, made, find_engine)
    events: list[Event] = []
    with tempfile.TemporaryDirectory() as folder:
        recorder = Recorder(
            open_run(Path(folder) / "run", "", describe(problem)),
            listener=lambda event: events.append(cast("Event", event)),
        )
        try:
            run_blocking(OptimizationLoop(problem, recorder).run())
        finally:
            recorder.close()
    values: dict[str, object] = {}
    for event in events:
        if event["event"] == "job":
            values |= event["values"]
    return value_of(world, values) / world.optimum()[1]


def value_of(world: Relay | Head, values: Mapping[str, object]) -> float:
    """Return the expected score of a configuration, given by the values that differ from the initial ones."""
    if isinstance(world, Relay):
        return world.value({component_of(key): entry(values, key, int) for key in values})
    return world.value({key.split(".")[1]: value for key, value in values.items()})


def budgets_of(system: str) -> Sequence[int]:
    """Return the numbers of system runs that a system is measured with."""
    return BUDGETS_OF_HEAD if system == HEAD else BUDGETS


def missing(known: Mapping[str, Mapping[str, object]]) -> list[tuple[str, int]]:
    """Return the systems and numbers of system runs that a method is to be measured with."""
    wanted = ((system, runs) for system in SYSTEMS for runs in budgets_of(system))
    return [(system, runs) for system, runs in wanted if str(runs) not in known.get(system, {})]


def rows_of(name: str, known: Mapping[str, dict[str, object]]) -> dict[str, dict[str, object]]:
    """Measure a method with all systems and budgets, except the known ones."""
    found = {system: dict(rows) for system, rows in known.items()}
    with ProcessPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        for system, runs in missing(known):
            values = list(pool.map(partial(share, system, name, runs), range(SEEDS)))
            summary = interval_of_means(values, bounds=UNIT)
            rounded = [round(value, 4) for value in values]
            found.setdefault(system, {})[str(runs)] = {**summary.to_json(), "values": rounded}
            print(name, system, runs, summary, flush=True)
    return {
        system: {str(runs): found[system][str(runs)] for runs in budgets_of(system)} for system in SYSTEMS
    }


def start(system: str) -> float:
    """Return the mean expected score of the initial configurations, as a share of the optimum's."""
    worlds = [SYSTEMS[system](seed) for seed in range(SEEDS)]
    return round(sum(value_of(world, {}) / world.optimum()[1] for world in worlds) / SEEDS, 4)


def main() -> None:
    """Measure the named methods, or all that are missing, and write the file after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("methods", nargs="*", metavar="METHOD", help=f"one of {', '.join(METHODS)}")
    args = parser.parse_args()
    known = json.loads(OUTPUT.read_text(encoding="utf-8")) if OUTPUT.exists() else {"methods": {}}
    wanted = args.methods or [name for name in METHODS if missing(known["methods"].get(name, {}))]
    for name in wanted:
        measured = {**known["methods"], name: rows_of(name, known["methods"].get(name, {}))}
        known = {
            "start": {system: start(system) for system in SYSTEMS},
            "methods": {each: measured[each] for each in METHODS if each in measured},
        }
        OUTPUT.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
