"""Alignment: how well local rewards order what the global reward orders (OPTIMAS, section 5.2).

Everything here is measured on inputs that the rewards in question were not fitted to.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from compound.evaluation.statistics import UNIT, cluster_mean_interval
from compound.runs.events import AccuracyDocument

Vector = NDArray[np.float64]


@dataclass(frozen=True)
class Accuracy:
    """Pairwise ranking accuracy: the mean over inputs of the share of their pairs that are ordered right.

    ``low`` and ``high`` are its 95 % limits over inputs, ``None`` without any input.
    """

    mean: float
    low: float | None
    high: float | None
    pairs: int
    inputs: int

    def to_json(self) -> AccuracyDocument:
        """Return the five numbers by name."""
        return {
            "mean": self.mean,
            "low": self.low,
            "high": self.high,
            "pairs": self.pairs,
            "inputs": self.inputs,
        }


NOTHING = Accuracy(0.5, None, None, 0, 0)


def accuracy(margins: Sequence[float] | Vector, inputs: Sequence[str]) -> Accuracy:
    """Return the share of pairs whose margin ``r(chosen) - r(rejected)`` is positive; a tie counts half.

    >>> accuracy([1.0, -0.5, 0.0, 2.0], ["a", "a", "b", "b"]).mean
    0.625
    """
    return mean_right([0.5 if margin == 0 else float(margin > 0) for margin in margins], inputs)


def mean_right(right: Sequence[float], inputs: Sequence[str]) -> Accuracy:
    """Return the accuracy of verdicts: 1 for a pair ordered right, 0 for a wrong one, or anything between.

    >>> mean_right([1.0, 0.5, 0.25], ["a", "a", "b"]).mean
    0.5
    """
    if not len(right):
        return NOTHING
    groups: dict[str, list[float]] = defaultdict(list)
    for share, name in zip(right, inputs, strict=True):
        groups[name].append(share)
    found = cluster_mean_interval(groups.values(), bounds=UNIT)
    return Accuracy(found.mean, found.low, found.high, len(right), found.n)


def rank_correlation(local: Sequence[Sequence[float]], global_: Sequence[Sequence[float]]) -> float:
    """Return Spearman's correlation of local with global rewards among one input's outputs, over inputs.

    Inputs whose outputs all have one global reward say nothing and are left out; ``nan`` without any other.

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
    """Pairs of similar stated probability: how often the better output was really the one so stated."""

    stated: float
    observed: float
    pairs: int


def reliability(margins: Sequence[float] | Vector, slope: float, bins: int = 5) -> list[Bin]:
    """Return stated against observed probabilities, in bins of equal numbers of pairs.

    Each pair is stated from the side the reward prefers, so that probabilities lie in [0.5, 1].
    """
    numbers = np.asarray(margins, np.float64)
    stated = 1 / (1 + np.exp(-slope * np.abs(numbers)))
    right = np.where(numbers == 0, 0.5, numbers > 0)
    order = np.argsort(stated, kind="stable")
    parts = np.array_split(order, min(bins, len(order))) if len(order) else []
    return [Bin(float(stated[p].mean()), float(right[p].mean()), len(p)) for p in parts]


def calibration_error(found: Sequence[Bin]) -> float:
    """Return the mean difference of stated and observed probabilities, weighed by pairs."""
    total = sum(b.pairs for b in found)
    return sum(abs(b.stated - b.observed) * b.pairs for b in found) / total if total else math.nan
