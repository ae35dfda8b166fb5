"""Corrections for the sampler-trainer mismatch: different probabilities from the same weights.

An inference engine rounds and orders sums differently, so samples are slightly off-policy from the start.
Truncated importance weights, multiplied into the advantages, correct for this.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from compound.optimizers.weights.loss.losses import Level

if TYPE_CHECKING:
    from torch import Tensor


def importance_weights(
    trainer: Tensor, sampler: Tensor, mask: Tensor, *, level: Level = "token", cap: float = 2.0
) -> Tensor:
    """Return truncated importance weights that correct the sampler-trainer mismatch.

    Args:
        trainer: the trainer's log-probabilities under the sampling weights, (B, T).
        sampler: the sampler's log-probabilities, (B, T).
        mask: 1 for sampled tokens, 0 for padding.
        level: ``token`` for a weight per token, (B, T); ``sequence`` for the product over the tokens of a
            sample, (B, 1).
        cap: the maximum weight.

    Returns:
        min(exp(trainer - sampler), cap), without gradient; 1 in the padding.
    """
    difference = (trainer - sampler).detach().masked_fill(~mask.bool(), 0.0)
    if level == "sequence":
        difference = difference.sum(-1, keepdim=True)
    return difference.exp().clamp(max=cap)


def correct_advantages(
    advantages: Tensor,
    trainer: Tensor,
    sampler: Tensor,
    mask: Tensor,
    *,
    level: Level = "token",
    cap: float = 2.0,
) -> Tensor:
    """Return advantages, (B, T), multiplied by `importance_weights`.

    All losses except VESPO are linear in the magnitude of the advantage, so this equals weighting the
    per-token loss. For VESPO, pass the sampler's log-probabilities as ``old``, which enter its ratio.

    >>> import torch
    >>> trainer, sampler = torch.tensor([[-1.0, -1.0]]), torch.tensor([[-1.0, -3.0]])
    >>> correct_advantages(torch.tensor([0.5]), trainer, sampler, torch.ones(1, 2))
    tensor([[0.5000, 1.0000]])
    """
    if advantages.dim() == 1:
        advantages = advantages.unsqueeze(1)
    weights = importance_weights(trainer, sampler, mask, level=level, cap=cap)
    return (advantages * weights).expand(mask.shape)
