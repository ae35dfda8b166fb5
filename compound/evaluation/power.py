"""Statistical power of the acceptance test, from the number of validation examples and the level.

The numbers are exact for scores of 0 and 1 with declared bounds: for these, the test of
`compound.evaluation.paired_tests` is the sign test over the examples whose score changed. For graded scores
the power depends on the distribution of the gains: a test that holds for every distribution needs more
examples for many small gains than for few large ones of the same mean (docs/adr/0031). P-values are at least
`least_p` in either case.
"""

from __future__ import annotations

import functools
import math

import numpy as np
from numpy.typing import NDArray
from scipy import special

from compound.evaluation.paired_tests import EXACT_UP_TO, FLIPS

POWER = 0.8  # detection probability above which an effect counts as detectable
MOST_EXAMPLES = 100_000


def least_p(n: int, *, bounded: bool = True) -> float:
    """Return the smallest p-value that `compound.evaluation.paired_tests.paired_test` can return.

    Args:
        n: number of validation examples.
        bounded: whether the bounds of the scores are known; without them, random sign patterns limit it.

    >>> least_p(5), least_p(40) < 1e-12, round(least_p(40, bounded=False), 6)
    (0.03125, True, 5e-05)
    """
    return 2.0**-n if bounded or n <= EXACT_UP_TO else max(2.0**-n, 1 / (FLIPS + 1))


def most_decisions(n: int, alpha: float, *, bounded: bool = True) -> int:
    """Return the largest number of equal parts of ``alpha`` at which ``n`` examples can show an improvement.

    >>> most_decisions(4, 0.05), most_decisions(5, 0.05), most_decisions(8, 0.05)
    (0, 1, 12)
    """
    return int(alpha / max(least_p(n, bounded=bounded), 1e-300))  # 2**-n underflows for large n


def least_improved(level: float) -> int:
    """Return the number of examples that must improve, with none getting worse, for a p-value at ``level``.

    >>> least_improved(0.05), least_improved(0.05 / 6)
    (5, 7)
    """
    return max(1, math.ceil(-math.log2(level) - 1e-9))  # tolerance: log2 of a power of two may round up


def power(n: int, level: float, better: float, worse: float = 0.0) -> float:
    """Return the acceptance probability for ``n`` examples with scores of 0 and 1.

    Args:
        n: number of validation examples.
        level: level of the test.
        better: probability that an example's score rises from 0 to 1.
        worse: probability that it falls from 1 to 0.

    >>> round(power(40, 0.05, better=0.2), 3), round(power(40, 0.05, better=0.2, worse=0.05), 3)
    (0.924, 0.485)
    """
    if better <= 0:
        return 0.0
    changed, least = np.arange(n + 1), _least_rises(n, level)
    possible = least <= changed
    share = better / (better + worse)
    accepted = np.where(possible, special.bdtrc(np.where(possible, least - 1, 0), changed, share), 0.0)
    return min(1.0, float(_binomial(n, min(1.0, better + worse)) @ accepted))


def _binomial(n: int, p: float) -> NDArray[np.float64]:
    """Return the probability of each number of successes of ``n``."""
    k = np.arange(n + 1)
    logs = special.gammaln(n + 1) - special.gammaln(k + 1) - special.gammaln(n - k + 1)
    found: NDArray[np.float64] = np.exp(logs + special.xlogy(k, p) + special.xlog1py(n - k, -p))
    return found


@functools.lru_cache(maxsize=64)
def _least_rises(n: int, level: float) -> NDArray[np.int64]:
    """Return the required number of rises by number of changed scores; ``n + 1`` if impossible."""
    found = np.full(n + 1, n + 1)
    k = 1
    for changed in range(1, n + 1):
        while k <= changed and special.bdtrc(k - 1, changed, 0.5) > level * (1 + 1e-12):
            k += 1
        if k <= changed:
            found[changed] = k
    return found


def detectable(n: int, level: float, worse: float = 0.0, chance: float = POWER) -> float | None:
    """Return the smallest mean gain accepted with probability ``chance``; ``None`` if there is none.

    Args:
        n: number of validation examples with scores of 0 and 1.
        level: level of the test.
        worse: share of examples that get worse.
        chance: required power.

    >>> round(detectable(40, 0.05), 2), detectable(4, 0.05)
    (0.16, None)
    """
    if power(n, level, 1 - worse, worse) < chance:
        return None
    low, high = 0.0, 1 - worse
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (low, middle) if power(n, level, middle, worse) >= chance else (middle, high)
    return high - worse


def examples_needed(gain: float, level: float, worse: float = 0.0, chance: float = POWER) -> int | None:
    """Return the number of validation examples that detect a mean gain with probability ``chance``.

    >>> examples_needed(0.1, 0.05), examples_needed(0.05, 0.05)
    (66, 134)
    """
    low, high = 1, 8
    while power(high, level, gain + worse, worse) < chance:
        low, high = high, 2 * high
        if high > MOST_EXAMPLES:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if power(middle, level, gain + worse, worse) >= chance else (middle, high)
    return high
