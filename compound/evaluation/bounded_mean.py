"""Confidence limits and p-values for the mean of independent values in a known range.

`lower_limit` implements Gaffke's bound. Add one imaginary value at the lower end of the range to the n
values, weigh all n + 1 by uniform random weights that sum to one (a flat Dirichlet distribution, as in the
Bayesian bootstrap), and take a low quantile of the weighted mean. The upper limit is the mirror image. For
values 0 and 1, both limits equal those of Clopper and Pearson. They cover the true mean at least as often as
stated for every distribution on the range: Gaffke conjectured it, and Vlassis and Thomas proved it for
independent values, which need not be identically distributed. The limits need no random numbers, do not
depend on the order of the values, stay within the range, and have a positive distance even for few or equal
values. `mean_p_value` is the test that belongs to the lower limit.

References:
    Clopper and Pearson (1934), "The use of confidence or fiducial limits illustrated in the case of the
    binomial"
    Gaffke (2005), "Three test statistics for a nonparametric one-sided hypothesis on the mean of a
    nonnegative variable"
    Learned-Miller and Thomas (2020), "A new confidence interval for the mean of a bounded random variable"
    Vlassis and Thomas (2026), "An exact distribution-free test for means of nonnegative random variables"
    (arXiv:2607.08415), theorem 1
    Daniels (1954), "Saddlepoint approximations in statistics", for the line of integration
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy import special

Vector = NDArray[np.float64]

_STEP, _REACH = 0.055, 17.0  # step and range of the integration; tested against closed forms
_BLOCK = 2_000  # points whose factors are in memory at a time
_U = np.arange(0.0, _REACH, _STEP)
_SINH, _COSH = np.sinh(_U), np.cosh(_U)
_CLOSE = 1e-12
_TINY = 1e-100  # smaller values count as 0: squares of their inverses overflow


def lower_limit(values: Vector, level: float) -> float:
    """Return the one-sided lower confidence limit of the mean of values in [0, 1].

    Args:
        values: The values.
        level: Confidence level: the probability that the limit is below the true mean. For levels below 0.64,
            a limit above the mean of the values and the imaginary 0 is replaced by that mean.

    >>> round(lower_limit(np.array([1.0, 1.0, 1.0]), 0.95), 4)  # the cube root of 0.05
    0.3684
    """
    points = np.append(np.sort(values), 0.0)
    distinct, counts = np.unique(points, return_counts=True)
    if len(distinct) == 1 or distinct[-1] < _TINY:
        return 0.0
    if len(distinct) == 2:  # a beta distribution, exactly
        low, high = (float(point) for point in distinct)
        return low + (high - low) * float(special.betaincinv(counts[1], counts[0], 1 - level))
    return _solve(points, 1 - level)


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

    The p-value is the probability that the randomly weighted mean of the values and the imaginary 0 is at
    most ``mean``. For levels from 0.64 it is at most ``1 - level`` if and only if `lower_limit` at
    ``level`` is at least ``mean``.

    Args:
        values: The values, at least one.
        mean: Largest mean of the hypothesis, between 0 and 1.

    >>> mean_p_value(np.array([1.0, 1.0, 1.0, 1.0]), 0.5)
    0.0625
    """
    c = np.append(np.sort(values), 0.0) - mean
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

    ``t`` must be above the minimum and at most the mean of the points.

    >>> round(weighted_mean_cdf(np.array([0.0, 0.5, 1.0]), 0.5), 6)
    0.5
    """
    return _weighted_sum_cdf(points - t)


def _weighted_sum_cdf(c: Vector) -> float:
    """Return the probability that ``sum(E * c)`` is at most 0 for independent standard exponential ``E``.

    The minimum of ``c`` must be negative and its sum at least 0. Dirichlet weights are exponential variables
    over their sum, which does not change the sign. The inversion integral of the moment generating function
    is taken on the line through the saddlepoint, where the integrand hardly oscillates.
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
    with np.errstate(over="ignore", invalid="ignore"):
        for start in range(0, len(c), _BLOCK):
            product *= np.prod(1 - 1j * y[:, None] * scaled[None, start : start + _BLOCK], axis=1)
        shrunk = np.nan_to_num(1 / product, nan=0.0, posinf=0.0, neginf=0.0)
    integrand = (shrunk / (theta + 1j * y)).real * width * _COSH
    total = _STEP * (integrand.sum() - integrand[0] / 2)
    return float(-np.exp(-np.sum(np.log1p(-c * theta))) * total / np.pi)
