"""Measure how often the acceptance tests accept changes that are no better, and how often they find gains.

    python -m benchmarks.measure.false_accepts [PART ...]

The parts are

- ``exact``: gains of two or three values. The probability of a false accept is summed over all samples; it is
  a number, not an estimate.
- ``drawn``: other gains, with random samples and the exact binomial limit of their number.
- ``power``: typical improvements, for the tests that were considered.
- ``runs``: whole optimization runs in which no candidate is better, with one and two looks at most.
- ``policies``: whole runs with one decision on candidates of known gain: how often each of `accept: best` and
  `accept: supported` returns the candidate, with one and two looks.

Each finished part is written to ``benchmarks/data/false_accepts.json``, and the other parts are
kept. All parts take about 20 minutes on two cores. See `docs/adr/0031` for the conclusions.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from unittest.mock import patch

import numpy as np
from numpy.typing import NDArray
from scipy import special, stats

from benchmarks.simulated.acceptance.gains import NONE, SOME, Vector
from benchmarks.simulated.acceptance.worlds import (
    VALID,
    WORLDS,
    World,
    decisions_of,
    problem,
    supported,
)
from compound.evaluation.acceptance import bounded_p, student_p
from compound.evaluation.statistics import UNIT
from compound.execution.rng import generator
from compound.optimization.runs.recorder import is_supported

OUTPUT = Path(__file__).parents[1] / "data" / "false_accepts.json"
SIZES = (10, 20, 40, 80, 200)
LEVELS = (0.05, 0.05 / 6)
SAMPLES = 2_000
RUNS = 2_000
ALPHA = 0.05
START, GAINS = 0.4, (-0.1, -0.05, 0.0, 0.05, 0.1, 0.2, 0.3)  # of the part `policies`
POLICY_RUNS, EXAMPLES = 400, 40
SURE = 0.999  # probability that a valid test stays within the limit of its false accepts
NEGLIGIBLE = 1e-13  # probability of samples that are counted as accepted without being tested
FLIPS = 2_000  # sign patterns, a tenth of those in a run
GRID = 32  # number of constant bets

Test = Callable[[Vector, float], bool]  # gains and level: whether the change is accepted


# -- tests -----------------------------------------------------------------------------------------------


def bounded(gains: Vector, level: float) -> bool:
    """Apply the test for scores in [0, 1]."""
    return bounded_p(gains, UNIT) <= level


def student(gains: Vector, level: float) -> bool:
    """Apply Student's t-test."""
    return student_p(gains) <= level


def sign_flips(gains: Vector, level: float) -> bool:
    """Apply the sign-flip permutation test."""
    return flips_p(gains) <= level


def flips_p(gains: Vector) -> float:
    """Return the p-value of the sign-flip test from 2,000 random patterns; 1 where it is above any level."""
    if gains.sum() <= 0:
        return 1.0
    rng = generator("flips", float(gains.sum()))
    signs = rng.choice(np.array([-1.0, 1.0], np.float32), (FLIPS, len(gains)))
    reached = int(np.sum(signs @ gains.astype(np.float32) >= gains.sum() - 1e-4))
    return (reached + 1) / (FLIPS + 1)


def all_flips_p(gains: Vector) -> float:
    """Return the p-value of the sign-flip test over all patterns, for gains of few different values."""
    values, counts = np.unique(gains[gains != 0], return_counts=True)
    sums, chances = np.zeros(1), np.ones(1)
    for value, count in zip(values, counts, strict=True):
        up = np.arange(count + 1)
        sums = np.add.outer(sums, value * (2 * up - count)).ravel()
        chances = np.multiply.outer(chances, stats.binom.pmf(up, count, 0.5)).ravel()
    return float(chances[sums >= gains.sum() - 1e-9].sum())


def constant_bets(gains: Vector, level: float) -> bool:
    """Test by the mean capital of constant bets, which is valid by Markov's inequality."""
    stakes = (np.arange(GRID) + 0.5) / GRID
    capital = np.log1p(stakes[:, None] * gains).sum(axis=1)
    return bool(np.logaddexp.reduce(capital) - np.log(GRID) >= -np.log(level))


