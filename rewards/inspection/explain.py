"""Explain a local reward by named features, words, similarity of heads, and drift over iterations.

All functions work on feature matrices and held-out margins, and so with any backbone.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from compound.errors import DataError
from compound.execution.rng import generator
from compound.rewards.alignment import Accuracy, accuracy
from compound.rewards.features import FeatureMap, NoBackbone
from compound.rewards.fit import RECENCY, PairTexts
from compound.rewards.heads import Matrix, fit
from compound.rewards.model import LocalReward
from compound.rewards.template import Reading, as_text

Vector = NDArray[np.float64]
RESAMPLES = 200  # bootstrap samples of the inputs, for the interval of a weight
PIECE = re.compile(r"\s*\S+")


def rewards_from_margins(margins: Sequence[tuple[int, int, float]]) -> list[dict[int, float]]:
    """Recover the local rewards of a call's candidates, with mean 0, from the margins of its pairs.

    A margin is the difference of two rewards by one head, so the pairs of a connected component determine the
    rewards of its candidates up to a constant. Each connected component is returned separately.

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

    Args:
        template_map: the head's feature map; the columns of the backbone are not used.
        chosen: the better output of each pair.
        rejected: the worse output of each pair.
        inputs: the input of each pair.
        margins: the head's held-out margins; pairs with margin 0 are skipped.
        seed: seeds the folds and the resamples.

    Returns:
        The explanation, or ``None`` if no named feature differs or there are too few inputs.
    """
    kept = np.flatnonzero(margins != 0).tolist()
    named = FeatureMap.of(template_map.template, [*chosen, *rejected], 0)
    differences = _rows(named, chosen)[kept] - _rows(named, rejected)[kept]
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


def _rows(named: FeatureMap, readings: Sequence[Reading]) -> Vector:
    return named.matrix(readings, NoBackbone()).astype(np.float64)


def _resampled(rows: Vector, groups: Sequence[str], strength: float, seed: int) -> Vector:
    """Return the 2.5 % and 97.5 % quantiles of the weights over resampled inputs."""
    names = np.array(groups)
    members = [np.flatnonzero(names == name) for name in dict.fromkeys(groups)]
    rng = generator(seed, "resamples")
    found = []
    for _ in range(RESAMPLES):
        drawn = np.concatenate([members[i] for i in rng.integers(0, len(members), len(members))])
        found.append(_newton(rows[drawn], strength))
    return np.asarray(np.quantile(found, [0.025, 0.975], axis=0))


def _newton(rows: Vector, strength: float) -> Vector:
    """Return the weights by Newton's method: as `compound.rewards.heads.fit`, but faster for few columns."""
    weights = np.zeros(rows.shape[1])
    for _ in range(50):
        wrong = 1 / (1 + np.exp(np.clip(rows @ weights, -500, 500)))
        gradient = weights - strength * (wrong @ rows)
        curvature = np.eye(len(weights)) + strength * (rows.T * (wrong * (1 - wrong))) @ rows
        step = np.linalg.solve(curvature, gradient)
        step /= max(1.0, float(np.abs(step).max()))  # full steps overshoot far from the optimum
        weights = weights - step
        if np.abs(step).max() < 1e-6:
            break
    return weights


@dataclass(frozen=True)
class Piece:
    """Part of an output, and the decrease of the reward without it, in log odds."""

    text: str
    effect: float


@dataclass(frozen=True)
class Attribution:
    """Reward of an output, and the effect of each of its parts.

    The effects need not add up, because words do not contribute independently.
    """

    reward: float
    pieces: tuple[Piece, ...]


