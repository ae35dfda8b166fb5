"""Compare numbers of validation examples for small budgets, on simulated systems.

    python -m benchmarks.simulated.valid_sizes

Each run is a whole optimization with `search`: the initial evaluation, jobs, and decisions on
validation examples. The file ``benchmarks/data/valid_sizes.json`` has, for each system, budget and
number of validation examples, the expected score of the configuration that each of 20 runs
accepted, as a share of the optimum's, the number of accepted changes, and the number of those whose
true gain is 0 or less.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks.simulated.relays import Relay
from benchmarks.simulated.systems import Simulated
from compound.api.description import describe, open_run
from compound.core.loops import run_blocking
from compound.core.narrowing import entry
from compound.evaluation.statistics import UNIT, interval_of_means
from compound.graph.configuration import component_of
from compound.graph.registry.engines import find_engine
from compound.optimization.loop.loop import OptimizationLoop
from compound.optimization.method import Problem
from compound.optimization.runs.recorder import Event, Recorder
from compound.optimization.settings.optimize import make_settings
from compound.optimizers.methods import method

OUTPUT = Path(__file__).parents[1] / "data" / "valid_sizes.json"
SEEDS, TRAIN, METHOD = 20, 200, "search"
SIZES = {40: (8, 10, 15), 60: (10, 15, 25), 100: (15, 25, 40), 160: (25, 40, 65)}  # by system runs
World = Relay | Simulated


def worlds(seed: int) -> Mapping[str, World]:
    """Return the systems of a seed."""
    diamond = Simulated("diamond", options=8, noise=0.0, blur=0.5, interaction=-0.3, seed=seed)
    return {
        "relay, 4 of 4 tuned": Relay(4, 4, seed=seed),
        "relay, 2 of 4 tuned": Relay(4, 2, seed=seed),
        "relay, 3 of 6 tuned": Relay(6, 3, seed=seed),
        "diamond, negative interaction": diamond,
    }


@dataclass(frozen=True)
class Outcome:
    """Result of a run.

    Attributes:
        reached: expected score of the accepted configuration, as a share of the optimum's.
        accepted: the number of accepted changes.
        false: the number of accepted changes that do not raise the expected score.
    """

    reached: float
    accepted: int
    false: int


def value_of(world: World, best: Mapping[str, object]) -> float:
    """Return the expected score of a configuration."""
    start = dict.fromkeys(world.names, 0)
    return world.value(start | {component_of(k): entry(best, k, int) for k in best})


def events_of(world: World, valid: int, runs: int, seed: int) -> list[Event]:
    """Run an optimization from the first option of each component, and return its events."""
    system, examples = world.system(), world.examples(valid, "valid")
    settings = make_settings(
        {
            "accept": "supported",
            "method": METHOD,
            "seed": seed,
            "valid_size": valid,
            "budget": {"system_runs": runs},
        }
    )
    chosen = method(METHOD, system, settings)
    problem = Problem(
        system, world.examples(TRAIN), examples, [], world, settings, chosen, find_engine
    )
    events: list[Event] = []
    with tempfile.TemporaryDirectory() as folder:
        recorder = Recorder(
            open_run(Path(folder) / "run", "", describe(problem)),
            listener=events.append,
        )
        try:
            run_blocking(OptimizationLoop(problem, recorder).run())
        finally:
            recorder.close()
    return events


def outcome(system: str, runs: int, valid: int, seed: int) -> Outcome:
    """Return the outcome of a run."""
    world, best = worlds(seed)[system], dict[str, object]()
    value, accepted, false = value_of(world, best), 0, 0
    for event in events_of(world, valid, runs, seed):
        if event["event"] == "decision" and event["accepted"]:
            best |= {key: after for key, _, after in event["changes"]}
            before, value = value, value_of(world, best)
            accepted, false = accepted + 1, false + (value <= before + 1e-12)
    return Outcome(value / world.optimum()[1], accepted, false)


def start(system: str) -> float:
    """Return the expected score of the start, as a share of the optimum's."""
    made = [worlds(seed)[system] for seed in range(SEEDS)]
    return sum(value_of(world, {}) / world.optimum()[1] for world in made) / SEEDS


def row(system: str, runs: int, valid: int, found: list[Outcome]) -> dict[str, object]:
    """Summarize the runs of all seeds."""
    shares = [round(each.reached, 4) for each in found]
    summary = interval_of_means(shares, bounds=UNIT)
    return {
        "system": system,
        "runs": runs,
        "valid": valid,
        "reached": shares,
        "mean": summary.mean,
        "low": summary.low,
        "high": summary.high,
        "accepted": sum(each.accepted for each in found),
        "false": sum(each.false for each in found),
    }


def main() -> None:
    """Run all optimizations, and write the file after each condition."""
    rows: list[dict[str, object]] = []
    starts = {system: round(start(system), 4) for system in worlds(0)}
    with ProcessPoolExecutor() as pool:
        for system in worlds(0):
            for runs, sizes in SIZES.items():
                for valid in sizes:
                    found = list(pool.map(partial(outcome, system, runs, valid), range(SEEDS)))
                    rows.append(row(system, runs, valid, found))
                    print(
                        *(f"{k}: {v}" for k, v in rows[-1].items() if k != "reached"),
                        sep=", ",
                        flush=True,
                    )
                    document = {"seeds": SEEDS, "method": METHOD, "start": starts, "rows": rows}
                    OUTPUT.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