def predictable_bets(gains: Vector, level: float) -> bool:
    """Test by bets chosen from past gains (Waudby-Smith and Ramdas 2024, section 4.1)."""
    x = (gains + 1) / 2
    bets = np.minimum(_predictable(x, level), 1.5)  # at most 3/4 of what a value of 0 allows
    return bool(np.log1p(bets * (x - 0.5)).cumsum().max() >= -np.log(level))


def empirical_bernstein(gains: Vector, level: float) -> bool:
    """Test by the predictable empirical Bernstein bound (Waudby-Smith and Ramdas 2024, section 3.2)."""
    x = (gains + 1) / 2
    bets = np.minimum(_predictable(x, level), 0.5)
    past = (0.5 + np.append(0.0, x.cumsum()[:-1])) / np.arange(1, len(x) + 1)
    penalty = (4 * (x - past) ** 2 * (-np.log1p(-bets) - bets) / 4).sum()
    return bool(((bets * x).sum() - penalty + np.log(level)) / bets.sum() >= 0.5)


def _predictable(x: Vector, level: float) -> Vector:
    """Return bets that depend on past values only, for a fixed sample size."""
    n = len(x)
    number = np.arange(1, n + 1)
    mean = (0.5 + x.cumsum()) / (number + 1)
    variance = (0.25 + ((x - mean) ** 2).cumsum()) / (number + 1)
    bets: Vector = np.sqrt(-2 * np.log(level) / (n * np.append(0.25, variance[:-1])))
    return bets


CONSIDERED: Mapping[str, Test] = {
    "bounded mean": bounded,
    "constant bets": constant_bets,
    "predictable bets": predictable_bets,
    "empirical Bernstein": empirical_bernstein,
    "sign flips": sign_flips,
    "t": student,
}


# -- false accepts of one test ---------------------------------------------------------------------------


NAMES = ("bounded mean", "sign flips and t", "sign flips")


def p_values(gains: Vector, flips: Callable[[Vector], float]) -> dict[str, float]:
    """Return the p-values of both tests of the loop, and of the test of earlier versions."""
    found = flips(gains)
    both = max(found, student_p(gains))
    return dict(zip(NAMES, (bounded_p(gains, UNIT), both, found), strict=True))


def exact(case: str, n: int) -> dict[str, list[float]]:
    """Return the probability that each test accepts ``n`` gains of a few values, by level.

    It is an upper bound: samples of negligible probability are not tested and count as accepted.
    """
    shares = NONE[case].shares or {}
    values, logs = np.array(list(shares)), np.log(list(shares.values()))
    found = {name: [0.0] * len(LEVELS) for name in NAMES}
    for counts in _counts(n, len(values)):
        chance = float(
            np.exp(special.gammaln(n + 1) - special.gammaln(counts + 1).sum() + counts @ logs)
        )
        gains = np.repeat(values, counts)
        p = p_values(gains, all_flips_p) if chance >= NEGLIGIBLE else dict.fromkeys(NAMES, 0.0)
        for (name, value), (i, level) in itertools.product(p.items(), enumerate(LEVELS)):
            if value <= level * (1 + 1e-12):
                found[name][i] += chance
    return found


def _counts(n: int, kinds: int) -> Iterator[NDArray[np.int64]]:
    """Yield all numbers of gains of each value."""
    for bars in itertools.combinations(range(n + kinds - 1), kinds - 1):
        yield np.diff([-1, *bars, n + kinds - 1]) - 1


def drawn(case: str, n: int) -> dict[str, list[int]]:
    """Return the number of samples in which each test accepts, by level."""
    gains = NONE[case].draw(generator("false accepts", case, n), (SAMPLES, n))
    found = [p_values(sample, flips_p) for sample in gains]
    return {name: [sum(p[name] <= level for p in found) for level in LEVELS] for name in NAMES}


def limit(n: int, level: float) -> int:
    """Return the number of false accepts that a valid test exceeds in one of a thousand measurements."""
    return int(stats.binom.ppf(SURE, n, level))


def powers(case: str, n: int) -> dict[str, list[float]]:
    """Return the share of samples in which each test accepts, by level."""
    gains = SOME[case].draw(generator("power", case, n), (SAMPLES, n))
    return {
        name: [float(np.mean([test(sample, level) for sample in gains])) for level in LEVELS]
        for name, test in CONSIDERED.items()
    }


