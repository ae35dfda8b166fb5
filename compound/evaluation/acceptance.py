"""Acceptance of a change: tests of its mean gain, their levels and their power.

The hypothesis of `paired_test` is that the mean gain over all examples of the task is at most 0;
the validation examples are an independent sample of them. For scores with a known range, it is
tested by `bounded_p`, which holds its level for every distribution and number of examples; for
scores of 0 and 1, it is the sign test. For other scores, no test is valid for all distributions
(Bahadur and Savage 1956): the larger of `sign_flip_p` (exact for symmetric differences) and
`student_p` (exact for normal ones) misses only rare large losses that are absent from the sample.

A run that makes several decisions accepts a change that is no better with a probability of at most
the sum of their levels (Dunn 1961), which is fixed before the first decision; `decision_level`
divides it. `power` is exact for scores of 0 and 1; for graded ones, it depends on the distribution
of the gains (docs/adr/0031).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from scipy import special

from compound.evaluation.statistics import (
    Bounds,
    Values,
    checked_bounds,
    differences_of,
    mean_p_value,
    validated,
)


def decision_level(alpha: float, planned: int, tested: Sequence[bool] = ()) -> float:
    """Return the level of the next of ``planned`` decisions, of which each has an equal part of ``alpha``.

    A decision without a test (``tested`` is false for it) leaves its level to the later ones. The
    levels of all tests sum to at most ``alpha``, and none is below its own part, if skipping a
    decision does not depend on the scores of the validation examples.

    >>> decision_level(0.06, 3), decision_level(0.06, 3, [True, True])
    (0.02, 0.02)
    >>> decision_level(0.06, 3, [False]), decision_level(0.06, 3, [False, False])
    (0.03, 0.06)
    """
    if len(tested) >= planned:
        raise ValueError(f"all {planned} planned decisions are made")
    returned = 0.0
    for number, was_tested in enumerate(tested):
        returned += -returned / (planned - number) if was_tested else alpha / planned
    return alpha / planned + returned / (planned - len(tested))


TestName = Literal["bounded mean", "sign flips and t"]

EXACT_UP_TO = 14  # differences: 2**14 sign patterns, about as many as FLIPS
FLIPS = 20_000
_CHUNK = 1_000  # permutations at a time, to bound the memory

Vector = NDArray[np.float64]


def applicable_test(bounds: Bounds | None) -> TestName:
    """Return the name of the test that `paired_test` applies, as recorded with a decision."""
    return "sign flips and t" if bounds is None else "bounded mean"


def paired_test(
    before: Values,
    after: Values,
    *,
    bounds: Bounds | None,
    rng: np.random.Generator,
    margin: float = 0.0,
) -> float:
    """Return the p-value of the hypothesis that ``after`` is on average no better than ``before``.

    Args:
        before: scores of the examples under the present configuration.
        after: scores of the same examples under the new configuration.
        bounds: minimum and maximum possible score, or ``None`` if unknown; chooses the test.
        rng: draws sign patterns, without bounds and for more than 14 differences.
        margin: a loss that does not matter (non-inferiority).

    Raises:
        ValueError: the scores are none, of different numbers, not finite, or not within the bounds.

    >>> paired_test([0, 0, 0, 0], [1, 1, 1, 1], bounds=(0, 1), rng=np.random.default_rng(0))
    0.0625
    """
    if bounds is not None:
        for scores in (before, after):
            checked_bounds(validated(scores), bounds)
        return bounded_p(differences_of(before, after), bounds, margin)
    differences = differences_of(before, after) + margin
    return max(sign_flip_p(differences, rng=rng), student_p(differences))


def bounded_p(differences: Vector, bounds: Bounds, margin: float = 0.0) -> float:
    """Return Gaffke's p-value for differences of scores within ``bounds``, relative to ``-margin``.

    With ``w = high - low``, it is the probability that ``sum(E * differences) <= E0 * w`` for
    independent standard exponential ``E`` and ``E0``. The term ``E0 * w`` stands for an example with
    the largest possible loss that the sample may have missed.

    >>> bounded_p(np.array([1.0, 1.0, 1.0, 0.0, -1.0]), (0.0, 1.0))  # 3 or more of 4
    0.3125
    >>> round(bounded_p(np.array([0.5, 0.5, 0.5]), (0.0, 1.0)), 6)  # (2/3)**3: a loss may be twice a gain
    0.296296
    >>> round(bounded_p(np.zeros(40), (0.0, 1.0), margin=0.1), 6)  # 0.9**40
    0.014781
    """
    width = bounds[1] - bounds[0]
    return mean_p_value(
        np.clip((differences / width + 1) / 2, 0.0, 1.0), max(0.0, 1 - margin / width) / 2
    )


def sign_flip_p(differences: Vector, *, rng: np.random.Generator) -> float:
    """Return the p-value of the one-sided sign-flip permutation test of the mean difference.

    Up to 14 nonzero differences, all sign patterns are enumerated; with more, 20,000 are drawn, with
    the correction of Phipson and Smyth (2010).

    >>> sign_flip_p(np.array([1.0, 1.0, 1.0, 1.0]), rng=np.random.default_rng(0))
    0.0625
    """
    nonzero = np.sort(differences[differences != 0])
    if not len(nonzero):
        return 1.0
    # Patterns whose sum equals the observed one must count despite rounding.
    threshold = nonzero.sum() - 1e-9 * np.abs(nonzero).sum()
    if len(nonzero) <= EXACT_UP_TO:
        patterns = np.arange(2 ** len(nonzero))[:, None] >> np.arange(len(nonzero)) & 1
        return float(np.mean((1 - 2 * patterns) @ nonzero >= threshold))
    reached = 0
    for _ in range(FLIPS // _CHUNK):
        signs = 1 - 2 * rng.integers(0, 2, size=(_CHUNK, len(nonzero)), dtype=np.int8)
        reached += int(np.sum(signs @ nonzero >= threshold))
    return (reached + 1) / (FLIPS + 1)


def student_p(differences: Vector) -> float:
    """Return the p-value of Student's one-sided t-test; equal differences give 0 or 1, by their sign.

    >>> round(student_p(np.array([1.0, 2.0, 3.0])), 6)
    0.03709
    """
    # The unit of the scores does not matter; with this one, squares of very small differences are
    # above zero.
    differences = np.ldexp(differences, -np.frexp(np.abs(differences).max(initial=0.0))[1])
    n, mean = len(differences), float(differences.mean())
    if np.ptp(differences) == 0:
        return float(mean <= 0)
    t = mean * np.sqrt(n) / differences.std(ddof=1)
    return float(special.stdtr(n - 1, -t))


POWER = 0.8  # detection probability above which an effect counts as detectable
MOST_EXAMPLES = 100_000


def least_p(n: int, *, bounded: bool = True) -> float:
    """Return the smallest p-value that `paired_test` can return.

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
    # tolerance: log2 of a power of two may round up
    return max(1, math.ceil(-math.log2(level) - 1e-9))


