"""Inspect the local rewards of a run, read-only and without loading a model unless it is needed.

A pair's held-out margin is the difference of its candidates' local rewards, by a head that was not
fitted to their input. The held-out rewards of the candidates of a call can therefore be recovered
from its pairs, without the backbone.

Stored rewards read no gold answers, because they may be served. So a joint search records how its own
reward, which reads them, judged each output (`record_reward`), and `inspect_search_reward` reads that.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import TypeAdapter, ValidationError

from compound.core.errors import (
    ConfigurationError,
    DataError,
    DeclarationError,
    RunDirectoryError,
    suggest_name,
)
from compound.core.security.untrusted import UntrustedFolder
from compound.graph.system import System
from compound.optimization.runs.directory import read_json, read_records
from compound.optimization.runs.recorder import Event, read_events
from compound.rewards.alignment import (
    NO_PAIRS,
    Accuracy,
    Bin,
    accuracy,
    calibration_error,
    rank_correlation,
    reliability,
)
from compound.rewards.buffer import Entry, PairBuffer
from compound.rewards.features import Reading
from compound.rewards.fit import PairTexts, component_pairs
from compound.rewards.gains import Critic, read_call
from compound.rewards.heads import slope
from compound.rewards.model import LocalReward, RewardModel, Stored, load, read
from compound.rewards.pairs import Draw, Pair, ordered_pairs
from compound.rewards.settings import PairSettings


@dataclass(frozen=True)
class RewardPoint:
    """A candidate: its held-out local reward and its global reward, each minus the mean of its call.

    ``x`` is the output's length in words, its value, or the index of its label.
    """

    input: str
    local: float
    global_: float
    x: float


@dataclass(frozen=True)
class Weight:
    """Weight of a named feature in a head: log odds of being ranked higher per standard deviation."""

    feature: str
    value: float
    prior: float = 0.0  # before any pairs were seen


@dataclass(frozen=True)
class LocalUse:
    """Use of a local reward in a joint search; prices are those of an evaluation, in system runs."""

    trust: float
    slope: float
    evaluations: int
    price: float
    global_price: float

    @property
    def saved(self) -> float:
        """System runs that as many global evaluations would have cost in addition."""
        return self.evaluations * (self.global_price - self.price)


@dataclass(frozen=True)
class Judgement:
    """A held-out pair with the reward's margin."""

    pair: Pair
    iteration: int
    inputs: str  # this text and the next two are those that the reward model read
    chosen: str
    rejected: str
    margin: float  # `r(chosen) - r(rejected)` in log odds; negative if the ranking is wrong

    @property
    def probability(self) -> float:
        """Predicted probability that the better output is the better one."""
        return 1 / (1 + math.exp(-max(-700.0, min(700.0, self.margin))))


@dataclass(frozen=True)
class HeadView:
    """Recorded facts on a component's reward."""

    component: str  # the name of the component
    accuracy: Accuracy  # the share of held-out pairs that are ordered correctly
    pairs: int  # the number of all pairs
    gap: float | None  # the mean gap between two outputs in the latest draws, if known
    jobs: int  # of the component that requested rewards
    steered: int  # of these jobs, those that used them
    why: str  # the latest reason for not using the reward
    bins: tuple[Bin, ...]  # predicted against observed probabilities
    error: float | None  # their mean difference
    margins: tuple[float, ...]  # the held-out margins in log odds
    points: tuple[RewardPoint, ...]  # the candidates
    # Spearman's correlation of local with global rewards within a call; `None` if all are equal
    correlation: float | None
    # the meaning of `x` of the points: `words`, `value` or `label` (an index into
    # `labels`)
    measure: str
    labels: tuple[str, ...]
    weights: tuple[Weight, ...]  # the weights of the named features, largest first
    local: LocalUse | None = None  # the use of the reward in the last joint search
    # the accuracy of the stored reward, if the others are of the reward that a search used
    stored: Accuracy | None = None


@dataclass(frozen=True)
class Missing:
    """A component without a reward, and the reason."""

    component: str
    why: str
    pairs: int
    gap: float | None


@dataclass(frozen=True)
class Overview:
    """Recorded facts on all local rewards of a run."""

    backbone: str
    trained: bool
    heads: tuple[HeadView, ...]
    missing: tuple[Missing, ...]


Vector = NDArray[np.float64]
FOLDER = Path("memory") / "rewards"
BINS = 5
UNUSED = "the score does not follow it"


