"""Trainings that a full disk interrupts: resumed with other processes, files and models."""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("peft")

from benchmarks.simulated.toy_model import make_toy_model
from compound import CompoundError
from compound.api.verify import verify
from compound.core.errors import RunDirectoryError
from compound.optimization.runs.directory import read_records
from compound.optimizers.weights.learner.trainer import Trainer
from compound.optimizers.weights.steps import CurvePoint, format_step
from trainings.jobs import train_toy

Run = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_toy_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def run(model: Path) -> Run:
    """Return a function that trains in a run directory, and returns the proposed weights."""

    def start(folder: Path, processes: int = 1) -> dict[str, Any]:
        learner = {"processes": processes}
        train_toy(model, folder, learner=learner, steps=3, examples=3, runs=3)
        events = read_records(folder / "events.jsonl")
        proposed: dict[str, Any] = next(e["values"] for e in events if e["event"] == "job")
        return proposed

    return start


@pytest.fixture(scope="module")
def interrupted(run: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run directory whose disk was full at the checkpoint of the third step."""
    folder, write, calls = tmp_path_factory.mktemp("interrupted") / "run", Trainer._write, 0

    def full(trainer: Trainer, made: Path) -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            (made / "state.safetensors").write_bytes(b"the first part")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(trainer, made)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "_write", full)
        with pytest.raises(RunDirectoryError, match="no space left on the disk of .*run") as caught:
            run(folder)
    assert "run the same command" in caught.value.hint
    return folder


@pytest.fixture
def copy(interrupted: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(interrupted, tmp_path / "run"))


def test_a_full_disk_loses_no_step_and_killed_writers_leave_no_files(
    run: Run, copy: Path, tmp_path: Path
) -> None:
    part = copy / "memory" / ".artifact-killed" / "made"
    part.mkdir(parents=True)
    (part / "state.safetensors").write_bytes(b"the first part")
    assert verify(copy) == []
    assert run(copy) == run(tmp_path / "whole")
    left, whole = (
        sorted(path.name for path in (folder / "memory").iterdir())
        for folder in (copy, tmp_path / "whole")
    )
    assert left == whole


@pytest.mark.slow
def test_another_number_of_processes_resumes(run: Run, copy: Path) -> None:
    assert run(copy, processes=2).keys() == {"first.weights", "second.weights", "third.weights"}


@pytest.mark.parametrize("kind", ["adapter_model.safetensors", "state.safetensors"])
@pytest.mark.parametrize("deleted", [True, False])
def test_damaged_checkpoints_are_named_with_the_remedy(
    kind: str, deleted: bool, run: Run, copy: Path
) -> None:
    """By the run, and by the verification of the unfinished run."""
    path = max(copy.glob(f"memory/*/{kind}"), key=lambda path: path.parent.stat().st_ctime_ns)
    for file in copy.glob(f"memory/*/{kind}"):
        if deleted:
            shutil.rmtree(file.parent)
        else:
            file.write_bytes(file.read_bytes()[:-1] + b"?")
    (problem,) = verify(copy)
    assert str(path.parent.parent) in problem
    with pytest.raises(RunDirectoryError, match="step 2 of .* cannot be restored") as caught:
        run(copy)
    assert "from a copy of the run directory" in caught.value.hint


def test_a_base_model_that_changed_is_refused_and_resumed_with_when_restored(
    run: Run, copy: Path, model: Path, tmp_path: Path
) -> None:
    weights = model / "model.safetensors"
    shutil.copy(weights, tmp_path / "kept")
    (model / "README.md").write_text("What is not loaded may change.")
    other = make_toy_model(tmp_path / "other", seed=1) / weights.name
    shutil.copy(other, weights)
    with pytest.raises(CompoundError, match=re.escape("changed: the files of the model")) as caught:
        run(copy)
    assert "restore them to resume the run" in caught.value.message
    shutil.copy(tmp_path / "kept", weights)
    run(copy)


def test_a_step_says_why_it_has_nothing_to_learn_from() -> None:
    step = CurvePoint(reward=0.5, samples=0, made=4, why="all equal")
    assert format_step(step) == "mean reward 0.500, trained on 0 of 4 samples: all equal"
