"""Explain a local reward by named features, without its backbone.

All functions work on feature matrices and held-out margins, and so with any backbone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from compound.core.errors import DataError
from compound.execution.rng import generator
from compound.rewards.alignment import Accuracy, accuracy
from compound.rewards.features import FeatureMap, NoBackbone, Reading
from compound.rewards.heads import fit, logistic

Vector = NDArray[np.float64]
RESAMPLES = 200  # bootstrap samples of the inputs, for the interval of a weight


def rewards_from_margins(margins: Sequence[tuple[int, int, float]]) -> list[dict[int, float]]:
    """Recover the local rewards of a call's candidates, with mean 0, from the margins of its pairs.

    A margin is the difference of two rewards by one head, so the pairs of a connected component
    determine the rewards of its candidates up to a constant. Each connected component is returned
    separately.

    >>> rewards_from_margins([(0, 1, 3.0), (1, 2, -1.5)])
    [{0: 1.5, 1: -1.5, 2: 0.0}]
    """
    neighbours: dict[int, list[tuple[int, float]]] = {}
    for better, worse, margin in margins:
        neighbours.setdefault(better, []).append((worse, -margin))
        neighbours.setdefault(worse, []).append((better, margin))
    groups: list[dict[int, float]] = []
    for start in neighbours:
        if any(start in group for group in groups):
            continue
        found, waiting = {start: 0.0}, [start]
        while waiting:
            current = waiting.pop()
            for other, step in neighbours[current]:
                if other not in found:
                    found[other] = found[current] + step
                    waiting.append(other)
        mean = sum(found.values()) / len(found)
        groups.append({i: found[i] - mean for i in sorted(found)})
    return groups


@dataclass(frozen=True)
class Weight:
    """Weight of a named feature: log odds of being ranked higher per standard deviation.

    ``low`` and ``high`` are the limits of the 95 % interval by resampling inputs.
    """

    feature: str
    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Explanation:
    """Approximation of a head by a logistic regression on only the named features.

    Attributes:
        weights: the weights of the features that differ between outputs, largest first.
        agreement: the share of held-out pairs that it orders like the head.
        accuracy: the share of held-out pairs that it orders like the global reward.
    """

    weights: tuple[Weight, ...]
    agreement: Accuracy
    accuracy: Accuracy


def explain_ranking(
    template_map: FeatureMap,
    chosen: Sequence[Reading],
    rejected: Sequence[Reading],
    inputs: Sequence[str],
    margins: Vector,
    *,
    seed: int = 0,
) -> Explanation | None:
    """Approximate a head's held-out ranking by the template's numbers and labels.

    Returns:
        The explanation, or ``None`` if no named feature differs or there are too few inputs.
    """
    kept = np.flatnonzero(margins != 0).tolist()
    named = FeatureMap.of(template_map.template, [*chosen, *rejected], 0)
    rows = named.matrix([*chosen, *rejected], NoBackbone()).astype(np.float64)
    differences = rows[: len(chosen)][kept] - rows[len(chosen) :][kept]
    varying = np.flatnonzero(np.abs(differences).max(axis=0, initial=0.0) > 0)
    if not len(varying):
        return None
    side = np.sign(margins[kept])[:, None]
    better, groups = (differences * side)[:, varying], [inputs[i] for i in kept]
    try:
        fitted = fit(better, np.zeros_like(better), groups, seed=seed)
    except DataError:
        return None
    spread = fitted.head.scale
    limits = _resampled(better / spread, groups, fitted.strength, seed)
    weights = [
        Weight(named.columns[column], float(value), float(low), float(high))
        for column, value, low, high in zip(varying, fitted.head.weights, *limits, strict=True)
    ]
    return Explanation(
        tuple(sorted(weights, key=lambda weight: -abs(weight.value))),
        accuracy(fitted.margins, groups),
        accuracy(fitted.margins * side[:, 0], groups),
    )


def _resampled(rows: Vector, groups: Sequence[str], strength: float, seed: int) -> Vector:
    """Return the 2.5 % and 97.5 % quantiles of the weights over resampled inputs."""
    names = np.array(groups)
    members = [np.flatnonzero(names == name) for name in dict.fromkeys(groups)]
    rng = generator(seed, "resamples")
    found = []
    for _ in range(RESAMPLES):
        drawn = np.concatenate([members[i] for i in rng.integers(0, len(members), len(members))])
        found.append(logistic(rows[drawn], np.ones(len(drawn)), strength))
    return np.asarray(np.quantile(found, [0.025, 0.975], axis=0))
