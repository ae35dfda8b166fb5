"""Settings of local rewards: preference pairs, backbone and reward model."""

from __future__ import annotations

from dataclasses import dataclass, field

from pydantic import Field

from compound.engines.local.devices import Attention, DeviceName, DType, Placement
from compound.optimization.settings.base import BackboneName, FeedbackFolder, Settings
from compound.rewards.candidates import Sampling


class BackboneSettings(Settings):
    """The model that embeds texts as features."""

    model: BackboneName = "minilm"
    """`minilm`, `smollm2`, a folder or hub id; with `none`, features are numbers, labels, and lengths and
    overlaps of texts."""
    max_length: int = Field(default=256, ge=8)
    """Maximum number of tokens that the backbone reads of a call (2048 in the paper)."""
    device: DeviceName = "auto"
    """`auto` (CUDA if available, else the CPU), `cpu`, `cuda`, `cuda:1`, `xpu` or `mps`."""
    dtype: DType = "auto"
    """Number format of the weights; `auto` selects the fastest one of the device."""
    attn_implementation: Attention = "auto"
    """Attention kernels: `eager`, `sdpa`, or `flash_attention_2`, which needs CUDA and flash-attn; `auto`
    leaves the choice to transformers."""

    @property
    def placement(self) -> Placement:
        """Device, number format and attention kernels of the backbone."""
        return Placement(self.device, self.dtype, self.attn_implementation)


class PairSettings(Settings):
    """Collection of preference pairs."""

    inputs: int = Field(default=20, ge=1)
    """Maximum number of inputs in the offline phase."""
    samples: int = Field(default=3, ge=1)
    """Additional outputs to draw for each input."""
    min_rollouts: int = Field(default=2, ge=1)
    """Minimum number of runs of the downstream components for each output; one if they are deterministic."""
    max_rollouts: int = Field(default=4, ge=1)
    """Number of such runs after which two outputs are compared; fewer if no further runs could make their
    order significant."""
    feedback: FeedbackFolder | None = None
    """A folder of feedback from `compound serve`, relative to the file. Ratings of runs with equal inputs
    give further pairs at no cost; they are copied into the run when it starts."""
    level: float = Field(default=0.1, gt=0, le=1)
    """Significance level of the order of two outputs, if downstream components are random: the maximum
    probability that two equally good outputs make a pair. 1 accepts any difference, even of one run each."""

    @property
    def sampling(self) -> Sampling:
        """The counts for `compound.rewards.pairs.collect`."""
        most = max(self.min_rollouts, self.max_rollouts)
        return Sampling(self.samples, self.min_rollouts, most, self.level)


class BackboneLoRASettings(Settings):
    """Training of a LoRA adapter on the backbone."""

    rank: int = Field(default=16, ge=1)
    """The rank of the adapter (32 in the paper)."""
    alpha: int = Field(default=32, ge=1)
    """The scaling factor of the adapter (16 in the paper)."""
    lr: float = Field(default=5e-4, gt=0)
    """The learning rate (2e-6 in the paper, for an 8B model)."""
    epochs: int = Field(default=25, ge=1)
    """Maximum number of epochs."""
    batch: int = Field(default=32, ge=1)
    """Pairs per training step."""
    patience: int = Field(default=512, ge=1)
    """Training steps without a lower held-out loss before training stops."""
    gradient_checkpointing: bool = False
    """Recompute the activations of each layer in the backward pass, instead of storing them."""


class RewardSettings(Settings):
    """Fitting and use of the reward model."""

    lora: BackboneLoRASettings | None = None
    """Train a LoRA adapter on the backbone; `{}` uses the defaults. Without it, features are fixed and
    cached."""
    trust_level: float = Field(default=0.05, gt=0, le=1)
    """Weights are trained by a local reward only if it orders the outputs of most inputs correctly, with this
    probability of an error: the exact lower limit of the share of such inputs exceeds one half. Otherwise the
    global reward is used. 1 trains by any local reward."""
    min_accuracy: float = Field(default=0.6, ge=0.5, le=1)
    """Minimum held-out ranking accuracy for training weights by a local reward, besides `trust_level`."""
    sufficient_accuracy: float = Field(default=0.9, ge=0.5)
    """The offline phase collects no more pairs of a component if the lower 95 % limit of its accuracy reaches
    this."""


@dataclass(frozen=True)
class RewardLearning:
    """Settings for collecting pairs and fitting rewards."""

    pairs: PairSettings = field(default_factory=PairSettings)
    backbone: BackboneSettings = field(default_factory=BackboneSettings)
    reward: RewardSettings = field(default_factory=RewardSettings)

    @property
    def requires(self) -> tuple[str, ...]:
        """Modules of the optional libraries that rewards are learned with."""
        embeds = self.backbone.model != "none"
        trained = embeds and self.reward.lora is not None
        return ("sklearn", *(("torch", "transformers") * embeds), *(("peft",) * trained))
