"""Corrections for a sampler that computes other probabilities than the trainer with the same weights.

An inference engine rounds and orders its sums differently, so that samples are slightly off-policy from the
start. Truncated importance weights make up for it, and are folded into the advantages.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from compound.optimizers.weights.loss.losses import Level

if TYPE_CHECKING:
    from torch import Tensor


def importance_weights(
    trainer: Tensor, sampler: Tensor, mask: Tensor, *, level: Level = "token", cap: float = 2.0
) -> Tensor:
    """Return truncated weights for what sampler and trainer make of the same weights differently.

    Args:
        trainer: the trainer's log-probabilities with the weights that sampled, (B, T).
        sampler: the sampler's own.
        mask: 1 for sampled tokens, 0 for padding.
        level: a weight for each token, (B, T), or one for the sample, the product of its tokens', (B, 1).
        cap: the largest weight.

    Returns:
        min(exp(trainer - sampler), cap), without gradient; 1 in the padding.
    """
    difference = (trainer - sampler).detach().masked_fill(~mask.bool(), 0.0)
    if level == "sequence":
        difference = difference.sum(-1, keepdim=True)
    return difference.exp().clamp(max=cap)


def corrected(
    advantages: Tensor,
    trainer: Tensor,
    sampler: Tensor,
    mask: Tensor,
    *,
    level: Level = "token",
    cap: float = 2.0,
) -> Tensor:
    """Return advantages, (B, T), with `importance_weights` folded in.

    Every loss here but VESPO's is linear in the size of the advantage, so that this equals weighing its
    per-token loss. For VESPO give the sampler's log-probabilities as ``old``: they enter its ratio.

    >>> import torch
    >>> trainer, sampler = torch.tensor([[-1.0, -1.0]]), torch.tensor([[-1.0, -3.0]])
    >>> corrected(torch.tensor([0.5]), trainer, sampler, torch.ones(1, 2))
    tensor([[0.5000, 1.0000]])
    """
    if advantages.dim() == 1:
        advantages = advantages.unsqueeze(1)
    weights = importance_weights(trainer, sampler, mask, level=level, cap=cap)
    return (advantages * weights).expand(mask.shape)