# -- parts -----------------------------------------------------------------------------------------------


def _grid(
    pool: ProcessPoolExecutor,
    run: Callable[[str, int], object],
    cases: Sequence[str],
    sizes: Sequence[int],
) -> dict[str, dict[str, object]]:
    """Run every case with every size; return the results by case and size."""
    places = list(itertools.product(cases, sizes))
    found = pool.map(run, *zip(*places, strict=True))
    table: dict[str, dict[str, object]] = {case: {} for case in cases}
    for (case, n), result in zip(places, found, strict=True):
        table[case][str(n)] = result
    return table


def measure_exact(pool: ProcessPoolExecutor) -> dict[str, object]:
    """Sum over all samples."""
    cases = [case for case, gains in NONE.items() if gains.shares]
    means = {case: NONE[case].mean for case in cases}
    return {"levels": LEVELS, "means": means, "cases": _grid(pool, exact, cases, SIZES)}


def measure_drawn(pool: ProcessPoolExecutor) -> dict[str, object]:
    """Draw samples."""
    cases = [case for case, gains in NONE.items() if not gains.shares]
    limits = [limit(SAMPLES, level) for level in LEVELS]
    found = _grid(pool, drawn, cases, SIZES)
    return {"levels": LEVELS, "samples": SAMPLES, "limits": limits, "cases": found}


def measure_power(pool: ProcessPoolExecutor) -> dict[str, object]:
    """Draw samples of improvements."""
    return {
        "levels": LEVELS,
        "samples": SAMPLES,
        "cases": _grid(pool, powers, list(SOME), (40, 80)),
    }


def measure_runs(pool: ProcessPoolExecutor) -> dict[str, object]:
    """Count the runs that call any change supported."""
    found: dict[str, object] = {}
    for (name, world), looks in itertools.product(WORLDS.items(), (1, 2)):
        run = partial(supported, world, further=VALID * (looks - 1))
        wrong = sum(n > 0 for n in pool.map(run, range(RUNS), chunksize=20))
        row = {"gain": round(world.gain, 4), "runs": RUNS, "supported": wrong}
        found[f"{name}, {looks} look{'s' * (looks > 1)}"] = row
        print(name, looks, row, flush=True)
    return {"alpha": ALPHA, "limit": limit(RUNS, ALPHA), "worlds": found}


def returned(gain: float, further: int, seed: int) -> tuple[bool, bool]:
    """Return whether a run with `accept: best` returns a candidate, and whether a test supports it."""
    world = World(f"chance {START}", f"chance {START + gain:.2f}", UNIT, gain)
    (decision,) = decisions_of(problem(world, seed, valid=EXAMPLES, further=further, decisions=1))
    return decision["accepted"], is_supported(decision)


def measure_policies(pool: ProcessPoolExecutor) -> dict[str, object]:
    """Count how often each policy returns a candidate."""
    rows = []
    for gain, looks in itertools.product(GAINS, (1, 2)):
        run = partial(returned, gain, EXAMPLES * (looks - 1))
        found = np.array(list(pool.map(run, range(POLICY_RUNS), chunksize=20)))
        best, supported_share = (round(float(share), 4) for share in found.mean(axis=0))
        rows.append({"gain": gain, "looks": looks, "best": best, "supported": supported_share})
        print(rows[-1], flush=True)
    return {"runs": POLICY_RUNS, "examples": EXAMPLES, "rows": rows}


PARTS: Mapping[str, Callable[[ProcessPoolExecutor], dict[str, object]]] = {
    "exact": measure_exact,
    "drawn": measure_drawn,
    "power": measure_power,
    "runs": measure_runs,
    "policies": measure_policies,
}


def skip_fsync() -> None:
    """Do not wait for the disk: the runs need not survive a power failure."""
    patch.object(os, "fsync", lambda _: None).start()


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
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with ProcessPoolExecutor(len(os.sched_getaffinity(0)), initializer=skip_fsync) as pool:
        for name in parser.parse_args(arguments).parts:
            found = PARTS[name](pool)
            known = json.loads(OUTPUT.read_text(encoding="utf-8")) if OUTPUT.exists() else {}
            known[name] = found
            ordered = {part: known[part] for part in PARTS if part in known}
            OUTPUT.write_text(json.dumps(ordered, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
