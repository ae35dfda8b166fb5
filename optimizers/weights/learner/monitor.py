"""Metrics of a training step for each component, as in the training curves of the papers."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import astuple
from statistics import fmean, pstdev
from typing import TYPE_CHECKING, Any

from compound.optimizers.weights.learner.samples import Sample
from compound.optimizers.weights.learner.updates import added
from compound.optimizers.weights.loss.diagnostics import Diagnostics

if TYPE_CHECKING:
    import torch

WORDS = 40  # of tokens, that similarity of answers is measured on


class Monitor:
    """Adds up what is seen of samples during a step.

    Args:
        samples: those of the step.
        kept: those that are trained on; the others are too long, or empty.
        divergence: whether the divergence from the base is known.
        masked: how many of those that are kept carry no loss, since they were truncated.
        device: that of the gradients, where several processes add up what they have seen.
    """

    def __init__(
        self,
        samples: Sequence[Sample],
        kept: Sequence[Sample],
        *,
        divergence: bool,
        masked: int = 0,
        device: torch.device | None = None,
    ) -> None:
        self._samples, self._left_out = list(kept), len(samples) - len(kept)
        self._seen: dict[str, Diagnostics] = defaultdict(Diagnostics)
        self._far: dict[str, float] = defaultdict(float)
        self._divergence, self._device = divergence, device
        self._norms: dict[str, list[float]] = defaultdict(list)
        self._masked, self._skipped = masked, 0

    def seen(self, component: str, sums: Diagnostics, far: float | None) -> None:
        """Add what was seen of a component in a micro-batch; ``far`` is its distance from the base."""
        self._seen[component] += sums
        if far is not None:
            self._far[component] += far

    def norm(self, adapter: str, value: float) -> None:
        """Add the norm of an update's gradient; one that is not finite counts as a skipped update."""
        if math.isfinite(value):
            self._norms[adapter].append(value)
        else:
            self._skipped += 1

    def facts(self) -> dict[str, Any]:
        """Return everything as JSON: means over tokens, and what the samples themselves say.

        Where several processes train together, all must call it: each has seen a part.
        """
        names = sorted({s.component for s in self._samples})
        sums = [[*astuple(self._seen[name]), self._far.get(name, 0.0)] for name in names]
        for name, row in zip(names, added(sums, self._device), strict=True):
            self._seen[name] = Diagnostics(*row[:-1])
            if self._divergence:
                self._far[name] = row[-1]
        return {
            "left_out": self._left_out,
            "masked": self._masked,
            "skipped_updates": self._skipped,
            "norms": {name: fmean(some) for name, some in self._norms.items()},
            "components": {
                name: self._component(name) for name in sorted({s.component for s in self._samples})
            },
        }

    def _component(self, name: str) -> dict[str, float]:
        own = [s for s in self._samples if s.component == name]
        seen = self._seen[name]
        means = seen.means()
        if name in self._far:
            means["base_kl"] = self._far[name] / max(seen.tokens, 1.0)
        rewards = [s.reward for s in own]
        found = {
            "samples": len(own),
            "tokens": sum(s.length for s in own),
            "length": fmean(s.length for s in own),
            "reward": fmean(rewards),
            "spread": pstdev(rewards),
            "similarity": similarity([s.tokens.sampled for s in own]),
            "truncated": fmean(s.is_truncated for s in own),
            **means,
        }
        return {fact: value for fact, value in found.items() if math.isfinite(value)}


def similarity(answers: Sequence[Sequence[int]]) -> float:
    """Return how alike answers are: the mean overlap (Jaccard) of each one's tokens with the next one's.

    >>> similarity([(1, 2), (1, 2), (1, 3)])
    0.6666666666666666
    """
    pairs = list(itertools.pairwise(answers))
    if not pairs:
        return 1.0
    sets = [(set(a[:WORDS]), set(b[:WORDS])) for a, b in pairs]
    return fmean(len(a & b) / len(a | b) if a | b else 1.0 for a, b in sets)
