"""Compare numbers of validation examples for small budgets, on simulated systems.

    python -m compound.benchmarks.simulated.valid_sizes

Each run is a whole optimization with `search`: the initial evaluation, jobs, and decisions on validation
examples. The file ``benchmarks/data/valid_sizes.json`` has, for each system, budget and number of validation
examples, the expected score of the configuration that each of 20 runs accepted, as a share of the optimum's,
the number of accepted changes, and the number of those whose true gain is 0 or less.
"""

from __future__ import annotations

import json
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

from compound.benchmarks.simulated.decision_rules import Outcome, outcome, settings_of, start, worlds
from compound.evaluation.statistics import UNIT, interval_of_means

OUTPUT = Path(__file__).parents[1] / "data" / "valid_sizes.json"
SEEDS, METHOD = 20, "search"
SIZES = {40: (8, 10, 15), 60: (10, 15, 25), 100: (15, 25, 40), 160: (25, 40, 65)}  # by system runs
SYSTEMS = tuple(system for system in worlds(0) if "equal" not in system)


def reached(system: str, runs: int, valid: int, seed: int) -> Outcome:
    """Return the outcome of a run."""
    return outcome(worlds(seed)[system], settings_of(METHOD, valid, runs, "round", seed))


def row(system: str, runs: int, valid: int, found: list[Outcome]) -> dict[str, object]:
    """Summarize the runs of all seeds."""
    shares = [round(each.reached, 4) for each in found]
    summary = interval_of_means(shares, bounds=UNIT)
    return {
        "system": system, "runs": runs, "valid": valid, "reached": shares,
        "mean": summary.mean, "low": summary.low, "high": summary.high,
        "accepted": sum(each.accepted for each in found), "false": sum(each.false for each in found),
    }  # fmt: skip


def main() -> None:
    """Run all optimizations, and write the file after each condition."""
    rows: list[dict[str, object]] = []
    starts = {system: round(start(system), 4) for system in SYSTEMS}
    with ProcessPoolExecutor() as pool:
        for system in SYSTEMS:
            for runs, sizes in SIZES.items():
                for valid in sizes:
                    found = list(pool.map(partial(reached, system, runs, valid), range(SEEDS)))
                    rows.append(row(system, runs, valid, found))
                    print(*(f"{k}: {v}" for k, v in rows[-1].items() if k != "reached"), sep=", ", flush=True)
                    document = {"seeds": SEEDS, "method": METHOD, "start": starts, "rows": rows}
                    OUTPUT.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
