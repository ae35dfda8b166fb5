"""A component's local reward as its value: it chooses the best of the options for each input (OPTIMAS).

What is stored is a reward checkpoint of one component (`compound.rewards.model`), named by its content.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol, TypeGuard, runtime_checkable

import numpy as np

from compound.errors import ConfigurationError, nearest
from compound.example import CallValues, Values
from compound.graph.types import names
from compound.rewards.feature_store import FeatureStore
from compound.rewards.features import Embeds
from compound.rewards.model import LocalReward, RewardModel, load, make_backbone, read
from compound.runs.directory import write_atomically
from compound.storage.artifacts import put

KEPT = 20_000  # texts whose features are kept in memory
AGAIN = "optimize again with method optimas, or bind one of the options"


def freeze(model: RewardModel, component: str, folder: Path) -> dict[str, str]:
    """Store one component's reward in ``folder``; return a reference whose path is relative to it."""
    reward = replace(model.rewards_of[component], margins=np.zeros(0))
    only = RewardModel(model.name, model.backbone, {component: reward}, model.data)

    def write(made: Path) -> None:
        only.save(made)
        _tidy(made / "adapter", model.name)

    return put(write, folder, component)


def _tidy(adapter: Path, backbone: str) -> None:
    """Make equal adapters equal files: peft writes sets in any order, and where the base lay."""
    config = adapter / "adapter_config.json"
    if config.exists():
        (adapter / "README.md").unlink(missing_ok=True)
        found = {**json.loads(config.read_text(encoding="utf-8")), "base_model_name_or_path": backbone}
        found = {k: sorted(v) if _is_texts(v) else v for k, v in found.items()}
        write_atomically(config, json.dumps(found, indent=1, sort_keys=True) + "\n")


def _is_texts(value: object) -> TypeGuard[list[str]]:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


@runtime_checkable
class _Storing(Protocol):
    """A backbone that keeps features."""

    store: FeatureStore


@dataclass(frozen=True)
class StoredPolicy:
    """A stored reward that scores the options of a call; implements `compound.registry.policies.Policy`."""

    path: Path
    model: RewardModel

    def scores(self, component: str, calls: Sequence[CallValues]) -> list[float]:
        """Return the local reward of each (inputs, outputs).

        Raises:
            ConfigurationError: the reward is another component's, or of other inputs or options.
        """
        if component not in self.model.rewards_of:
            raise ConfigurationError(
                f"{self.path} holds no reward for component {component!r}",
                hint=nearest(component, self.model.rewards_of),
            )
        reward = self.model.rewards_of[component]
        for inputs, outputs in calls:
            self._check(component, reward, inputs, outputs)
        found: list[float] = self.model.rewards(component, calls).tolist()
        self._forget()
        return found

    def _check(self, component: str, reward: LocalReward, inputs: Values, outputs: Values) -> None:
        unknown = sorted(set(inputs) - set(reward.inputs))
        if unknown:
            raise ConfigurationError(
                f"{self.path} is a reward of another system: {component!r} has the input {unknown[0]!r}, "
                f"but the reward was trained on calls with {names(reward.inputs)}",
                hint=AGAIN,
            )
        for name, options in reward.features.template.labels.items():
            if outputs.get(name) not in options:
                raise ConfigurationError(
                    f"{self.path} is a reward for other options: {component!r} may choose "
                    f"{outputs.get(name)!r}, but the reward knows {names(map(str, options))}",
                    hint=AGAIN,
                )

    def _forget(self) -> None:
        """Drop features from memory before a server that runs for months holds too many."""
        backbone = self.model.backbone
        if isinstance(backbone, _Storing) and len(backbone.store) > KEPT:
            backbone.store = FeatureStore(None, backbone.dim)


def load_policy(path: Path) -> StoredPolicy:
    """Read a checkpoint written by `freeze`; nothing in it is executed.

    Raises:
        ConfigurationError: it is no such folder, or is damaged.
    """
    stored = read(path)
    make = make_backbone if stored.adapter else _shared_backbone
    return StoredPolicy(path, load(path, backbone=lambda name: make(name, stored.max_length)))


@functools.lru_cache(maxsize=2)
def _shared_backbone(name: str, max_length: int) -> Embeds:
    """Return a backbone of fixed features, apart from the one that rewards are learned with."""
    return make_backbone(name, max_length)
