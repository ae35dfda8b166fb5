"""Importance of parameters: how much of the differences between candidates each explains."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from compound.graph.configuration import canonical_json
from compound.optimization.runs.candidate_record import CandidateRecord

FEWEST = 6  # candidates below which nothing is said
RIDGE = 1.0  # prior weight against an effect, in candidates of average size


@dataclass(frozen=True)
class Importance:
    """A parameter."""

    key: str
    share: float  # its share of the explained variance of gains
    values: int  # number of values that were tried
    best: object  # the value with the largest effect; `None` if it is the initial one
    effect: float  # that effect, over the mean of all values


def importance(candidates: Sequence[CandidateRecord]) -> list[Importance]:
    """Return the parameters by their importance, the largest first; empty with few candidates.

    A ridge regression of the gains on the values of all parameters, weighted by evaluations, gives
    an effect for each value. The importance of a parameter is the variance of its effects over the
    candidates, divided by the sum over all parameters. Parameters that changed together share their
    effect.

    Returns:
        One entry for each parameter that changed.
    """
    known = [c for c in candidates if c.gain is not None and c.evaluations]
    keys = sorted({key for c in known for key in c.values})
    if len(known) < FEWEST or not keys:
        return []
    levels = [
        [canonical_json(c.values[key]) if key in c.values else "" for c in known] for key in keys
    ]
    names = [sorted(set(column)) for column in levels]
    design = np.hstack(
        [
            np.array([[value == name for name in found] for value in column], float)
            for column, found in zip(levels, names, strict=True)
        ]
    )
    weights = np.sqrt([c.evaluations for c in known])
    weights = weights / weights.mean()
    gains = np.array([c.gain for c in known], float)
    centred = gains - np.average(gains, weights=weights)
    scaled = design * weights[:, None]
    effects = np.linalg.solve(
        scaled.T @ scaled + RIDGE * np.eye(design.shape[1]), scaled.T @ (centred * weights)
    )
    found, start = [], 0
    for key, values in zip(keys, names, strict=True):
        own = slice(start, start + len(values))
        start = own.stop
        contribution = design[:, own] @ effects[own]
        variance = float(np.average((contribution - contribution.mean()) ** 2, weights=weights))
        best = int(np.argmax(effects[own]))
        effect = float(effects[own][best] - contribution.mean())
        value = json.loads(values[best]) if values[best] else None
        found.append((key, variance, len(values), value, effect))
    total = sum(row[1] for row in found) or 1.0
    rows = [Importance(key, v / total, n, best, effect) for key, v, n, best, effect in found]
    return sorted(rows, key=lambda row: -row.share)
