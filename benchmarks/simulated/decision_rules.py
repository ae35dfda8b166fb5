"""Compare one decision for a round of jobs with a decision for each component, on simulated systems.

    python -m compound.benchmarks.simulated.decision_rules

Each run is a whole optimization: the initial evaluation, jobs, decisions on validation examples. The file
``benchmarks/data/decision_rules.json`` has, for each system, method, size of the validation split, budget and
rule, the expected score of the configuration that each of 20 runs accepted, as a share of the optimum's, the
number of accepted changes, and the number of those whose true gain is 0 or less. Where the budget or alpha
does not allow a decision for each component, the rule ``component`` decides rounds, and the two runs are the
same.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict, cast

from compound.api.description import describe, open_run
from compound.benchmarks.simulated.relays import Relay
from compound.benchmarks.simulated.systems import Simulated
from compound.concurrency.blocking import run_blocking
from compound.evaluation.statistics import interval_of_means
from compound.graph.configuration import component_of
from compound.loop.loop import OptimizationLoop
from compound.narrowing import entry
from compound.optimization.budget_plan import BudgetPlan, has_job_per_component
from compound.optimization.problem import Problem
from compound.optimization.prospects import plan_by_runs
from compound.optimizers.methods import method
from compound.registry.engines import find_engine
from compound.runs.events import Event
from compound.runs.recorder import Recorder
from compound.settings.optimize import OptimizeSettings, make_settings

OUTPUT = Path(__file__).parents[1] / "data" / "decision_rules.json"
SEEDS, TRAIN, RULES = 20, 200, ("round", "component")
BUDGETS = (100, 200, 400)
World = Relay | Simulated


def worlds(seed: int) -> Mapping[str, World]:
    """Return the systems of a seed."""
    return {
        "relay, 4 of 4 tuned": Relay(4, 4, seed=seed),
        "relay, 2 of 4 tuned": Relay(4, 2, seed=seed),
        "relay, 3 of 6 tuned": Relay(6, 3, seed=seed),
        "diamond, negative interaction": Simulated(
            "diamond", options=8, noise=0.0, blur=0.5, interaction=-0.3, seed=seed
        ),
        "relay, all options equal": Relay(4, 4, skill=(0.6, 0.6), seed=seed),
    }


CONDITIONS = [
    *(("coordinate", 40, system, BUDGETS) for system in worlds(0)),
    ("optimas", 40, "relay, 4 of 4 tuned", BUDGETS),
    ("coordinate", 20, "relay, 2 of 4 tuned", BUDGETS),
    ("coordinate", 40, "relay, 4 of 4 tuned", (800,)),
]  # method, number of validation examples, system, budgets


@dataclass(frozen=True)
class Outcome:
    """Result of a run.

    Attributes:
        plan: the plan that the run followed.
        reached: expected score of the accepted configuration, as a share of the optimum's.
        accepted: the number of accepted changes.
        false: the number of accepted changes that do not raise the expected score.
        decisions: the number of decisions.
    """

    plan: BudgetPlan
    reached: float
    accepted: int
    false: int
    decisions: int


class Row(TypedDict):
    """Runs of one rule under the same conditions, one for each seed."""

    method: str
    valid: int
    system: str
    runs: int
    rule: str
    by_component: int
    decisions: float
    accepted: float
    false: float
    reached: list[float]
    mean: float
    low: float
    high: float


def value_of(world: World, best: Mapping[str, object]) -> float:
    """Return the expected score of a configuration."""
    start = dict.fromkeys(world.names, 0)
    return world.value(start | {component_of(k): entry(best, k, int) for k in best})


def outcome(world: World, settings: OptimizeSettings) -> Outcome:
    """Run an optimization from the first option of each component."""
    problem = problem_of(world, settings)
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
    search = recorder.state.search
    assert search is not None
    best: dict[str, object] = {}
    value, accepted, false, decisions = value_of(world, best), 0, 0, 0
    for event in events:
        if event["event"] != "decision":
            continue
        decisions += 1
        if event["accepted"]:
            best |= {key: after for key, _, after in event["changes"]}
            before, value = value, value_of(world, best)
            accepted, false = accepted + 1, false + (value <= before + 1e-12)
    return Outcome(search.plan, value / world.optimum()[1], accepted, false, decisions)


def problem_of(world: World, settings: OptimizeSettings) -> Problem:
    """Return the problem of optimizing a system."""
    system, valid = world.system(), world.examples(settings.valid_examples or 40, "valid")
    chosen = method(settings.method, system, settings)
    return Problem(system, world.examples(TRAIN), valid, [], world, settings, chosen, find_engine)


def settings_of(name: str, valid: int, runs: int, rule: str, seed: int) -> OptimizeSettings:
    """Return the settings of a run."""
    own: dict[str, object] = {"optimas": {"backbone": {"model": "none"}}} if name == "optimas" else {}
    return make_settings({
        "accept": "supported",
        "method": name, "seed": seed, "valid_size": valid, "decide": rule, "budget": {"system_runs": runs},
        **own,
    })  # fmt: skip


def decides_components(problem: Problem) -> bool:
    """Return whether a run is planned with a decision for each component."""
    plan, _ = plan_by_runs(problem)
    return has_job_per_component(problem.method) and plan.jobs == 1


def rows_of(name: str, valid: int, system: str, runs: int) -> list[Row]:
    """Measure both rules under the same conditions."""
    found: dict[str, list[Outcome]] = {rule: [] for rule in RULES}
    for seed in range(SEEDS):
        world = worlds(seed)[system]
        first = outcome(world, settings_of(name, valid, runs, RULES[0], seed))
        other = settings_of(name, valid, runs, RULES[1], seed)
        found[RULES[0]].append(first)
        found[RULES[1]].append(
            outcome(world, other) if decides_components(problem_of(world, other)) else first
        )
    return [_row(name, valid, system, runs, rule, each) for rule, each in found.items()]


def _row(name: str, valid: int, system: str, runs: int, rule: str, found: list[Outcome]) -> Row:
    reached = [round(each.reached, 4) for each in found]
    summary = interval_of_means(reached)
    return {
        "method": name, "valid": valid, "system": system, "runs": runs, "rule": rule,
        "by_component": sum(each.plan.jobs == 1 for each in found),
        "decisions": sum(each.decisions for each in found) / SEEDS,
        "accepted": sum(each.accepted for each in found) / SEEDS,
        "false": sum(each.false for each in found) / SEEDS,
        "reached": reached, "mean": summary.mean, "low": summary.low, "high": summary.high,
    }  # fmt: skip


def start(system: str) -> float:
    """Return the expected score of the start, as a share of the optimum's."""
    made = [worlds(seed)[system] for seed in range(SEEDS)]
    return sum(value_of(world, {}) / world.optimum()[1] for world in made) / SEEDS


def main() -> None:
    """Run all optimizations, and write the file after each condition."""
    starts = {system: round(start(system), 4) for system in worlds(0)}
    rows: list[Row] = []
    for name, valid, system, budgets in CONDITIONS:
        for runs in budgets:
            rows += rows_of(name, valid, system, runs)
            for row in rows[-len(RULES) :]:
                print(*(f"{key}: {value}" for key, value in row.items() if key != "reached"), sep=", ")
        result = {"seeds": SEEDS, "alpha": 0.05, "start": starts, "rows": rows}
        OUTPUT.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
