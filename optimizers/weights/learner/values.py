"""Critic of PPO: one value head for all components, on the hidden states of the policy or of its own adapter.

Without an adapter, the head is a linear probe: the policy's states are detached, so that learning values does
not change the policy. With one, the critic is as large as the policy: an adapter on the same frozen base,
which only the value loss trains. The head initially returns 0.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from compound.graph.space import LoRA, Weights
from compound.settings.base import Settings

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class CriticAdapterSettings(Settings):
    """Adapter of the critic on the frozen base model."""

    rank: int = Field(default=8, ge=1)
    """Rank of the adapter, which adapts all linear layers."""
    lr: float = Field(default=1e-4, gt=0)
    """Learning rate of the adapter; that of the value head is `critic.lr`."""


class CriticSettings(Settings):
    """The value head, and the estimation of advantages from its values."""

    adapter: CriticAdapterSettings | None = None
    """An adapter for the critic. By default, the value head reads the states of the policy (a linear probe);
    with an adapter, it reads those of the base model with the critic's adapter. This takes a second pass over
    the samples of each update."""
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

    @property
    def space(self) -> Weights | None:
        """The shape of the critic's adapter; ``None`` for a linear probe."""
        return None if self.adapter is None else LoRA(rank=self.adapter.rank)


def value_head(width: int) -> torch.nn.Sequential:
    """Return a head that maps states (…, width) to values (…, 1), initially 0."""
    import torch

    head = torch.nn.Sequential(torch.nn.LayerNorm(width), torch.nn.Linear(width, 1))
    torch.nn.init.zeros_(head[1].weight)
    torch.nn.init.zeros_(head[1].bias)
    return head


def values(head: torch.nn.Module, states: Tensor) -> Tensor:
    """Return the value before each token, (samples, tokens), from states (samples, tokens, width)."""
    return head(states.float())[..., 0]
