"""Log-probabilities of given tokens, without keeping a row of the vocabulary for each of them.

What the output layer returns for a token is as long as the vocabulary. Chunks of tokens are taken through it
one after the other, and again in the backward pass, so that memory holds one chunk.
"""

from __future__ import annotations

from typing import Any

CHUNK = 32_000_000  # numbers that a chunk of logits may hold


def token_logps(hidden: Any, layer: Any, targets: Any, bonus: bool = False) -> tuple[Any, Any]:
    """Return log-probabilities (nats) of ``targets`` (n,) and the entropies there, from states (n, width).

    Args:
        hidden: the final states before each target.
        layer: the model's output layer.
        targets: token ids.
        bonus: whether the entropies have a gradient.
    """
    import torch
    from torch.utils.checkpoint import checkpoint

    rows = max(1, CHUNK // layer.weight.shape[0])
    if len(targets) <= rows:
        return _chunk(hidden, layer, targets, bonus)
    parts = [
        checkpoint(_chunk, hidden[i : i + rows], layer, targets[i : i + rows], bonus, use_reentrant=False)
        for i in range(0, len(targets), rows)
    ]
    return torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])


def _chunk(hidden: Any, layer: Any, targets: Any, bonus: bool) -> tuple[Any, Any]:
    import torch

    logits = layer(hidden).float()
    norm = logits.logsumexp(-1)
    logps = logits.gather(-1, targets[:, None])[:, 0] - norm
    with torch.set_grad_enabled(bonus and torch.is_grad_enabled()):
        entropies = norm - ((logits - norm[:, None]).exp() * logits).sum(-1)  # H = log Z - Σ p z
    return logps, entropies
