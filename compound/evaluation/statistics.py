"""Confidence intervals of scores, and the agreement of a judge with human labels.

`lower_limit` implements Gaffke's bound (2005) for scores with a known range: add one imaginary
value at the lower end of the range, weigh all values by uniform random weights that sum to one, and
take a low quantile of the weighted mean. It covers the true mean at least as often as stated for
every distribution on the range (conjectured by Gaffke; Vlassis and Thomas 2026, arXiv:2607.08415,
theorem 1), equals the limit of Clopper and Pearson for values 0 and 1, and needs no random numbers.
`mean_p_value` is the test that belongs to it. docs/adr/0024 compares its coverage with that of
alternatives.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, TypedDict

import numpy as np
from numpy.typing import NDArray
from scipy import special

from compound.core.errors import DataError, DeclarationError

Vector = NDArray[np.float64]

_STEP, _REACH = 0.055, 17.0  # step and range of the integration; tested against closed forms
_BLOCK = 2_000  # points whose factors are in memory at a time
_MANY, _LEVELS = (
    4_096,
    2_048,
)  # more than _MANY values in [0, 1] are rounded down to a grid of 1 / _LEVELS
_U = np.arange(0.0, _REACH, _STEP)
_SINH, _COSH = np.sinh(_U), np.cosh(_U)
_CLOSE = 1e-12
_TINY = 1e-100  # smaller values count as 0: squares of their inverses overflow


def lower_limit(values: Vector, level: float) -> float:
    """Return the one-sided lower confidence limit of the mean of values in [0, 1].

    For levels below 0.64, it is at most the mean of the values and the imaginary 0.

    >>> round(lower_limit(np.array([1.0, 1.0, 1.0]), 0.95), 4)  # the cube root of 0.05
    0.3684
    """
    points = np.append(np.sort(_coarse(values)), 0.0)
    distinct, counts = np.unique(points, return_counts=True)
    if len(distinct) == 1 or distinct[-1] < _TINY:
        return 0.0
    if len(distinct) == 2:  # a beta distribution, exactly
        low, high = (float(point) for point in distinct)
        return low + (high - low) * float(special.betaincinv(counts[1], counts[0], 1 - level))
    return _solve(points, 1 - level)


def _coarse(values: Vector) -> Vector:
    """Return values, rounded down to a grid if there are many; a limit decreases by less than its step."""
    return values if len(values) <= _MANY else np.floor(values * _LEVELS) / _LEVELS


def _solve(points: Vector, share: float) -> float:
    """Return the value below which the randomly weighted mean of points falls with probability ``share``."""
    from scipy import optimize

    low, mean = float(points.min()), float(points.mean())
    if weighted_mean_cdf(points, mean) <= share:  # only for levels below 1 - 1 / e
        return mean
    least = low + (mean - low) * _CLOSE

    def excess(t: float) -> float:
        return float(np.log(max(weighted_mean_cdf(points, t), 1e-300) / share))

    return float(optimize.brentq(excess, least, mean, xtol=1e-12, rtol=1e-10))


def mean_p_value(values: Vector, mean: float) -> float:
    """Return the p-value of the hypothesis that the true mean of values in [0, 1] is at most ``mean``.

    It is the probability that the randomly weighted mean of the values and the imaginary 0 is at most
    ``mean``. From level 0.64 on, it is at most ``1 - level`` if and only if `lower_limit` is at least
    ``mean``.

    >>> mean_p_value(np.array([1.0, 1.0, 1.0, 1.0]), 0.5)
    0.0625
    """
    c = np.append(np.sort(_coarse(values)), 0.0) - mean
    c = c[np.abs(c) >= _TINY]
    distinct, counts = np.unique(c, return_counts=True)
    if not len(distinct) or distinct[-1] < 0:
        return 1.0
    if distinct[0] > 0:  # the hypothesis is a mean of 0, which a positive value refutes
        return 0.0
    if len(distinct) == 2:  # a beta distribution, exactly; for values 0, 1/2 and 1 the sign test
        low, high = (float(value) for value in distinct)
        return float(special.betainc(counts[1], counts[0], -low / (high - low)))
    p = _weighted_sum_cdf(c) if c.sum() >= 0 else 1 - _weighted_sum_cdf(-c)
    return min(max(p, 0.0), 1.0)


def weighted_mean_cdf(points: Vector, t: float) -> float:
    """Return the probability that the mean of points with flat Dirichlet weights is at most ``t``.

    >>> round(weighted_mean_cdf(np.array([0.0, 0.5, 1.0]), 0.5), 6)
    0.5
    """
    return _weighted_sum_cdf(points - t)


def _weighted_sum_cdf(c: Vector) -> float:
    """Return the probability that ``sum(E * c)`` is at most 0 for independent standard exponential ``E``.

    The minimum of ``c`` must be negative and its sum at least 0. The moment generating function is
    inverted on the line through the saddlepoint (Daniels 1954), where it hardly oscillates.
    """
    from scipy import optimize

    def slope(theta: float) -> float:
        return float(np.sum(c / (1 - c * theta)) - 1 / theta)

    edge = 1 / float(c.min())  # the moment generating function exists between here and 0
    # the slope is infinite at both ends of the interval
    theta = float(optimize.brentq(slope, edge * (1 - 1e-13), edge * 1e-13, xtol=1e-300, rtol=1e-9))
    scaled = c / (1 - c * theta)
    width = 1 / np.sqrt(np.sum(scaled**2) + 1 / theta**2)
    y = width * _SINH
    product = np.ones(len(y), dtype=np.complex128)
    factors, counts = np.unique(scaled, return_counts=True)
    if len(factors) > len(scaled) / 2:
        factors, counts = scaled, np.ones(len(scaled), int)
    with np.errstate(over="ignore", invalid="ignore"):
        for start in range(0, len(factors), _BLOCK):
            part = slice(start, start + _BLOCK)
            powers = 1 - 1j * y[:, None] * factors[None, part]
            if len(factors) < len(scaled):
                powers = powers ** counts[None, part]
            product *= np.prod(powers, axis=1)
        shrunk = np.nan_to_num(1 / product, nan=0.0, posinf=0.0, neginf=0.0)
    integrand = (shrunk / (theta + 1j * y)).real * width * _COSH
    total = _STEP * (integrand.sum() - integrand[0] / 2)
    return float(-np.exp(-np.sum(np.log1p(-c * theta))) * total / np.pi)


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

    With ``bounds``, the interval is Gaffke's: it lies within them, holds for every distribution, and
    never has zero width. Without, it is Student's, whose limits are infinite for equal values.

    Raises:
        ValueError: there is no value, one is not finite, or one is outside the bounds.

    >>> interval = mean_interval([1.0, 1.0, 1.0], bounds=(0.0, 1.0))
    >>> interval.mean, round(interval.low, 3), interval.high
    (1.0, 0.292, 1.0)
    >>> interval = mean_interval([1.0, 2.0, 3.0])
    >>> interval.mean, round(interval.low, 3), round(interval.high, 3)
    (2.0, -0.484, 4.484)
    """
    numbers = validated(values)
    if not 0 < level < 1:
        raise ValueError(f"0 < level < 1 must hold, got level={level}")
    if bounds is not None:
        return _bounded(numbers, level, checked_bounds(numbers, bounds))
    n, mean = len(numbers), float(numbers.mean())
    if np.ptp(numbers) == 0:
        return Interval(float(numbers[0]), -math.inf, math.inf, n)
    half = (
        float(special.stdtrit(n - 1, (1 + level) / 2)) * float(numbers.std(ddof=1)) / math.sqrt(n)
    )
    return Interval(mean, mean - half, mean + half, n)


