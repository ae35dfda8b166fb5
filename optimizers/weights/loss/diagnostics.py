"""Diagnostics of a policy update: clip fractions, and divergence from the sampling policy."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from compound.optimizers.weights.loss.losses import Level, LossSettings, at_level, variant_of

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Diagnostics:
    """Sums over the tokens of a micro-batch; ``+`` adds micro-batches.

    Attributes:
        tokens: the number of tokens.
        low: the number of tokens with a negative advantage and a ratio below the lower clipping bound.
        high: the number of tokens with a positive advantage and a ratio above the upper clipping bound.
        kl: the sum of the estimates of KL(old policy, policy), ratio - 1 - log ratio.
        ratio: the sum of the probability ratios.
        entropy: the sum of the entropies; 0 if none were given.
    """

    tokens: float = 0.0
    low: float = 0.0
    high: float = 0.0
    kl: float = 0.0
    ratio: float = 0.0
    entropy: float = 0.0

    def __add__(self, other: Diagnostics) -> Diagnostics:
        return Diagnostics(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def means(self) -> dict[str, float]:
        """Return the means over tokens, by name; 0 without tokens."""
        return {f.name: getattr(self, f.name) / max(self.tokens, 1.0) for f in fields(self)[1:]}


def diagnose(
    variant: str,
    logps: Tensor,
    old: Tensor | None,
    advantages: Tensor | None,
    mask: Tensor,
    settings: LossSettings | None = None,
    *,
    level: Level | None = None,
    entropy: Tensor | None = None,
) -> Diagnostics:
    """Return the diagnostics of a micro-batch; the arguments are those of `losses.per_token_loss`.

    This waits for the device; `diagnostic_sums` does not.

    Example:
        >>> import torch
        >>> logps, old = torch.tensor([[-1.0, -2.0]]), torch.tensor([[-1.0, -3.0]])
        >>> found = diagnose("grpo", logps, old, torch.tensor([1.0]), torch.ones(1, 2))
        >>> {name: round(value, 3) for name, value in found.means().items()}
        {'low': 0.0, 'high': 0.5, 'kl': 0.359, 'ratio': 1.859, 'entropy': 0.0}
    """
    sums = diagnostic_sums(variant, logps, old, advantages, mask, settings, level=level, entropy=entropy)
    return Diagnostics(*sums.tolist())


def diagnostic_sums(
    variant: str,
    logps: Tensor,
    old: Tensor | None,
    advantages: Tensor | None,
    mask: Tensor,
    settings: LossSettings | None = None,
    *,
    level: Level | None = None,
    entropy: Tensor | None = None,
) -> Tensor:
    """Return the sums of `Diagnostics` in their order, (6,), on the device; the arguments are as above."""
    import torch

    chosen, keep = variant_of(variant), mask.bool()
    low, high = (settings if settings is not None else chosen.settings()).bounds
    current = logps.detach()
    log_ratio = (current - (current if old is None else old)).masked_fill(~keep, 0.0)
    bounded = at_level(log_ratio, keep, level or chosen.level).exp()
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