@dataclass(frozen=True)
class Inspection:
    """Local rewards of a finished or unfinished run."""

    path: Path  # the run directory
    stored: Stored  # the checkpoint
    buffer: PairBuffer  # the draws that the checkpoint was fitted to
    events: Sequence[Event]  # the recorded events of the run

    @staticmethod
    def open(path: str | Path, system: System | None = None) -> Inspection:
        """Open a run of method `optimas`; by default, of the system of the first record.

        Raises:
            RunDirectoryError: it is not a run directory, has no local rewards, or is inconsistent.
            ConfigurationError: the reward checkpoint is damaged.
            DataError: the pair buffer is damaged, or belongs to another system.
        """
        folder = Path(path)
        config = read_json(folder, "config.json")
        if UntrustedFolder(folder).kind(f"{FOLDER}/card.json") is None:
            raise RunDirectoryError(
                f"{folder} has no local rewards",
                hint="method optimas stores them after jobs of components whose outputs changed the score",
            )
        try:
            pairs = config["optimize"]["optimas"]["pairs"]
            known = {name: pairs[name] for name in PairSettings.model_fields if name in pairs}
            sampling = PairSettings.model_validate(known).sampling
        except (KeyError, TypeError, ValidationError):
            raise RunDirectoryError(
                f"{folder}/config.json has no reward settings of this version"
            ) from None
        stored = read(folder / FOLDER)
        memory = read_records(folder, "memory.jsonl")
        records = [record for record in memory if "kind" not in record]
        whose = system or (str(records[0]["system"]) if records and "system" in records[0] else "")
        whole = PairBuffer.read(records, whose, sampling, f"{folder}/memory.jsonl: ")
        events = read_events(folder)
        found = Inspection(folder, stored, _learned_from(whole, stored, folder), events)
        found._check()
        return found

    @property
    def components(self) -> tuple[str, ...]:
        """Components with a reward, in the order of the pairs."""
        return tuple(name for name in self.buffer.components if name in self.stored.rewards_of)

    @functools.cached_property
    def model(self) -> RewardModel:
        """Reward model with its backbone, loaded on first access."""
        return load(self.path / FOLDER)

    def reward(self, component: str) -> LocalReward:
        """Return a component's reward.

        Raises:
            DeclarationError: the component has no reward.
        """
        if component not in self.stored.rewards_of:
            known = self.stored.rewards_of
            hint = suggest_name(component, known) if known else "no component of this run has one"
            raise DeclarationError(f"no local reward for component {component!r}", hint=hint)
        return self.stored.rewards_of[component]

    def texts(self, component: str) -> PairTexts:
        """Return a component's pairs as rendered by its template."""
        template = self.reward(component).features.template
        return component_pairs(self.buffer, template, held_out=bool(self.stored.adapter))

    def margins(self, component: str) -> Vector:
        """Return each pair's held-out margin in log odds, in buffer order; ``nan`` for training pairs."""
        reward, texts = self.reward(component), self.texts(component)
        judged = np.array(texts.is_judged, bool)
        found = np.full(len(judged), np.nan)
        found[judged] = reward.slope * reward.margins
        return found

    def head(self, component: str) -> HeadView:
        """Return the recorded facts on a component's reward."""
        margins, uses = self.margins(component), self._uses(component)
        groups = self._points(component)
        known = margins[~np.isnan(margins)]
        bins = reliability(known, 1.0, BINS)
        correlation = rank_correlation(
            [[p.local for p in g] for g in groups], [[p.global_ for p in g] for g in groups]
        )
        measure, labels = self._measure(component)
        return HeadView(
            component=component,
            accuracy=self.reward(component).accuracy,
            pairs=len(margins),
            gap=self.buffer.gap(component),
            jobs=len(uses),
            steered=sum(not why for why in uses),
            why=next((why for why in reversed(uses) if why), ""),
            bins=tuple(bins),
            error=calibration_error(bins) if bins else None,
            margins=tuple(known.tolist()),
            points=tuple(point for group in groups for point in group),
            correlation=None if math.isnan(correlation) else correlation,
            measure=measure,
            labels=labels,
            weights=self.weights(component),
            local=self._use(component),
        )

    def worst(self, component: str, count: int = 3) -> list[Judgement]:
        """Return the held-out pairs with the lowest margins."""
        return sorted(self.judgements(component), key=lambda judgement: judgement.margin)[:count]

    def judgements(self, component: str) -> list[Judgement]:
        """Return all held-out pairs with their margins, in buffer order."""
        texts, margins = self.texts(component), self.margins(component)
        pairs = self.buffer.weighted_pairs(component)
        found = zip(pairs, texts.chosen, texts.rejected, margins, strict=True)
        return [
            Judgement(pair, iteration, a.inputs, a.written, b.written, float(margin))
            for (pair, iteration, _), a, b, margin in found
            if not math.isnan(margin)
        ]

    def weights(self, component: str) -> tuple[Weight, ...]:
        """Return the weights of the head on named features that differ between outputs, largest first."""
        reward = self.reward(component)
        columns = zip(
            reward.features.columns, reward.head.weights, reward.features.soft, strict=True
        )
        found = [Weight(n, reward.slope * float(w)) for n, w, soft in columns if w and not soft]
        return tuple(sorted(found, key=lambda weight: -abs(weight.value)))

    def overview(self) -> Overview:
        """Return all recorded facts on the local rewards."""
        reasons = {
            name: why for facts in self._facts() for name, why in facts.get("missing", {}).items()
        }
        names = dict.fromkeys([*self.buffer.components, *reasons])
        missing = (
            Missing(
                name,
                reasons.get(name, ""),
                len(self.buffer.weighted_pairs(name)),
                self.buffer.gap(name),
            )
            for name in names
            if name not in self.stored.rewards_of
        )
        heads, trained = map(self.head, self.components), bool(self.stored.adapter)
        return Overview(self.stored.backbone, trained, tuple(heads), tuple(missing))

    def _facts(self) -> list[dict[str, Any]]:
        found = [event.get("facts", {}) for event in self.events if event["event"] == "job"]
        return [facts for facts in found if facts.get("accuracy") is not None]

    def searched(self, component: str) -> tuple[int, object] | None:
        """Return the iteration of the last joint search, and its record of the component's reward."""
        found = [facts for facts in self._facts() if component in facts.get("local", {})]
        record = found[-1]["local"][component].get("record") if found else None
        return None if record is None else (int(found[-1]["iteration"]), record)

    def _use(self, component: str) -> LocalUse | None:
        found = [facts["local"] for facts in self._facts() if component in facts.get("local", {})]
        names = [each.name for each in fields(LocalUse)]
        return LocalUse(**{name: found[-1][component][name] for name in names}) if found else None

    def _uses(self, component: str) -> list[str]:
        """Return, for each job of a component, why its reward was not used; ``""`` if it was."""
        found: list[str] = []
        for facts in self._facts():
            if facts.get("component") == component:
                found.append("" if facts.get("steered") else str(facts.get("why", "")) or UNUSED)
            elif (local := facts.get("local", {}).get(component)) is not None:
                found.append("" if local["evaluations"] else UNUSED)
        return found

    def _points(self, component: str) -> list[list[RewardPoint]]:
        template = self.reward(component).features.template
        margins = iter(self.margins(component).tolist())
        groups = []
        for entry in self.buffer.of(component):
            place = {id(c.outputs): i for i, c in enumerate(entry.draw.candidates)}
            pairs = [
                (place[id(pair.chosen)], place[id(pair.rejected)], next(margins))
                for decided in (True, False)
                for pair in ordered_pairs(entry.draw, self.buffer.sampling, decided=decided)
            ]
            for group in rewards_from_margins([pair for pair in pairs if not math.isnan(pair[2])]):
                chosen = [entry.draw.candidates[i] for i in group]
                mean = sum(c.value for c in chosen) / len(chosen)
                read_ = [template.read(entry.draw.inputs, c.outputs) for c in chosen]
                places = [self.position(component, reading) for reading in read_]
                made = zip(group.values(), chosen, places, strict=True)
                example = entry.draw.example
                groups.append([RewardPoint(example, r, c.value - mean, x) for r, c, x in made])
        return groups

    def _measure(self, component: str) -> tuple[str, tuple[str, ...]]:
        features = self.reward(component).features
        if any(name.endswith(".words") for name in features.numbers):
            return "words", ()
        if features.labels:
            return "label", features.labels
        return "value", ()

    def position(self, component: str, reading: Reading) -> float:
        """Return the horizontal position of an output in figures; see `HeadView.measure`."""
        measure, labels = self._measure(component)
        if measure == "label":
            return float(labels.index(reading.label) if reading.label in labels else len(labels))
        if measure == "words":
            words = (v for name, v in reading.numbers.items() if name.endswith(".words"))
            return sum(map(math.expm1, words))
        return next(iter(reading.numbers.values()), 0.0)

    def _check(self) -> None:
        for name in self.stored.rewards_of:
            texts = self.texts(name)
            judged = sum(texts.is_judged)
            if judged != len(self.reward(name).margins):
                raise ConfigurationError(
                    f"{self.path / FOLDER} is a damaged reward checkpoint: it has "
                    f"{len(self.reward(name).margins)} margins of {name!r}, the buffer {judged} pairs"
                )


def _learned_from(buffer: PairBuffer, stored: Stored, folder: Path) -> PairBuffer:
    """Return the start of a buffer that a checkpoint was fitted to; a run may have added draws since."""
    for count in range(len(buffer.entries), 0, -1):
        part = PairBuffer(buffer.system, buffer.sampling, buffer.entries[:count])
        if part.digest == stored.data:
            return part
    raise RunDirectoryError(
        f"{folder}/{FOLDER} was not fitted to the pairs in {folder}/memory.jsonl",
        hint="a file was changed, or the run was killed while fitting rewards; resume the run",
    )


def rewards_from_margins(margins: Sequence[tuple[int, int, float]]) -> list[dict[int, float]]:
    """Recover the local rewards of a call's candidates from the margins of its pairs, by connected component.

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
