"""Cross-fitted rewards for the training of one component: the reward of an example was not fitted to it.

Inputs are divided into folds, by the order in which they were first seen. One head is fitted per fold, to the
pairs of all other folds (equation 5 of OPTIMAS); it scores the examples of its fold. Examples without pairs
are scored by the mean of the heads. The heads may read features that exist on train examples only
(`compound.rewards.gains.gold`), so a critic is never stored as a value of a configuration.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from scipy import special

from compound.rewards.buffer import Entry
from compound.rewards.features import Embedder, FeatureMap
from compound.rewards.heads import MIN_INPUTS, Head, fit_head
from compound.rewards.template import Reading, Template

__all__ = ["Critic", "FitCritic", "fit_critic", "read_call"]

FOLDS = 5
RECENCY = 0.8  # decay of a pair's weight per iteration

Vector = NDArray[np.float64]


@dataclass(frozen=True)
class Critic:
    """Cross-fitted local reward of one component.

    Attributes:
        template: renders calls.
        features: the feature map of the heads.
        heads: the head of each fold, scaled such that the mean square of its margins is 1.
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
    """Pairs of readings with different rewards."""

    chosen: list[Reading]
    rejected: list[Reading]
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
        The critic; ``None`` if pairs come from fewer than one more than `MIN_INPUTS` examples.
    """
    pairs = _pairs(entries, template, certain)
    names = list(dict.fromkeys(pairs.examples))
    if len(names) <= MIN_INPUTS:
        return None
    folds = min(FOLDS, len(names))
    fold_of = {name: place % folds for place, name in enumerate(names)}
    fold = np.array([fold_of[name] for name in pairs.examples])
    features = FeatureMap.of(template, [*pairs.chosen, *pairs.rejected], backbone.dim)
    rows = features.matrix([*pairs.chosen, *pairs.rejected], backbone)
    chosen, rejected = rows[: len(fold)], rows[len(fold) :]
    weights = np.array(pairs.weights) / np.mean(pairs.weights)
    heads, margins = list[Head](), np.zeros(len(fold))
    for number in range(folds):
        kept, out = fold != number, fold == number
        head = fit_head(chosen[kept], rejected[kept], weights[kept], soft=features.soft)
        trained = head.rewards(chosen[kept]) - head.rewards(rejected[kept])
        size = float(np.sqrt(np.mean(trained**2))) or 1.0
        head = replace(head, weights=head.weights / size)
        heads.append(head)
        margins[out] = head.rewards(chosen[out]) - head.rewards(rejected[out])
    return Critic(template, features, heads, fold_of, backbone, margins, pairs.examples)


def _pairs(entries: Sequence[Entry], template: Template, certain: bool) -> _Pairs:
    """Return all pairs of candidates with different rewards; each draw has the same total weight."""
    latest = max((entry.iteration for entry in entries), default=0)
    found: list[tuple[Reading, Reading, str, float, float]] = []
    for entry in entries:
        draw, age = entry.draw, RECENCY ** (latest - entry.iteration)
        known = [candidate for candidate in draw.candidates if candidate.rewards]
        readings = [read_call(template, draw.inputs, c.outputs, c.signals) for c in known]
        values = [candidate.value for candidate in known]
        share = age / max(1, len(values) - 1)
        found += [
            (readings[i], readings[j], draw.example, values[i] - values[j], share)
            for i in range(len(values))
            for j in range(len(values))
            if values[i] > values[j]
        ]
    gaps = np.array([row[3] for row in found])
    scale = float(np.sqrt(np.mean(gaps**2))) if len(gaps) else 1.0
    sure = np.ones(len(gaps)) if certain else 2 * special.ndtr(gaps / scale) - 1
    return _Pairs(
        [row[0] for row in found],
        [row[1] for row in found],
        [row[2] for row in found],
        [row[4] * weight for row, weight in zip(found, sure.tolist(), strict=True)],
    )
