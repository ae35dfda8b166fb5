"""The local reward that a joint search used, which also reads relations to gold answers.

Stored rewards read no gold answers, because they may be served. So the search records how its own
reward judged each output (`record_reward`), which `inspect_search_reward` reads.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from pydantic import TypeAdapter, ValidationError

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
from compound.rewards.gains import Critic, read_call
from compound.rewards.heads import slope
from compound.rewards.inspection import (
    BINS,
    HeadView,
    Inspection,
    Judgement,
    RewardPoint,
    Vector,
    Weight,
)
from compound.rewards.pairs import Draw, Pair

DIGITS = 6  # of recorded rewards and weights


@dataclass(frozen=True)
class SearchRecord:
    """Rewards that a joint search gave to outputs of a component it was not fitted to, by draw."""

    rewards: tuple[tuple[float, ...], ...]
    prior: tuple[tuple[float, ...], ...]  # by the prior alone; empty without gold answers
    weights: tuple[Weight, ...]  # of named features that differ between outputs


@dataclass(frozen=True)
class SearchReward:
    """Reward that a joint search used for a component."""

    head: HeadView  # facts on it; the reward of an example was not fitted to it
    # the accuracy of the prior alone, on the same pairs; of no pairs without gold answers
    prior: Accuracy
    judgements: tuple[Judgement, ...]  # the pairs of outputs with different scores


def record_reward(critic: Critic, prior: Critic | None, draws: Sequence[Draw]) -> SearchRecord:
    """Return what `inspect_search_reward` reads: the rewards of the outputs, and what they depend on."""
    calls = [(draw.inputs, made) for draw in draws for made in draw.candidates]
    readings = [read_call(critic.template, x, made.outputs, made.signals) for x, made in calls]
    examples = [draw.example for draw in draws for _ in draw.candidates]
    ends = np.cumsum([len(draw.candidates) for draw in draws])[:-1]

    def by_draw(fitted: Critic) -> tuple[tuple[float, ...], ...]:
        rewards = fitted.rewards(readings, examples).round(DIGITS)
        return tuple(tuple(part.tolist()) for part in np.split(rewards, ends))

    rows = critic.features.matrix(readings, critic.backbone).astype(np.float64)

    def mean(fitted: Critic) -> Vector:
        weights = np.mean([head.weights / head.scale for head in fitted.heads], 0)
        return np.asarray((weights * rows.std(0)).round(DIGITS))

    before, after = np.zeros(rows.shape[1]) if prior is None else mean(prior), mean(critic)
    columns = enumerate(zip(critic.features.columns, critic.features.soft, strict=True))
    weights = [
        Weight(name, float(after[i]), float(before[i]))
        for i, (name, is_embedded) in columns
        if not is_embedded and np.ptp(rows[:, i]) > 0
    ]
    return SearchRecord(by_draw(critic), by_draw(prior) if prior else (), tuple(weights))


def without_order(entry: Entry) -> Entry:
    """Return a draw whose outputs have equal scores, to which a critic's prior alone is fitted."""
    equal = tuple(replace(made, rewards=(0.0,)) for made in entry.draw.candidates)
    return replace(entry, draw=replace(entry.draw, candidates=equal))


def inspect_search_reward(inspection: Inspection, component: str) -> SearchReward:
    """Return the facts on the reward that the last joint search used for a component.

    Raises:
        DeclarationError: the component has no stored reward.
        DataError: no joint search recorded its reward, or the record belongs to other pairs.
    """
    found = inspection.searched(component)
    if found is None:
        raise DataError(f"no joint search of this run recorded a reward of {component!r}")
    iteration, given = found
    own = [entry for entry in inspection.buffer.of(component) if entry.iteration == iteration]
    entries = [entry for entry in own if len(entry.draw.candidates) > 1]
    try:
        record = TypeAdapter(SearchRecord).validate_python(given)
        whole = list(zip(entries, record.rewards, strict=True))
        points = [
            point for entry, rewards in whole for point in _points(inspection, entry, rewards)
        ]
        first = [
            rewards[i] - rewards[j]
            for entry, rewards in zip(entries, record.prior, strict=bool(record.prior))
            for i, j in _ordered(entry)
        ]
    except (ValidationError, ValueError, IndexError):
        raise DataError(
            f"the record of the reward of {component!r} does not belong to the pairs of this run"
        ) from None
    judged = [j for entry, rewards in whole for j in _judge(inspection, entry, rewards)]
    names = [j.pair.example for j in judged]
    held_out = accuracy([j.margin for j in judged], names)
    scale = slope(np.array([j.margin for j in judged]))
    judged = [replace(j, margin=scale * j.margin) for j in judged]
    margins = [j.margin for j in judged]
    bins = reliability(margins, 1.0, BINS)
    correlation = rank_correlation(
        record.rewards, [[made.value for made in entry.draw.candidates] for entry in entries]
    )
    weights = sorted(record.weights, key=lambda weight: -abs(weight.value))
    head = replace(
        inspection.head(component),
        accuracy=held_out,
        pairs=len(margins),
        bins=tuple(bins),
        error=calibration_error(bins) if bins else None,
        margins=tuple(margins),
        points=tuple(replace(point, local=scale * point.local) for point in points),
        correlation=None if math.isnan(correlation) else correlation,
        weights=tuple(Weight(w.feature, scale * w.value, scale * w.prior) for w in weights),
        stored=inspection.reward(component).accuracy,
    )
    return SearchReward(head, accuracy(first, names) if first else NO_PAIRS, tuple(judged))


def _ordered(entry: Entry) -> list[tuple[int, int]]:
    """Return the places of the better and the worse output of each pair with different scores."""
    made = entry.draw.candidates
    places = range(len(made))
    return [(i, j) for i in places for j in places if made[i].value > made[j].value]


def _points(
    inspection: Inspection, entry: Entry, rewards: Sequence[float]
) -> Iterator[RewardPoint]:
    """Yield each output of a draw with its reward and its score, minus their means."""
    draw = entry.draw
    template = inspection.reward(draw.component).features.template
    mean, score = np.mean(rewards), np.mean([made.value for made in draw.candidates])
    for made, reward in zip(draw.candidates, rewards, strict=True):
        x = inspection.position(draw.component, template.read(draw.inputs, made.outputs))
        yield RewardPoint(draw.example, float(reward - mean), float(made.value - score), x)


def _judge(inspection: Inspection, entry: Entry, rewards: Sequence[float]) -> Iterator[Judgement]:
    draw, made = entry.draw, entry.draw.candidates
    template = inspection.reward(draw.component).features.template
    readings = [read_call(template, draw.inputs, each.outputs, each.signals) for each in made]
    origin = draw.component, draw.example, draw.configuration, draw.inputs
    for i, j in _ordered(entry):
        gap = made[i].value - made[j].value
        yield Judgement(
            Pair(*origin, made[i].outputs, made[j].outputs, gap),
            entry.iteration,
            readings[i].inputs,
            readings[i].output,
            readings[j].output,
            rewards[i] - rewards[j],
        )
