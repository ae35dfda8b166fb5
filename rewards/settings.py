"""Settings of local rewards: the preference pairs, the backbone that reads texts, and the reward model."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from pydantic import Field

from compound.rewards.pairs import Sampling
from compound.settings.base import Settings
from compound.settings.references import BackboneName


class BackboneSettings(Settings):
    """The model that turns texts into features."""

    model: BackboneName = "minilm"
    """`minilm`, `smollm2`, a folder or hub id; `none` reads numbers and labels only."""
    max_length: int = Field(default=256, ge=8)
    """Tokens the backbone reads of one call (2048 in the paper)."""


class PairSettings(Settings):
    """How preference pairs are collected."""

    inputs: int = Field(default=20, ge=1)
    """The most inputs of the offline phase."""
    samples: int = Field(default=3, ge=1)
    """Further outputs drawn for each input."""
    min_rollouts: int = Field(default=2, ge=1)
    """The fewest runs of the downstream components, for each output."""
    max_rollouts: int = Field(default=4, ge=1)
    """The most of them, where chance leaves the order open."""

    @property
    def sampling(self) -> Sampling:
        """The same as counts for `compound.rewards.pairs.collect`."""
        return Sampling(self.samples, self.min_rollouts, max(self.min_rollouts, self.max_rollouts))


class FreshPairSettings(PairSettings):
    """How preference pairs are collected, offline and in every later iteration."""

    fresh: int = Field(default=4, ge=0)
    """Fresh inputs of each later iteration, for the component to be optimized (20 in the paper)."""


class BackboneLoRASettings(Settings):
    """How a LoRA adapter is trained on the backbone."""

    rank: int = Field(default=16, ge=1)
    """The rank of the adapter (32 in the paper)."""
    alpha: int = Field(default=32, ge=1)
    """Its scale (16 in the paper)."""
    lr: float = Field(default=5e-4, gt=0)
    """The learning rate (2e-6 in the paper, for an 8B model)."""
    epochs: int = Field(default=25, ge=1)
    """The most passes over the pairs."""
    batch: int = Field(default=32, ge=1)
    """Pairs of one training step."""
    patience: int = Field(default=512, ge=1)
    """Training steps without a lower held-out loss before training stops."""


class RewardSettings(Settings):
    """How the reward model is fitted, and when it is used."""

    weighting: Literal["plain", "margin"] = "margin"
    """`margin` weighs pairs by how much the global reward differs, `plain` does not (the paper's equation 5):
    where scores are noisy, a small difference says little."""
    lora: BackboneLoRASettings | None = None
    """Trains a LoRA adapter on the backbone; `{}` takes the defaults. Without it, features are fixed and
    cached."""
    min_accuracy: float = Field(default=0.6, ge=0.5, le=1)
    """A local reward must order this share of held-out pairs correctly; otherwise its component is optimized
    by the global reward."""
    check_below: float = Field(default=0.9, ge=0.5)
    """Proposals of a local reward with an accuracy below this are checked by the global reward on train
    examples."""


@dataclass(frozen=True)
class RewardLearning:
    """All that collecting pairs and fitting rewards needs."""

    pairs: PairSettings = field(default_factory=PairSettings)
    backbone: BackboneSettings = field(default_factory=BackboneSettings)
    reward: RewardSettings = field(default_factory=RewardSettings)
