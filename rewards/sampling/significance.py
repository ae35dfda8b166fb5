"""Test whether two outputs lead to different mean rewards, from a few paired rewards of unknown variance.

The differences of the rewards are tested once, after the maximum number of downstream runs. Earlier looks
only end the runs of pairs that no further rewards could decide, so that false decisions do not become more
frequent.

The test is Student's, with n - 1 degrees of freedom. It holds its level for normal rewards, however much
noise the two outputs share. Rewards with two values, such as exact matches, are less regular: the differences
1, 1, 1 and 0 have a t of 3. Their p-value is therefore at least the exact one of fair, independent rewards,
which are the noisiest ones of this kind.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from itertools import product

import numpy as np

ROUNDING = 1e-9  # relative error within which numbers computed in different ways count as equal


def is_significant(differences: Sequence[float], level: float) -> bool:
    """Return whether the mean of some differences is not 0, at a two-sided significance level.

    At level 1 any mean other than 0 is significant, that of a single difference too.

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

    The largest t that they can lead to is that of equal differences of size Σd² / Σd: they raise the ratio
    (Σd)² / Σd², of which t is an increasing function, by one each.

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
    """Return the probability of at least this ratio if both rewards are 0 or 1, like fair coins.

    A difference is then -1, 0 or 1 with probabilities 1/4, 1/2 and 1/4.
    """
    total = 0.0
    for plus, minus in product(range(n + 1), repeat=2):
        changed = plus + minus
        if 0 < changed <= n and (plus - minus) ** 2 / changed >= ratio - n * ROUNDING:
            total += math.comb(n, changed) * math.comb(changed, plus) * 0.25**changed * 0.5 ** (n - changed)
    return total
