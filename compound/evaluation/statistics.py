"""Confidence intervals of scores.

Intervals of scores with a known range stay within it (`compound.evaluation.bounded_mean`);
benchmarks/measure/interval_coverage.py compares their coverage of the true mean with that of alternatives
(docs/adr/0024). Improvements are tested by `compound.evaluation.paired_tests`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypedDict

import numpy as np
from numpy.typing import NDArray
from scipy import special

from compound.evaluation.bounded_mean import lower_limit

Values = Sequence[float] | NDArray[np.float64]
Bounds = tuple[float, float]
"""Minimum and maximum possible score."""

UNIT: Bounds = (0.0, 1.0)
ROUNDING = 1e-9  # tolerance of bounds for float sums, relative to the range


class IntervalDocument(TypedDict):
    """An `Interval` as JSON types; infinite limits are ``None``."""

    mean: float
    low: float | None
    high: float | None
    n: int


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean, its confidence limits (infinite if unknown), and the number of values it is based on.

    >>> print(Interval(0.5625, 0.44, 0.68, 60))
    0.562 [0.440, 0.680]
    """

    mean: float
    low: float
    high: float
    n: int

    def __str__(self) -> str:
        return f"{self.mean:.3f} [{self.low:.3f}, {self.high:.3f}]"

    def to_json(self) -> IntervalDocument:
        """Return the four numbers by name; infinite limits are ``None``."""
        low, high = (limit if math.isfinite(limit) else None for limit in (self.low, self.high))
        return {"mean": self.mean, "low": low, "high": high, "n": self.n}


def mean_interval(values: Values, level: float = 0.95, *, bounds: Bounds | None = None) -> Interval:
    """Return the mean of independent values with a two-sided confidence interval.

    With ``bounds``, the interval is Gaffke's: it lies within the bounds, contains the mean, makes no
    distributional assumption, and never has zero width. Without, it is Student's, which assumes nearly
    normal means and may exceed an undeclared range; its limits are infinite if there is no variance to
    estimate, that is, for a single value and for equal values.

    Args:
        values: The values, at least one, all finite.
        level: Confidence level: the probability that the interval contains the true mean.
        bounds: Minimum and maximum possible value, or ``None`` if unknown.

    Raises:
        ValueError: There is no value, one is not finite, or one is outside the bounds.

    >>> interval = mean_interval([1.0, 1.0, 1.0], bounds=(0.0, 1.0))
    >>> interval.mean, round(interval.low, 3), interval.high
    (1.0, 0.292, 1.0)
    >>> interval = mean_interval([1.0, 2.0, 3.0])
    >>> interval.mean, round(interval.low, 3), round(interval.high, 3)
    (2.0, -0.484, 4.484)
    """
    numbers = validated(values)
    _check_share(level=level)
    if bounds is not None:
        return _bounded(numbers, level, checked_bounds(numbers, bounds))
    n, mean = len(numbers), float(numbers.mean())
    if np.ptp(numbers) == 0:
        return Interval(float(numbers[0]), -math.inf, math.inf, n)
    half = _student(n, level) * float(numbers.std(ddof=1)) / math.sqrt(n)
    return Interval(mean, mean - half, mean + half, n)


def cluster_mean_interval(
    clusters: Iterable[Values], level: float = 0.95, *, bounds: Bounds | None = None
) -> Interval:
    """Return the mean over examples that were each run several times.

    Repeats of one example are not independent: each example's repeats are averaged first, all examples
    have equal weight, and ``n`` counts examples.

    >>> cluster_mean_interval([[1.0, 1.0, 1.0], [0.0]]).mean
    0.5
    """
    means = [float(validated(repeats).mean()) for repeats in clusters]
    return mean_interval(means, level, bounds=bounds)


def paired_interval(
    before: Values, after: Values, level: float = 0.95, *, bounds: Bounds | None = None
) -> Interval:
    """Return the mean of ``after - before`` over the same examples, with its interval.

    ``bounds`` are the bounds of the scores; differences of scores in [0, 1] are in [-1, 1].

    >>> interval = paired_interval([0.0, 0.5, 1.0], [1.0, 1.0, 1.0], bounds=(0.0, 1.0))
    >>> interval.mean, round(interval.low, 3), round(interval.high, 3)
    (0.5, -0.578, 0.933)
    """
    return mean_interval(differences_of(before, after), level, bounds=difference_bounds(bounds))


def difference_bounds(bounds: Bounds | None) -> Bounds | None:
    """Return the bounds of the difference of two scores.

    >>> difference_bounds((0.0, 1.0)), difference_bounds(None)
    ((-1.0, 1.0), None)
    """
    return None if bounds is None else (bounds[0] - bounds[1], bounds[1] - bounds[0])


