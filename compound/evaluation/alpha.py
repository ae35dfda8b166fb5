"""Division of a significance level among the planned decisions of a run.

A run that makes several decisions accepts a change that is no better with a probability of at most the sum of
the levels of its decisions. The sum is fixed before the first decision, and only its division may depend on
what the run does: the level of a decision that turned out unnecessary, because nothing was proposed, goes to
the later ones.

References:
    Dunn (1961), "Multiple comparisons among means", for the division by Bonferroni's inequality
"""

from __future__ import annotations

from collections.abc import Sequence


def decision_level(
    alpha: float, planned: int, tested: Sequence[bool] = (), *, shares: Sequence[float] | None = None
) -> float:
    """Return the level of the next of ``planned`` decisions.

    Each decision has its part of ``alpha``. A decision without a test returns its level, which all later
    decisions divide by their shares. The levels of the tests of a run sum to at most ``alpha`` (up to the
    rounding of floats), whatever happens, and no level is below the decision's own part.

    Whether a decision is skipped must not depend on the scores of the validation examples.

    Args:
        alpha: Sum of the levels of all decisions.
        planned: Number of decisions, chosen before the first one.
        tested: For each past decision, whether it made a test.
        shares: Relative part of each planned decision; default: equal parts.

    Raises:
        ValueError: All planned decisions are made, or there is not one positive share for each.

    >>> decision_level(0.06, 3), decision_level(0.06, 3, [True, True])
    (0.02, 0.02)
    >>> decision_level(0.06, 3, [False]), decision_level(0.06, 3, [False, False])
    (0.03, 0.06)
    >>> decision_level(0.06, 3, [False], shares=[1, 3, 2])
    0.036
    """
    weights = [1.0] * planned if shares is None else list(shares)
    if len(weights) != planned or not all(weight > 0 for weight in weights):
        raise ValueError(f"shares must be {planned} positive numbers, got {shares!r}")
    if len(tested) >= planned:
        raise ValueError(f"all {planned} planned decisions are made")
    returned = 0.0
    for number, was_tested in enumerate(tested):
        if was_tested:
            returned -= _part(returned, weights[number:])
        else:
            returned += _part(alpha, weights, number)
    return _part(alpha, weights, len(tested)) + _part(returned, weights[len(tested) :])


def _part(amount: float, weights: Sequence[float], number: int = 0) -> float:
    return amount * weights[number] / sum(weights)
