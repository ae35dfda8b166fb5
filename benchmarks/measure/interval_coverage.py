"""Measure the coverage and the width of 95 % confidence intervals of means.

Run with ``python -m benchmarks.measure.interval_coverage``; it takes about 15 minutes on one core
and writes ``benchmarks/data/interval_coverage.json``. Every method gets the same samples. The cases
represent the scores of metrics: right or wrong, shares, reciprocal ranks, skewed and nearly
constant scores, and differences of two scores, most of which are equal. See `docs/adr/0024` for the
conclusions.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy import special

from compound.core.narrowing import entry
from compound.evaluation.statistics import Bounds, interval_of_means, mean_interval
from compound.execution.rng import generator

OUTPUT = Path(__file__).parents[1] / "data" / "interval_coverage.json"
SIZES = (1, 2, 3, 5, 10, 20, 40, 100)
SEEDS = (2, 3, 5)
SAMPLES = 1_000
RESAMPLES = 500
GRID = 32  # number of bets of the betting interval
Z = float(special.ndtri(0.975))

Vector = NDArray[np.float64]
Limits = tuple[Vector, Vector]
Row = dict[str, float | None]
Draw = Callable[[np.random.Generator, tuple[int, int]], Vector]


@dataclass(frozen=True)
class Case:
    """Distribution of scores: a sampler, the true mean, and the range if it is known."""

    draw: Draw
    mean: float
    bounds: Bounds | None = (0.0, 1.0)


def _labels(values: Mapping[float, float]) -> tuple[Draw, float]:
    points, shares = np.array(list(values)), np.array(list(values.values()))
    return lambda rng, size: rng.choice(points, size, p=shares), float(points @ shares)


def _f1(rng: np.random.Generator, size: tuple[int, int]) -> Vector:
    """Draw scores like token F1: many zeros, some ones, and values in between."""
    kind = rng.random(size)
    return np.where(kind < 0.5, 0.0, np.where(kind < 0.7, 1.0, rng.beta(2, 2, size)))


def _f1_differences(rng: np.random.Generator, size: tuple[int, int]) -> Vector:
    """Draw differences of two such scores, which are equal on most examples."""
    before = _f1(rng, size)
    return np.where(rng.random(size) < 0.6, 0.0, _f1(rng, size) - before)


def _rare(rng: np.random.Generator, size: tuple[int, int]) -> Vector:
    """Draw scores of which one in twenty is positive."""
    return np.where(rng.random(size) < 0.05, rng.random(size), 0.0)


BOTH: Bounds = (-1.0, 1.0)
CASES: Mapping[str, Case] = {
    "right or wrong, 0.5": Case(*_labels({0: 0.5, 1: 0.5})),
    "right or wrong, 0.9": Case(*_labels({0: 0.1, 1: 0.9})),
    "right or wrong, 0.02": Case(*_labels({0: 0.98, 1: 0.02})),
    "always the same, 0.5": Case(*_labels({0.5: 1.0})),
    "thirds, skewed": Case(*_labels({0: 0.05, 1 / 3: 0.05, 2 / 3: 0.1, 1: 0.8})),
    "reciprocal rank": Case(
        *_labels({0: 0.3, 0.2: 0.1, 0.25: 0.1, 1 / 3: 0.1, 0.5: 0.15, 1: 0.25})
    ),
    "token F1": Case(_f1, 0.5 * 0.0 + 0.2 * 1.0 + 0.3 * 0.5),
    "rarely above zero": Case(_rare, 0.025),
    "nearly constant": Case(lambda rng, size: rng.beta(70, 30, size), 0.7),
    "close to one": Case(lambda rng, size: rng.beta(9, 0.5, size), 9 / 9.5),
    "gain of accuracy": Case(*_labels({-1: 0.04, 0: 0.86, 1: 0.1}), BOTH),
    "gain of token F1": Case(_f1_differences, 0.0, BOTH),
    "normal, range unknown": Case(lambda rng, size: rng.normal(0, 1, size), 0.0, None),
    "exponential, range unknown": Case(lambda rng, size: rng.exponential(1, size), 1.0, None),
    "log-normal, range unknown": Case(
        lambda rng, size: rng.lognormal(0, 1, size), float(np.exp(0.5)), None
    ),
}


# Methods: each takes one sample per row, scaled to [0, 1] if the range is known.


def student(x: Vector, rng: np.random.Generator) -> Limits:
    """Compute Student's interval."""
    n = x.shape[1]
    if n == 1:
        return np.full(len(x), -np.inf), np.full(len(x), np.inf)
    half = float(special.stdtrit(n - 1, 0.975)) * x.std(axis=1, ddof=1) / np.sqrt(n)
    return x.mean(axis=1) - half, x.mean(axis=1) + half


