"""Explain a local reward by named features, words, other heads, and time.

All of it works on rows of features and held-out margins, so it holds for any backbone. Nothing here draws.
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
RESAMPLES = 200  # of the inputs, for the limits of a weight
PIECE = re.compile(r"\s*\S+")


def placed(margins: Sequence[tuple[int, int, float]]) -> list[dict[int, float]]:
    """Return local rewards of one call's candidates from the margins of its pairs, 0 on average.

    A margin is the difference of two rewards by one head, so the pairs that hang together fix the rewards of
    their candidates up to a constant. Each group that hangs together is returned apart.

    >>> placed([(0, 1, 3.0), (1, 2, -1.5)])
    [{0: 1.5, 1: -1.5, 2: 0.0}]
    """
    beside: dict[int, list[tuple[int, float]]] = {}
    for better, worse, margin in margins:
        beside.setdefault(better, []).append((worse, -margin))
        beside.setdefault(worse, []).append((better, margin))
    groups: list[dict[int, float]] = []
    for start in beside:
        if any(start in group for group in groups):
            continue
        found, waiting = {start: 0.0}, [start]
        while waiting:
            here = waiting.pop()
            for other, step in beside[here]:
                if other not in found:
                    found[other] = found[here] + step
                    waiting.append(other)
        mean = sum(found.values()) / len(found)
        groups.append({i: found[i] - mean for i in sorted(found)})
    return groups


@dataclass(frozen=True)
class Weight:
    """What one named feature adds to the log odds of being ranked higher, for one standard deviation more.

    ``low`` and ``high`` are 95 % limits by resampling inputs.
    """

    feature: str
    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Explanation:
    """A head, imitated by a logistic regression on the named features alone.

    Attributes:
        weights: of the features that differ between outputs, the largest first.
        agreement: the share of pairs of unseen inputs that it orders as the head does.
        accuracy: the share of them that it orders as the global reward does.
    """

    weights: tuple[Weight, ...]
    agreement: Accuracy
    accuracy: Accuracy


def explained(
    template_map: FeatureMap,
    chosen: Sequence[Reading],
    rejected: Sequence[Reading],
    inputs: Sequence[str],
    margins: Vector,
    *,
    seed: int = 0,
) -> Explanation | None:
    """Imitate a head's held-out ranking by the template's numbers and labels.

    Args:
        template_map: the head's feature map; its backbone's columns are not used.
        chosen, rejected: the pairs.
        inputs: which input each belongs to.
        margins: the head's, on inputs it had not seen. A pair that it holds for equal says nothing.
        seed: names the folds and the resamples.

    Returns:
        ``None`` where no named feature differs, or there are too few inputs.
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
    """Return 2.5 % and 97.5 % quantiles of the weights over resampled inputs."""
    names = np.array(groups)
    members = [np.flatnonzero(names == name) for name in dict.fromkeys(groups)]
    rng = generator(seed, "resamples")
    found = []
    for _ in range(RESAMPLES):
        drawn = np.concatenate([members[i] for i in rng.integers(0, len(members), len(members))])
        found.append(_newton(rows[drawn], strength))
    return np.asarray(np.quantile(found, [0.025, 0.975], axis=0))


def _newton(rows: Vector, strength: float) -> Vector:
    """Return the weights that `compound.rewards.heads.fit` would: for a few columns, much faster."""
    weights = np.zeros(rows.shape[1])
    for _ in range(50):
        wrong = 1 / (1 + np.exp(np.clip(rows @ weights, -500, 500)))
        gradient = weights - strength * (wrong @ rows)
        curvature = np.eye(len(weights)) + strength * (rows.T * (wrong * (1 - wrong))) @ rows
        step = np.linalg.solve(curvature, gradient)
        step /= max(1.0, float(np.abs(step).max()))  # far from the optimum, whole steps overshoot
        weights = weights - step
        if np.abs(step).max() < 1e-6:
            break
    return weights


@dataclass(frozen=True)
class Piece:
    """A part of an output, and how much the reward falls without it, in log odds."""

    text: str
    effect: float


@dataclass(frozen=True)
class Attribution:
    """An output's reward, and what each of its parts does for it.

    The effects need not add up: words do not count independently.
    """

    reward: float
    pieces: tuple[Piece, ...]


def attributed(
    score: Callable[[Sequence[Mapping[str, object]]], Vector],
    outputs: Mapping[str, object],
    *,
    most: int = 60,
) -> Attribution:
    """Leave each word of each text out in turn, and each item of each list, and see what the reward says.

    Args:
        score: rewards of outputs, all for one input.
        outputs: of a call; values that are neither texts nor lists stay as they are.
        most: parts; in a longer output several words or items go together.
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
    """Return the words of a text, with the spaces before them, or the items of a list."""
    if isinstance(value, str):
        return PIECE.findall(value)
    return list(value) if isinstance(value, list | tuple) else []


@dataclass(frozen=True)
class Similarity:
    """How alike two heads are: the cosine of their weights over the columns both have.

    ``cosine`` is ``None`` where they share no column that both give weight.
    """

    first: str
    second: str
    cosine: float | None
    shared: int


def similar(first: LocalReward, second: LocalReward) -> Similarity:
    """Compare two heads, each feature in units of its own standard deviation."""
    one, other = (dict(zip(r.features.columns, r.head.weights, strict=True)) for r in (first, second))
    shared = [name for name in one if name in other]
    a, b = (np.array([weights[name] for name in shared]) for weights in (one, other))
    size = float(np.linalg.norm(a) * np.linalg.norm(b)) if shared else 0.0
    names = first.features.template.component, second.features.template.component
    return Similarity(*names, float(a @ b) / size if size else None, len(shared))


@dataclass(frozen=True)
class Judged:
    """A head's accuracy at one iteration."""

    iteration: int
    accuracy: Accuracy


def prequential(
    chosen: Matrix,
    rejected: Matrix,
    texts: PairTexts,
    iterations: Sequence[int],
    *,
    soft: Sequence[bool],
    seed: int = 0,
) -> list[Judged]:
    """Judge each iteration's pairs by a head fitted to the iterations before it.

    Pairs of an input that was there before are left out, and so is an iteration with nothing left, or with
    too few inputs before it. Where the backbone was trained, only inputs it never saw are judged.

    Args:
        chosen, rejected: features of the pairs.
        texts: the pairs.
        iterations: which iteration each pair was made in.
        soft: which columns come from the backbone.
        seed: names the folds.
    """
    when, names = np.asarray(iterations), np.array(texts.inputs)
    apart = np.array(texts.apart, bool) if texts.apart else None
    found = []
    for iteration in np.unique(when)[1:]:
        earlier = when < iteration
        judged = (when == iteration) & ~np.isin(names, names[earlier])
        if apart is not None:
            earlier, judged = earlier & ~apart, judged & apart
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
