"""Tests of the mean gain of a change, from the scores of the same examples before and after it.

The hypothesis is that the mean gain over all examples of the task is at most 0; the validation examples are
an independent sample of them. Whether it can be tested depends on what is known about the scores:

- Scores with a known range: `bounded_p`, Gaffke's test (`compound.evaluation.bounded_mean`). A p-value of at
  most ``level`` has a probability of at most ``level`` under the hypothesis, for every distribution of the
  differences within the range and every number of examples. For scores of 0 and 1, it is the sign test.
- Scores with an unknown range: the larger of `sign_flip_p` and `student_p`. No test of the mean is valid for
  all distributions in this case (Bahadur and Savage 1956). The first is exact for symmetric differences, the
  second for normal ones, and both are approximately valid for many examples unless rare examples dominate
  the mean: large losses that are absent from the sample are found by neither.

References:
    Bahadur and Savage (1956), "The nonexistence of certain statistical procedures in nonparametric problems"
    Phipson and Smyth (2010), "Permutation p-values should never be zero"
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray
from scipy import special

from compound.evaluation.bounded_mean import mean_p_value
from compound.evaluation.statistics import (
    Bounds,
    Values,
    checked_bounds,
    differences_of,
    validated,
)

TestName = Literal["bounded mean", "sign flips and t"]

EXACT_UP_TO = 14  # differences: 2**14 sign patterns, about as many as FLIPS
FLIPS = 20_000
_CHUNK = 1_000  # permutations at a time, to bound the memory

Vector = NDArray[np.float64]


def applicable_test(bounds: Bounds | None) -> TestName:
    """Return the name of the test that `paired_test` applies, as recorded with a decision."""
    return "sign flips and t" if bounds is None else "bounded mean"


def paired_test(
    before: Values, after: Values, *, bounds: Bounds | None, rng: np.random.Generator, margin: float = 0.0
) -> float:
    """Return the p-value of the hypothesis that ``after`` is on average no better than ``before``.

    The order of the examples does not matter, and examples with equal scores are no evidence for a gain. With
    a margin, the hypothesis is that ``after`` is on average worse by at least the margin (non-inferiority).

    Args:
        before: Scores of the examples under the present configuration.
        after: Scores of the same examples under the new configuration.
        bounds: Minimum and maximum possible score, or ``None`` if unknown; chooses the test.
        rng: Source of the random sign patterns; used only without bounds and for more than 14 differences.
        margin: The loss that does not matter.

    Raises:
        ValueError: There is no score, the numbers of scores differ, or a score is not finite or not within
            the bounds.

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
    """Return Gaffke's p-value for differences of scores within ``bounds``.

    With ``w = high - low``, the largest possible loss of an example, it is the probability that
    ``sum(E * differences) <= E0 * w`` for independent standard exponential variables ``E`` and ``E0``. The
    term ``E0 * w`` stands for an example with the largest loss that the sample may have missed. For
    differences of ``-w``, 0 and ``w``, the p-value is that of the sign test. With a margin, differences are
    relative to ``-margin``.

    >>> bounded_p(np.array([1.0, 1.0, 1.0, 0.0, -1.0]), (0.0, 1.0))  # 3 or more of 4
    0.3125
    >>> round(bounded_p(np.array([0.5, 0.5, 0.5]), (0.0, 1.0)), 6)  # (2/3)**3: a loss may be twice a gain
    0.296296
    >>> round(bounded_p(np.zeros(40), (0.0, 1.0), margin=0.1), 6)  # 0.9**40
    0.014781
    """
    width = bounds[1] - bounds[0]
    return mean_p_value(np.clip((differences / width + 1) / 2, 0.0, 1.0), max(0.0, 1 - margin / width) / 2)


def sign_flip_p(differences: Vector, *, rng: np.random.Generator) -> float:
    """Return the p-value of the one-sided sign-flip permutation test of the mean difference.

    It is valid if every difference is as likely as its negative. With up to 14 nonzero differences, all sign
    patterns are enumerated; with more, 20,000 random patterns are drawn, and the +1 correction keeps the test
    valid (Phipson and Smyth 2010).

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
    """Return the p-value of Student's one-sided t-test of the mean difference.

    Equal differences have no variance to estimate: the p-value is 0 or 1 by their sign, and `paired_test`
    relies on `sign_flip_p`.

    >>> round(student_p(np.array([1.0, 2.0, 3.0])), 6)
    0.03709
    """
    # The unit of the scores does not matter; with this one, squares of very small differences are above zero.
    differences = np.ldexp(differences, -np.frexp(np.abs(differences).max(initial=0.0))[1])
    n, mean = len(differences), float(differences.mean())
    if np.ptp(differences) == 0:
        return float(mean <= 0)
    t = mean * np.sqrt(n) / differences.std(ddof=1)
    return float(special.stdtr(n - 1, -t))
