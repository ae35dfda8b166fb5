"""Local rewards inside a search: features from gold answers, cross-fitted critics, and trust in them.

Gold features are relations between a component's output and an example's gold answer. A reward that
reads them ranks outputs of a component far from the answer, such as passages, much better than one
that reads only (x, y) (an asymmetric critic). It never scores validation or test examples, and is
never part of a configuration.

A critic is a cross-fitted reward of one component: one head per fold of inputs is fitted to the pairs
of all other folds (equation 5 of OPTIMAS). A few pairs that differ in one gold feature alone say that
closer outputs are better until other pairs say otherwise (a prior as data, Greenland 2007).

Trust in a local reward is the slope of the scores on it, within calls with the same inputs. Each slope
is shrunk toward the common one of all components (Fay and Herriot 1979), and that one toward 0.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from scipy import special

from compound.components.fields import format_value
from compound.core.example import Example
from compound.evaluation.metrics.text import normalize
from compound.rewards.buffer import Entry
from compound.rewards.features import Embedder, FeatureMap, Matrix, Reading, Template
from compound.rewards.heads import MIN_INPUTS, Head, fit_head

GOLD = "gold:"  # prefix of the names of these features


def answers_of(example: Example) -> dict[str, object]:
    """Return the gold fields of an example, without its inputs and its identifier.

    Rows of files have all of their columns as gold fields.

    >>> row = {"id": "r1", "question": "Who?", "answer": "Ann"}
    >>> answers_of(Example("r1", {"question": "Who?"}, row))
    {'answer': 'Ann'}
    """
    read = example.inputs
    return {k: v for k, v in example.gold.items() if k not in read and v != example.id}


def gold_features(outputs: Mapping[str, object], gold: Mapping[str, object]) -> dict[str, float]:
    """Return the relations of each output to each gold field; of several answers, the best one counts.

    Texts, and lists of texts by their best item: ``holds``, ``equal``, ``covers`` (share of the answer's
    words) and ``f1``; lists also ``rank`` and ``share`` of items with the answer; numbers ``near``.

    >>> found = gold_features({"passages": ["Rome is old.", "Lima is in Peru."]}, {"answer": "Lima"})
    >>> found["gold:passages.answer.holds"], found["gold:passages.answer.rank"]
    (1.0, 0.5)
    """
    found: dict[str, float] = {}
    for field, answer in gold.items():
        answers = _items(answer)
        for name, value in outputs.items():
            prefix = f"{GOLD}{name}.{field}"
            if _is_number(value) and len(answers) == 1 and _is_number(answers[0]):
                near = -math.log1p(abs(float(str(value)) - float(str(answers[0]))))
                found |= {f"{prefix}.near": near, f"{prefix}.equal": float(near == 0)}
            else:
                wanted = [
                    text for text in (normalize(format_value(item)) for item in answers) if text
                ]
                found |= _of_texts(prefix, value, wanted)
    return found


def _of_texts(prefix: str, value: object, answers: Sequence[str]) -> dict[str, float]:
    items = [normalize(format_value(item)) for item in _items(value)]
    holds = [any(f" {answer} " in f" {item} " for answer in answers) for item in items]
    overlaps = [_overlap(item, answer) for item in items for answer in answers]
    found = {
        "holds": float(any(holds)),
        "equal": float(any(item == answer for item in items for answer in answers)),
        "covers": max((recall for recall, _ in overlaps), default=0.0),
        "f1": max((f1 for _, f1 in overlaps), default=0.0),
    }
    if isinstance(value, list | tuple):
        found["rank"] = 1 / (1 + holds.index(True)) if any(holds) else 0.0
        found["share"] = sum(holds) / len(holds) if holds else 0.0
    return {f"{prefix}.{name}": number for name, number in found.items()}


def _overlap(text: str, answer: str) -> tuple[float, float]:
    """Return recall and F1 of the distinct words of an answer in a text."""
    words, wanted = set(text.split()), set(answer.split())
    common = len(words & wanted)
    if not common:
        return 0.0, 0.0
    recall, precision = common / len(wanted), common / len(words)
    return recall, 2 * recall * precision / (recall + precision)


def _items(value: object) -> list[object]:
    return list(value) if isinstance(value, list | tuple) else [value]


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


FOLDS = 5
RECENCY = 0.8  # decay of a pair's weight per iteration
PRIOR_PAIRS = 10.0  # weight of the prior, in pairs
LEAST_SD = 1e-6  # of a feature in the prior

Vector = NDArray[np.float64]


@dataclass(frozen=True)
class Critic:
    """Cross-fitted local reward of one component."""

    template: Template
    features: FeatureMap
    # the head of each fold, scaled such that the mean square of the differences of outputs for the
    # same inputs is 1
    heads: Sequence[Head]
    fold_of: Mapping[str, int]  # the fold of each example that pairs came from
    backbone: Embedder
    margins: Vector
    inputs: Sequence[str]

    def rewards(self, readings: Sequence[Reading], examples: Sequence[str]) -> Vector:
        """Return the reward of each call, by the head that was not fitted to its example."""
        if not readings:
            return np.zeros(0)
        rows = self.features.matrix(readings, self.backbone)
        every = np.array([head.rewards(rows) for head in self.heads])
        mean = every.mean(0)
        folds = [self.fold_of.get(name) for name in examples]
        rewards = [mean[i] if fold is None else every[fold, i] for i, fold in enumerate(folds)]
        return np.array(rewards)


def read_call(
    template: Template,
    inputs: Mapping[str, object],
    outputs: Mapping[str, object],
    signals: Mapping[str, float],
) -> Reading:
    """Return a call as the critic reads it: with the signals among its numbers."""
    reading = template.read(inputs, outputs)
    return replace(reading, numbers={**reading.numbers, **signals})


def fit_critic(
    entries: Sequence[Entry], template: Template, backbone: Embedder, *, certain: bool
) -> Critic | None:
    """Fit a critic to draws; ``None`` if there are neither pairs nor a prior.

    It is the prior alone if pairs come from at most `MIN_INPUTS` examples. Unless ``certain`` (the
    components after this one are deterministic), pairs are weighted by the probability that their order
    is right: ``2 Φ(gap / s) − 1``, where s is the root mean square of all gaps.
    """
    readings, every, ordered = _pairs(entries, template, certain)
    examples = [name for *_, name, _ in ordered]
    names = list(dict.fromkeys(examples))
    features = FeatureMap.of(template, readings, backbone.dim)
    rows = features.matrix(readings, backbone)
    better, worse = _prior(features, rows)
    fold_of = {name: place % min(FOLDS, len(names)) for place, name in enumerate(names)}
    if len(names) <= MIN_INPUTS:
        if not (len(better) and every):
            return None
        fold_of = {}
    first, second = [i for i, _ in every], [j for _, j in every]
    chosen, rejected = rows[[i for i, *_ in ordered]], rows[[j for _, j, *_ in ordered]]
    fold = np.array([fold_of.get(name, -1) for name in examples], int)
    weights = np.array([weight for *_, weight in ordered])
    weights = weights / (weights.mean() if ordered else 1.0)
    certainty = np.full(len(better), PRIOR_PAIRS / max(1, len(better)))
    heads, margins = list[Head](), np.zeros(len(fold))
    for number in range(max(fold_of.values(), default=0) + 1):
        kept, out = (fold != number) & (fold >= 0), fold == number
        above, below = np.vstack([chosen[kept], better]), np.vstack([rejected[kept], worse])
        head = fit_head(
            above, below, np.concatenate([weights[kept], certainty]), soft=features.soft
        )
        rewards = head.rewards(rows)
        size = float(np.sqrt(np.mean((rewards[first] - rewards[second]) ** 2))) or 1.0
        head = replace(head, weights=head.weights / size)
        heads.append(head)
        margins[out] = head.rewards(chosen[out]) - head.rewards(rejected[out])
    return Critic(template, features, heads, fold_of, backbone, margins, examples)


def _prior(features: FeatureMap, rows: Matrix) -> tuple[Matrix, Matrix]:
    """Return pairs that differ in one relation to a gold answer alone, by two standard deviations."""
    if not len(rows):
        return rows, rows
    mean, sd = rows.mean(0), rows.std(0)
    gold = [
        i for i, name in enumerate(features.columns) if name.startswith(GOLD) and sd[i] > LEAST_SD
    ]
    step = np.zeros((len(gold), len(mean)), np.float32)
    step[np.arange(len(gold)), gold] = sd[gold]
    return mean + step, mean - step


def _pairs(
    entries: Sequence[Entry], template: Template, certain: bool
) -> tuple[list[Reading], list[tuple[int, int]], list[tuple[int, int, str, float]]]:
    """Return the outputs of draws, the pairs within draws, and those with different rewards.

    The latter are the better and the worse output, the example, and the weight, equal for each draw.
    """
    latest = max((entry.iteration for entry in entries), default=0)
    readings: list[Reading] = []
    every: list[tuple[int, int]] = []
    found: list[tuple[int, int, str, float, float]] = []
    for entry in entries:
        draw, age = entry.draw, RECENCY ** (latest - entry.iteration)
        known = [candidate for candidate in draw.candidates if candidate.rewards]
        first = len(readings)
        readings += [read_call(template, draw.inputs, c.outputs, c.signals) for c in known]
        values = [candidate.value for candidate in known]
        every += itertools.combinations(range(first, len(readings)), 2)
        share = age / max(1, len(values) - 1)
        found += [
            (first + i, first + j, draw.example, share, values[i] - values[j])
            for i, j in itertools.permutations(range(len(values)), 2)
            if values[i] > values[j]
        ]
    gaps = np.array([gap for *_, gap in found])
    scale = float(np.sqrt(np.mean(gaps**2))) if len(gaps) else 1.0
    sure = np.ones(len(gaps)) if certain else 2 * special.ndtr(gaps / scale) - 1
    ordered = zip(found, sure.tolist(), strict=True)
    weighted = [(i, j, name, share * weight) for (i, j, name, share, _), weight in ordered]
    return readings, every, weighted


Slope = tuple[float, float]  # an estimate and its variance


def slope_within(
    rewards: Vector, scores: Vector, calls: Sequence[int], examples: Sequence[str]
) -> Slope | None:
    """Return the slope of scores on rewards within calls, and its variance over examples.

    ``calls`` and ``examples`` are those that each output is from. It is ``None`` if all rewards of each
    call are equal, or the outputs are too few.

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

    ``scale`` is the prior variance of the common slope.
    """
    known = {name: slope for name, slope in found.items() if slope[1] > 0}
    if not known:
        return {}
    slopes, variances = (np.array(values) for values in zip(*known.values(), strict=True))
    precision = float((1 / variances).sum())
    common = float((slopes / variances).sum()) / (precision + 1 / scale) if scale else 0.0
    variance = 1 / (precision + 1 / scale) if scale else 0.0
    mean = float((slopes / variances).sum()) / precision
    spread = max(0.0, float(np.mean((slopes - mean) ** 2 - variances)))
    result = {}
    for name, (slope, own) in known.items():
        weight = spread / (spread + own)
        rest = 1 - weight
        result[name] = weight * slope + rest * common, weight * own + rest**2 * variance
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
