"""Learner whose updates several processes compute together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compound.components.engines import model_folder, models
from compound.errors import CompoundError
from compound.optimizers.weights.distributed.learner import LearnerSpec
from compound.optimizers.weights.distributed.messages import samples_to_json
from compound.optimizers.weights.distributed.processes import Processes
from compound.optimizers.weights.learner.samples import Sample
from compound.optimizers.weights.learner.saved import Saved
from compound.storage.artifacts import Reference, copy_into

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class ShardedLearner:
    """Learner that divides the samples of every update among processes; see `Learner` for its methods.

    All processes receive all samples and take the same update. Weights and optimizer states are therefore
    equal in all of them, and only the first process writes files.

    Args:
        processes: the processes, used by this learner only.
        spec: the declaration of the learner.
        sharding: ``data``, or ``fsdp`` to divide the base model, too.

    Raises:
        CompoundError: the model cannot be loaded or trained.
    """

    def __init__(self, processes: Processes, spec: LearnerSpec, *, sharding: str = "data") -> None:
        self._processes, self._model = processes, spec.model
        unshared = processes.call_all("open", spec=spec.model_dump(mode="json"), sharding=sharding)
        if len(set(map(bool, unshared))) > 1:  # they would divide samples differently
            raise CompoundError(
                f"the learner processes differ: only some can read equal prompts once ({unshared})",
                hint=f"set {spec.section}.learner.processes to 1, or use equal devices",
            )
        self._versions: Mapping[str, list[str]] = processes.call("versions")

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer of the base model."""
        return model_folder.load_tokenizer(models.resolve(self._model))

    def start(self, references: Mapping[str, Reference | None], folder: Path) -> None:
        """Start from stored adapters."""
        # copied by this process, so that the others only read
        own = {
            name: reference and copy_into({**reference, "path": str(folder / reference["path"])}, folder)
            for name, reference in references.items()
        }
        self._processes.call("start", references=own, folder=str(folder))
        self._versions = self._processes.call("versions")

    def restore(self, saved: Saved, folder: Path) -> None:
        """Restore adapters and optimizer states."""
        self._processes.call("restore", saved=saved.to_json(), folder=str(folder))
        self._versions = saved.versions

    def restore_optimizer(self, name: str, reference: Reference, folder: Path) -> None:
        """Restore the optimizer state of one adapter, or of the value head."""
        self._processes.call("restore_optimizer", name=name, reference=dict(reference), folder=str(folder))

    def step(self, samples: Sequence[Sample], number: int) -> dict[str, Any]:
        """Update every adapter that has samples."""
        facts: dict[str, Any] = self._processes.call(
            "step", samples=samples_to_json(samples), number=number, versions=self._versions
        )
        return facts

    def values(self, samples: Sequence[Sample]) -> list[Sample]:
        """Return the samples with the value head's estimates."""
        rows = self._processes.call("values", samples=samples_to_json(samples))
        return [replace(sample, values=tuple(row)) for sample, row in zip(samples, rows, strict=True)]

    def divergences(
        self, samples: Sequence[Sample], taught: Sequence[Sample] | None = None
    ) -> list[tuple[float, ...]]:
        """Return the log-ratios of the policy to the base model or to the teacher."""
        sent = {"samples": samples_to_json(samples), "taught": taught and samples_to_json(taught)}
        return [tuple(row) for row in self._processes.call("divergences", **sent)]

    def save(self, folder: Path) -> Saved:
        """Store adapters and optimizer states."""
        saved = Saved.from_json(self._processes.call("save", folder=str(folder.absolute())))
        self._versions = saved.versions
        return saved

    def write_adapter(self, name: str, folder: Path) -> None:
        """Write the current weights of an adapter to a folder."""
        self._processes.call("write_adapter", name=name, folder=str(folder.absolute()))

    def release_cache(self) -> None:
        """Return the unused memory of all processes to their devices."""
        self._processes.call("release_cache")

    def interrupt(self) -> None:
        """Let the processes exit, so that a call in another thread raises."""
        self._processes.interrupt()

    def close(self) -> None:
        """End the processes."""
        self._processes.close()
