"""Optimize a pipeline of plain Python functions: a choice and two numbers, and no model.

A sensor gives faulty spikes and reads 7 degrees too low. The pipeline summarizes the latest
readings and adds a correction. The gold temperatures were computed with the settings in `OPTIMUM`,
so only these score 1.

Needs ``pip install -e ".[search]"``.
Run: python docs/examples/plain_functions.py [FOLDER]
"""

from __future__ import annotations

import random
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import mean, median

import compound as cp

STATISTICS: Mapping[str, Callable[[list[int]], float]] = {
    "mean": mean,
    "median": median,
    "max": max,
}
OPTIMUM = {"summarize.statistic": "median", "summarize.window": 5, "correct.offset": 7}


def summarize(readings: list[int], statistic: str, window: int) -> float:
    """Return a statistic of the latest readings."""
    return float(STATISTICS[statistic](readings[-window:]))


def correct(level: float, offset: int) -> float:
    """Add a constant to a temperature."""
    return level + offset


def closeness(outputs: Mapping[str, object], example: cp.Example) -> float:
    """Score 1 for the gold temperature, 1/2 if it is missed by a degree, 1/3 by two degrees."""
    estimate, gold = outputs["temperature"], example.gold["temperature"]
    assert isinstance(estimate, float)
    assert isinstance(gold, float)
    return 1 / (1 + abs(estimate - gold))


def declare() -> cp.System:
    """Declare the pipeline, with one guess for each setting."""
    statistic = cp.Choice("mean", "median", "max", value="mean")
    summarizer = cp.Function(
        "summarize", summarize, statistic=statistic, window=cp.Choice(1, 3, 5, 7, 9)
    )
    corrector = cp.Function("correct", correct, offset=cp.Int(-10, 10, value=0))
    level = summarizer(readings=cp.Input("readings", list[int]))
    return cp.System("sensor", outputs={"temperature": corrector(level=level)})


def rows(count: int, seed: int) -> list[dict[str, object]]:
    """Return readings, every fourth of them a spike, and the gold temperatures."""
    rng = random.Random(seed)
    made: list[dict[str, object]] = []
    for number in range(count):
        level = rng.randint(10, 30)
        readings = [99 if rng.random() < 0.25 else level + rng.randint(-4, 4) for _ in range(9)]
        gold = correct(summarize(readings, "median", 5), 7)
        made.append({"id": f"{seed}-{number}", "readings": readings, "temperature": gold})
    return made


def main(folder: Path) -> cp.Result:
    """Optimize the pipeline, and print the best settings beside the optimum."""
    result = cp.optimize(
        declare(),
        data={"train": rows(200, seed=1), "valid": rows(40, seed=2), "test": rows(100, seed=3)},
        metric=cp.metrics.custom(closeness, bounds=(0, 1)),
        budget=cp.Budget(system_runs=4000),
        run_dir=folder / "plain_functions",
        progress=False,
        candidates=48,
        seed=0,
    )
    assert result.test_before is not None
    assert result.test_after is not None
    print(f"score on test rows: {result.test_before.mean:.3f} -> {result.test_after.mean:.3f}")
    for key, value in OPTIMUM.items():
        print(f"  {key} = {result.best[key]} (optimum {value})")
    return result


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        main(Path(sys.argv[1] if len(sys.argv) > 1 else temporary))