def student_clipped(x: Vector, rng: np.random.Generator) -> Limits:
    """Compute Student's interval, clipped to the range."""
    low, high = student(x, rng)
    return np.clip(low, 0, 1), np.clip(high, 0, 1)


def bootstrap_t(x: Vector, rng: np.random.Generator) -> Limits:
    """Compute the studentized bootstrap interval (Efron 1979)."""
    n = x.shape[1]
    if n == 1:
        return student(x, rng)
    low, high = np.empty(len(x)), np.empty(len(x))
    for i, sample in enumerate(x):
        drawn = sample[rng.integers(0, n, (RESAMPLES, n))]
        deviation = drawn.std(axis=1, ddof=1)
        centred = drawn.mean(axis=1) - sample.mean()
        with np.errstate(divide="ignore", invalid="ignore"):
            pivots = np.where(deviation > 0, centred / deviation, np.sign(centred) * np.inf)
        pivots = np.nan_to_num(pivots, nan=0.0, posinf=np.inf, neginf=-np.inf)
        spread = sample.std(ddof=1)
        edges = np.quantile(pivots, (0.025, 0.975), method="inverted_cdf")
        low[i], high[i] = sample.mean() - (edges[::-1] * spread if spread else np.zeros(2))
    return low, high


def bootstrap_t_clipped(x: Vector, rng: np.random.Generator) -> Limits:
    """Compute the studentized bootstrap interval, clipped to the range."""
    low, high = bootstrap_t(x, rng)
    return np.clip(low, 0, 1), np.clip(high, 0, 1)


def bca(x: Vector, rng: np.random.Generator) -> Limits:
    """Compute the bias-corrected and accelerated bootstrap interval (Efron 1987)."""
    n = x.shape[1]
    low, high = x.min(axis=1), x.max(axis=1)
    for i, sample in enumerate(x):
        if n == 1 or np.ptp(sample) == 0:
            continue
        means = sample[rng.integers(0, n, (RESAMPLES, n))].mean(axis=1)
        below = (np.mean(means < sample.mean()) + np.mean(means <= sample.mean())) / 2
        bias = special.ndtri(np.clip(below, 1 / RESAMPLES, 1 - 1 / RESAMPLES))
        away = sample.mean() - sample
        skew = np.sum(away**3) / (6 * np.sum(away**2) ** 1.5)
        shifted = bias + np.array([-Z, Z])
        low[i], high[i] = np.quantile(means, special.ndtr(bias + shifted / (1 - skew * shifted)))
    return low, high


def wilson(x: Vector, rng: np.random.Generator) -> Limits:
    """Compute Wilson's score interval (1927) with the mean as the share, which maximizes the variance."""
    n, share = x.shape[1], x.mean(axis=1)
    middle = (share + Z**2 / (2 * n)) / (1 + Z**2 / n)
    half = Z * np.sqrt(share * (1 - share) / n + Z**2 / (4 * n**2)) / (1 + Z**2 / n)
    return middle - half, middle + half


def betting(x: Vector, rng: np.random.Generator) -> Limits:
    """Test each mean by bets against it (Waudby-Smith and Ramdas 2024), averaged over constant bets.

    Unlike sequential bets, the average over constant bets does not depend on the order of the
    values.
    """
    return _bet(x), 1 - _bet(1 - x)


def _bet(x: Vector) -> Vector:
    stakes = (np.arange(GRID) + 0.5) / GRID
    low, high = np.zeros(len(x)), np.ones(len(x))
    for _ in range(40):
        mean = (low + high) / 2
        wealth = np.log1p(stakes[None, :, None] * (x[:, None, :] / mean[:, None, None] - 1)).sum(
            axis=2
        )
        refuted = np.logaddexp.reduce(wealth, axis=1) - np.log(GRID) >= np.log(2 / 0.05)
        low, high = np.where(refuted, mean, low), np.where(refuted, high, mean)
    return low


@lru_cache(maxsize=200_000)
def _gaffke(sample: tuple[float, ...]) -> tuple[float, float]:
    found = mean_interval(sample, bounds=(0.0, 1.0))
    return found.low, found.high


def gaffke(x: Vector, rng: np.random.Generator) -> Limits:
    """Compute Gaffke's two-sided bound (2005), `compound.evaluation.statistics.mean_interval` with bounds."""
    found = np.array([_gaffke(tuple(np.sort(sample).tolist())) for sample in x])
    return found[:, 0], found[:, 1]


