"""The state that a training stores between steps."""

from __future__ import annotations

from pydantic import Field

from compound.storage.state import State

Stored = dict[str, str]  # a reference to a folder, see `compound.storage.artifacts`


class Saved(State):
    """References to what `Trainer.save` stored, relative to the folder of the run's memory.

    Attributes:
        adapters: the folder of each adapter; ``None`` where it never changed.
        optimizers: the folder of the optimizer states.
        versions: digests of the latest versions of each adapter.
        skipped: consecutive skipped updates of each adapter.
    """

    adapters: dict[str, Stored | None]
    optimizers: Stored
    versions: dict[str, list[str]]
    skipped: dict[str, int] = Field(default={})


class Step(State):
    """One training step, for the learning curve.

    Attributes:
        reward: the mean reward of its rollouts; ``None`` without any.
        samples: the samples that were trained on.
        made: all samples, those of skipped groups included.
        skipped: updates that were skipped for a non-finite gradient.
        why: why there was nothing to train on.
    """

    reward: float | None
    samples: int
    made: int
    skipped: int = 0
    why: str = ""


class Best(State):
    """The best evaluated step.

    Attributes:
        step: its number; 0 for the starting weights.
        score: its mean score on the held-out examples.
        saved: its weights; ``None`` for those of the start.
    """

    step: int
    score: float
    saved: Saved | None


class TrainingState(State):
    """The progress of a training job.

    Attributes:
        step: steps made.
        saved: the present weights.
        ahead: the folder of samples that were drawn ahead.
        kept: what the recipe keeps from step to step, as JSON.
        curve: all steps.
        max_runs: the most system runs that a step has taken.
        evaluated: each evaluated step with its score.
        best: the best of them.
        folders: the folders that this state needs.
        folders_before: the folders that the state before needed.
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
