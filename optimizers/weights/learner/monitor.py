"""Metrics of the updates of a training step, by component: of the samples that were trained on."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Any

from compound.optimizers.weights.learner.losses import LossSettings, at_level, variant_of
from compound.optimizers.weights.learner.samples import Sample
from compound.optimizers.weights.learner.updates import all_reduce_rows

if TYPE_CHECKING:
    import torch
    from torch import Tensor

# Over tokens: their number; those with a negative advantage and a ratio below the lower clipping
# bound; those with a positive one and a ratio above the upper bound; ratio - 1 - log ratio, which
# estimates KL(old policy, policy); probability ratios; entropies.
SUMS = ("tokens", "low", "high", "kl", "ratio", "entropy")


def diagnostic_sums(
    variant: str,
    logps: Tensor,
    old: Tensor | None,
    advantages: Tensor | None,
    mask: Tensor,
    settings: LossSettings | None = None,
    *,
    entropy: Tensor | None = None,
) -> Tensor:
    """Return `SUMS` over the tokens of a micro-batch, (6,), on the device.

    The arguments are those of `losses.per_token_loss`, and the entropies, which count as 0 if not
    given.

    Example:
        >>> import torch
        >>> logps, old = torch.tensor([[-1.0, -2.0]]), torch.tensor([[-1.0, -3.0]])
        >>> found = diagnostic_sums("grpo", logps, old, torch.tensor([1.0]), torch.ones(1, 2))
        >>> {name: round(float(value), 3) for name, value in zip(SUMS, found)}
        {'tokens': 2.0, 'low': 0.0, 'high': 1.0, 'kl': 0.718, 'ratio': 3.718, 'entropy': 0.0}
    """
    import torch

    chosen, keep = variant_of(variant), mask.bool()
    low, high = (settings if settings is not None else chosen.settings()).bounds
    current = logps.detach()
    log_ratio = (current - (current if old is None else old)).masked_fill(~keep, 0.0)
    bounded = at_level(log_ratio, keep, chosen.level).exp()
    if advantages is None:
        advantages = torch.zeros_like(current)
    elif advantages.dim() == 1:
        advantages = advantages.unsqueeze(1)
    ratio = log_ratio.exp()
    sums = [
        keep,
        (bounded < low) & (advantages < 0) & keep,
        (bounded > high) & (advantages > 0) & keep,
        ratio - 1 - log_ratio,
        ratio * keep,
        torch.zeros_like(ratio) if entropy is None else entropy.detach().masked_fill(~keep, 0.0),
    ]
    return torch.stack([values.sum().float() for values in sums])


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
        self._added: list[tuple[str, Tensor]] = []  # on the device until `facts`
        self._divergence, self._device = divergence, device
        self._norms: dict[str, list[float]] = defaultdict(list)
        self._masked, self._skipped = masked, 0

    def add(self, component: str, sums: Tensor, base_kl: Tensor | None) -> None:
        """Add the diagnostics of a component's samples in a micro-batch, without waiting for the device.

        Args:
            component: the component.
            sums: sums over its tokens, by `diagnostic_sums`.
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
        import torch

        names = sorted({s.component for s in self._samples})
        sums = {name: [0.0] * (len(SUMS) + 1) for name in names}
        # all are read from the device at once
        rows = torch.stack([row for _, row in self._added]).tolist() if self._added else []
        for (component, _), row in zip(self._added, rows, strict=True):
            sums[component] = [a + b for a, b in zip(sums[component], row, strict=True)]
        reduced = all_reduce_rows([sums[name] for name in names], self._device)
        return {
            "left_out": self._left_out,
            "masked": self._masked,
            "skipped_updates": self._skipped,
            "norms": {name: fmean(some) for name, some in self._norms.items()},
            "components": {
                name: self._component(name, row) for name, row in zip(names, reduced, strict=True)
            },
        }

    def _component(self, name: str, sums: Sequence[float]) -> dict[str, float]:
        """Return the metrics of a component from its sums over tokens."""
        own = [s for s in self._samples if s.component == name]
        means = [value / max(sums[0], 1.0) for value in sums[1:]]
        metrics: dict[str, float] = {"samples": len(own), "tokens": sum(s.length for s in own)}
        metrics |= dict(zip((*SUMS[1:], "base_kl"), means, strict=True))
        if not self._divergence:
            del metrics["base_kl"]
        return {name: value for name, value in metrics.items() if math.isfinite(value)}
