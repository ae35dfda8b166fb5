"""The local reward model: one backbone, and one head per component with its held-out accuracy.

A checkpoint is a folder with ``heads.safetensors``, ``card.json`` (template, components,
accuracies, data digest) and, if the backbone was trained, its LoRA adapter.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NotRequired

import numpy as np
from numpy.typing import NDArray
from pydantic import FiniteFloat, NonNegativeInt, TypeAdapter
from typing_extensions import TypedDict  # pydantic requires it before Python 3.12

from compound.core.errors import ConfigurationError, DeclarationError, MissingExtra, suggest_name
from compound.core.example import CallValues, Values
from compound.core.security.limits import ARTIFACT
from compound.core.security.untrusted import UntrustedFolder
from compound.core.storage.artifacts import store_folder
from compound.core.storage.records import Damaged, read_document, to_document
from compound.core.storage.state import validated
from compound.engines.local.devices import Placement
from compound.graph.configuration import to_readable_values
from compound.graph.types import quote_names
from compound.optimization.runs.directory import write_atomically
from compound.rewards.alignment import Accuracy, Evidence
from compound.rewards.features import TEMPLATE, Embedder, FeatureMap, NoBackbone
from compound.rewards.heads import Head

Vector = NDArray[np.float64]
ScoreCalls = Callable[
    [str, Sequence[CallValues]], Vector
]  # scores calls of a component, higher is better
FORMAT = 1
NONE = "none"  # name of the backbone that reads no text
CARD, HEADS = "card.json", "heads.safetensors"


@dataclass(frozen=True)
class LocalReward:
    """Reward function ``r_k = h_k ∘ φ`` of a component, with its held-out accuracy."""

    features: FeatureMap  # the component's feature map
    head: Head  # the linear head on these features
    # calibration; `σ(slope · (r(y) - r(y')))` is the probability that y leads to a higher global
    # reward than y'
    slope: float
    accuracy: Accuracy  # the ranking accuracy on held-out inputs
    # the held-out margins behind the accuracy, for figures
    margins: Vector = field(default_factory=lambda: np.zeros(0))
    inputs: tuple[str, ...] = ()  # the names of the component's inputs in training
    # the inputs ordered right and wrong by rewards that did not depend on them; `None` if that
    # was not tested. It is not stored
    evidence: Evidence | None = None


@dataclass
class RewardModel:
    """Local rewards of the calls (x, y) of a system's components."""

    name: str  # the name of the backbone, or `none`
    backbone: Embedder  # embeds texts as vectors
    rewards_of: dict[str, LocalReward]  # the reward function of each component that has one
    data: str = ""  # the digest of the training pairs

    def rewards(self, component: str, calls: Sequence[CallValues]) -> Vector:
        """Return the local reward of each (inputs, outputs), in log odds of being better.

        Raises:
            DeclarationError: the component has no reward function.
        """
        if component not in self.rewards_of:
            raise DeclarationError(
                f"no local reward for component {component!r}",
                hint=suggest_name(component, self.rewards_of),
            )
        reward = self.rewards_of[component]
        template = reward.features.template
        readings = [
            template.read(to_readable_values(inputs), to_readable_values(outputs))
            for inputs, outputs in calls
        ]
        return reward.slope * reward.head.rewards(reward.features.matrix(readings, self.backbone))

    def save(self, folder: Path) -> None:
        """Write a checkpoint; the card is written last, so that a folder with a card is complete."""
        try:
            from safetensors.numpy import save
        except ImportError:
            raise MissingExtra("a reward checkpoint", "safetensors", "local") from None
        files = UntrustedFolder(folder).make()
        tensors = {
            f"{name}.{part}": np.ascontiguousarray(getattr(reward.head, part))
            for name, reward in self.rewards_of.items()
            for part in ("weights", "center", "scale")
        }
        tensors |= {
            f"{name}.margins": r.margins for name, r in self.rewards_of.items() if len(r.margins)
        }
        heads = save(tensors)
        files.write(HEADS, heads)
        self.backbone.save_adapter(folder / "adapter")
        files.write(CARD, to_document({**self.card(), "heads": hashlib.sha256(heads).hexdigest()}))

    def card(self) -> dict[str, object]:
        """Return the description of the model as JSON types."""
        return {
            "format": FORMAT,
            "template": TEMPLATE,
            "backbone": self.name,
            "adapter": self.backbone.adapter,
            "max_length": self.backbone.max_length,
            "data": self.data,
            "components": {
                name: {
                    "accuracy": reward.accuracy.to_json(),
                    "slope": reward.slope,
                    "inputs": list(reward.inputs),
                    "features": reward.features.to_json(),
                }
                for name, reward in self.rewards_of.items()
            },
        }


