"""Compare the system runs that jobs were expected to take with those that they took, on simulated systems.

Run ``python -m compound.benchmarks.simulated.predicted_runs``.

Writes ``benchmarks/data/predicted_runs.json``. For each job: the price of its candidates, the system runs
that the dry run predicts for it in the first round, its share when it started, the runs that it spent, and
why it ended. A job should spend nearly all of its share, unless it used all train examples or steps, or its
last candidate was no better than the incumbent.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypedDict, cast

from compound.api.description import describe, open_run
from compound.benchmarks.simulated.relays import Relay
from compound.benchmarks.simulated.systems import Simulated
from compound.concurrency.blocking import run_blocking
from compound.loop.loop import OptimizationLoop
from compound.optimization.allowance import allowance
from compound.optimization.problem import Problem
from compound.optimization.prospects import plan_by_runs, prospects
from compound.optimizers.methods import method
from compound.optimizers.search.joint import MOST_STEPS
from compound.optimizers.search.joint_state import JointProgress
from compound.optimizers.search.racing import Race
from compound.registry.engines import find_engine
from compound.runs.events import Event
from compound.runs.recorder import Recorder
from compound.settings.optimize import OptimizeSettings, make_settings

OUTPUT = Path(__file__).parents[1] / "data" / "predicted_runs.json"
METHODS = ("search", "coordinate", "optimas")
TRAIN, VALID, RUNS = 400, 40, 900
Reason = Literal["share", "examples", "no gain", "steps", "not raced"]
WORLDS: Mapping[str, Simulated | Relay] = {
    "chain": Simulated("chain", options=8, noise=0.0, blur=0.5),
    "join": Simulated("join", options=8, noise=0.0, blur=0.5),
    "diamond": Simulated("diamond", options=8, noise=0.0, blur=0.5),
    "five": Simulated("five", options=8, noise=0.0, blur=0.5),
    "relay": Relay(4, 4),
    "relay with a tail": Relay(8, 3),
}


class JobRow(TypedDict):
    """A job; ``predicted`` is ``None`` after the first round, and ``price`` is that of a candidate."""

    keys: list[str]
    price: float
    predicted: float | None
    share: float
    spent: float
    ended: Reason


def measure(world: Simulated | Relay, name: str) -> list[JobRow]:
    """Optimize a system with a method, and return its jobs."""
    own = {name: {"backbone": {"model": "none"}}} if name == "optimas" else {}
    settings = make_settings({"method": name, "valid_size": VALID, "budget": {"system_runs": RUNS}, **own})
    problem = problem_of(world, settings)
    plan, free = plan_by_runs(problem)
    expected = [
        found.runs for found in prospects(problem, plan, free, allowance(problem, free, plan.decisions))
    ]
    rows: list[JobRow] = []
    last: list[tuple[float, Mapping[str, Any]]] = []  # share and progress of the job so far

    def receive(received: Mapping[str, object]) -> None:
        event, search = cast("Event", received), recorder.state.search
        if event["event"] == "progress" and search is not None and search.job is not None:
            last.append((search.job.share, search.job.progress or {}))
        elif event["event"] == "job" and search is not None and last:
            share, progress = last[-1]
            number = event["job"]
            keys = list(event["keys"])
            rows.append({
                "keys": keys,
                "price": search.prices.keys(keys),
                "predicted": expected[number] if number < len(expected) else None,
                "share": share,
                "spent": event["runs"],
                "ended": _reason(progress),
            })  # fmt: skip
            last.clear()

    with tempfile.TemporaryDirectory() as folder:
        recorder = Recorder(open_run(Path(folder) / "run", "", describe(problem)), listener=receive)
        try:
            run_blocking(OptimizationLoop(problem, recorder).run())
        finally:
            recorder.close()
    return rows


def problem_of(world: Simulated | Relay, settings: OptimizeSettings) -> Problem:
    """Return the problem of optimizing a system from the first option of each component."""
    system = world.system()
    chosen = method(settings.method, system, settings)
    train, valid = world.examples(TRAIN), world.examples(VALID, "valid")
    return Problem(system, train, valid, [], world, settings, chosen, find_engine)


def _reason(progress: Mapping[str, Any]) -> Reason:
    """Return why a job ended, from its last progress."""
    if "levels" in progress:
        joint = JointProgress.from_json(progress)
        if joint.steps == MOST_STEPS:
            return "steps"
        return "share" if joint.field else "examples"
    if progress.get("race") is None:
        return "not raced"
    race = Race.model_validate(progress["race"])
    if race.seen == TRAIN:
        return "examples"
    is_hopeless = race.is_finished and race.ranking()[0].gain <= 0
    return "no gain" if is_hopeless else "share"


def main() -> None:
    """Measure all systems and methods, write the jobs, and print the spent part of the shares."""
    found = {
        f"{system}, {name}": measure(world, name) for system, world in WORLDS.items() for name in METHODS
    }
    OUTPUT.write_text(json.dumps({"train": TRAIN, "runs": RUNS, "jobs": found}, indent=1) + "\n")
    for title, rows in found.items():
        limited = [row for row in rows if row["ended"] == "share"]
        share, spent = sum(row["share"] for row in limited), sum(row["spent"] for row in limited)
        part = f"{spent / share:.1%} of {share:.0f} runs" if share else "none"
        print(f"{title}: {len(rows)} jobs, {len(limited)} limited by their share, which spent {part}")


if __name__ == "__main__":
    main()
