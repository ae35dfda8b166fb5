"""Hierarchical behaviour cloning: each component imitates outputs that led to high rewards.

A baseline of OPTIMAS (appendix D). It uses the pairs of the offline phase and the search of
`compound.optimizers.optimas.local`; only the score of an output differs: its similarity to the
preferred output for the same input, weighted by the reward gap of that pair. Outputs for other
inputs score 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from pydantic import Field

from compound.core.example import CallValues
from compound.graph.configuration import canonical_json, to_readable_json, to_readable_values
from compound.optimization.method import Proposal
from compound.optimizers.search.memory_part import MemoryPart
from compound.optimizers.search.rewarding import Guidance, RunRewards
from compound.rewards.buffer import PairBuffer, input_key
from compound.rewards.features import Embedder, Template, as_text
from compound.rewards.model import Vector

NO_TARGETS = "no input has an output that reliably leads to a higher score than another"


class CloningMemory(MemoryPart):
    """Memory of `hbc`: the configuration that the pairs were collected with."""

    NAME = "cloning"
    start: dict[str, object] = Field(default_factory=dict)


@dataclass(frozen=True)
class Target:
    """The outputs to imitate for one input.

    Attributes:
        preferred: the preferred outputs; several if they are equally good.
        gap: the largest difference in global reward between a preferred and another output.
    """

    preferred: tuple[Mapping[str, object], ...]
    gap: float
    example: str


@dataclass(frozen=True)
class Imitation:
    """Scores outputs of one component by their similarity to the target.

    Attributes:
        labels: the output fields that are categorical.
    """

    targets: Mapping[str, Target]
    labels: frozenset[str]
    backbone: Embedder

    def rewards(self, component: str, calls: Sequence[CallValues]) -> Vector:
        """Return similarity × gap / mean gap for each call; 0 for calls without a target."""
        targets = [
            self.targets.get(canonical_json(to_readable_json(inputs))) for inputs, _ in calls
        ]
        written = [to_readable_values(outputs) for _, outputs in calls]
        texts = {text: None for outputs in written for text in self._texts(outputs)}
        texts |= {
            t: None
            for target in targets
            if target
            for y in target.preferred
            for t in self._texts(y)
        }
        vectors = self._embedded(list(texts))
        mean_gap = sum(target.gap for target in self.targets.values()) / max(1, len(self.targets))
        return np.array(
            [
                target.gap
                / mean_gap
                * max(self._similarity(outputs, y, vectors) for y in target.preferred)
                if target
                else 0.0
                for outputs, target in zip(written, targets, strict=True)
            ]
        )

    def _similarity(
        self,
        outputs: Mapping[str, object],
        preferred: Mapping[str, object],
        vectors: Mapping[str, Vector],
    ) -> float:
        """Return the mean similarity of fields: cosine for texts, equality for numbers and labels."""
        similarities = []
        for name, target in preferred.items():
            value = outputs[name]
            if self._is_text(name, target) and self._is_text(name, value) and value != target:
                similarities.append(float(vectors[as_text(value)] @ vectors[as_text(target)]))
            else:
                similarities.append(float(value == target))
        return sum(similarities) / len(similarities)

    def _is_text(self, name: str, value: object) -> bool:
        return (
            self.backbone.dim > 0
            and name not in self.labels
            and not isinstance(value, bool | int | float)
        )

    def _texts(self, outputs: Mapping[str, object]) -> list[str]:
        return [as_text(value) for name, value in outputs.items() if self._is_text(name, value)]

    def _embedded(self, texts: Sequence[str]) -> dict[str, Vector]:
        """Return the embedding of each text, normalized to length 1."""
        if not texts:
            return {}
        rows = self.backbone.embed([("", text) for text in texts]).astype(np.float64)
        lengths = np.linalg.norm(rows, axis=1, keepdims=True)
        return dict(zip(texts, rows / np.where(lengths > 0, lengths, 1.0), strict=True))


class Cloning(RunRewards):
    """Scores calls by preferred outputs instead of rewards."""

    learns = False

    async def needing_pairs(self, components: Sequence[str]) -> list[str]:
        """Return all components: every further input may add a target."""
        return list(components)

    async def finish_offline(self, components: Sequence[str]) -> Proposal:
        """Store the configuration that the pairs were collected with, and report the number of targets."""
        CloningMemory(start=self.task.system.configuration.to_json()).store(self.memory)
        counts = {name: len(targets_of(self.buffer, name)) for name in components}
        note = ", ".join(f"{name} {count}" for name, count in counts.items())
        facts = {**self.facts(None), "targets": counts}
        return Proposal({}, note=f"inputs with an output to imitate: {note}", facts=facts)

    async def guidance(self, component: str) -> Guidance:
        """Return scoring by similarity to the targets, if the component has any."""
        targets = targets_of(self.buffer, component)
        labels = frozenset(Template.of(self.task.system.components[component]).labels)
        missing, examples = (
            "" if targets else NO_TARGETS,
            frozenset(t.example for t in targets.values()),
        )
        scores = Imitation(targets, labels, self.frozen_backbone())
        return Guidance(scores.rewards, self.facts(None), missing, missing, examples)

    @property
    def base(self) -> Mapping[str, object]:
        """The initial configuration, whose calls have the inputs of the targets."""
        return CloningMemory.of(self.memory).start or super().base


def targets_of(buffer: PairBuffer, component: str) -> dict[str, Target]:
    """Return the target of each input of a component that has a preference pair."""
    targets: dict[str, Target] = {}
    for pair, _ in buffer.pairs(component):
        key = input_key(pair)
        known = targets.get(key)
        if known is None or pair.gap > known.gap:
            targets[key] = Target((pair.chosen,), pair.gap, pair.example)
        elif pair.gap == known.gap and pair.chosen not in known.preferred:
            targets[key] = Target((*known.preferred, pair.chosen), pair.gap, known.example)
    return targets