def cluster_mean_interval(clusters: Iterable[Values], *, bounds: Bounds | None = None) -> Interval:
    """Return the mean over examples that were each run several times; ``n`` counts examples.

    >>> cluster_mean_interval([[1.0, 1.0, 1.0], [0.0]]).mean
    0.5
    """
    means = [float(r[0] if len(r) == 1 else validated(r).mean()) for r in clusters]
    return mean_interval(means, bounds=bounds)


def paired_interval(before: Values, after: Values, *, bounds: Bounds | None = None) -> Interval:
    """Return the mean of ``after - before`` over the same examples, with its interval.

    ``bounds`` are the bounds of the scores; differences of scores in [0, 1] are in [-1, 1].

    >>> interval = paired_interval([0.0, 0.5, 1.0], [1.0, 1.0, 1.0], bounds=(0.0, 1.0))
    >>> interval.mean, round(interval.low, 3), round(interval.high, 3)
    (0.5, -0.578, 0.933)
    """
    return mean_interval(differences_of(before, after), bounds=difference_bounds(bounds))


def difference_bounds(bounds: Bounds | None) -> Bounds | None:
    """Return the bounds of the difference of two scores.

    >>> difference_bounds((0.0, 1.0)), difference_bounds(None)
    ((-1.0, 1.0), None)
    """
    return None if bounds is None else (bounds[0] - bounds[1], bounds[1] - bounds[0])


