"""Value head for PPO: one critic for all components, on top of the policy's hidden states.

The states are detached, so that learning values does not change the policy. The head initially returns 0.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from compound.settings.base import Settings

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class CriticSettings(Settings):
    """The value head, and the estimation of advantages from its values."""

    gamma: float = Field(default=1.0, ge=0, le=1)
    """Discount factor per token."""
    lam: float = Field(default=0.95, ge=0, le=1)
    """The λ of generalized advantage estimation."""
    lr: float = Field(default=1e-3, gt=0)
    """Learning rate of the value head."""
    clip: float | None = Field(default=0.2, gt=0)
    """Clipping range of value updates: how far a value may move in a step; `null` disables clipping."""
    kl_reward: float = Field(default=0.0, ge=0)
    """Coefficient of the KL penalty in the per-token reward: the log-ratio of the policy to the base model,
    adapter off (TRL's PPO used 0.05). The `beta` of a loss adds a KL term to the loss instead."""


def value_head(width: int) -> torch.nn.Sequential:
    """Return a head that maps states (…, width) to values (…, 1), initially 0."""
    import torch

    head = torch.nn.Sequential(torch.nn.LayerNorm(width), torch.nn.Linear(width, 1))
    torch.nn.init.zeros_(head[1].weight)
    torch.nn.init.zeros_(head[1].bias)
    return head


def values(head: torch.nn.Module, states: Tensor) -> Tensor:
    """Return the value before each token, (samples, tokens), from states (samples, tokens, width)."""
    return head(states.detach().float())[..., 0]
