"""Inspect the local reward that a joint search used, which also reads relations to gold answers.

The rewards that a run stores read no gold answers, because they may be served. The reward of the
search is fitted to the same draws, so it is fitted again here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from compound.core.errors import DataError
from compound.rewards.alignment import (
    NO_PAIRS,
    Accuracy,
    accuracy,
    calibration_error,
    rank_correlation,
    reliability,
)
from compound.rewards.buffer import Entry
from compound.rewards.features import Embedder, NoBackbone, Reading
from compound.rewards.gains import Critic, fit_critic, read_call
from compound.rewards.heads import slope
from compound.rewards.inspection import BINS, HeadView, Inspection, Judgement, RewardPoint, Vector
from compound.rewards.pairs import Pair


@dataclass(frozen=True)
class FeatureWeight:
    """Weight of a feature per standard deviation: of the prior alone, and after the pairs of the run."""

    feature: str
    prior: float
    learned: float


@dataclass(frozen=True)
class SearchReward:
    """Reward that a joint search used for a component."""

    head: HeadView  # facts on it; the reward of an example was not fitted to it
    # the accuracy of the prior alone, on the same pairs; of no pairs without gold answers
    prior: Accuracy
    # the weights of the features that differ between outputs, largest first
    weights: tuple[FeatureWeight, ...]
    judgements: tuple[Judgement, ...]  # the pairs of outputs with different scores


def inspect_search_reward(
    inspection: Inspection, component: str, backbone: Embedder | None = None
) -> SearchReward:
    """Fit the reward of a joint search again, and return the facts on it.

    Args:
        inspection: the run.
        component: the name of a component with a reward.
        backbone: embeds texts; by default, only numbers and labels are read.

    Raises:
        DeclarationError: the component has no reward.
        DataError: it has too few outputs.
    """
    entries = inspection.buffer.of(component)
    template, reader = inspection.reward(component).features.template, backbone or NoBackbone()
    certain = all(made.certain for entry in entries for made in entry.draw.candidates)
    learned = fit_critic(entries, template, reader, certain=certain)
    prior = fit_critic(
        [_without_order(entry) for entry in entries], template, reader, certain=certain
    )
    if learned is None:
        raise DataError(
            f"the draws of {component!r} are too few to fit the reward of the search again"
        )
    draws = [(e, _read(learned, e)) for e in entries if len(e.draw.candidates) > 1]
    judged = [j for entry, readings in draws for j in _judge(learned, entry, readings)]
    first = (
        [j for entry, readings in draws for j in _judge(prior, entry, readings)] if prior else []
    )
    margins, names = [j.margin for j in judged], [j.pair.example for j in judged]
    scale = slope(np.array(margins))
    judged = [replace(j, margin=scale * j.margin) for j in judged]
    local = [scale * _rewards(learned, entry, readings) for entry, readings in draws]
    return SearchReward(
        _view(inspection.head(component), local, [entry for entry, _ in draws], judged),
        accuracy([j.margin for j in first], names) if first else NO_PAIRS,
        _weights(prior, learned, [reading for _, readings in draws for reading in readings]),
        tuple(judged),
    )


def _without_order(entry: Entry) -> Entry:
    """Return a draw whose outputs have equal scores."""
    equal = tuple(replace(made, rewards=(0.0,)) for made in entry.draw.candidates)
    return replace(entry, draw=replace(entry.draw, candidates=equal))


def _read(critic: Critic, entry: Entry) -> list[Reading]:
    draw = entry.draw
    return [read_call(critic.template, draw.inputs, c.outputs, c.signals) for c in draw.candidates]


def _rewards(critic: Critic, entry: Entry, readings: Sequence[Reading]) -> Vector:
    return critic.rewards(readings, [entry.draw.example] * len(readings))


def _judge(critic: Critic, entry: Entry, readings: Sequence[Reading]) -> list[Judgement]:
    """Return the pairs of a draw with different scores."""
    draw, made, rewards = entry.draw, entry.draw.candidates, _rewards(critic, entry, readings)
    origin = draw.component, draw.example, draw.configuration, draw.inputs
    return [
        Judgement(
            Pair(*origin, made[i].outputs, made[j].outputs, made[i].value - made[j].value),
            entry.iteration,
            readings[i].inputs,
            readings[i].output,
            readings[j].output,
            float(rewards[i] - rewards[j]),
        )
        for i in range(len(made))
        for j in range(len(made))
        if made[i].value > made[j].value
    ]


def _view(
    view: HeadView, local: Sequence[Vector], entries: Sequence[Entry], judged: Sequence[Judgement]
) -> HeadView:
    """Return the facts on the reward of the search in place of those on the stored one."""
    scores = [np.array([made.value for made in entry.draw.candidates]) for entry in entries]
    margins, names = [j.margin for j in judged], [j.pair.example for j in judged]
    bins = reliability(margins, 1.0, BINS)
    points = [
        RewardPoint(entry.draw.example, float(r), float(score), 0.0)
        for entry, own, values in zip(entries, local, scores, strict=True)
        for r, score in zip(own - own.mean(), values - values.mean(), strict=True)
    ]
    return replace(
        view,
        accuracy=accuracy(margins, names),
        pairs=len(margins),
        bins=tuple(bins),
        error=calibration_error(bins),
        margins=tuple(margins),
        points=tuple(points),
        correlation=rank_correlation([r.tolist() for r in local], [v.tolist() for v in scores]),
        weights=(),
        history=(),
    )


def _weights(
    prior: Critic | None, learned: Critic, readings: Sequence[Reading]
) -> tuple[FeatureWeight, ...]:
    """Return the weights per standard deviation over some readings, the means over the folds."""
    rows = learned.features.matrix(readings, learned.backbone).astype(np.float64)

    def mean(critic: Critic) -> Vector:
        weights = np.mean([head.weights / head.scale for head in critic.heads], 0)
        return np.asarray(weights * rows.std(0))

    before, after = np.zeros(rows.shape[1]) if prior is None else mean(prior), mean(learned)
    found = [
        FeatureWeight(name, float(before[i]), float(after[i]))
        for i, name in enumerate(learned.features.columns)
        if np.ptp(rows[:, i]) > 0
    ]
    return tuple(sorted(found, key=lambda weight: -abs(weight.learned)))