def interval_of_means(values: Values, level: float = 0.95, *, bounds: Bounds | None = None) -> Interval:
    """Return the mean of a few values that are themselves means of many scores, such as one per seed.

    Such values are close to normal, which `mean_interval` does not assume: from three arbitrary values in
    [0, 1] it can infer little. With ``bounds``, this is Wilson's score interval with Student's quantile and
    the sample variance in place of the binomial one; it equals Student's in the middle of the range and
    stays within the range. Its limits are infinite for a single value and for equal values.

    >>> interval = interval_of_means([0.98, 0.99, 1.0], bounds=(0.0, 1.0))
    >>> round(interval.mean, 3), round(interval.low, 3), round(interval.high, 3)
    (0.99, 0.924, 0.999)
    """
    numbers = validated(values)
    _check_share(level=level)
    n, mean = len(numbers), float(numbers.mean())
    if np.ptp(numbers) == 0:
        return Interval(float(numbers[0]), -math.inf, math.inf, n)
    half = _student(n, level) * float(numbers.std(ddof=1)) / math.sqrt(n)
    if bounds is None:
        return Interval(mean, mean - half, mean + half, n)
    low, high = checked_bounds(numbers, bounds)
    share, relative = min(max((mean - low) / (high - low), ROUNDING), 1 - ROUNDING), half / (high - low)
    k = relative**2 / (share * (1 - share))
    middle = (share + k / 2) / (1 + k)
    reach = math.sqrt(k * share * (1 - share) + k**2 / 4) / (1 + k)
    limits = [low + (high - low) * min(max(limit, 0.0), 1.0) for limit in (middle - reach, middle + reach)]
    return Interval(mean, min(limits[0], mean), max(limits[1], mean), n)


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


def binomial_lower(successes: int, n: int, level: float = 0.95) -> float:
    """Return the exact one-sided lower limit of a probability (Clopper and Pearson 1934).

    >>> round(binomial_lower(4, 4), 4), round(binomial_lower(5, 5), 4)
    (0.4729, 0.5493)
    """
    return 1 - binomial_upper(n - successes, n, level)


def binomial_tail(successes: int, n: int, share: float) -> float:
    """Return the probability of at least ``successes`` successes in ``n`` trials of probability ``share``.

    >>> round(binomial_tail(7, 8, 0.5), 4)
    0.0352
    """
    return float(special.bdtrc(successes - 1, n, share)) if successes else 1.0


def _bounded(numbers: NDArray[np.float64], level: float, bounds: Bounds) -> Interval:
    low, high = bounds
    mean = min(max(float(numbers.mean()), low), high)
    shares = np.clip(
        (numbers - low) / (high - low), 0.0, 1.0
    )  # clips rounding errors only: the bounds are checked
    one_sided = (1 + level) / 2
    least = low + (high - low) * lower_limit(shares, one_sided)
    most = high - (high - low) * lower_limit(1 - shares, one_sided)
    return Interval(mean, max(low, min(least, mean)), min(high, max(most, mean)), len(numbers))


def _student(n: int, level: float) -> float:
    return float(special.stdtrit(n - 1, (1 + level) / 2))


def checked_bounds(numbers: NDArray[np.float64], bounds: Bounds) -> Bounds:
    """Return the bounds, rejecting invalid ones and numbers outside them (up to rounding)."""
    low, high = bounds
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise ValueError(f"bounds must be finite numbers with low < high, got {bounds!r}")
    slack = ROUNDING * (high - low)
    if numbers.min() < low - slack or numbers.max() > high + slack:
        raise ValueError(f"values must lie in {bounds!r}, got {numbers.min():g} to {numbers.max():g}")
    return bounds


def differences_of(before: Values, after: Values) -> NDArray[np.float64]:
    """Return ``after - before`` of the same examples; all values must be finite."""
    if len(before) != len(after):
        raise ValueError(f"paired scores must have equal lengths, got {len(before)} and {len(after)}")
    return validated(after) - validated(before)


def validated(values: Values) -> NDArray[np.float64]:
    """Return the values as an array, rejecting an empty one and values that are not finite."""
    numbers = np.asarray(values, dtype=np.float64)
    if numbers.ndim != 1 or not len(numbers) or not np.isfinite(numbers).all():
        raise ValueError(f"values must be non-empty and finite, got {values!r:.80}")
    return numbers


def _check_share(**share: float) -> None:
    for name, value in share.items():
        if not 0 < value < 1:
            raise ValueError(f"0 < {name} < 1 must hold, got {name}={value}")
