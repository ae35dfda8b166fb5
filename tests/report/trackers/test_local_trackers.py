"""TensorBoard's event files and Trackio's database: every point, also of runs that were killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # the libraries' imports
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from trackio import sqlite_storage, utils

import compound as cp
from compound.core.errors import RunDirectoryError
from compound.optimization.runs.directory import read_json, read_records
from compound.report.trackers.backends import TRACKIO_PARAMETER, TrackedRun, TrackioTracker
from compound.report.trackers.tracking import FILE, Follower
from compound.report.training import records
from tracked_runs import DATA
from tracked_runs import optimize as optimize_small
from training_settings import trainings

ROOT = Path(__file__).parents[3]
LOCAL = ("tensorboard", "trackio")
Points = list[tuple[float, float]]  # step and value


@pytest.fixture(autouse=True)
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty local store of Trackio, for this process and its children."""
    place = tmp_path / "trackio"
    monkeypatch.setenv("TRACKIO_DIR", str(place))
    monkeypatch.setattr(sqlite_storage, "TRACKIO_DIR", place)
    monkeypatch.setattr(utils, "TRACKIO_DIR", place)
    return place


def optimize(folder: Path, **changes: Any) -> cp.Result:
    return optimize_small(folder, **{"trackers": LOCAL, **changes})


def board(folder: Path) -> EventAccumulator:
    """Return what TensorBoard shows of a run directory."""
    found = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0})
    return found.Reload()


def scalars(folder: Path) -> dict[str, Points]:
    found = board(folder)
    return {
        tag: [(event.step, event.value) for event in found.Scalars(tag)]
        for tag in found.Tags()["scalars"]
        if tag != "budget/seconds"
    }


def trackio_rows(folder: Path, project: str = "qa") -> list[Mapping[str, Any]]:
    """Return the points of a run in Trackio's database."""
    identity = read_json(folder, FILE)["trackio"]["id"]
    return list(sqlite_storage.SQLiteStorage.get_logs(project, run_id=identity))


def trackio_config(folder: Path) -> Mapping[str, Any]:
    identity = read_json(folder, FILE)["trackio"]["id"]
    return dict(sqlite_storage.SQLiteStorage.get_run_config("qa", run_id=identity) or {})


def column(rows: list[Mapping[str, Any]], name: str) -> list[float]:
    return [row[name] for row in rows if name in row]


def test_a_search_and_its_baseline_are_stored_and_nothing_is_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = optimize(tmp_path / "run", baselines=("random",))
    assert capsys.readouterr().out == ""
    events = list(read_records(tmp_path / "run", "events.jsonl"))
    runs = [event["spent"]["system_runs"] for event in events]
    decisions = [event for event in events if event["event"] == "decision"]
    assert decisions
    shown, rows = scalars(tmp_path / "run"), trackio_rows(tmp_path / "run")
    assert [step for step, _ in shown["budget/system_runs"]] == [round(n) for n in runs]
    assert [value for _, value in shown["budget/system_runs"]] == pytest.approx(runs)
    assert column(rows, "budget/system_runs") == runs
    assert column(rows, "step") == [round(n) for n in runs]
    assert [value for _, value in shown["decision/accepted"]] == [d["accepted"] for d in decisions]
    assert column(rows, "decision/accepted") == [d["accepted"] for d in decisions]
    assert shown["best/valid"][-1][1] == pytest.approx(result.after.mean)
    assert column(rows, "best/valid")[-1] == result.after.mean
    (text,) = board(tmp_path / "run").Tensors("parameters")
    assert b"| optimize.method | random |" in text.tensor_proto.string_val[0]
    identity = read_json(tmp_path / "run", FILE)["trackio"]["id"]
    config = trackio_config(tmp_path / "run")
    assert config["optimize.method"] == "random"
    assert config["_Group"] == identity
    folder = tmp_path / "run" / "baselines" / "random"
    found = result.baselines["random"].test_after
    assert found is not None
    assert scalars(folder)["test_after/mean"][-1][1] == pytest.approx(found.mean)
    assert column(trackio_rows(folder), "test_after/mean") == [found.mean]
    assert trackio_config(folder)["_Group"] == identity


