"""A run's local rewards, opened to be looked into: nothing is written, no model loaded unless asked for.

The records hold more than one would think: a pair's held-out margin is the difference of two candidates'
local rewards by a head that had not seen their input, so the pairs of a call give back its candidates'
held-out rewards, whatever backbone made them. Only attributions and drift read texts again.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

from compound.errors import ConfigurationError, DeclarationError, RunDirectoryError, nearest
from compound.graph.configuration import components_of
from compound.graph.system import System
from compound.rewards.alignment import (
    Accuracy,
    calibration_error,
    rank_correlation,
    reliability,
)
from compound.rewards.buffer import PairBuffer
from compound.rewards.features import Embeds
from compound.rewards.fit import PairTexts, read_pairs
from compound.rewards.inspection.explain import (
    Attribution,
    Explanation,
    Judged,
    Similarity,
    attributed,
    explained,
    placed,
    prequential,
    similar,
)
from compound.rewards.inspection.views import HeadView, Judgement, Missing, Overview, Point, Step
from compound.rewards.model import NONE, LocalReward, RewardModel, Stored, load, read
from compound.rewards.pairs import ordered
from compound.rewards.settings import FreshPairSettings, RewardSettings
from compound.rewards.template import Reading
from compound.runs.directory import read_json, read_records
from compound.runs.events import Event, JobFacts, read_events
from compound.runs.formats import reward_section
from compound.security.untrusted import UntrustedFolder

Vector = NDArray[np.float64]
FOLDER = Path("memory") / "rewards"
BINS = 5


@dataclass(frozen=True)
class Inspection:
    """The local rewards of a run directory, finished or not.

    Attributes:
        path: the run directory.
        settings: how rewards were fitted and used.
        stored: the checkpoint.
        buffer: the pairs it was made from.
        events: what the run recorded.
    """

    path: Path
    settings: RewardSettings
    stored: Stored
    buffer: PairBuffer
    events: Sequence[Event]

    @staticmethod
    def open(path: str | Path, system: System | None = None) -> Inspection:
        """Open a run.

        Args:
            path: a run directory of method `optimas`.
            system: whose pairs they must be; otherwise whatever the first record says.

        Raises:
            RunDirectoryError: it is no run directory, has no local rewards, or the files do not fit together.
            ConfigurationError: the reward checkpoint is damaged.
            DataError: the pair buffer is damaged, or another system's.
        """
        folder = Path(path)
        config = read_json(folder, "config.json")
        if UntrustedFolder(folder).kind(f"{FOLDER}/card.json") is None:
            raise RunDirectoryError(
                f"{folder} has no local rewards",
                hint="method optimas learns them, once its offline phase has collected pairs",
            )
        try:
            optimize = config["optimize"]
            section = reward_section(optimize["rewards"]) if "rewards" in optimize else optimize["optimas"]
            settings = RewardSettings.model_validate(section["reward"])
            sampling = FreshPairSettings.model_validate(section["pairs"]).sampling
        except (KeyError, TypeError, AttributeError, ValidationError):
            raise RunDirectoryError(f"{folder}/config.json has no reward settings of this version") from None
        stored = read(folder / FOLDER)
        records = [record for record in read_records(folder, "memory.jsonl") if "kind" not in record]
        whose = system or (str(records[0]["system"]) if records and "system" in records[0] else "")
        whole = PairBuffer.read(records, whose, sampling)
        events = read_events(folder)
        found = Inspection(folder, settings, stored, _learned_from(whole, stored, folder), events)
        found._check()
        return found

    @property
    def components(self) -> tuple[str, ...]:
        """The components that have a reward, in the order of the pairs."""
        known = dict.fromkeys(entry.draw.component for entry in self.buffer.entries)
        return tuple(name for name in known if name in self.stored.rewards_of)

    @functools.cached_property
    def model(self) -> RewardModel:
        """The reward model with its backbone, which is loaded here."""
        return load(self.path / FOLDER)

    def reward(self, component: str) -> LocalReward:
        """Return a component's reward.

        Raises:
            DeclarationError: it has none.
        """
        if component not in self.stored.rewards_of:
            known = self.stored.rewards_of
            hint = nearest(component, known) if known else "no component of this run has one"
            raise DeclarationError(f"no local reward for component {component!r}", hint=hint)
        return self.stored.rewards_of[component]

    def texts(self, component: str) -> PairTexts:
        """Return a component's pairs as the reward model reads them."""
        template = self.reward(component).features.template
        return read_pairs(self.buffer, template, held_out=bool(self.stored.adapter))

    def margins(self, component: str) -> Vector:
        """Return each pair's held-out margin in log odds, in buffer order; ``nan`` for one learned from."""
        reward, texts = self.reward(component), self.texts(component)
        judged = np.array(texts.apart or (True,) * len(texts.inputs), bool)
        found = np.full(len(judged), np.nan)
        found[judged] = reward.slope * reward.margins
        return found

    @property
    def largest(self) -> str:
        """The component with the most pairs, among those that have a reward.

        Raises:
            DeclarationError: none has.
        """
        if not self.components:
            raise DeclarationError(
                f"no component of {self.path} has a local reward",
                hint="the report says why, in the table of local rewards",
            )
        return max(self.components, key=lambda name: len(self.buffer.pairs(name)))

    # -- one component -----------------------------------------------------------------------------------

    def head(self, component: str, *, backbone: Embeds | None = None) -> HeadView:
        """Return what the records show of one component's reward.

        Args:
            component: its name.
            backbone: reads the texts again, for the drift; without one there is a drift only where no text
                is read at all.
        """
        reward, margins = self.reward(component), self.margins(component)
        known = margins[~np.isnan(margins)]
        bins = reliability(known, 1.0, BINS)
        points, groups = self._points(component)
        jobs = [f for f in self._facts() if f.get("component") == component]
        correlation = rank_correlation(
            [[p.local for p in g] for g in groups], [[p.global_ for p in g] for g in groups]
        )
        measure, labels = self._measure(component)
        return HeadView(
            component, reward.accuracy, len(margins), self.buffer.gap(component),
            len(jobs), sum(bool(f.get("steered")) for f in jobs),
            next((str(f["why"]) for f in reversed(jobs) if f.get("why")), ""),
            tuple(bins), calibration_error(bins) if bins else None, tuple(known.tolist()), tuple(points),
            None if math.isnan(correlation) else correlation, measure, labels,
            self.explanation(component), self.history(component),
            self.drift(component, backbone) if backbone or self.stored.backbone == NONE else None,
        )  # fmt: skip

    def worst(self, component: str, count: int = 3) -> list[Judgement]:
        """Return the held-out pairs that the reward got most wrong."""
        return sorted(self.judgements(component), key=lambda judgement: judgement.margin)[:count]

    def judgements(self, component: str) -> list[Judgement]:
        """Return all held-out pairs with their margins, in buffer order."""
        texts, margins = self.texts(component), self.margins(component)
        found = zip(self.buffer.pairs(component), texts.chosen, texts.rejected, margins, strict=True)
        return [
            Judgement(pair, iteration, a.inputs, _written(a), _written(b), float(margin))
            for (pair, iteration), a, b, margin in found
            if not math.isnan(margin)
        ]

    def explanation(self, component: str) -> Explanation | None:
        """Return what the head rewards, in terms of the template's numbers and labels."""
        texts, margins = self.texts(component), self.margins(component)
        judged = np.flatnonzero(~np.isnan(margins))
        return explained(
            self.reward(component).features,
            [texts.chosen[i] for i in judged], [texts.rejected[i] for i in judged],
            [texts.inputs[i] for i in judged], margins[judged],
        )  # fmt: skip

    def attributions(
        self, component: str, inputs: Mapping[str, object], outputs: Mapping[str, object]
    ) -> Attribution:
        """Return what each word of an output does for its reward, by the head fitted to all pairs."""

        def score(variants: Sequence[Mapping[str, object]]) -> Vector:
            return self.model.rewards(component, [(inputs, variant) for variant in variants])

        self.reward(component)
        return attributed(score, outputs)

    def drift(self, component: str, backbone: Embeds | None = None) -> tuple[Judged, ...]:
        """Return the accuracy on each iteration's pairs by a head fitted to earlier iterations only."""
        texts, features = self.texts(component), self.reward(component).features
        rows = features.matrix([*texts.chosen, *texts.rejected], backbone or self.model.backbone)
        n = len(texts.chosen)
        iterations = [iteration for _, iteration in self.buffer.pairs(component)]
        return tuple(prequential(rows[:n], rows[n:], texts, iterations, soft=features.soft))

    def history(self, component: str) -> tuple[Judged, ...]:
        """Return the accuracy each time rewards were learned, the last of each iteration."""
        found: dict[int, Accuracy] = {}
        for facts in self._facts():
            accuracies = facts.get("accuracy") or {}
            if component in accuracies:
                found[int(facts["iteration"])] = Accuracy(**accuracies[component])
        return tuple(Judged(iteration, found[iteration]) for iteration in sorted(found))

    # -- all of them -------------------------------------------------------------------------------------

    def similarities(self) -> list[Similarity]:
        """Return the cosine of every two heads."""
        names = self.components
        rewards = [self.reward(name) for name in names]
        return [similar(a, b) for i, a in enumerate(rewards) for b in rewards[i + 1 :]]

    def steps(self) -> tuple[Step, ...]:
        """Return the validation score at the start and after each accepted change."""
        found = []
        for event in self.events:
            if event["event"] == "start":
                found.append(Step(0, event["mean"], event["low"], event["high"], ()))
            elif event["event"] == "decision" and event["accepted"] and "after" in event:
                changed = components_of(change[0] for change in event["changes"])
                after = event["after"]
                found.append(
                    Step(event["decision"], after["mean"], after["low"], after["high"], tuple(changed))
                )
        return tuple(found)

    def overview(self, *, backbone: Embeds | None = None) -> Overview:
        """Return all that the records show."""
        reasons = {name: why for facts in self._facts() for name, why in facts.get("missing", {}).items()}
        known = dict.fromkeys([*(entry.draw.component for entry in self.buffer.entries), *reasons])
        return Overview(
            self.stored.backbone, bool(self.stored.adapter), self.settings.min_accuracy,
            tuple(self.head(name, backbone=backbone) for name in self.components),
            tuple(
                Missing(name, reasons.get(name, ""), len(self.buffer.pairs(name)), self.buffer.gap(name))
                for name in known if name not in self.stored.rewards_of
            ),
            self.steps(), sum(event["event"] == "decision" for event in self.events),
        )  # fmt: skip

    # -- how ---------------------------------------------------------------------------------------------

    def _facts(self) -> list[JobFacts]:
        return [
            e["facts"]
            for e in self.events
            if e["event"] == "job" and e.get("facts", {}).get("accuracy") is not None
        ]

    def _points(self, component: str) -> tuple[list[Point], list[list[Point]]]:
        """Return the candidates whose held-out reward is known, and the same by call."""
        template = self.reward(component).features.template
        measure, labels = self._measure(component)
        margins = iter(self.margins(component).tolist())
        groups = []
        for entry in self.buffer.of(component):
            place = {id(c.outputs): i for i, c in enumerate(entry.draw.candidates)}
            pairs = [
                (place[id(pair.chosen)], place[id(pair.rejected)], next(margins))
                for pair in ordered(entry.draw, self.buffer.sampling)
            ]
            for group in placed([pair for pair in pairs if not math.isnan(pair[2])]):
                chosen = [entry.draw.candidates[i] for i in group]
                mean = sum(c.value for c in chosen) / len(chosen)
                groups.append([
                    Point(entry.draw.example, local, c.value - mean,
                          _x(template.read(entry.draw.inputs, c.outputs), measure, labels))
                    for c, local in zip(chosen, group.values(), strict=True)
                ])  # fmt: skip
        return [point for group in groups for point in group], groups

    def _measure(self, component: str) -> tuple[str, tuple[str, ...]]:
        features = self.reward(component).features
        if any(name.endswith(".words") for name in features.numbers):
            return "words", ()
        if features.labels:
            return "label", features.labels
        return "value", ()

    def _check(self) -> None:
        """Make sure that every pair has its margin."""
        for name in self.stored.rewards_of:
            texts = self.texts(name)
            judged = sum(texts.apart) if texts.apart else len(texts.inputs)
            if judged != len(self.reward(name).margins):
                raise ConfigurationError(
                    f"{self.path / FOLDER} is a damaged reward checkpoint: it has "
                    f"{len(self.reward(name).margins)} margins of {name!r}, the buffer {judged} pairs"
                )


def _learned_from(buffer: PairBuffer, stored: Stored, folder: Path) -> PairBuffer:
    """Return the part of a buffer that a checkpoint was made from: a run may have remembered more since."""
    for count in range(len(buffer.entries), 0, -1):
        part = PairBuffer(buffer.system, buffer.sampling, buffer.entries[:count])
        if part.digest == stored.data:
            return part
    raise RunDirectoryError(
        f"{folder}/{FOLDER} was not made from the pairs in {folder}/memory.jsonl",
        hint="a file was changed, or the run was killed while it learned: go on with it",
    )


def _written(reading: Reading) -> str:
    return "\n".join(part for part in (reading.output, reading.label) if part)


def _x(reading: Reading, measure: str, labels: Sequence[str]) -> float:
    """Return where a candidate stands in a picture of its outputs."""
    if measure == "label":
        return float(labels.index(reading.label)) if reading.label in labels else float(len(labels))
    if measure == "words":
        return sum(math.expm1(v) for name, v in reading.numbers.items() if name.endswith(".words"))
    return next(iter(reading.numbers.values()), 0.0)
