"""Candidates: outputs of a call with their rewards, and whether the order of two of them is decided.

The differences of the rewards are tested once, after the maximum number of downstream runs, by
Student's test. Rewards with two values are less regular: their p-value is at least the exact one of
fair, independent rewards. Earlier looks only end the runs of pairs that could not be decided.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product

import numpy as np

ROUNDING = 1e-9  # relative error within which numbers computed in different ways count as equal


@dataclass(frozen=True)
class Sampling:
    """Number of candidates per call, and the significance required to order them."""

    samples: int = 3
    rollouts: int = 2  # the minimum number of downstream runs for each candidate
    # the number of downstream runs after which two candidates are compared. Fewer run for a
    # candidate whose order no further runs could make significant
    max_rollouts: int = 4
    # the significance level: the maximum probability that two candidates with equal expected
    # rewards make a pair; 1 accepts any difference, even of one run each
    level: float = 0.1
    pairs: int = 6  # the maximum number of pairs per call, those with the largest gaps


@dataclass(frozen=True)
class Candidate:
    """An output of a call, with the global reward of each downstream sample."""

    outputs: Mapping[str, object]
    rewards: tuple[float, ...] = ()
    # the settings of the draw that differ from those of the component
    settings: Mapping[str, object] = field(default_factory=dict)
    # whether the downstream components were deterministic, so that every run would give the same
    # reward
    certain: bool = False
    # named features of the outputs that only train examples have; see `compound.rewards.gains`
    signals: Mapping[str, float] = field(default_factory=dict)

    @property
    def value(self) -> float:
        """Mean reward: a Monte Carlo estimate of the expectation in equation 4."""
        return sum(self.rewards) / len(self.rewards)


def differences(a: Candidate, b: Candidate) -> list[float]:
    """Return the differences of two candidates' rewards, paired by downstream sample."""
    n = min((len(c.rewards) for c in (a, b) if not c.certain), default=1)
    ours, theirs = (c.rewards[:1] * n if c.certain else c.rewards[:n] for c in (a, b))
    return [one - other for one, other in zip(ours, theirs, strict=True)]


def is_decided(a: Candidate, b: Candidate, level: float) -> bool:
    """Return whether two candidates differ by more than their downstream randomness explains.

    >>> is_decided(Candidate({}, (0.7, 0.8, 0.9)), Candidate({}, (0.1, 0.1, 0.2)), level=0.1)
    True
    >>> is_decided(Candidate({}, (1.0,), certain=True), Candidate({}, (0.9,), certain=True), level=0.1)
    True
    """
    found = differences(a, b)
    return is_significant(found, 1.0 if a.certain and b.certain else level)


def is_comparable(a: Candidate, b: Candidate, level: float) -> bool:
    """Return whether two candidates' rewards say anything about their order, unlike one random run each."""
    return (a.certain and b.certain) or level >= 1 or len(differences(a, b)) > 1


def could_be_decided(a: Candidate, b: Candidate, sampling: Sampling) -> bool:
    """Return whether further downstream runs could decide the order of two candidates."""
    found = differences(a, b)
    further = sampling.max_rollouts - len(found)
    if (a.certain and b.certain) or further <= 0:
        return False
    return len(found) < sampling.rollouts or can_become_significant(found, further, sampling.level)


def is_significant(differences: Sequence[float], level: float) -> bool:
    """Return whether the mean of some differences is not 0, at a two-sided significance level.

    >>> is_significant([1.0, 0.0, 1.0, 1.0], 0.1), is_significant([0.4], 0.1), is_significant([0.4], 1.0)
    (True, False, True)
    """
    numbers = np.asarray(differences, np.float64)
    n, ratio = len(numbers), _ratio(numbers)
    if ratio <= ROUNDING or ratio < _least_ratio(n, level) - ROUNDING:
        return False
    sizes = np.abs(numbers)
    sizes = sizes[sizes > ROUNDING * sizes.max()]
    has_two_values = sizes.max() - sizes.min() <= ROUNDING * sizes.max()
    return not has_two_values or _chance_of_two_values(n, ratio) <= level


def can_become_significant(differences: Sequence[float], further: int, level: float) -> bool:
    """Return whether ``further`` more differences could make the mean significant at ``level``.

    Those that lead to the largest t are equal: they raise (Σd)² / Σd² by one each.

    >>> can_become_significant([0.0, 0.0], 2, 0.1), can_become_significant([1.0, 0.0], 2, 0.1)
    (False, True)
    """
    largest = _ratio(np.asarray(differences, np.float64)) + further
    return largest >= _least_ratio(len(differences) + further, level) - ROUNDING


def _ratio(differences: np.ndarray[tuple[int, ...], np.dtype[np.float64]]) -> float:
    """Return (Σd)² / Σd², which is between 0 and n; 0 if all differences are 0."""
    largest = float(np.abs(differences).max(initial=0.0))
    if not largest:
        return 0.0
    scaled = differences / largest  # squares of very small numbers are 0
    return float(scaled.sum() ** 2 / (scaled**2).sum())


@functools.lru_cache
def _least_ratio(n: int, level: float) -> float:
    """Return the smallest significant ratio of n differences, from t² = (n - 1) · ratio / (n - ratio)."""
    from scipy import stats

    if level >= 1:
        return 0.0
    if n < 2:
        return math.inf
    t = float(stats.t.isf(level / 2, n - 1))
    return n * t * t / (n - 1 + t * t)


@functools.lru_cache
def _chance_of_two_values(n: int, ratio: float) -> float:
    """Return the probability of at least this ratio if both rewards are 0 or 1, like fair coins."""
    total = 0.0
    for plus, minus in product(range(n + 1), repeat=2):
        changed = plus + minus
        if 0 < changed <= n and (plus - minus) ** 2 / changed >= ratio - n * ROUNDING:
            ways = math.comb(n, changed) * math.comb(changed, plus)
            total += ways * 0.25**changed * 0.5 ** (n - changed)
    return total
