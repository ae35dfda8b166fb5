"""Checkpointed state of a training job."""

from __future__ import annotations

from pydantic import Field

from compound.storage.state import State

Stored = dict[str, str]  # a reference to a folder, see `compound.storage.artifacts`


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


class Step(State):
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
    curve: list[Step] = Field(default=[])
    max_runs: float = 0.0
    evaluated: list[tuple[int, float | None]] = Field(default=[])
    best: Best | None = None
    folders: list[str] = Field(default=[])
    folders_before: list[str] = Field(default=[])
