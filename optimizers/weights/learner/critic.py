"""Critic of PPO: one value head for all components, a linear probe of the policy's hidden states.

The states are detached, so that learning values does not change the policy. The head initially
returns 0. Its weights are stored with the optimizer states.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from pydantic import Field

from compound.optimization.settings.base import Settings
from compound.optimizers.weights.learner.adapters import Adapters
from compound.optimizers.weights.learner.updates import OptimizerSettings, Rate, Updater

if TYPE_CHECKING:
    import torch
    from torch import Tensor

VALUE, HEAD = "|value", "|head:"  # prefixes of the value head's optimizer state and weights


class CriticSettings(Settings):
    """The value head, and the estimation of advantages from its values."""

    gamma: float = Field(default=1.0, ge=0, le=1)
    """Discount factor per token."""
    lam: float = Field(default=1.0, ge=0, le=1)
    """The λ of generalized advantage estimation. Below 1, early tokens of long answers get little of the
    reward, as long as the values are near 0: with 0.95, the first of 100 tokens gets 0.6 % of it."""
    lr: float = Field(default=1e-3, gt=0)
    """Learning rate of the value head."""
    clip: float | None = Field(default=0.2, gt=0)
    """Clipping range of value updates: how far a value may move in a step; `null` disables clipping."""
    kl_reward: float = Field(default=0.0, ge=0)
    """Coefficient of the KL penalty in the per-token reward: the log-ratio of the policy to the base model,
    adapter off (TRL's PPO used 0.05). The `beta` of a loss adds a KL term to the loss instead."""


class ValueCritic:
    """Value head for all components."""

    def __init__(self, settings: CriticSettings, adapters: Adapters) -> None:
        self.settings = settings
        self.head = value_head(adapters.base.config.hidden_size).to(adapters.device)

    def updater(self, optimizer: OptimizerSettings, section: str) -> Updater:
        """Return the updater of the head."""
        named, rate = list(self.head.named_parameters()), Rate(self.settings.lr)
        return Updater(named, rate, optimizer, "the value head", section)

    def estimates(self, states: Tensor) -> Tensor:
        """Return the value before each token; the states get no gradient."""
        return self.head(states.detach().float())[..., 0]

    def state(self) -> dict[str, Tensor]:
        """Return all weights by name, to be stored with the optimizer states."""
        found = self.head.state_dict().items()
        return {f"{HEAD}{key}": tensor.detach().cpu().clone() for key, tensor in found}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Restore the weights that `state` returned."""
        found = {key: tensor for key, tensor in state.items() if key.startswith(HEAD)}
        self.head.load_state_dict({key.removeprefix(HEAD): found[key] for key in found})


def value_head(width: int) -> torch.nn.Sequential:
    """Return a head that maps states (…, width) to values (…, 1), initially 0."""
    import torch

    head = torch.nn.Sequential(torch.nn.LayerNorm(width), torch.nn.Linear(width, 1))
    torch.nn.init.zeros_(head[1].weight)
    torch.nn.init.zeros_(head[1].bias)
    return head
