"""Hierarchical behaviour cloning: each component imitates outputs that led to high rewards.

A baseline of OPTIMAS (appendix D). It uses the pairs of the offline phase and the search of
`compound.optimizers.optimas.local`; only the score of an output differs: its similarity to the preferred
output for the same input, weighted by the reward gap of that pair. Outputs for other inputs score 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from pydantic import Field

from compound.example import CallValues
from compound.graph.configuration import canonical_json, to_readable_json, to_readable_values
from compound.optimization.method import Proposal
from compound.optimizers.optimas.guides import Guidance
from compound.optimizers.optimas.rewarding import RunRewards, shared_backbone
from compound.optimizers.search.memory_part import MemoryPart
from compound.rewards.buffer import PairBuffer, input_key
from compound.rewards.features import Embedder
from compound.rewards.model import Vector
from compound.rewards.template import Template, as_text

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
        example: the name of the example that the input is from.
    """

    preferred: tuple[Mapping[str, object], ...]
    gap: float
    example: str


@dataclass(frozen=True)
class Imitation:
    """Scores outputs of one component by their similarity to the target; implements `Scores`.

    Attributes:
        targets: the targets, by input.
        labels: the output fields that are categorical.
        backbone: embeds texts.
    """

    targets: Mapping[str, Target]
    labels: frozenset[str]
    backbone: Embedder

    def rewards(self, component: str, calls: Sequence[CallValues]) -> Vector:
        """Return similarity × gap / mean gap for each call; 0 for calls without a target."""
        targets = [self.targets.get(canonical_json(to_readable_json(inputs))) for inputs, _ in calls]
        written = [to_readable_values(outputs) for _, outputs in calls]
        texts = {text: None for outputs in written for text in self._texts(outputs)}
        texts |= {t: None for target in targets if target for y in target.preferred for t in self._texts(y)}
        vectors = self._embedded(list(texts))
        mean_gap = sum(target.gap for target in self.targets.values()) / max(1, len(self.targets))
        return np.array(
            [
                target.gap / mean_gap * max(self._similarity(outputs, y, vectors) for y in target.preferred)
                if target
                else 0.0
                for outputs, target in zip(written, targets, strict=True)
            ]
        )

    def _similarity(
        self, outputs: Mapping[str, object], preferred: Mapping[str, object], vectors: Mapping[str, Vector]
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
        return self.backbone.dim > 0 and name not in self.labels and not isinstance(value, bool | int | float)

    def _texts(self, outputs: Mapping[str, object]) -> list[str]:
        return [as_text(value) for name, value in outputs.items() if self._is_text(name, value)]

    def _embedded(self, texts: Sequence[str]) -> dict[str, Vector]:
        """Return the embedding of each text, normalized to length 1."""
        if not texts:
            return {}
        rows = self.backbone.embed([("", text) for text in texts]).astype(np.float64)
        lengths = np.linalg.norm(rows, axis=1, keepdims=True)
        return dict(zip(texts, rows / np.where(lengths > 0, lengths, 1.0), strict=True))


@dataclass(frozen=True)
class Cloning:
    """Guide based on preferred outputs; implements `compound.optimizers.optimas.guides.Guide`."""

    async def needing_pairs(self, rewards: RunRewards, components: Sequence[str]) -> list[str]:
        """Return all components: every further input may add a target."""
        return list(components)

    async def finish_offline(self, rewards: RunRewards, components: Sequence[str]) -> Proposal:
        """Store the configuration that the pairs were collected with, and report the number of targets."""
        CloningMemory(start=rewards.task.system.configuration.to_json()).store(rewards.memory)
        counts = {name: len(targets_of(rewards.buffer, name)) for name in components}
        note = ", ".join(f"{name} {count}" for name, count in counts.items())
        facts = {**rewards.facts(None), "targets": counts}
        return Proposal({}, note=f"inputs with an output to imitate: {note}", facts=facts)

    async def guidance(self, rewards: RunRewards, component: str) -> Guidance:
        """Return scoring by similarity to the targets, if the component has any."""
        targets = targets_of(rewards.buffer, component)
        labels = frozenset(Template.of(rewards.task.system.components[component]).labels)
        settings = rewards.learning.backbone
        backbone = shared_backbone(settings.model, settings.max_length, settings.placement)
        # the backbone is shared in the process, and another method may have trained an adapter on it
        remove_adapter = getattr(backbone, "remove_adapter", None)
        if remove_adapter is not None:
            remove_adapter()
        missing = "" if targets else NO_TARGETS
        examples = {target.example for target in targets.values()}
        return Guidance(Imitation(targets, labels, backbone), rewards.facts(None), missing, missing, examples)

    def configuration(self, rewards: RunRewards) -> Mapping[str, object]:
        """Return the initial configuration, whose calls have the inputs of the targets."""
        return CloningMemory.of(rewards.memory).start or rewards.task.system.configuration.to_json()


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
