"""Critic of the trainer: the value head, and the critic's own adapter if there is one.

Neither belongs to the adapters that are saved for sampling: their weights are stored with the optimizer
states.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from compound.optimizers.weights.learner.adapters import CRITIC, Adapters
from compound.optimizers.weights.learner.updates import Rate, Updater
from compound.optimizers.weights.learner.values import CriticSettings, value_head, values

if TYPE_CHECKING:
    from torch import Tensor

VALUE, HEAD = "|value", "|head:"  # prefixes of the value head's optimizer state and weights
ADAPTER = "|critic-weights:"  # prefix of the weights of the critic's adapter


class Critic:
    """Value head for all components, on the states of the policy or of an adapter of its own.

    Args:
        settings: the settings of the critic.
        adapters: the base model; with an adapter named `CRITIC` if the settings have one.
    """

    def __init__(self, settings: CriticSettings, adapters: Adapters) -> None:
        self.settings = settings
        self.has_adapter = settings.adapter is not None
        self.head = value_head(adapters.base.config.hidden_size).to(adapters.device)
        self._weights = dict(adapters.parameters(CRITIC)) if self.has_adapter else {}

    def updaters(self, max_norm: float, max_skipped: int, section: str) -> dict[str, Updater]:
        """Return the updaters of the head and of the adapter, by the name of their optimizer state."""
        named, rate = list(self.head.named_parameters()), Rate(self.settings.lr)
        found = {VALUE: Updater(named, rate, max_norm, "the value head", max_skipped, section)}
        if self.settings.adapter is not None:
            own, rate = list(self._weights.items()), Rate(self.settings.adapter.lr)
            found[CRITIC] = Updater(own, rate, max_norm, "the critic's adapter", max_skipped, section)
        return found

    def estimates(self, states: Tensor) -> Tensor:
        """Return the value before each token; only the critic's own states have a gradient."""
        return values(self.head, states if self.has_adapter else states.detach())

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
        head = {key.removeprefix(HEAD): tensor for key, tensor in state.items() if key.startswith(HEAD)}
        self.head.load_state_dict(head)
        for key, tensor in self._weights.items():
            tensor.data.copy_(state[f"{ADAPTER}{key}"])