def interval_of_means(values: Values, *, bounds: Bounds | None = None) -> Interval:
    """Return the mean of a few values that are themselves means of many scores, such as one per seed.

    Such values are close to normal. With ``bounds``, this is Wilson's score interval with Student's
    quantile and the sample variance: it stays within the range. Limits are infinite for equal values.

    >>> interval = interval_of_means([0.98, 0.99, 1.0], bounds=(0.0, 1.0))
    >>> round(interval.mean, 3), round(interval.low, 3), round(interval.high, 3)
    (0.99, 0.924, 0.999)
    """
    plain = mean_interval(values)
    if bounds is None or math.isinf(plain.high):
        return plain
    mean, half = plain.mean, plain.high - plain.mean
    low, high = checked_bounds(validated(values), bounds)
    share = min(max((mean - low) / (high - low), ROUNDING), 1 - ROUNDING)
    relative = half / (high - low)
    k = relative**2 / (share * (1 - share))
    middle = (share + k / 2) / (1 + k)
    reach = math.sqrt(k * share * (1 - share) + k**2 / 4) / (1 + k)
    limits = [
        low + (high - low) * min(max(limit, 0.0), 1.0) for limit in (middle - reach, middle + reach)
    ]
    return Interval(mean, min(limits[0], mean), max(limits[1], mean), plain.n)


def binomial_lower(successes: int, n: int, level: float = 0.95) -> float:
    """Return the exact one-sided lower limit of a probability (Clopper and Pearson 1934).

    >>> round(binomial_lower(4, 4), 4), round(binomial_lower(5, 5), 4)
    (0.4729, 0.5493)
    """
    if not 0 <= successes <= n:
        raise ValueError(f"0 <= successes <= n must hold, got successes={successes}, n={n}")
    if not 0 < level < 1:
        raise ValueError(f"0 < level < 1 must hold, got level={level}")
    if not successes:
        return 0.0
    return 1 - float(special.betaincinv(n - successes + 1, successes, level))


def binomial_tail(successes: int, n: int, share: float) -> float:
    """Return the probability of at least ``successes`` successes in ``n`` trials of probability ``share``.

    >>> round(binomial_tail(7, 8, 0.5), 4)
    0.0352
    """
    return float(special.bdtrc(successes - 1, n, share)) if successes else 1.0


def _bounded(numbers: NDArray[np.float64], level: float, bounds: Bounds) -> Interval:
    low, high = bounds
    mean = min(max(float(numbers.mean()), low), high)
    # clips rounding errors only: the bounds are checked
    shares = np.clip((numbers - low) / (high - low), 0.0, 1.0)
    one_sided = (1 + level) / 2
    least = low + (high - low) * lower_limit(shares, one_sided)
    most = high - (high - low) * lower_limit(1 - shares, one_sided)
    return Interval(mean, max(low, min(least, mean)), min(high, max(most, mean)), len(numbers))


def checked_bounds(numbers: NDArray[np.float64], bounds: Bounds) -> Bounds:
    """Return the bounds, rejecting invalid ones and numbers outside them (up to rounding)."""
    low, high = bounds
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise ValueError(f"bounds must be finite numbers with low < high, got {bounds!r}")
    slack = ROUNDING * (high - low)
    if numbers.min() < low - slack or numbers.max() > high + slack:
        raise ValueError(
            f"values must lie in {bounds!r}, got {numbers.min():g} to {numbers.max():g}"
        )
    return bounds


