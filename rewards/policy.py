"""Use a component's local reward as its value, to choose the best option for each input (OPTIMAS).

The stored value is a reward checkpoint of one component (`compound.rewards.model`), addressed by
its content.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from compound.core.errors import ConfigurationError, suggest_name
from compound.core.example import CallValues, Values
from compound.core.storage.artifacts import store_folder
from compound.graph.types import quote_names
from compound.optimization.runs.directory import write_atomically
from compound.rewards.features import Embedder
from compound.rewards.model import LocalReward, RewardModel, load, make_backbone, read

KEPT = 20_000  # maximum number of texts with features in memory
AGAIN = "optimize again with method optimas, or bind one of the options"


def store_reward(model: RewardModel, component: str, folder: Path) -> dict[str, str]:
    """Store a component's reward in ``folder``, and return a reference with a path relative to it."""
    reward = replace(model.rewards_of[component], margins=np.zeros(0))
    only = RewardModel(model.name, model.backbone, {component: reward}, model.data)

    def write(target: Path) -> None:
        only.save(target)
        _normalize(target / "adapter", model.name)

    return store_folder(write, folder, component)


def _normalize(adapter: Path, backbone: str) -> None:
    """Make the files of equal adapters equal: peft writes sets in any order, and the path of the base."""
    config = adapter / "adapter_config.json"
    if config.exists():
        (adapter / "README.md").unlink(missing_ok=True)
        found = {
            **json.loads(config.read_text(encoding="utf-8")),
            "base_model_name_or_path": backbone,
        }
        for name, value in found.items():
            if isinstance(value, list) and all(isinstance(item, str) for item in value):
                found[name] = sorted(value)
        write_atomically(config, json.dumps(found, indent=1, sort_keys=True) + "\n")


@dataclass(frozen=True)
class StoredPolicy:
    """A stored reward that scores the options of a call; see `compound.graph.registry.plugins`."""

    path: Path
    model: RewardModel

    def scores(self, component: str, calls: Sequence[CallValues]) -> list[float]:
        """Return the local reward of each (inputs, outputs).

        Raises:
            ConfigurationError: the reward belongs to another component, or to other inputs or
                options.
        """
        if component not in self.model.rewards_of:
            raise ConfigurationError(
                f"{self.path} has no reward for component {component!r}",
                hint=suggest_name(component, self.model.rewards_of),
            )
        reward = self.model.rewards_of[component]
        for inputs, outputs in calls:
            self._check(component, reward, inputs, outputs)
        found: list[float] = self.model.rewards(component, calls).tolist()
        self.model.backbone.limit_features(KEPT)  # bounds the memory of a server
        return found

    def _check(self, component: str, reward: LocalReward, inputs: Values, outputs: Values) -> None:
        unknown = sorted(set(inputs) - set(reward.inputs))
        if unknown:
            raise ConfigurationError(
                f"{self.path} is a reward for another system: {component!r} has the input {unknown[0]!r}, "
                f"but the reward was trained on calls with {quote_names(reward.inputs)}",
                hint=AGAIN,
            )
        for name, options in reward.features.template.labels.items():
            if outputs.get(name) not in options:
                raise ConfigurationError(
                    f"{self.path} is a reward for other options: {component!r} may choose "
                    f"{outputs.get(name)!r}, but the reward was trained on {quote_names(map(str, options))}",
                    hint=AGAIN,
                )


def load_policy(path: Path) -> StoredPolicy:
    """Read a checkpoint written by `store_reward`; nothing in it is executed.

    Raises:
        ConfigurationError: the folder is not a reward checkpoint, or is damaged.
    """
    stored = read(path)
    make = make_backbone if stored.adapter else _shared_backbone
    return StoredPolicy(path, load(path, backbone=lambda name: make(name, stored.max_length)))


@functools.lru_cache(maxsize=2)
def _shared_backbone(name: str, max_length: int) -> Embedder:
    """Return a backbone of fixed features, separate from the one used for training rewards."""
    return make_backbone(name, max_length)