def attribute_reward(
    score: Callable[[Sequence[Mapping[str, object]]], Vector],
    outputs: Mapping[str, object],
    *,
    most: int = 60,
) -> Attribution:
    """Return the change of the reward without each word of a text and each item of a list.

    Args:
        score: returns the rewards of outputs, all for the same input.
        outputs: the outputs of a call; values that are neither strings nor lists are not changed.
        most: the maximum number of parts; longer outputs are split into groups of words or items.
    """
    found = {name: pieces for name, value in outputs.items() if (pieces := _pieces(value))}
    size = max(1, math.ceil(sum(map(len, found.values())) / most))
    parts: list[str] = []
    without: list[Mapping[str, object]] = []
    for name, pieces in found.items():
        for start in range(0, len(pieces), size):
            taken, left = pieces[start : start + size], [*pieces[:start], *pieces[start + size :]]
            if isinstance(outputs[name], str):
                parts.append("".join(map(str, taken)).strip())
                without.append({**outputs, name: "".join(map(str, left)).lstrip()})
            else:
                texts = [piece for piece in taken if isinstance(piece, str)]
                parts.append("; ".join(texts) if len(texts) == len(taken) else as_text(taken))
                without.append({**outputs, name: left})
    rewards = score([outputs, *without])
    effects = rewards[0] - rewards[1:]
    pairs = [Piece(part, float(effect)) for part, effect in zip(parts, effects, strict=True)]
    return Attribution(float(rewards[0]), tuple(pairs))


def _pieces(value: object) -> list[object]:
    """Return the words of a text, with their leading spaces, or the items of a list."""
    if isinstance(value, str):
        return PIECE.findall(value)
    return list(value) if isinstance(value, list | tuple) else []


@dataclass(frozen=True)
class Similarity:
    """Similarity of two heads: the cosine of their weights over shared columns.

    ``cosine`` is ``None`` if the heads have no shared column with weights.
    """

    first: str
    second: str
    cosine: float | None
    shared: int


def head_similarity(first: LocalReward, second: LocalReward) -> Similarity:
    """Compare two heads, with features in units of their standard deviations."""
    one, other = (dict(zip(r.features.columns, r.head.weights, strict=True)) for r in (first, second))
    shared = [name for name in one if name in other]
    a, b = (np.array([weights[name] for name in shared]) for weights in (one, other))
    size = float(np.linalg.norm(a) * np.linalg.norm(b)) if shared else 0.0
    names = first.features.template.component, second.features.template.component
    return Similarity(*names, float(a @ b) / size if size else None, len(shared))


@dataclass(frozen=True)
class Judged:
    """Accuracy of a head at an iteration."""

    iteration: int
    accuracy: Accuracy


def prequential_accuracies(
    chosen: Matrix,
    rejected: Matrix,
    texts: PairTexts,
    iterations: Sequence[int],
    *,
    soft: Sequence[bool],
    seed: int = 0,
) -> list[Judged]:
    """Evaluate a head fitted to earlier iterations on the pairs of each iteration.

    Pairs of inputs that occurred before are left out. Iterations without remaining pairs, or with too few
    inputs before them, are skipped. If the backbone was trained, only its held-out inputs are evaluated.

    Args:
        chosen: the better output of each pair.
        rejected: the worse output of each pair.
        texts: the pairs.
        iterations: the iteration of each pair.
        soft: whether each column comes from the backbone.
        seed: seeds the folds.
    """
    when, names = np.asarray(iterations), np.array(texts.inputs)
    roles = np.array(texts.roles) if texts.roles else None
    found = []
    for iteration in np.unique(when)[1:]:
        earlier = when < iteration
        judged = (when == iteration) & ~np.isin(names, names[earlier])
        if roles is not None:
            earlier, judged = earlier & (roles != "judge"), judged & (roles == "judge")
        recency = RECENCY ** (iteration - 1 - when[earlier]).astype(float)
        try:
            head = fit(
                chosen[earlier], rejected[earlier], names[earlier].tolist(),
                recency=recency.tolist(), soft=soft, seed=seed,
            ).head  # fmt: skip
        except DataError:
            continue
        if judged.any():
            margins = head.rewards(chosen[judged]) - head.rewards(rejected[judged])
            found.append(Judged(int(iteration), accuracy(margins, names[judged].tolist())))
    return found
