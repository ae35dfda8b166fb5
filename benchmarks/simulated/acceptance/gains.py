"""Distributions of the gain of one example, for measuring tests of the mean gain.

Scores are in [0, 1] and gains in [-1, 1]. Those of `NONE` have a mean of 0 or slightly below, so
that every accepted one is an error; those of `SOME` are typical improvements.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]
Draw = Callable[[np.random.Generator, tuple[int, int]], Vector]


@dataclass(frozen=True)
class Gains:
    """Distribution of gains.

    Attributes:
        draw: draws an array of gains.
        mean: the true mean; ``None`` if it was not computed.
        shares: the probability of each value, if there are few.
    """

    draw: Draw
    mean: float | None = None
    shares: Mapping[float, float] | None = None


def discrete(shares: Mapping[float, float]) -> Gains:
    """Return the distribution of a few values with given probabilities.

    >>> discrete({0.5: 0.5, -1.0: 0.25, 0.0: 0.25}).mean
    0.0
    """
    values, weights = np.array(list(shares)), np.array(list(shares.values()))
    return Gains(
        lambda rng, size: rng.choice(values, size, p=weights), float(values @ weights), dict(shares)
    )


def f1(
    rng: np.random.Generator, size: tuple[int, int], zeros: float = 0.5, ones: float = 0.2
) -> Vector:
    """Draw scores like token F1: zeros, ones, and values in between."""
    kind = rng.random(size)
    return np.where(kind < zeros, 0.0, np.where(kind < zeros + ones, 1.0, rng.beta(2, 2, size)))


def _f1_gain(zeros: float, ones: float) -> Draw:
    """Draw gains of token F1 where two of five examples are answered anew."""

    def draw(rng: np.random.Generator, size: tuple[int, int]) -> Vector:
        before = f1(rng, size)
        return np.where(rng.random(size) < 0.6, 0.0, f1(rng, size, zeros, ones) - before)

    return draw


def _rare_collapse(rng: np.random.Generator, size: tuple[int, int]) -> Vector:
    """Draw small gains of 0.03 on average, and a loss of 0.97 on 3 % of the examples."""
    return np.where(
        rng.random(size) < 0.03, -rng.uniform(0.94, 1.0, size), rng.uniform(0.02, 0.04, size)
    )


def _ranks(rng: np.random.Generator, size: tuple[int, int]) -> Vector:
    """Draw gains of the reciprocal rank where 40 % of the right items rise by one and 10 % fall by one."""
    rank, change = rng.integers(1, 6, size), rng.random(size)
    moved = np.where(change < 0.4, np.maximum(rank - 1, 1), np.where(change < 0.5, rank + 1, rank))
    return 1 / moved - 1 / rank


NONE: Mapping[str, Gains] = {
    "+0.05 on 95 %, -1 on 5 %": discrete({0.05: 0.95, -1.0: 0.05}),
    "+1/19 on 95 %, -1 on 5 %": discrete({1 / 19: 0.95, -1.0: 0.05}),
    "+1/99 on 99 %, -1 on 1 %": discrete({1 / 99: 0.99, -1.0: 0.01}),
    "+0.25 on 80 %, -1 on 20 %": discrete({0.25: 0.8, -1.0: 0.2}),
    "+1 on 5 %, -1/19 on 95 %": discrete({1.0: 0.05, -1 / 19: 0.95}),
    "+1 and -1 on half each": discrete({1.0: 0.5, -1.0: 0.5}),
    "+1 and -1 on 10 % each": discrete({1.0: 0.1, 0.0: 0.8, -1.0: 0.1}),
    "+1 on 10 %, -0.5 on 20 %": discrete({1.0: 0.1, 0.0: 0.7, -0.5: 0.2}),
    "+0.1 on 60 %, -1 on 6 %": discrete({0.1: 0.6, 0.0: 0.34, -1.0: 0.06}),
    "+0.5 on 4 %, -1 on 2 %": discrete({0.5: 0.04, 0.0: 0.94, -1.0: 0.02}),
    "uniform": Gains(lambda rng, size: rng.uniform(-1, 1, size), 0.0),
    "normal, s = 0.2": Gains(lambda rng, size: rng.normal(0, 0.2, size).clip(-1, 1), 0.0),
    "token F1, answered anew": Gains(_f1_gain(0.5, 0.2), 0.0),
    "0.1 less a beta variable": Gains(lambda rng, size: 0.1 - rng.beta(0.1, 0.9, size), 0.0),
    "0.1 less a ninth power": Gains(lambda rng, size: 0.1 - rng.random(size) ** 9, 0.0),
    "small gains, rare collapse": Gains(_rare_collapse, 0.0),
}

SOME: Mapping[str, Gains] = {
    "right or wrong: 20 % better, 5 % worse": discrete({1.0: 0.2, 0.0: 0.75, -1.0: 0.05}),
    "token F1: two of five answered anew": Gains(_f1_gain(0.2, 0.5)),
    "five grades: 40 % better, 10 % worse": discrete({0.5: 0.1, 0.25: 0.3, 0.0: 0.5, -0.25: 0.1}),
    "five grades: 20 % better, none worse": discrete({0.5: 0.1, 0.25: 0.1, 0.0: 0.8}),
    "reciprocal rank: 40 % better, 10 % worse": Gains(_ranks),
    "every example: +0.1, s = 0.1": Gains(
        lambda rng, size: rng.normal(0.1, 0.1, size).clip(-1, 1), 0.1
    ),
    "every example: +0.2, s = 0.3": Gains(
        lambda rng, size: rng.normal(0.2, 0.3, size).clip(-1, 1), 0.2
    ),
}