def differences_of(before: Values, after: Values) -> NDArray[np.float64]:
    """Return ``after - before`` of the same examples; all values must be finite."""
    if len(before) != len(after):
        raise ValueError(
            f"paired scores must have equal lengths, got {len(before)} and {len(after)}"
        )
    return validated(after) - validated(before)


def validated(values: Values) -> NDArray[np.float64]:
    """Return the values as an array, rejecting an empty one and values that are not finite."""
    numbers = np.asarray(values, dtype=np.float64)
    if numbers.ndim != 1 or not len(numbers) or not np.isfinite(numbers).all():
        raise ValueError(f"values must be non-empty and finite, got {values!r:.80}")
    return numbers


Weights = Literal["quadratic", "none"]


@dataclass(frozen=True)
class Agreement:
    """Cohen's kappa of a judge and human labels, with its 95 % confidence interval.

    Attributes:
        kappa: 1 for perfect agreement, 0 for that of independent labels; NaN if both always give
            one label.
        low, high: limits of the confidence interval.
        observed: mean agreement of the two, from 0 to 1.
        expected: mean agreement of independent labels with the same frequencies.
        n: number of labelled outputs.
        failed: number of labelled outputs that the judge could not score; they are left out.
        consistent: share of outputs on which a judge agreed with itself in both orders; ``None``
            for judges that are not asked twice.

    >>> print(agreement_of([1, 1, 0, 0], [1, 1, 0, 1]))
    kappa 0.50 [-0.61, 0.99] on 4 labels, agreement 0.75 (0.50 by chance)
    """

    kappa: float
    low: float
    high: float
    observed: float
    expected: float
    n: int
    failed: int = 0
    consistent: float | None = None

    def __str__(self) -> str:
        failed = f", {self.failed} not scored" if self.failed else ""
        same = (
            "" if self.consistent is None else f", the same in both orders on {self.consistent:.0%}"
        )
        kappa = f"{self.kappa:.2f} [{self.low:.2f}, {self.high:.2f}]"
        kappa = "undefined (one label only)" if math.isnan(self.kappa) else kappa
        return (
            f"kappa {kappa} on {self.n} labels, agreement {self.observed:.2f} "
            f"({self.expected:.2f} by chance){failed}{same}"
        )


def agreement_of(
    judged: Sequence[float],
    human: Sequence[float],
    weights: Weights = "quadratic",
    *,
    failed: int = 0,
    consistent: float | None = None,
) -> Agreement:
    """Return the agreement of scores with human labels on the same scale from 0 to 1.

    ``quadratic`` weights count a difference d as agreement 1 - d²; ``none`` counts equal labels only,
    with each score rounded to the nearest label. The interval takes the agreement by chance as known.

    Raises:
        DataError: there are no labels, their numbers differ, or one is outside 0 to 1.
    """
    scores, labels = np.asarray(judged, dtype=np.float64), np.asarray(human, dtype=np.float64)
    if weights not in ("quadratic", "none"):
        raise DeclarationError(f"weights must be 'quadratic' or 'none', got {weights!r}")
    if not len(scores) or len(scores) != len(labels):
        raise DataError(
            f"agreement needs as many scores as labels, got {len(scores)} and {len(labels)}"
        )
    for values in (scores, labels):
        if not np.all((values >= 0) & (values <= 1)):
            raise DataError(
                "scores and labels must be from 0 to 1", hint="pass the scale of the labels"
            )
    if weights == "none":
        levels = np.unique(labels)
        scores = levels[np.argmin(np.abs(scores[:, None] - levels[None, :]), axis=1)]
        pairs = (scores[:, None] == labels[None, :]).astype(np.float64)
    else:
        pairs = 1 - (scores[:, None] - labels[None, :]) ** 2
    agreed, expected = np.diag(pairs), float(pairs.mean())
    found = mean_interval(agreed.tolist(), bounds=UNIT)

    def kappa(observed: float) -> float:
        return math.nan if expected >= 1 else (observed - expected) / (1 - expected)

    low, high = max(-1.0, kappa(found.low)), kappa(found.high)
    return Agreement(
        kappa(found.mean), low, high, found.mean, expected, len(labels), failed, consistent
    )
