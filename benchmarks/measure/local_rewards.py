"""Measure the value of local rewards on simulated systems with a known optimum.

    python -m benchmarks.measure.local_rewards [PART ...]

Each finished part is written to ``benchmarks/data/local_rewards.json``, and the other parts are
kept. See `PARTS` for the parts. Seeds run in parallel processes; results do not depend on the
number of processes.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.progress import track
from scipy import stats

from benchmarks.simulated.reward_accuracy import KINDS, accuracy, lora
from benchmarks.simulated.systems import SHAPES
from compound.core.narrowing import entry
from compound.evaluation.statistics import UNIT, Bounds, interval_of_means
from compound.execution.rng import generator
from compound.graph.configuration import component_of
from compound.optimization.method import Job, JobRecord, Scheduler
from compound.optimization.settings.base import BudgetSettings
from compound.optimization.settings.optimize import OptimizeSettings
from compound.optimizers.optimas.methods import OptimasSettings
from compound.optimizers.scheduling import RewardGapScheduler, Uniform
from compound.rewards.buffer import PairBuffer
from compound.rewards.candidates import Candidate, Sampling
from compound.rewards.pairs import Draw

OUTPUT = Path(__file__).parents[1] / "data" / "local_rewards.json"
SEEDS = 20
LABELS = "benchmarks.simulated.ablations"

SETTINGS = OptimizeSettings(candidates=16, minibatch=8, alpha=0.2, valid_size=40)


def settings(method: str, seed: int, runs: float, **changed: object) -> OptimizeSettings:
    """Return the settings of `optimas`, or of an ablation of it."""
    own = OptimasSettings.model_validate(
        {"backbone": {"model": "none"}, "pairs": {"min_rollouts": 1, "max_rollouts": 1, "level": 1}}
    )
    budget = BudgetSettings(system_runs=runs)
    given = {
        **SETTINGS.given,
        "method": method,
        "seed": seed,
        "budget": budget,
        method: own,
        **changed,
    }
    return OptimizeSettings.model_validate(given)


# -- schedulers ------------------------------------------------------------------------------------------

HEADROOM = (1.0, 0.5, 0.1, 0.05, 0.02)  # possible gain of each of five components at the start
COSTS = (4.0, 7.0, 10.0, 13.0, 16.0)  # system runs of a job of each component, in another order
RUNS_OF_JOBS = 300.0
OFFLINE, FRESH = 20, 4  # inputs with pairs before the first job, and in each job
ROLLOUT_NOISE = 0.3  # standard deviation of the reward of one downstream run
TRAIN_NOISE = 0.05  # standard deviation of a measured gain on train examples
SCHEDULERS: Mapping[str, Scheduler] = {
    "uniform": Uniform(),
    "gaps": RewardGapScheduler(),
}


def regret(_: str, seed: int) -> dict[str, float]:
    """Return each scheduler's regret: the sum of the remaining headroom over all jobs, per ten system runs.

    A scheduler sees the records of a run only: gaps of draws with noisy rewards, and noisy gains on
    train examples.
    """
    return {name: _regret(scheduler, seed) for name, scheduler in SCHEDULERS.items()}


def _regret(scheduler: Scheduler, seed: int) -> float:
    jobs = [Job("local", (f"{name}.option",)) for name in "abcde"]
    left, costs = (
        dict(zip("abcde", generator(seed, part).permutation(values).tolist(), strict=True))
        for part, values in (("headroom", HEADROOM), ("costs", COSTS))
    )
    gaps = {
        name: _measured_gap(left[name], generator(seed, "offline", name), OFFLINE) for name in left
    }
    history = [JobRecord(job=0, optimizer="offline", keys=(), facts={"gaps": dict(gaps)})]
    total = spent = 0.0
    while spent < RUNS_OF_JOBS:
        job = scheduler.choose(jobs, history, seed)
        name = component_of(job.keys[0])
        rng = generator(seed, "job", name, sum(record.keys == job.keys for record in history))
        gaps[name] = _measured_gap(left[name], rng, FRESH)
        gain = 0.3 * rng.random() * left[name]
        measured = gain + TRAIN_NOISE * rng.normal()
        is_accepted = measured > 0
        left[name] -= gain if is_accepted else 0.0
        history.append(
            JobRecord(
                job=len(history),
                optimizer="local",
                keys=job.keys,
                runs=costs[name],
                values={job.keys[0]: 1} if is_accepted else {},
                train_before=0.0,
                train_after=measured,
                facts={"gaps": dict(gaps)},
            )
        )
        spent += costs[name]
        total += sum(left.values()) * costs[name] / 10
    return total


def _measured_gap(headroom: float, rng: np.random.Generator, inputs: int) -> float:
    """Return the gap that a run would record for a component whose outputs differ by its headroom."""
    sampling = Sampling()
    buffer = PairBuffer("simulated", sampling)
    for i in range(inputs):
        values = headroom * rng.random(sampling.samples + 1)
        rewards = values[:, None] + ROLLOUT_NOISE * rng.normal(
            size=(len(values), sampling.max_rollouts)
        )
        candidates = tuple(
            Candidate({"y": j}, tuple(row)) for j, row in enumerate(rewards.tolist())
        )
        buffer.add([Draw("component", "component", str(i), "", {"x": i}, candidates)], 1)
    return buffer.gap("component") or 0.0


# -- summaries -------------------------------------------------------------------------------------------


Rows = Mapping[str, Sequence[Mapping[str, object]]]
DIFFERENCE: Bounds = (-1.0, 1.0)


def summary(values: Sequence[float], bounds: Bounds | None = UNIT) -> dict[str, object]:
    """Return mean, 95 % limits, minimum and number of values; each value is a mean over many examples."""
    found = interval_of_means(values, bounds=bounds)
    return {**found.to_json(), "least": min(values)}


def _by_shape(rows: Rows, *path: str, less: Sequence[str] = ()) -> dict[str, object]:
    """Return the intervals of a number in each row, optionally minus another one, by shape."""
    return {
        shape: summary(
            [_at(row, path) - (_at(row, less) if less else 0.0) for row in found],
            DIFFERENCE if less else UNIT,
        )
        for shape, found in rows.items()
    }


def _at(row: Mapping[str, object], path: Sequence[str]) -> float:
    *groups, name = path
    for key in groups:
        row = entry(row, key, dict)
    return float(entry(row, name, (int, float)))


def sum_accuracy(rows: Rows) -> dict[str, object]:
    """Return accuracies by kind and shape, the limit, and the distance to it."""
    return {
        kind: {
            "learned": _by_shape(rows, kind, "learned"),
            "limit": _by_shape(rows, kind, "limit"),
            "short": _by_shape(rows, kind, "limit", less=(kind, "learned")),
        }
        for kind in KINDS
    }


def sum_regret(rows: Rows) -> dict[str, object]:
    """Return regrets, and paired tests against `uniform`."""
    found = next(iter(rows.values()))
    result: dict[str, object] = {}
    for name in SCHEDULERS:
        values = np.array([row[name] for row in found])
        less = values - np.array([row["uniform"] for row in found])
        p = 1.0 if name == "uniform" else float(stats.wilcoxon(less, alternative="less").pvalue)
        result[name] = {**summary(values.tolist(), None), "p_less_than_uniform": p}
    return result


def sum_lora(rows: Rows) -> dict[str, object]:
    """Return the values of each seed."""
    return {
        shape: {key: [row[key] for row in found] for key in found[0]}
        for shape, found in rows.items()
    }


@dataclass(frozen=True)
class Part:
    """Part of the benchmark: a function of shape and seed, and a summary of all their results."""

    run: Callable[[str, int], Mapping[str, object]]
    summary: Callable[[Rows], Mapping[str, object]]
    shapes: Sequence[str] = tuple(SHAPES)
    seeds: int = SEEDS


PARTS: Mapping[str, Part] = {
    "accuracy": Part(accuracy, sum_accuracy),
    "lora": Part(lora, sum_lora, ("chain",), 3),
    "regret": Part(regret, sum_regret, ("five",), 200),
}


def _one(job: tuple[str, str, int]) -> Mapping[str, object]:
    part, shape, seed = job
    return PARTS[part].run(shape, seed)


def measure(name: str, workers: int) -> dict[str, object]:
    """Run a part; return its summary and rows.

    Finished rows are appended to a file, so that an interrupted part can be resumed.
    """
    part = PARTS[name]
    unfinished = OUTPUT.with_name(f"{OUTPUT.stem}.{name}.jsonl")
    known = unfinished.read_text(encoding="utf-8").splitlines() if unfinished.exists() else []
    done = {(shape, seed): row for shape, seed, row in map(json.loads, known)}
    jobs = [(name, shape, seed) for shape in part.shapes for seed in range(part.seeds)]
    left = [job for job in jobs if job[1:] not in done]
    with ProcessPoolExecutor(workers) as pool, unfinished.open("a", encoding="utf-8") as file:
        for (_, shape, seed), row in zip(
            left, track(pool.map(_one, left), name, len(left)), strict=True
        ):
            done[shape, seed] = rounded(row)
            print(json.dumps([shape, seed, done[shape, seed]]), file=file, flush=True)
    rows = {shape: [done[shape, seed] for seed in range(part.seeds)] for shape in part.shapes}
    unfinished.unlink()
    return {"summary": rounded(part.summary(rows)), "rows": rows}


def rounded(value: object) -> object:
    """Round all numbers in a JSON value to four decimal places."""
    if isinstance(value, float):
        return round(value, 4)
    if isinstance(value, dict):
        return {k: rounded(v) for k, v in value.items()}
    return [rounded(v) for v in value] if isinstance(value, list) else value


def main(arguments: Sequence[str]) -> None:
    """Run the given parts, or all, and write the file after each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "parts",
        nargs="*",
        choices=PARTS,
        default=list(PARTS),
        metavar="part",
        help=", ".join(PARTS),
    )
    names: list[str] = parser.parse_args(arguments).parts
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    for name in names:
        known = json.loads(OUTPUT.read_text(encoding="utf-8")) if OUTPUT.exists() else {}
        known[name] = measure(name, workers=len(os.sched_getaffinity(0)))
        ordered = {part: known[part] for part in PARTS if part in known}
        OUTPUT.write_text(json.dumps(ordered, indent=1) + "\n", encoding="utf-8")
        print(json.dumps({name: known[name]["summary"]}, indent=1))


if __name__ == "__main__":
    main(sys.argv[1:])
