"""Hierarchical behaviour cloning: each component imitates outputs that led to high rewards.

A baseline of OPTIMAS (appendix D). The pairs are those of the offline phase, the search is that of
`compound.optimizers.optimas.local`; only the score of an output differs. It is how similar the output is to
the preferred one of the same input, weighed by how much that one was preferred. Outputs for other inputs have
no score.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from pydantic import Field

from compound.example import CallValues
from compound.graph.configuration import canonical, readable, readable_values
from compound.optimization.method import Proposal
from compound.optimizers.optimas.guides import Guidance, whole_calls
from compound.optimizers.optimas.local_scoring import Recorded
from compound.optimizers.optimas.rewarding import RunRewards, shared_backbone
from compound.optimizers.search.remembered import Remembered
from compound.rewards.buffer import PairBuffer, input_key
from compound.rewards.features import Embeds
from compound.rewards.model import Vector
from compound.rewards.template import Template, as_text

NOTHING = "no input has an output that surely leads to a higher score than another"


class CloningMemory(Remembered):
    """What a run remembers of its imitation: the values that the pairs were collected with."""

    NAME = "cloning"
    start: dict[str, object] = Field(default_factory=dict)


@dataclass(frozen=True)
class Target:
    """What to write for one input.

    Attributes:
        preferred: the preferred outputs, several where they are equally good.
        gap: how much higher the global reward is after them than after the worst output.
        example: where the input comes from.
    """

    preferred: tuple[Mapping[str, object], ...]
    gap: float
    example: str


@dataclass(frozen=True)
class Imitation:
    """Scores outputs of one component by what they should be; implements `Scores`.

    Attributes:
        targets: what to write, by input.
        labels: the outputs that are one of a few labels.
        backbone: embeds texts.
    """

    targets: Mapping[str, Target]
    labels: frozenset[str]
    backbone: Embeds

    def rewards(self, component: str, calls: Sequence[CallValues]) -> Vector:
        """Return similarity times gap for each call, the gaps being 1 on average; 0 without a target."""
        found = [self.targets.get(canonical(readable(inputs))) for inputs, _ in calls]
        written = [readable_values(outputs) for _, outputs in calls]
        texts = {text: None for outputs in written for text in self._texts(outputs)}
        texts |= {t: None for target in found if target for y in target.preferred for t in self._texts(y)}
        vectors = self._embedded(list(texts))
        usual = sum(target.gap for target in self.targets.values()) / max(1, len(self.targets))
        return np.array(
            [
                target.gap / usual * max(self._alike(outputs, y, vectors) for y in target.preferred)
                if target
                else 0.0
                for outputs, target in zip(written, found, strict=True)
            ]
        )

    def _alike(
        self, outputs: Mapping[str, object], preferred: Mapping[str, object], vectors: Mapping[str, Vector]
    ) -> float:
        """Return the mean over fields: the cosine of texts, or whether numbers or labels are equal."""
        found = []
        for name, value in preferred.items():
            mine = outputs[name]
            if self._is_text(name, value) and self._is_text(name, mine) and mine != value:
                found.append(float(vectors[as_text(mine)] @ vectors[as_text(value)]))
            else:
                found.append(float(mine == value))
        return sum(found) / len(found)

    def _is_text(self, name: str, value: object) -> bool:
        return self.backbone.dim > 0 and name not in self.labels and not isinstance(value, bool | int | float)

    def _texts(self, outputs: Mapping[str, object]) -> list[str]:
        return [as_text(value) for name, value in outputs.items() if self._is_text(name, value)]

    def _embedded(self, texts: Sequence[str]) -> dict[str, Vector]:
        """Return a vector of length 1 for each text."""
        if not texts:
            return {}
        rows = self.backbone.embed([("", text) for text in texts]).astype(np.float64)
        lengths = np.linalg.norm(rows, axis=1, keepdims=True)
        return dict(zip(texts, rows / np.where(lengths > 0, lengths, 1.0), strict=True))


@dataclass(frozen=True)
class Cloning:
    """Guides a local search by preferred outputs; implements `compound.optimizers.optimas.guides.Guide`."""

    adapts: bool = False

    async def unsettled(self, rewards: RunRewards, components: Sequence[str]) -> list[str]:
        """Return all: every further input is one more to imitate."""
        return list(components)

    async def opened(self, rewards: RunRewards, components: Sequence[str]) -> Proposal:
        """Remember what the pairs were collected with."""
        CloningMemory(start=rewards.task.system.configuration.to_json()).store(rewards.memory)
        counts = {name: len(targets_of(rewards.buffer, name)) for name in components}
        note = ", ".join(f"{name} {count}" for name, count in counts.items())
        facts = {**rewards.facts(None), "targets": counts}
        return Proposal({}, note=f"inputs with an output to imitate: {note}", facts=facts)

    async def guidance(self, rewards: RunRewards, component: str) -> Guidance:
        """Return the preferred outputs as scores; without any they may not steer."""
        targets = targets_of(rewards.buffer, component)
        labels = frozenset(Template.of(rewards.task.system.components[component]).labels)
        reads = rewards.learning.backbone
        backbone = shared_backbone(reads.model, reads.max_length)
        dropped = getattr(backbone, "drop_adapter", None)  # another method may have trained it
        if dropped is not None:
            dropped()
        distrust = "" if targets else NOTHING
        distrusted = [name for name in rewards.components if not targets_of(rewards.buffer, name)]
        return Guidance(Imitation(targets, labels, backbone), rewards.facts(None), distrust, distrusted)

    async def recorded(
        self, rewards: RunRewards, component: str, among: Sequence[str] | None = None
    ) -> Recorded:
        """Return the starting configuration's calls whose inputs have targets, those of the largest gaps."""
        task = rewards.task
        targets = targets_of(rewards.buffer, component)
        ranked = sorted(targets.values(), key=lambda target: -target.gap)
        wanted = list(dict.fromkeys(target.example for target in ranked))[: task.minibatch]
        known = {example.id: example for example in task.train}
        start = CloningMemory.of(rewards.memory).start
        examples = [known[name] for name in wanted if among is None or name in among]
        made = await whole_calls(task, start, examples, component)
        calls = [(trace, call) for trace, call in made if canonical(readable(call.inputs)) in targets]
        return Recorded(task.system.bind(start), calls)


def targets_of(buffer: PairBuffer, component: str) -> dict[str, Target]:
    """Return what a component should write, for each input that has a decided pair."""
    found: dict[str, Target] = {}
    for pair, _ in buffer.pairs(component):
        key = input_key(pair)
        known = found.get(key)
        if known is None or pair.gap > known.gap:
            found[key] = Target((pair.chosen,), pair.gap, pair.example)
        elif pair.gap == known.gap and pair.chosen not in known.preferred:
            found[key] = Target((*known.preferred, pair.chosen), pair.gap, known.example)
    return found
