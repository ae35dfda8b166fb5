"""Intervals and tests for scores: pure functions, and any chance in them is passed in by the caller.

An improvement is accepted by `paired_test`, which is valid for any score (no normality). The loop divides
``alpha`` over its planned decisions, so that a run errs with probability ``alpha`` at most.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from scipy import special

EXACT_UP_TO = 14
FLIPS = 20_000
RESAMPLES = 9_999
_CHUNK = 1_000

Values = Sequence[float] | NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean, its confidence limits, and how many values it rests on."""

    mean: float
    low: float
    high: float
    n: int


def mean_interval(
    values: Values, level: float = 0.95, *, method: Literal["t", "bootstrap"] = "t", seed: int | None = None
) -> Interval:
    """Return the mean of independent values with a two-sided confidence interval.

    One value says nothing about spread: its limits are infinite. Values that are all equal give a width
    of zero, which claims too much for scores of 0 and 1; `binomial_upper` is exact there.

    Args:
        values: The values, at least one, all finite.
        level: How often intervals made like this hold the true mean.
        method: ``"t"`` for Student's t, or ``"bootstrap"`` for the bias-corrected and accelerated
            bootstrap (Efron 1987), which suits skewed scores.
        seed: The bootstrap's seed, which it needs.

    >>> interval = mean_interval([1.0, 2.0, 3.0])
    >>> interval.mean, round(interval.low, 3), round(interval.high, 3)
    (2.0, -0.484, 4.484)
    """
    numbers = _checked(values)
    _check_share(level=level)
    if method not in ("t", "bootstrap"):
        raise ValueError(f"method must be 't' or 'bootstrap', got {method!r}")
    if method == "bootstrap" and seed is None:
        raise ValueError("method='bootstrap' needs a seed")
    n, mean = len(numbers), float(numbers.mean())
    if n == 1:
        return Interval(mean, -math.inf, math.inf, 1)
    if np.ptp(numbers) == 0:
        return Interval(float(numbers[0]), float(numbers[0]), float(numbers[0]), n)
    if method == "bootstrap":
        return Interval(mean, *_bootstrap(numbers, level, np.random.default_rng(seed)), n)
    half = float(special.stdtrit(n - 1, (1 + level) / 2) * numbers.std(ddof=1) / math.sqrt(n))
    return Interval(mean, mean - half, mean + half, n)


def cluster_mean_interval(clusters: Iterable[Values], level: float = 0.95) -> Interval:
    """Return the mean over examples of which each was run several times.

    Repeats of one example are not independent: each example's repeats are averaged first, every example
    weighs the same, and ``n`` counts examples.

    >>> cluster_mean_interval([[1.0, 1.0, 1.0], [0.0]]).mean
    0.5
    """
    return mean_interval([float(_checked(repeats).mean()) for repeats in clusters], level)


def paired_interval(before: Values, after: Values, level: float = 0.95) -> Interval:
    """Return the mean of ``after - before`` over the same examples, with its interval.

    >>> paired_interval([0.0, 0.5, 1.0], [1.0, 1.0, 1.0]).mean
    0.5
    """
    return mean_interval(_differences(before, after), level)


def paired_test(before: Values, after: Values, *, rng: np.random.Generator) -> float:
    """Return the p-value of "``after`` is no better than ``before``" over the same examples.

    A one-sided sign-flip permutation test of the mean difference: if nothing changed, every difference
    is as likely as its negative. Zero differences carry no evidence. With up to 14 others all sign
    patterns are counted and ``rng`` is not touched; with more, 20,000 random ones, where the +1
    correction keeps the test valid (Phipson and Smyth 2010). The order of the examples does not matter.

    >>> paired_test([0, 0, 0, 0], [1, 1, 1, 1], rng=np.random.default_rng(0))
    0.0625
    """
    every = _differences(before, after)
    differences = np.sort(every[every != 0])
    if not len(differences):
        return 1.0
    # Patterns whose sum equals the observed one must count in spite of rounding.
    threshold = differences.sum() - 1e-9 * np.abs(differences).sum()
    if len(differences) <= EXACT_UP_TO:
        patterns = np.arange(2 ** len(differences))[:, None] >> np.arange(len(differences)) & 1
        return float(np.mean((1 - 2 * patterns) @ differences >= threshold))
    reached = 0
    for _ in range(FLIPS // _CHUNK):
        signs = 1 - 2 * rng.integers(0, 2, size=(_CHUNK, len(differences)), dtype=np.int8)
        reached += int(np.sum(signs @ differences >= threshold))
    return (reached + 1) / (FLIPS + 1)


def binomial_upper(successes: int, n: int, level: float = 0.95) -> float:
    """Return the exact one-sided upper limit of a probability (Clopper and Pearson 1934).

    >>> round(binomial_upper(0, 10), 4)
    0.2589
    """
    if not 0 <= successes <= n:
        raise ValueError(f"0 <= successes <= n must hold, got successes={successes}, n={n}")
    _check_share(level=level)
    if successes == n:
        return 1.0
    return float(special.betaincinv(successes + 1, n - successes, level))


def binomial_tail(successes: int, n: int, share: float) -> float:
    """Return the probability of at least so many successes of ``n``, each of which has the same chance.

    >>> round(binomial_tail(7, 8, 0.5), 4)
    0.0352
    """
    return float(special.bdtrc(successes - 1, n, share)) if successes else 1.0


def _bootstrap(numbers: NDArray[np.float64], level: float, rng: np.random.Generator) -> tuple[float, float]:
    from scipy import stats

    # scipy before 1.15 knows the argument `rng` by this name only.
    limits = stats.bootstrap(
        (numbers,), np.mean, confidence_level=level, n_resamples=RESAMPLES, method="BCa", random_state=rng
    ).confidence_interval
    return float(limits.low), float(limits.high)


def _differences(before: Values, after: Values) -> NDArray[np.float64]:
    if len(before) != len(after):
        raise ValueError(f"paired scores must be of the same examples, got {len(before)} and {len(after)}")
    return _checked(after) - _checked(before)


def _checked(values: Values) -> NDArray[np.float64]:
    numbers = np.asarray(values, dtype=np.float64)
    if numbers.ndim != 1 or not len(numbers) or not np.isfinite(numbers).all():
        raise ValueError(f"at least one value and only finite ones must be given, got {values!r:.80}")
    return numbers


def _check_share(**share: float) -> None:
    for name, value in share.items():
        if not 0 < value < 1:
            raise ValueError(f"0 < {name} < 1 must hold, got {name}={value}")
