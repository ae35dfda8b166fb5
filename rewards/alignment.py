"""Measure the alignment of local rewards with the global reward, on inputs that they were not fitted to."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray
from pydantic import NonNegativeInt

from compound.evaluation.statistics import UNIT, binomial_lower, cluster_mean_interval

Vector = NDArray[np.float64]


@dataclass(frozen=True)
class Accuracy:
    """Pairwise ranking accuracy, the mean over inputs, with its 95 % interval (``None`` without inputs)."""

    mean: float
    low: float | None
    high: float | None
    pairs: NonNegativeInt
    inputs: NonNegativeInt

    def to_json(self) -> dict[str, float | int | None]:
        """Return the fields as JSON types."""
        return asdict(self)


@dataclass(frozen=True)
class Evidence:
    """Whether a reward orders outputs better than chance, by inputs."""

    right: int = 0  # the inputs most of whose pairs are ordered correctly
    wrong: int = 0  # the inputs most of whose pairs are not

    def lower_limit(self, level: float) -> float:
        """Return the exact lower limit of the probability that an input is ordered right.

        ``level`` is the probability that the limit is too high; at 1, it is 1, whatever the evidence.

        >>> [round(Evidence(right, 0).lower_limit(0.05), 3) for right in (0, 4, 5)]
        [0.0, 0.473, 0.549]
        """
        if level >= 1:
            return 1.0
        return binomial_lower(self.right, self.right + self.wrong, 1 - level)


def evidence(margins: Sequence[float] | Vector, inputs: Sequence[str]) -> Evidence:
    """Count the inputs most of whose pairs are ordered correctly, and those most of whose pairs are not.

    Pairs of one input are not independent, so an input counts once; pairs without a margin do not.

    >>> evidence([1.0, 2.0, -3.0, -1.0, 1.0, -1.0, math.nan], ["a", "a", "a", "b", "c", "c", "d"])
    Evidence(right=1, wrong=1)
    """
    balance: dict[str, float] = defaultdict(float)
    for margin, name in zip(margins, inputs, strict=True):
        if not math.isnan(margin):
            balance[name] += math.copysign(1.0, margin) if margin else 0.0
    values = list(balance.values())
    return Evidence(sum(value > 0 for value in values), sum(value < 0 for value in values))


NO_PAIRS = Accuracy(0.5, None, None, 0, 0)


def accuracy(margins: Sequence[float] | Vector, inputs: Sequence[str]) -> Accuracy:
    """Return the accuracy of margins ``r(chosen) - r(rejected)``: positive is correct, a tie counts half.

    >>> accuracy([1.0, -0.5, 0.0, 2.0], ["a", "a", "b", "b"]).mean
    0.625
    """
    return mean_accuracy([0.5 if margin == 0 else float(margin > 0) for margin in margins], inputs)


def mean_accuracy(right: Sequence[float], inputs: Sequence[str]) -> Accuracy:
    """Return the accuracy of verdicts between 0 (wrong order) and 1 (correct order).

    >>> mean_accuracy([1.0, 0.5, 0.25], ["a", "a", "b"]).mean
    0.5
    """
    if not len(right):
        return NO_PAIRS
    groups: dict[str, list[float]] = defaultdict(list)
    for share, name in zip(right, inputs, strict=True):
        groups[name].append(share)
    found = cluster_mean_interval(groups.values(), bounds=UNIT)
    return Accuracy(found.mean, found.low, found.high, len(right), found.n)


def rank_correlation(local: Sequence[Sequence[float]], global_: Sequence[Sequence[float]]) -> float:
    """Return Spearman's correlation of local with global rewards within an input, averaged over inputs.

    Inputs whose outputs all have the same global reward are skipped; ``nan`` if none remain.

    >>> round(rank_correlation([[1.0, 2.0, 3.0], [1.0, 2.0], [1.0, 2.0]], [[1, 5, 9], [1, 0], [0, 1]]), 2)
    0.33
    """
    from scipy import stats

    found = []
    for r, value in zip(local, global_, strict=True):
        if len(set(value)) > 1:
            found.append(float(stats.spearmanr(r, value).statistic) if len(set(r)) > 1 else 0.0)
    return sum(found) / len(found) if found else math.nan


@dataclass(frozen=True)
class Bin:
    """Pairs of similar predicted probability, with the mean prediction and the observed share."""

    stated: float
    observed: float
    pairs: int


def reliability(margins: Sequence[float] | Vector, slope: float, bins: int = 5) -> list[Bin]:
    """Return predicted against observed probabilities of preferred outputs, in bins of equal size."""
    numbers = np.asarray(margins, np.float64)
    stated = 1 / (1 + np.exp(-slope * np.abs(numbers)))
    right = np.where(numbers == 0, 0.5, numbers > 0)
    order = np.argsort(stated, kind="stable")
    parts = np.array_split(order, min(bins, len(order))) if len(order) else []
    return [Bin(float(stated[p].mean()), float(right[p].mean()), len(p)) for p in parts]


def calibration_error(found: Sequence[Bin]) -> float:
    """Return the mean difference of predicted and observed probabilities, weighted by pairs."""
    total = sum(b.pairs for b in found)
    return sum(abs(b.stated - b.observed) * b.pairs for b in found) / total if total else math.nan
