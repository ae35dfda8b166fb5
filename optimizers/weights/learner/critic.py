"""Critic of PPO: one value head for all components, on the hidden states of the policy or of its own adapter.

Without an adapter, the head is a linear probe: the policy's states are detached, so that learning
values does not change the policy. With one, the critic is as large as the policy: an adapter on the
same frozen base, which only the value loss trains. The head initially returns 0.

Neither belongs to the adapters that are saved for sampling: their weights are stored with the
optimizer states.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from pydantic import Field

from compound.graph.space import LoRA, Weights
from compound.optimization.settings.base import Settings
from compound.optimizers.weights.learner.adapters import CRITIC, Adapters
from compound.optimizers.weights.learner.updates import OptimizerSettings, Rate, Updater

if TYPE_CHECKING:
    import torch
    from torch import Tensor

VALUE, HEAD = "|value", "|head:"  # prefixes of the value head's optimizer state and weights
ADAPTER = "|critic-weights:"  # prefix of the weights of the critic's adapter


class CriticAdapterSettings(Settings):
    """Adapter of the critic on the frozen base model."""

    rank: int = Field(default=8, ge=1)
    """Rank of the adapter, which adapts all linear layers."""
    lr: float = Field(default=1e-4, gt=0)
    """Learning rate of the adapter; that of the value head is `critic.lr`."""


class CriticSettings(Settings):
    """The value head, and the estimation of advantages from its values."""

    adapter: CriticAdapterSettings | None = None
    """An adapter for the critic. With `null`, the value head reads the states of the policy (a linear probe);
    with an adapter, it reads those of the base model with the critic's adapter. This takes a second pass over
    the samples of each update."""
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

    @property
    def space(self) -> Weights | None:
        """The shape of the critic's adapter; ``None`` for a linear probe."""
        return None if self.adapter is None else LoRA(rank=self.adapter.rank)


class ValueCritic:
    """Value head for all components, on the states of the policy or of an adapter of its own."""

    def __init__(self, settings: CriticSettings, adapters: Adapters) -> None:
        self.settings = settings
        self.has_adapter = settings.adapter is not None
        self.head = value_head(adapters.base.config.hidden_size).to(adapters.device)
        self._weights = dict(adapters.parameters(CRITIC)) if self.has_adapter else {}

    def updaters(self, optimizer: OptimizerSettings, section: str) -> dict[str, Updater]:
        """Return the updaters of the head and of the adapter, by the name of their optimizer state."""
        named, rate = list(self.head.named_parameters()), Rate(self.settings.lr)
        found = {VALUE: Updater(named, rate, optimizer, "the value head", section)}
        if self.settings.adapter is not None:
            own, rate = list(self._weights.items()), Rate(self.settings.adapter.lr)
            found[CRITIC] = Updater(own, rate, optimizer, "the critic's adapter", section)
        return found

    def estimates(self, states: Tensor) -> Tensor:
        """Return the value before each token; only the critic's own states have a gradient."""
        return self.head((states if self.has_adapter else states.detach()).float())[..., 0]

    def state(self) -> dict[str, Tensor]:
        """Return all weights by name, to be stored with the optimizer states."""
        head = {f"{HEAD}{key}": tensor for key, tensor in self.head.state_dict().items()}
        own = {f"{ADAPTER}{key}": tensor for key, tensor in self._weights.items()}
        return {key: tensor.detach().cpu().clone() for key, tensor in {**head, **own}.items()}

    def fits(self, state: Mapping[str, Tensor]) -> bool:
        """Return whether stored weights are those of a critic of this kind and size."""
        own = {key: tensor.shape for key, tensor in self.state().items()}
        stored = {key: t.shape for key, t in state.items() if key.startswith((HEAD, ADAPTER))}
        return own == stored

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Restore the weights that `state` returned."""
        head = {
            key.removeprefix(HEAD): tensor for key, tensor in state.items() if key.startswith(HEAD)
        }
        self.head.load_state_dict(head)
        for key, tensor in self._weights.items():
            tensor.data.copy_(state[f"{ADAPTER}{key}"])


def value_head(width: int) -> torch.nn.Sequential:
    """Return a head that maps states (…, width) to values (…, 1), initially 0."""
    import torch

    head = torch.nn.Sequential(torch.nn.LayerNorm(width), torch.nn.Linear(width, 1))
    torch.nn.init.zeros_(head[1].weight)
    torch.nn.init.zeros_(head[1].bias)
    return head