Method = Callable[[Vector, np.random.Generator], Limits]
BOUNDED: Mapping[str, Method] = {
    "t": student,
    "t, clipped": student_clipped,
    "bootstrap-t, clipped": bootstrap_t_clipped,
    "BCa bootstrap": bca,
    "Wilson": wilson,
    "betting": betting,
    "Gaffke": gaffke,
}
UNBOUNDED: Mapping[str, Method] = {"t": student, "bootstrap-t": bootstrap_t, "BCa bootstrap": bca}


def measure(case: str, n: int, samples: int = SAMPLES) -> dict[str, Row]:
    """Return coverage, misses and mean width by method, and how often limits leave the range or coincide."""
    found = CASES[case]
    low, high = found.bounds or (0.0, 1.0)
    drawn = (found.draw(generator(0, "coverage", case, n), (samples, n)) - low) / (high - low)
    truth = (found.mean - low) / (high - low)
    rows: dict[str, Row] = {}
    for name, method in (BOUNDED if found.bounds else UNBOUNDED).items():
        least, most = method(drawn, generator(0, "resampling", case, n, name))
        rows[name] = _row(least, most, truth, bool(found.bounds))
    return rows


def _row(least: Vector, most: Vector, truth: float, bounded: bool) -> Row:
    slack = 1e-9
    finite = np.isfinite(most - least)
    row: Row = {
        "coverage": float(np.mean((least <= truth + slack) & (truth - slack <= most))),
        "above": float(np.mean(least > truth + slack)),
        "below": float(np.mean(most < truth - slack)),
        "width": float((most - least)[finite].mean()) if finite.any() else None,
        "no_width": float(np.mean(most - least < slack)),
    }
    if bounded:
        row["left_range"] = float(np.mean((least < -slack) | (most > 1 + slack)))
    return {key: None if value is None else round(value, 4) for key, value in row.items()}


def of_seeds(samples: int = SAMPLES) -> dict[str, object]:
    """Compare `interval_of_means` with other methods for a few seeds, each the mean of 60 scores."""
    found: dict[str, object] = {}
    for case in ("token F1", "right or wrong, 0.9", "close to one"):
        for n in SEEDS:
            rng = generator(0, "seeds", case, n)
            drawn = CASES[case].draw(rng, (samples * n, 60)).mean(axis=1).reshape(samples, n)
            score = np.array([_ends(sample) for sample in drawn])
            found[f"{case}, {n} seeds"] = {
                "t": _row(*student(drawn, rng), CASES[case].mean, True),
                "Gaffke": _row(*gaffke(drawn, rng), CASES[case].mean, True),
                "score with t": _row(score[:, 0], score[:, 1], CASES[case].mean, True),
            }
    return found


def _ends(sample: Vector) -> tuple[float, float]:
    found = interval_of_means(sample, bounds=(0.0, 1.0))
    return found.low, found.high


Found = Mapping[str, Row]  # by method: coverage, width and the like


def worst(cases: Mapping[str, Mapping[str, Found]]) -> dict[str, object]:
    """Return each method's least coverage over the bounded cases, and its mean width relative to Gaffke's."""
    return {
        name: _worst(
            name,
            [
                (f"{case}, n = {n}", int(n), found)
                for case, sizes in cases.items()
                if CASES[case].bounds
                for n, found in sizes.items()
            ],
        )
        for name in BOUNDED
    }


def _worst(name: str, places: Sequence[tuple[str, int, Found]]) -> dict[str, object]:
    least = min(places, key=lambda place: _number(place[2][name], "coverage"))
    larger = [found for _, n, found in places if n >= 10]
    ratios = [_number(found[name], "width") / _number(found["Gaffke"], "width") for found in larger]
    return {
        "least_coverage": least[2][name]["coverage"],
        "at": least[0],
        "least_coverage_from_n_10": min(_number(found[name], "coverage") for found in larger),
        "places_below_94_percent": sum(
            _number(found[name], "coverage") < 0.94 for _, _, found in places
        ),
        "places": len(places),
        "left_range": max(_number(found[name], "left_range") for _, _, found in places),
        "no_width": max(_number(found[name], "no_width") for _, _, found in places),
        "width_beside_gaffke_from_n_10": round(float(np.mean(ratios)), 3),
    }


def _number(row: Row, name: str) -> float:
    return entry(row, name, (int, float))


def main() -> None:
    """Measure everything and write the file."""
    start = time.perf_counter()
    cases = {case: {str(n): measure(case, n) for n in SIZES} for case in CASES}
    found = {
        "level": 0.95,
        "samples": SAMPLES,
        "resamples": RESAMPLES,
        "worst": worst(cases),
        "cases": cases,
        "seeds": of_seeds(),
    }
    OUTPUT.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(found["worst"], indent=1))
    print(f"{time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
