"""Trust in local rewards: the slope of the scores on them, within calls with the same inputs.

The expected gain of the score per unit of a local reward is small for components far from the output, since
everything after them adds noise, and each component has few examples at first. The slopes of all components
are therefore estimated together: each is shrunk toward their common one (Fay and Herriot 1979), and that one
toward 0, the slope of a useless reward, so that no threshold decides between trust and distrust.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from scipy import special

__all__ = ["Slope", "shrink", "slope_within", "trust_in"]

Vector = NDArray[np.float64]
Slope = tuple[float, float]  # an estimate and its variance


def slope_within(
    rewards: Vector, scores: Vector, calls: Sequence[int], examples: Sequence[str]
) -> Slope | None:
    """Return the slope of scores on rewards within calls, and its variance over examples.

    Args:
        rewards: the local reward of each output, by a reward that was not fitted to its example.
        scores: the mean score that each output led to.
        calls: the number of the call that each output is from.
        examples: the example that each output is from; outputs of one example are not independent.

    Returns:
        The slope, and the larger of its variance with and without regard to the examples; ``None`` if all
        rewards of each call are equal, or the outputs are too few.

    >>> rewards, scores = np.array([0.0, 1.0, 0.0, 1.0, 1.0, 0.0]), np.array([0.0, 1.0, 0.2, 1.0, 0.6, 0.0])
    >>> slope, _ = slope_within(rewards, scores, [0, 0, 1, 1, 2, 2], ["a", "a", "b", "b", "c", "c"])
    >>> round(slope, 9)
    0.8
    """
    number = np.asarray(calls)
    x, y = _centred(rewards, number), _centred(scores, number)
    square, freedom = float(x @ x), len(x) - len(set(calls)) - 1
    if square < 1e-12 or freedom < 1:
        return None
    slope = float(x @ y) / square
    rest = y - slope * x
    place = {name: i for i, name in enumerate(dict.fromkeys(examples))}
    parts = np.bincount([place[name] for name in examples], x * rest)
    clustered = float(parts @ parts) * len(parts) / max(1, len(parts) - 1) / square**2
    return slope, max(clustered, float(rest @ rest) / freedom / square)


def shrink(found: Mapping[str, Slope], scale: float) -> dict[str, Slope]:
    """Return the slopes of several components, shrunk toward their common one, and that one toward 0.

    Args:
        found: the estimated slopes, by component.
        scale: prior variance of the common slope.
    """
    known = {name: slope for name, slope in found.items() if slope[1] > 0}
    if not known:
        return {}
    slopes, variances = (np.array(values) for values in zip(*known.values(), strict=True))
    precision = float((1 / variances).sum())
    common = float((slopes / variances).sum()) / (precision + 1 / scale) if scale else 0.0
    variance = 1 / (precision + 1 / scale) if scale else 0.0
    spread = max(
        0.0, float(np.mean((slopes - float((slopes / variances).sum()) / precision) ** 2 - variances))
    )
    result = {}
    for name, (slope, own) in known.items():
        weight = spread / (spread + own)
        result[name] = (weight * slope + (1 - weight) * common, weight * own + (1 - weight) ** 2 * variance)
    return result


def trust_in(slope: Slope) -> float:
    """Return the probability that a slope is positive, above that of chance and scaled from 0 to 1.

    >>> trust_in((0.0, 1.0)), trust_in((-1.0, 1.0)), round(trust_in((2.0, 1.0)), 2)
    (0.0, 0.0, 0.95)
    """
    mean, variance = slope
    return max(0.0, 2 * float(special.ndtr(mean / math.sqrt(variance))) - 1) if variance else 0.0


def _centred(values: Vector, of: NDArray[np.int64]) -> Vector:
    """Return values minus the mean of their group."""
    return values - (np.bincount(of, values) / np.bincount(of))[of]
