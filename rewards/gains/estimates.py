"""Estimate the gains of candidates from a few global and many local evaluations.

A local reward is a control variate. Let D be the global gain of a candidate over the incumbent on an example,
and L its local gain, in units of the score. With the slope β of D on L,

    gain = β · mean of L over many examples + mean of (D − β L) over the few with a global evaluation

is unbiased for every β that does not depend on these examples, and has the variance
``β² var(L) / n_local + var(D − β L) / n_global`` (double sampling, Cochran 1977, section 12;
prediction-powered inference, Angelopoulos et al. 2023). A useless reward has β ≈ 0; no threshold is needed.

If the local reward explains the differences between candidates up to a remainder b with variance τ² over
candidates, the second mean is mostly noise where τ² is small. Its best linear weight is
``w = τ² / (τ² + σ² / n_global)`` (the area model of Fay and Herriot 1979): 1 for a useless or a misleading
reward, which leaves the unbiased estimate, and near 0 for a reward that explains all that was measured.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

__all__ = ["EstimateGains", "Evaluations", "Gains", "estimate_gains", "estimate_unbiased"]

Matrix = NDArray[np.float64]
Vector = NDArray[np.float64]

FEWEST = 3  # candidates with global evaluations from which the variance between them is estimated


@dataclass(frozen=True)
class Evaluations:
    """Gains of candidates (rows) over the incumbent on examples (columns); nan if not evaluated.

    Attributes:
        globally: differences of the global score.
        locally: differences of the local reward, by a reward that was not fitted to the example.
    """

    globally: Matrix
    locally: Matrix

    def both(self) -> NDArray[np.bool_]:
        """Return where both are known."""
        return ~np.isnan(self.globally) & ~np.isnan(self.locally)


@dataclass(frozen=True)
class Gains:
    """Estimated gains of candidates.

    Attributes:
        mean: the estimate by candidate.
        sd: the square root of its mean squared error, which includes the bias of shrinkage; the standard
            deviation of an unbiased estimate.
        locally: the calibrated local gain ``β · mean of L`` by candidate; nan without local evaluations.
        globally: the mean of D by candidate; nan without global evaluations.
        counts: the number of global evaluations by candidate.
        slope: β, gain of the score per unit of local reward; 0 if the local reward tells nothing.
        noise: σ, standard deviation of ``D − β L`` within a candidate.
        spread: τ, standard deviation between candidates of what the local reward does not explain; infinite
            if it is unknown, or not used.
        doubt: square root of the standard error of τ².
        ratio: the mean squared error of the estimates relative to global evaluations alone (their mean over
            candidates); 1 without a local reward.
    """

    mean: Vector
    sd: Vector
    locally: Vector
    globally: Vector
    counts: NDArray[np.int64]
    slope: float
    noise: float
    spread: float
    doubt: float
    ratio: float


class EstimateGains(Protocol):
    """Estimates the gain of every candidate that has a global or a local evaluation."""

    def __call__(self, data: Evaluations) -> Gains:
        """Return the estimates; nan for candidates without an evaluation."""
        ...


def estimate_gains(data: Evaluations, *, shrink: bool = True) -> Gains:
    """Estimate the gain of every candidate that has a global or a local evaluation.

    Args:
        data: the evaluations.
        shrink: whether to weigh the correction by ``w``; otherwise ``w = 1``, the unbiased control variate.

    Returns:
        The estimates; nan for candidates without an evaluation.

    >>> rng = np.random.default_rng(0)
    >>> true = np.array([-0.2, 0.0, 0.3])
    >>> local = true[:, None] + 0.1 * rng.normal(size=(3, 100))
    >>> scores = np.full((3, 100), np.nan)
    >>> scores[:, :10] = local[:, :10] + 0.5 * rng.normal(size=(3, 10))
    >>> int(np.argmax(estimate_gains(Evaluations(scores, local)).mean))
    2
    """
    both = data.both()
    slope = _slope(data, both)
    known = ~np.isnan(data.globally)
    counted = both if slope else known
    residuals = data.globally - slope * np.nan_to_num(data.locally)
    n = counted.sum(1)
    means, noise2 = _row_means(residuals, counted), _variance_within(residuals, counted)
    locally = ~np.isnan(data.locally) if slope else np.zeros_like(known)
    n_local, local_means = locally.sum(1), slope * _row_means(data.locally, locally)
    local2 = slope**2 * _variance_within(data.locally, locally) if slope else 0.0
    spread2, doubt2 = _variance_between(means, n, noise2) if slope and shrink else (math.inf, 0.0)
    with np.errstate(divide="ignore", invalid="ignore"):
        weight = _weights(n, noise2, spread2)
        left = np.where(n > 0, weight**2 * noise2 / n, 0.0)  # mean squared error of the correction
        if math.isfinite(spread2):
            left += (1 - weight) ** 2 * (spread2 + doubt2)
        else:
            left = np.where(n > 0, left, math.inf)
        variance = left + np.where(n_local > 0, local2 / n_local, 0.0 if not slope else math.inf)
        alone = _variance_within(data.globally, known) / known.sum(1)
        ratios = np.where((n > 0) & (alone > 0), variance / alone, np.nan)
    gain = np.where((n > 0) | (n_local > 0), local_means + weight * means, np.nan)
    finite = ratios[np.isfinite(ratios)]
    return Gains(
        gain,
        np.sqrt(variance),
        np.where(n_local > 0, local_means, np.nan),
        np.where(known.any(1), _row_means(data.globally, known), np.nan),
        known.sum(1),
        slope,
        math.sqrt(noise2),
        math.sqrt(spread2),
        math.sqrt(doubt2),
        float(finite.mean()) if slope and len(finite) else 1.0,
    )


def estimate_unbiased(data: Evaluations) -> Gains:
    """Estimate gains by the control variate without shrinkage."""
    return estimate_gains(data, shrink=False)


def _weights(n: NDArray[np.int64], noise2: float, spread2: float) -> Vector:
    """Return the weight of each candidate's correction."""
    if not math.isfinite(spread2):
        return np.where(n > 0, 1.0, 0.0)
    if not spread2:
        return np.zeros(len(n))
    return np.where(n > 0, spread2 / (spread2 + noise2 / np.maximum(n, 1)), 0.0)