KILLED = """
import os, signal, sys, warnings
from pathlib import Path
warnings.simplefilter("ignore")
from compound.testing import ScriptedLM
sys.path.insert(0, str(Path({tests!r})))
import test_local_trackers as tests

original, made = ScriptedLM._reply, [0]

def dying(*arguments):
    made[0] += 1
    if made[0] == 40:
        os.kill(os.getpid(), signal.SIGKILL)
    return original(*arguments)

ScriptedLM._reply = dying
tests.optimize(Path(sys.argv[1]))
"""


def test_a_killed_run_is_continued(tmp_path: Path) -> None:
    optimize(tmp_path / "whole")
    program = KILLED.format(tests=str(Path(__file__).parent))
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests" / "support")]),
    }
    killed = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "run")],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    before = read_json(tmp_path / "run", FILE)
    optimize(tmp_path / "run")
    after = read_json(tmp_path / "run", FILE)
    assert after["trackio"]["id"] == before.get("trackio", after["trackio"])["id"]
    found, expected = (tmp_path / name for name in ("run", "whole"))

    def distinct(points: Mapping[str, Iterable[object]]) -> dict[str, list[object]]:
        """Leave out repetitions: the last event before the kill may have been logged twice."""
        return {name: list(dict.fromkeys(values)) for name, values in points.items()}

    assert distinct(scalars(found)) == distinct(scalars(expected))
    names = ("budget/system_runs", "best/valid", "decision/accepted", "test_after/mean", "step")
    stored, whole = (
        {name: column(trackio_rows(folder), name) for name in names} for folder in (found, expected)
    )
    assert distinct(stored) == distinct(whole)


def test_steps_of_a_training_are_stored(make_model: Callable[..., Path], tmp_path: Path) -> None:
    pytest.importorskip("peft")
    from compound.engines.local.engine import TransformersEngine

    model = str(make_model(tmp_path / "model"))
    llm = cp.LLM(
        "answerer", prompt=cp.Text("Say it."), max_tokens=8, weights=cp.LoRA(rank=2), retries=0
    )
    system = cp.System("qa", outputs={"answer": llm(question=cp.Input("question"))}, lm=model)
    cp.optimize(
        system,
        DATA,
        lambda outputs, _: float(len(outputs["answer"]) % 5),
        run_dir=tmp_path / "run",
        engines={model: TransformersEngine(model, dtype="float32")},
        progress=False,
        method="mmgrpo",
        valid_size=8,
        test_size=4,
        budget=400,
        trackers=LOCAL,
        **trainings(steps=3, examples=2, runs=2, lr=0.01),
    )
    recorded = [step["reward"] for step in records(tmp_path / "run")]
    assert len(recorded) == 3
    shown, rows = scalars(tmp_path / "run"), trackio_rows(tmp_path / "run")
    assert [value for _, value in shown["training/reward"]] == pytest.approx(recorded)
    assert column(rows, "training/reward") == recorded
    steps = [step for step, _ in shown["training/step"]]
    assert all(a < b for a, b in pairwise(steps))  # the axis is system runs


def test_a_run_directory_names_no_run_of_someone_else(tmp_path: Path) -> None:
    storage = sqlite_storage.SQLiteStorage
    storage.bulk_log("qa", "victim", [{"loss": 1.0}], config={"lr": 1}, run_id="0123")
    tracker = TrackioTracker()
    run = TrackedRun("run", "qa", tmp_path)
    found = tracker.start(run, "0123")
    assert found != "0123"
    tracker.log({"loss": 2.0}, 1.0, 1.0)
    assert [row["loss"] for row in storage.get_logs("qa", run_id="0123")] == [1.0]
    config = storage.get_run_config("qa", run_id=found)
    assert config is not None
    assert config[TRACKIO_PARAMETER] == str(tmp_path)


def test_event_files_are_not_written_through_a_link(tmp_path: Path) -> None:
    optimize(tmp_path / "run", trackers=())
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "run" / "tensorboard").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(RunDirectoryError, match="symbolic link"):
        Follower("tensorboard", tmp_path / "run").start()
    assert not list((tmp_path / "elsewhere").iterdir())
