"""Protocol of the learners of training jobs, and the declaration that every learner is opened from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from compound.components.engines.local import loading
from compound.components.engines.local.devices import Placement
from compound.components.engines.local.out_of_memory import naming_settings
from compound.graph.space import Weights
from compound.optimizers.weights.learner.adapters import Adapters, FrozenModel, Load, check_same_tokens
from compound.optimizers.weights.learner.critic import CriticSettings
from compound.optimizers.weights.learner.samples import Sample, SamplingSettings
from compound.optimizers.weights.learner.saved import Saved
from compound.optimizers.weights.learner.trainer import Trainer
from compound.optimizers.weights.learner.updates import OptimizerSettings
from compound.optimizers.weights.loss.objective import ImitationObjective, Objective, PolicyObjective
from compound.settings.base import Settings
from compound.storage.artifacts import Reference

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LOWER = "set {section}.base.dtype to bfloat16, {section}.base.quantization to 4bit, or use a smaller model"


class Learner(Protocol):
    """Computes values and updates of weights for a training job, in this process or in others.

    The job samples, keeps budgets and decides; a learner only computes. `Trainer` is the learner of one
    process. All methods block until they are done.
    """

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer of the base model."""

    def start(self, references: Mapping[str, Reference | None], folder: Path) -> None:
        """Start from stored adapters; ``None`` keeps the initial weights, which equal the base model."""

    def restore(self, saved: Saved, folder: Path) -> None:
        """Restore adapters and optimizer states that `save` stored, by any learner."""

    def restore_optimizer(self, name: str, reference: Reference, folder: Path) -> None:
        """Restore the optimizer state of one adapter, or of the value head, from a checkpoint."""

    def step(self, samples: Sequence[Sample], number: int) -> dict[str, Any]:
        """Update every adapter that has samples, and return statistics as JSON."""

    def values(self, samples: Sequence[Sample]) -> list[Sample]:
        """Return the samples with the value head's estimate before each of their tokens."""

    def divergences(
        self, samples: Sequence[Sample], taught: Sequence[Sample] | None = None
    ) -> list[tuple[float, ...]]:
        """Return, per sampled token, the log-ratio of the policy to the base model or to the teacher."""

    def save(self, folder: Path) -> Saved:
        """Store adapters and optimizer states, and return their references, relative to ``folder``."""

    def write_adapter(self, name: str, folder: Path) -> None:
        """Write the current weights of an adapter to a folder, in peft's format."""

    def release_cache(self) -> None:
        """Return memory that is not in use to the device, so that other processes can use it."""

    def interrupt(self) -> None:
        """End a call that another thread waits for, if it can be ended; the learner must then be closed."""

    def close(self) -> None:
        """Release memory and end processes; the learner cannot be used afterwards."""


class AdapterShape(Settings):
    """Shape of an adapter, see `compound.graph.space.Weights`."""

    rank: int
    alpha: int
    targets: str | tuple[str, ...]

    @classmethod
    def of(cls, space: Weights) -> AdapterShape:
        """Return the shape of a space."""
        return cls(rank=space.rank, alpha=space.alpha, targets=space.targets)

    def space(self) -> Weights:
        """Return the space of adapters of this shape."""
        return Weights(rank=self.rank, alpha=self.alpha, targets=self.targets)


class LearnerSpec(Settings):
    """Declaration of a learner, as JSON if it is opened in another process."""

    model: str
    """The base model: `smollm2`, a folder, or a hub id."""
    shapes: dict[str, AdapterShape]
    """The shape of each adapter."""
    adapter_of: dict[str, str]
    """The adapter of each component."""
    policy: PolicyObjective | None = None
    """The loss of policy gradients; `None` for imitation."""
    imitation: ImitationObjective | None = None
    """The loss of imitation; `None` for policy gradients."""
    optimizer: OptimizerSettings
    """Weight updates."""
    rollouts: SamplingSettings
    """The settings that samples are drawn with."""
    critic: CriticSettings | None = None
    """The value head; `None` for none."""
    teacher: str | None = None
    """A model that scores answers instead of the base model; `None` for none."""
    seed: int = 0
    """The seed of initial weights and of the order of samples."""
    steps: int = 1
    """The number of steps of the job, for the learning rate."""
    longest: int | None = None
    """The maximum number of tokens of an answer."""
    section: str
    """The path of the training settings, for messages."""
    placement: Placement = Placement()
    """Where and how the base model is loaded."""
    checkpointing: bool = False
    """Whether activations are recomputed in the backward pass."""

    @property
    def loss(self) -> Objective:
        """The loss."""
        return self.policy or self.imitation or PolicyObjective()


def open_trainer(spec: LearnerSpec, *, load: Load | None = None) -> Trainer:
    """Load the base model in this process, and return a trainer of its adapters.

    Args:
        spec: the declaration.
        load: loads the base model and divides its weights among processes, which then run all forward passes
            together.

    Raises:
        CompoundError: the model cannot be loaded or trained.
    """
    with naming_settings(f"loading {spec.model!r} for training", LOWER.format(section=spec.section)):
        adapters = Adapters(
            spec.model, {name: shape.space() for name, shape in spec.shapes.items()}, seed=spec.seed,
            placement=spec.placement, checkpointing=spec.checkpointing, load=load or loading.load_base,
            critic=spec.critic.space if spec.critic else None, dropout=spec.optimizer.dropout,
        )  # fmt: skip
        teacher = FrozenModel(spec.teacher, spec.placement) if spec.teacher else None
    if spec.teacher:
        check_same_tokens(spec.teacher, spec.model, spec.section)
    return Trainer(
        adapters, spec.adapter_of, spec.loss, spec.optimizer, spec.rollouts, spec.critic, seed=spec.seed,
        steps=spec.steps, longest=spec.longest, section=spec.section, in_step=load is not None,
        teacher=teacher,
    )  # fmt: skip
