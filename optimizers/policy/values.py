"""A value head for PPO: one critic for all components, which reads the policy's own states.

It reads them without gradient, so that learning values does not move the policy, and begins by saying 0.
"""

from __future__ import annotations

from typing import Any


def value_head(width: int) -> Any:
    """Return a head from states (…, width) to values (…, 1)."""
    import torch

    head = torch.nn.Sequential(torch.nn.LayerNorm(width), torch.nn.Linear(width, 1))
    torch.nn.init.zeros_(head[1].weight)
    torch.nn.init.zeros_(head[1].bias)
    return head


def values(head: Any, states: Any) -> Any:
    """Return the value before each token: (samples, tokens)."""
    return head(states.detach().float())[..., 0]
