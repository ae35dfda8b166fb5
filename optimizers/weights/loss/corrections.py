"""Corrections for the sampler-trainer mismatch: different probabilities from the same weights.

An inference engine rounds and orders sums differently, so samples are slightly off-policy from the start.
Truncated importance weights, multiplied into the advantages, correct for this.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def importance_weights(trainer: Tensor, sampler: Tensor, mask: Tensor, *, cap: float = 2.0) -> Tensor:
    """Return truncated importance weights that correct the sampler-trainer mismatch.

    Args:
        trainer: the trainer's log-probabilities under the sampling weights, (B, T).
        sampler: the sampler's log-probabilities, (B, T).
        mask: 1 for sampled tokens, 0 for padding.
        cap: the maximum weight.

    Returns:
        min(exp(trainer - sampler), cap), (B, T), without gradient; 1 in the padding. All losses are linear in
        the magnitude of the advantage, so weights on advantages equal weights on the loss of tokens.
    """
    difference = (trainer - sampler).detach().masked_fill(~mask.bool(), 0.0)
    return difference.exp().clamp(max=cap)