def power(n: int, level: float, better: float, worse: float = 0.0) -> float:
    """Return the acceptance probability for ``n`` examples with scores of 0 and 1.

    Scores rise from 0 to 1 with the probability ``better``, and fall with the probability ``worse``.

    >>> round(power(40, 0.05, better=0.2), 3), round(power(40, 0.05, better=0.2, worse=0.05), 3)
    (0.924, 0.485)
    """
    if better <= 0:
        return 0.0
    changed, least = np.arange(n + 1), _least_rises(n, level)
    possible = least <= changed
    share = better / (better + worse)
    accepted = np.where(
        possible, special.bdtrc(np.where(possible, least - 1, 0), changed, share), 0.0
    )
    return min(1.0, float(_binomial(n, min(1.0, better + worse)) @ accepted))


def _binomial(n: int, p: float) -> NDArray[np.float64]:
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


def detectable(n: int, level: float, worse: float = 0.0) -> float | None:
    """Return the smallest mean gain accepted with probability `POWER`; ``None`` if there is none.

    >>> round(detectable(40, 0.05), 2), detectable(4, 0.05)
    (0.16, None)
    """
    if power(n, level, 1 - worse, worse) < POWER:
        return None
    low, high = 0.0, 1 - worse
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (low, middle) if power(n, level, middle, worse) >= POWER else (middle, high)
    return high - worse


def examples_needed(gain: float, level: float) -> int | None:
    """Return the number of validation examples that detect a mean gain with probability `POWER`.

    >>> examples_needed(0.1, 0.05), examples_needed(0.05, 0.05)
    (66, 134)
    """
    low, high = 1, 8
    while power(high, level, gain) < POWER:
        low, high = high, 2 * high
        if high > MOST_EXAMPLES:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if power(middle, level, gain) >= POWER else (middle, high)
    return high
