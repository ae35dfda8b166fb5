"""What a training step looked like, component by component: the numbers of the papers' training curves."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from statistics import fmean, pstdev
from typing import Any

from compound.optimizers.policy.samples import Sample

WORDS = 40  # of tokens, that similarity of answers is measured on


class Monitor:
    """Adds up what is seen of samples during a step.

    Args:
        samples: those of the step.
        kept: those that are trained on; the others are too long, or empty.
    """

    def __init__(self, samples: Sequence[Sample], kept: Sequence[Sample]) -> None:
        self._samples, self._left_out = list(kept), len(samples) - len(kept)
        self._sums: dict[str, Counter[str]] = defaultdict(Counter)
        self._norms: dict[str, list[float]] = defaultdict(list)

    def seen(self, batch: Sequence[Sample], mask: Any, facts: Mapping[str, Any]) -> None:
        """Add a micro-batch: each fact is (samples, tokens)."""
        totals = {name: (fact.detach() * mask).sum(-1).tolist() for name, fact in facts.items()}
        for i, sample in enumerate(batch):
            sums = self._sums[sample.component]
            sums["tokens"] += sample.length
            for name, rows in totals.items():
                sums[name] += rows[i]

    def norm(self, adapter: str, value: float) -> None:
        """Add the norm of an update's gradient."""
        self._norms[adapter].append(value)

    def facts(self) -> dict[str, Any]:
        """Return everything as JSON: means over tokens, and what the samples themselves say."""
        return {
            "left_out": self._left_out,
            "norms": {name: fmean(some) for name, some in self._norms.items()},
            "components": {name: self._component(name) for name in sorted({s.component for s in self._samples})},
        }

    def _component(self, name: str) -> dict[str, float]:
        own = [s for s in self._samples if s.component == name]
        sums = self._sums[name]
        tokens = sums["tokens"]
        means = {fact: total / tokens for fact, total in sums.items() if fact != "tokens"} if tokens else {}
        rewards = [s.reward for s in own]
        return {
            "samples": len(own),
            "tokens": sum(s.length for s in own),
            "length": fmean(s.length for s in own),
            "reward": fmean(rewards),
            "spread": pstdev(rewards),
            "similarity": similarity([s.tokens.sampled for s in own]),
            **means,
        }


def similarity(answers: Sequence[Sequence[int]]) -> float:
    """Return how alike answers are: the mean overlap (Jaccard) of each one's tokens with the next one's.

    >>> similarity([(1, 2), (1, 2), (1, 3)])
    0.6666666666666666
    """
    pairs = list(zip(answers, answers[1:], strict=False))
    if not pairs:
        return 1.0
    sets = [(set(a[:WORDS]), set(b[:WORDS])) for a, b in pairs]
    return fmean(len(a & b) / len(a | b) if a | b else 1.0 for a, b in sets)
