"""Cross-fitted rewards for the training of one component: the reward of an example was not fitted to it.

Inputs are divided into folds, by the order in which they were first seen. One head is fitted per fold, to the
pairs of all other folds (equation 5 of OPTIMAS); it scores the examples of its fold. Examples without pairs
are scored by the mean of the heads. The heads may read features that exist on train examples only
(`compound.rewards.gains.gold`), so a critic is never stored as a value of a configuration.

Until the pairs say otherwise, an output is taken to be the better the closer it is to the gold answers: a few
pairs that differ in one of these features alone are added (a prior as data, Greenland 2007). Whether a reward
is used depends on scores alone (`compound.rewards.gains.slopes`), so it costs little where this is wrong.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from scipy import special

from compound.rewards.buffer import Entry
from compound.rewards.features import Embedder, FeatureMap, Matrix
from compound.rewards.gains.gold import GOLD
from compound.rewards.heads import MIN_INPUTS, Head, fit_head
from compound.rewards.template import Reading, Template

__all__ = ["Critic", "FitCritic", "fit_critic", "read_call"]

FOLDS = 5
RECENCY = 0.8  # decay of a pair's weight per iteration
PRIOR_PAIRS = 10.0  # weight of the prior, in pairs
LEAST_SD = 1e-6  # of a feature in the prior

Vector = NDArray[np.float64]


@dataclass(frozen=True)
class Critic:
    """Cross-fitted local reward of one component.

    Attributes:
        template: renders calls.
        features: the feature map of the heads.
        heads: the head of each fold, scaled such that the mean square of the differences of
            outputs for the same inputs is 1.
        fold_of: the fold of each example that pairs came from.
        backbone: embeds texts.
        margins: the margin of each pair by the head of its fold.
        inputs: the example of each of these pairs.
    """

    template: Template
    features: FeatureMap
    heads: Sequence[Head]
    fold_of: Mapping[str, int]
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
        return np.array(
            [
                every[self.fold_of[name], i] if name in self.fold_of else mean[i]
                for i, name in enumerate(examples)
            ]
        )


def read_call(
    template: Template,
    inputs: Mapping[str, object],
    outputs: Mapping[str, object],
    signals: Mapping[str, float],
) -> Reading:
    """Return a call as the critic reads it: with the signals among its numbers."""
    reading = template.read(inputs, outputs)
    return replace(reading, numbers={**reading.numbers, **signals})


class FitCritic(Protocol):
    """Fits the local reward of a component to draws; see `fit_critic`."""

    def __call__(
        self, entries: Sequence[Entry], template: Template, backbone: Embedder, *, certain: bool
    ) -> Critic | None:
        """Return the local reward; ``None`` if there are too few draws."""
        ...


@dataclass(frozen=True)
class _Pairs:
    """Readings of outputs, and their pairs within draws: all of them, and those with different rewards."""

    readings: list[Reading]
    first: list[int]
    second: list[int]
    chosen: list[int]
    rejected: list[int]
    examples: list[str]
    weights: list[float]


def fit_critic(
    entries: Sequence[Entry], template: Template, backbone: Embedder, *, certain: bool
) -> Critic | None:
    """Fit a critic to draws.

    Args:
        entries: the draws of the component; candidates without a global reward are left out.
        template: renders calls.
        backbone: embeds texts; `NoBackbone` for numbers and labels only.
        certain: whether the components after this one are deterministic. Otherwise one run of each candidate
            says little about their order, so pairs are weighted by the probability that their order is
            right: ``2 Φ(gap / s) − 1``, where s is the root mean square of all gaps.

    Returns:
        The critic, which is the prior alone if pairs come from at most `MIN_INPUTS` examples; ``None`` if
        there is no prior, either.
    """
    pairs = _pairs(entries, template, certain)
    names = list(dict.fromkeys(pairs.examples))
    features = FeatureMap.of(template, pairs.readings, backbone.dim)
    rows = features.matrix(pairs.readings, backbone)
    better, worse = _prior(features, rows)
    fold_of = {name: place % min(FOLDS, len(names)) for place, name in enumerate(names)}
    if len(names) <= MIN_INPUTS:
        if not (len(better) and pairs.first):
            return None
        fold_of = {}
    chosen, rejected = rows[pairs.chosen], rows[pairs.rejected]
    fold = np.array([fold_of.get(name, -1) for name in pairs.examples], int)
    weights = np.array(pairs.weights) / (np.mean(pairs.weights) if pairs.weights else 1.0)
    certainty = np.full(len(better), PRIOR_PAIRS / max(1, len(better)))
    heads, margins = list[Head](), np.zeros(len(fold))
    for number in range(max(fold_of.values(), default=0) + 1):
        kept, out = (fold != number) & (fold >= 0), fold == number
        above, below = np.vstack([chosen[kept], better]), np.vstack([rejected[kept], worse])
        head = fit_head(above, below, np.concatenate([weights[kept], certainty]), soft=features.soft)
        rewards = head.rewards(rows)
        size = float(np.sqrt(np.mean((rewards[pairs.first] - rewards[pairs.second]) ** 2))) or 1.0
        head = replace(head, weights=head.weights / size)
        heads.append(head)
        margins[out] = head.rewards(chosen[out]) - head.rewards(rejected[out])
    return Critic(template, features, heads, fold_of, backbone, margins, pairs.examples)


def _prior(features: FeatureMap, rows: Matrix) -> tuple[Matrix, Matrix]:
    """Return pairs that differ in one relation to a gold answer alone, by two standard deviations."""
    if not len(rows):
        return rows, rows
    mean, sd = rows.mean(0), rows.std(0)
    gold = [i for i, name in enumerate(features.columns) if name.startswith(GOLD) and sd[i] > LEAST_SD]
    step = np.zeros((len(gold), len(mean)), np.float32)
    step[np.arange(len(gold)), gold] = sd[gold]
    return mean + step, mean - step


def _pairs(entries: Sequence[Entry], template: Template, certain: bool) -> _Pairs:
    """Return all pairs of candidates with different rewards; each draw has the same total weight."""
    latest = max((entry.iteration for entry in entries), default=0)
    readings: list[Reading] = []
    every: list[tuple[int, int]] = []
    found: list[tuple[int, int, str, float, float]] = []
    for entry in entries:
        draw, age = entry.draw, RECENCY ** (latest - entry.iteration)
        known, first = [candidate for candidate in draw.candidates if candidate.rewards], len(readings)
        readings += [read_call(template, draw.inputs, c.outputs, c.signals) for c in known]
        values = [candidate.value for candidate in known]
        every += itertools.combinations(range(first, len(readings)), 2)
        share = age / max(1, len(values) - 1)
        found += [
            (first + i, first + j, draw.example, values[i] - values[j], share)
            for i in range(len(values))
            for j in range(len(values))
            if values[i] > values[j]
        ]
    gaps = np.array([row[3] for row in found])
    scale = float(np.sqrt(np.mean(gaps**2))) if len(gaps) else 1.0
    sure = np.ones(len(gaps)) if certain else 2 * special.ndtr(gaps / scale) - 1
    return _Pairs(
        readings,
        [pair[0] for pair in every],
        [pair[1] for pair in every],
        [row[0] for row in found],
        [row[1] for row in found],
        [row[2] for row in found],
        [row[4] * weight for row, weight in zip(found, sure.tolist(), strict=True)],
    )