def _slope(data: Evaluations, both: NDArray[np.bool_]) -> float:
    """Return the slope of global on local gains through the origin, at least 0.

    Equal outputs have equal scores, so that there is no intercept.
    """
    x, y = data.locally[both], data.globally[both]
    if not len(x) or not np.any(x):
        return 0.0
    return max(0.0, float(x @ y) / float(x @ x))


def _row_means(values: Matrix, counted: NDArray[np.bool_]) -> Vector:
    means: Vector = np.where(counted, values, 0.0).sum(1) / np.maximum(counted.sum(1), 1)
    return means


def _variance_within(values: Matrix, counted: NDArray[np.bool_]) -> float:
    """Return the pooled variance within rows; infinite if no row has two values."""
    freedom = int(np.maximum(counted.sum(1) - 1, 0).sum())
    deviations = np.where(counted, values - _row_means(values, counted)[:, None], 0.0)
    return float((deviations**2).sum()) / freedom if freedom else math.inf


def _variance_between(means: Vector, n: NDArray[np.int64], noise2: float) -> tuple[float, float]:
    """Return the variance of the means around 0 beyond their noise, and the standard error of that variance.

    The incumbent is one of the candidates: what its local reward does not explain is no larger than for the
    others, so that the means of differences from it have expectation 0.
    """
    known = n > 0
    if known.sum() < FEWEST or not math.isfinite(noise2):
        return math.inf, 0.0
    x, weights = means[known], n[known].astype(float)
    total = float(weights.sum())
    found = (float((weights * x**2).sum()) - len(x) * noise2) / total
    return max(0.0, found), math.sqrt(2 * len(x)) * noise2 / total
