"""Checkpointed state of a training job, and optimizer states that persist across jobs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import Field

from compound.core.storage.state import State

Stored = dict[str, str]  # a reference to a folder, see `compound.core.storage.artifacts`


class Saved(State):
    """References to the folders that `Trainer.save` wrote, relative to the folder of the run's memory.

    Attributes:
        adapters: the folder of each adapter; ``None`` if it equals the base model.
        optimizers: the folder of the optimizer states.
        versions: the digests of the latest versions of each adapter.
        skipped: the number of consecutive skipped updates of each adapter.
    """

    adapters: dict[str, Stored | None]
    optimizers: Stored
    versions: dict[str, list[str]]
    skipped: dict[str, int] = Field(default={})


class CurvePoint(State):
    """One point of the learning curve.

    Attributes:
        reward: the mean reward of the step's rollouts; ``None`` without rollouts.
        samples: the number of samples trained on.
        made: the number of all samples, including those of skipped groups.
        skipped: the number of updates skipped because of a non-finite gradient.
        refilled: the number of examples drawn in place of others without a gradient.
        why: the reason if there was nothing to train on.
    """

    reward: float | None
    samples: int
    made: int
    skipped: int = 0
    refilled: int = 0
    why: str = ""


class Best(State):
    """The best evaluated step.

    Attributes:
        step: the number of the step; 0 for the starting weights.
        score: the mean score on the held-out examples.
        saved: the checkpoint of the weights; ``None`` for the starting weights.
    """

    step: int
    score: float
    saved: Saved | None


class TrainingState(State):
    """Progress of a training job.

    Attributes:
        step: the number of completed steps.
        saved: the checkpoint of the current weights.
        ahead: the folder of the samples drawn ahead for the next step.
        kept: the recipe's state between steps, as JSON.
        curve: the learning curve: one entry per completed step.
        max_runs: the most system runs of any step, if it had drawn the maximum number of examples.
        evaluated: each evaluated step with its score.
        best: the best evaluated step.
        folders: the folders that this state needs.
        folders_before: the folders that the previous state needed.
    """

    step: int = 0
    saved: Saved | None = None
    ahead: Stored | None = None
    kept: dict[str, object] = Field(default={})
    curve: list[CurvePoint] = Field(default=[])
    max_runs: float = 0.0
    evaluated: list[tuple[int, float | None]] = Field(default=[])
    best: Best | None = None
    folders: list[str] = Field(default=[])
    folders_before: list[str] = Field(default=[])


# Optimizer states persist across jobs of a run, in its memory: Adam moments and the value head,
# under the digests of the adapters that a job proposed. A later job of the same recipe that starts
# from these adapters restores them; if the proposal is rejected, they are dropped, so that those of
# the previous adapter apply.
MOMENTS = "optimizer_states"


class StoredMoments(State):
    """Reference to the optimizer states of an earlier proposal.

    Attributes:
        recipe: the recipe that trained the adapters.
        adapters: the digests of the adapters by name.
        reference: the folder of the states.
    """

    recipe: str
    adapters: dict[str, str]
    reference: Stored


def stored_moments(memory: Mapping[str, Any]) -> list[StoredMoments]:
    """Return all entries in the memory of a run."""
    return [StoredMoments.from_json(entry) for entry in memory.get(MOMENTS, [])]


def remember_moments(memory: dict[str, Any], recipe: str, saved: Saved) -> None:
    """Add the optimizer states of the checkpoint that a recipe proposes to the memory of a run."""
    digests = {name: reference["sha256"] for name, reference in saved.adapters.items() if reference}
    if digests:
        entry = StoredMoments(recipe=recipe, adapters=digests, reference=saved.optimizers)
        others = [stored for stored in stored_moments(memory) if stored != entry]
        memory[MOMENTS] = [stored.to_json() for stored in (*others, entry)]


def drop_moments(memory: dict[str, Any], live: set[str]) -> None:
    """Remove the states of adapters whose digests are not in the current configuration."""
    if MOMENTS in memory:
        kept = [e for e in stored_moments(memory) if not live.isdisjoint(e.adapters.values())]
        memory[MOMENTS] = [stored.to_json() for stored in kept]


def find_moments(
    memory: Mapping[str, Any], recipe: str, starts: Mapping[str, str]
) -> dict[str, StoredMoments]:
    """Return, by adapter name, the stored states that match the adapters a job starts from.

    Args:
        memory: the run's memory.
        recipe: the recipe that will train the adapters; the moments of another recipe's loss do not
            apply.
        starts: the digests of the starting adapters by name; ``""`` stands for the base model.
    """
    return {
        name: stored
        for stored in stored_moments(memory)
        for name, digest in starts.items()
        if digest and stored.recipe == recipe and stored.adapters.get(name) == digest
    }
