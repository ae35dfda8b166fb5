"""Inspect the local rewards of a run, read-only and without loading a model unless it is needed.

A pair's held-out margin is the difference of its candidates' local rewards, by a head that was not fitted to
their input. The held-out rewards of the candidates of a call can therefore be recovered from its pairs,
without the backbone. Only attributions and drift embed texts again.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

from compound.errors import ConfigurationError, DeclarationError, RunDirectoryError, suggest_name
from compound.graph.configuration import components_of
from compound.graph.system import System
from compound.rewards.alignment import (
    Accuracy,
    calibration_error,
    rank_correlation,
    reliability,
)
from compound.rewards.buffer import PairBuffer
from compound.rewards.features import Embedder
from compound.rewards.fit import PairTexts, read_pairs
from compound.rewards.inspection.explain import (
    Attribution,
    Explanation,
    Judged,
    Similarity,
    attribute_reward,
    explain_ranking,
    head_similarity,
    prequential_accuracies,
    rewards_from_margins,
)
from compound.rewards.inspection.views import (
    HeadView,
    Judgement,
    LocalUse,
    Missing,
    Overview,
    Point,
    Step,
)
from compound.rewards.model import NONE, LocalReward, RewardModel, Stored, load, read
from compound.rewards.pairs import ordered_pairs, single_run_pairs
from compound.rewards.settings import PairSettings, RewardSettings
from compound.rewards.template import Reading
from compound.runs.directory import read_json, read_records
from compound.runs.events import Event, JobFacts, read_events
from compound.runs.formats import reward_section
from compound.security.untrusted import UntrustedFolder
from compound.settings.base import Settings

Vector = NDArray[np.float64]
Known = TypeVar("Known", bound=Settings)
FOLDER = Path("memory") / "rewards"
BINS = 5
UNUSED = "the score does not follow it"


@dataclass(frozen=True)
class Inspection:
    """Local rewards of a finished or unfinished run.

    Attributes:
        path: the run directory.
        settings: the settings of the reward model.
        stored: the checkpoint.
        buffer: the draws that the checkpoint was fitted to.
        events: the recorded events of the run.
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
            system: the system that the pairs must belong to; by default that of the first record.

        Raises:
            RunDirectoryError: the folder is not a run directory, has no local rewards, or its files are
                inconsistent.
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
            optimize = config["optimize"]
            section = reward_section(optimize["rewards"]) if "rewards" in optimize else optimize["optimas"]
            settings = _known_settings(RewardSettings, section["reward"])
            sampling = _known_settings(PairSettings, section["pairs"]).sampling
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
        """Components with a reward, in the order of the pairs."""
        known = dict.fromkeys(entry.draw.component for entry in self.buffer.entries)
        return tuple(name for name in known if name in self.stored.rewards_of)

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
        return read_pairs(self.buffer, template, held_out=bool(self.stored.adapter))

    def margins(self, component: str) -> Vector:
        """Return each pair's held-out margin in log odds, in buffer order; ``nan`` for training pairs."""
        reward, texts = self.reward(component), self.texts(component)
        judged = np.array(texts.is_judged, bool)
        found = np.full(len(judged), np.nan)
        found[judged] = reward.slope * reward.margins
        return found

    @property
    def largest(self) -> str:
        """Component with the most pairs, among those with a reward.

        Raises:
            DeclarationError: no component has a reward.
        """
        if not self.components:
            raise DeclarationError(
                f"no component of {self.path} has a local reward",
                hint="see the reasons in the report's table of local rewards",
            )
        return max(self.components, key=lambda name: len(self.buffer.weighted_pairs(name)))

    # -- one component -----------------------------------------------------------------------------------

    def head(self, component: str, *, backbone: Embedder | None = None) -> HeadView:
        """Return the recorded facts on a component's reward.

        Args:
            component: the name of the component.
            backbone: embeds the texts again to compute the drift; without it, the drift is computed only for
                reward models that read no text.
        """
        reward, margins = self.reward(component), self.margins(component)
        known = margins[~np.isnan(margins)]
        bins = reliability(known, 1.0, BINS)
        points, groups = self._points(component)
        uses = self._uses(component)
        correlation = rank_correlation(
            [[p.local for p in g] for g in groups], [[p.global_ for p in g] for g in groups]
        )
        measure, labels = self._measure(component)
        return HeadView(
            component, reward.accuracy, len(margins), self.buffer.gap(component),
            len(uses), sum(not why for why in uses), next((why for why in reversed(uses) if why), ""),
            tuple(bins), calibration_error(bins) if bins else None, tuple(known.tolist()), tuple(points),
            None if math.isnan(correlation) else correlation, measure, labels,
            self.explanation(component), self.history(component),
            self.drift(component, backbone) if backbone or self.stored.backbone == NONE else None,
            self._use(component),
        )  # fmt: skip

    def worst(self, component: str, count: int = 3) -> list[Judgement]:
        """Return the held-out pairs with the lowest margins."""
        return sorted(self.judgements(component), key=lambda judgement: judgement.margin)[:count]

    def judgements(self, component: str) -> list[Judgement]:
        """Return all held-out pairs with their margins, in buffer order."""
        texts, margins = self.texts(component), self.margins(component)
        found = zip(self.buffer.weighted_pairs(component), texts.chosen, texts.rejected, margins, strict=True)
        return [
            Judgement(pair, iteration, a.inputs, _written(a), _written(b), float(margin))
            for (pair, iteration, _), a, b, margin in found
            if not math.isnan(margin)
        ]

    def explanation(self, component: str) -> Explanation | None:
        """Explain the head's ranking by the template's numbers and labels."""
        texts, margins = self.texts(component), self.margins(component)
        judged = np.flatnonzero(~np.isnan(margins))
        return explain_ranking(
            self.reward(component).features,
            [texts.chosen[i] for i in judged], [texts.rejected[i] for i in judged],
            [texts.inputs[i] for i in judged], margins[judged],
        )  # fmt: skip

    def attributions(
        self, component: str, inputs: Mapping[str, object], outputs: Mapping[str, object]
    ) -> Attribution:
        """Return the effect of each word of an output on its reward, by the head fitted to all pairs."""

        def score(variants: Sequence[Mapping[str, object]]) -> Vector:
            return self.model.rewards(component, [(inputs, variant) for variant in variants])

        self.reward(component)
        return attribute_reward(score, outputs)

    def drift(self, component: str, backbone: Embedder | None = None) -> tuple[Judged, ...]:
        """Return the accuracy on each iteration's pairs of a head fitted only to earlier iterations."""
        texts, features = self.texts(component), self.reward(component).features
        rows = features.matrix([*texts.chosen, *texts.rejected], backbone or self.model.backbone)
        n = len(texts.chosen)
        iterations = [iteration for _, iteration, _ in self.buffer.weighted_pairs(component)]
        return tuple(prequential_accuracies(rows[:n], rows[n:], texts, iterations, soft=features.soft))

    def history(self, component: str) -> tuple[Judged, ...]:
        """Return the last recorded accuracy of each iteration."""
        found: dict[int, Accuracy] = {}
        for facts in self._facts():
            accuracies = facts.get("accuracy") or {}
            if component in accuracies:
                found[int(facts["iteration"])] = Accuracy(**accuracies[component])
        return tuple(Judged(iteration, found[iteration]) for iteration in sorted(found))

    # -- all of them -------------------------------------------------------------------------------------

    def similarities(self) -> list[Similarity]:
        """Return the cosine similarity of every pair of heads."""
        names = self.components
        rewards = [self.reward(name) for name in names]
        return [head_similarity(a, b) for i, a in enumerate(rewards) for b in rewards[i + 1 :]]

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

    def overview(self, *, backbone: Embedder | None = None) -> Overview:
        """Return all recorded facts on the local rewards."""
        reasons = {name: why for facts in self._facts() for name, why in facts.get("missing", {}).items()}
        known = dict.fromkeys([*(entry.draw.component for entry in self.buffer.entries), *reasons])
        return Overview(
            self.stored.backbone, bool(self.stored.adapter),
            tuple(self.head(name, backbone=backbone) for name in self.components),
            tuple(
                Missing(
                    name,
                    reasons.get(name, ""),
                    len(self.buffer.weighted_pairs(name)),
                    self.buffer.gap(name),
                )
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

    def _use(self, component: str) -> LocalUse | None:
        """Return the use of a component's reward in the last joint search."""
        found = [facts["local"] for facts in self._facts() if component in facts.get("local", {})]
        return LocalUse(**found[-1][component]) if found else None

    def _uses(self, component: str) -> list[str]:
        """Return, for each job of a component, why its reward was not used; ``""`` if it was."""
        found: list[str] = []
        for facts in self._facts():
            if facts.get("component") == component:
                found.append("" if facts.get("steered") else str(facts.get("why", "")) or UNUSED)
            elif (local := facts.get("local", {}).get(component)) is not None:
                found.append("" if local["evaluations"] else UNUSED)
        return found

    def _points(self, component: str) -> tuple[list[Point], list[list[Point]]]:
        """Return the candidates with a known held-out reward, flat and grouped by call."""
        template = self.reward(component).features.template
        measure, labels = self._measure(component)
        margins = iter(self.margins(component).tolist())
        groups = []
        for entry in self.buffer.of(component):
            place = {id(c.outputs): i for i, c in enumerate(entry.draw.candidates)}
            pairs = [
                (place[id(pair.chosen)], place[id(pair.rejected)], next(margins))
                for pair in (
                    *ordered_pairs(entry.draw, self.buffer.sampling),
                    *single_run_pairs(entry.draw, self.buffer.sampling),
                )
            ]
            for group in rewards_from_margins([pair for pair in pairs if not math.isnan(pair[2])]):
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
        """Check that the checkpoint has a margin for every held-out pair."""
        for name in self.stored.rewards_of:
            texts = self.texts(name)
            judged = sum(texts.is_judged)
            if judged != len(self.reward(name).margins):
                raise ConfigurationError(
                    f"{self.path / FOLDER} is a damaged reward checkpoint: it has "
                    f"{len(self.reward(name).margins)} margins of {name!r}, the buffer {judged} pairs"
                )


def _known_settings(kind: type[Known], section: Mapping[str, object]) -> Known:
    """Return the settings of a run, without those that only an earlier version had."""
    return kind.model_validate({name: value for name, value in section.items() if name in kind.model_fields})


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


def _written(reading: Reading) -> str:
    return "\n".join(part for part in (reading.output, reading.label) if part)


def _x(reading: Reading, measure: str, labels: Sequence[str]) -> float:
    """Return the horizontal position of a candidate in figures."""
    if measure == "label":
        return float(labels.index(reading.label)) if reading.label in labels else float(len(labels))
    if measure == "words":
        return sum(math.expm1(v) for name, v in reading.numbers.items() if name.endswith(".words"))
    return next(iter(reading.numbers.values()), 0.0)
