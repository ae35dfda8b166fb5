"""Metrics of the updates of a training step, by component: of the samples that were trained on."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import astuple
from statistics import fmean
from typing import TYPE_CHECKING, Any

from compound.optimizers.weights.learner.samples import Sample
from compound.optimizers.weights.learner.updates import all_reduce_rows
from compound.optimizers.weights.loss.diagnostics import Diagnostics

if TYPE_CHECKING:
    import torch


class Monitor:
    """Accumulates the metrics of the updates of a training step.

    Args:
        samples: all samples of the step.
        kept: the samples trained on; the others are too long or empty.
        divergence: whether the KL divergence from the base model is computed.
        masked: the number of kept samples excluded from the loss because they were truncated.
        device: the device of the gradients, for the reduction in distributed training.
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
        self._added: list[tuple[str, torch.Tensor]] = []  # on the device until `facts`
        self._sums: dict[str, Diagnostics] = defaultdict(Diagnostics)
        self._base_kl: dict[str, float] = defaultdict(float)
        self._divergence, self._device = divergence, device
        self._norms: dict[str, list[float]] = defaultdict(list)
        self._masked, self._skipped = masked, 0

    def add(self, component: str, sums: torch.Tensor, base_kl: torch.Tensor | None) -> None:
        """Add the diagnostics of a component's samples in a micro-batch, without waiting for the device.

        Args:
            component: the component.
            sums: sums over its tokens, by `diagnostics.diagnostic_sums`.
            base_kl: the sum of the KL divergence from the base model; ``None`` if not computed.
        """
        import torch

        own = sums.new_zeros(()) if base_kl is None else base_kl.to(sums.dtype)
        self._added.append((component, torch.cat([sums, own[None]])))

    def add_norm(self, adapter: str, value: float) -> None:
        """Add the gradient norm of an update; a non-finite norm counts as a skipped update."""
        if math.isfinite(value):
            self._norms[adapter].append(value)
        else:
            self._skipped += 1

    def facts(self) -> dict[str, Any]:
        """Return all metrics as JSON: counts of samples, and means over their tokens.

        In distributed training, all processes must call it, since each has accumulated a part.
        """
        self._collect()
        names = sorted({s.component for s in self._samples})
        sums = [[*astuple(self._sums[name]), self._base_kl.get(name, 0.0)] for name in names]
        for name, row in zip(names, all_reduce_rows(sums, self._device), strict=True):
            self._sums[name] = Diagnostics(*row[:-1])
            if self._divergence:
                self._base_kl[name] = row[-1]
        return {
            "left_out": self._left_out,
            "masked": self._masked,
            "skipped_updates": self._skipped,
            "norms": {name: fmean(some) for name, some in self._norms.items()},
            "components": {
                name: self._component(name) for name in sorted({s.component for s in self._samples})
            },
        }

    def _collect(self) -> None:
        """Read the added sums from the device, all at once."""
        import torch

        if not self._added:
            return
        rows = torch.stack([row for _, row in self._added]).tolist()
        for (component, _), row in zip(self._added, rows, strict=True):
            self._sums[component] += Diagnostics(*row[:-1])
            if self._divergence:
                self._base_kl[component] += row[-1]
        self._added.clear()

    def _component(self, name: str) -> dict[str, float]:
        own = [s for s in self._samples if s.component == name]
        sums = self._sums[name]
        means = sums.means()
        if name in self._base_kl:
            means["base_kl"] = self._base_kl[name] / max(sums.tokens, 1.0)
        metrics = {"samples": len(own), "tokens": sum(s.length for s in own), **means}
        return {name: value for name, value in metrics.items() if math.isfinite(value)}