def load(folder: str | Path, *, backbone: Callable[[str], Embedder] | None = None) -> RewardModel:
    """Read a checkpoint; nothing in it is executed.

    Args:
        folder: a folder written by `RewardModel.save`.
        backbone: creates a backbone from its name; by default, `make_backbone`.

    Raises:
        ConfigurationError: the folder is not a reward checkpoint, or is damaged.
    """
    path = Path(folder)
    stored = read(path)
    embeds = (backbone or (lambda n: make_backbone(n, stored.max_length)))(stored.backbone)
    for name, reward in stored.rewards_of.items():
        if reward.features.dim != embeds.dim:
            raise ConfigurationError(
                f"{path} is a damaged reward checkpoint: the head {name!r} reads {reward.features.dim} "
                f"features of the backbone {stored.backbone!r}, which has {embeds.dim}"
            )
    if stored.adapter:
        UntrustedFolder(path / "adapter", error=ConfigurationError).check()
        embeds.load_adapter(path / "adapter", stored.adapter)  # type: ignore[attr-defined]  # only `Backbone`
    return RewardModel(stored.backbone, embeds, stored.rewards_of, stored.data)


@dataclass(frozen=True)
class Stored:
    """Contents of a checkpoint without the backbone, which is identified by its name and adapter."""

    backbone: str
    adapter: str
    max_length: int
    data: str
    rewards_of: dict[str, LocalReward]


def read(path: Path) -> Stored:
    """Read a checkpoint without loading its backbone.

    Raises:
        ConfigurationError: the folder is not a reward checkpoint, or is damaged.
    """
    try:
        from safetensors import SafetensorError
        from safetensors.numpy import load as load_tensors
    except ImportError:
        raise MissingExtra("a reward checkpoint", "safetensors", "local") from None

    files = UntrustedFolder(path, error=ConfigurationError)
    for name in (CARD, HEADS):
        if files.kind(name) is None:
            raise ConfigurationError(f"{path} is not a reward checkpoint: no {path / name}")
    try:
        found = read_document(files.read(CARD))
        versions = found.get("format"), found.get("template")
        if versions != (FORMAT, TEMPLATE):
            raise ConfigurationError(
                f"{path} has format {versions[0]} and template {versions[1]}, but this version reads "
                f"{FORMAT} and {TEMPLATE}"
            )
        card = validated(_CARD, found, "the card of a reward checkpoint")
        heads = files.read(HEADS, ARTIFACT)
        if card.get("heads", digest := hashlib.sha256(heads).hexdigest()) != digest:
            raise ConfigurationError(
                f"{path / HEADS} was changed: it does not match the digest in its card"
            )
        tensors = load_tensors(heads)
        rewards_of = {
            name: _reward(name, stored, tensors) for name, stored in card["components"].items()
        }
    except Damaged as error:
        raise ConfigurationError(
            f"{path} is a damaged reward checkpoint: {CARD}: {error}"
        ) from None
    except (ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
        if isinstance(error, ConfigurationError):
            raise
        raise ConfigurationError(f"{path} is a damaged reward checkpoint: {error!r:.200}") from None
    if card["adapter"] and card["backbone"] == NONE:
        raise ConfigurationError(
            f"{path} is a damaged reward checkpoint: it has an adapter, but no backbone"
        )
    names = card["backbone"], card["adapter"]
    return Stored(*names, card["max_length"], card["data"], rewards_of)


def make_backbone(name: str, max_length: int = 256, placement: Placement | None = None) -> Embedder:
    """Return a backbone by name, loaded where ``placement`` says; ``none`` reads no text."""
    if name == NONE:
        return NoBackbone()
    from compound.rewards.backbone import Backbone

    return Backbone(name, max_length=max_length, placement=placement)


class _StoredFeatures(TypedDict):
    component: str
    settings: list[str]
    label_fields: dict[str, list[str | int | float | bool | None]]
    numbers: list[str]
    labels: list[str]
    dim: NonNegativeInt
    description: str


class _StoredReward(TypedDict):
    accuracy: Accuracy
    slope: FiniteFloat
    inputs: NotRequired[list[str]]
    features: _StoredFeatures


class _Card(TypedDict):
    backbone: str
    adapter: str
    max_length: NonNegativeInt
    data: str
    components: dict[str, _StoredReward]
    heads: NotRequired[str]


_CARD = TypeAdapter(_Card)


def _reward(name: str, stored: _StoredReward, tensors: Mapping[str, Vector]) -> LocalReward:
    head = Head(*(np.asarray(tensors[f"{name}.{part}"]) for part in ("weights", "center", "scale")))
    parts, found = (head.weights, head.center, head.scale), stored["features"]
    labels = len(found["labels"])
    # counted without making the columns: a card may state any number of them
    columns = len(found["numbers"]) + labels + found["dim"] * max(1, labels)
    if any(part.shape != (columns,) for part in parts):
        raise ValueError(f"head {name!r} does not fit its feature map")
    if not all(np.isfinite(part).all() for part in parts) or not (head.scale > 0).all():
        raise ValueError(f"head {name!r} has numbers that are not finite, or scales of 0")
    margins = np.asarray(tensors.get(f"{name}.margins", np.zeros(0)))
    if margins.ndim != 1:
        raise ValueError(f"the margins of head {name!r} are not a list of numbers")
    accuracy, inputs = stored["accuracy"], tuple(stored.get("inputs", ()))
    return LocalReward(
        FeatureMap.from_json(found), head, stored["slope"], accuracy, margins, inputs
    )


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
        found = json.loads(config.read_text(encoding="utf-8"))
        found["base_model_name_or_path"] = backbone
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
        if not all(map(math.isfinite, found)):
            raise ConfigurationError(f"{self.path} computes rewards that are not finite")
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
