"""What trackers receive: every event and training step once and in order, however often a run is interrupted."""

from __future__ import annotations

import itertools
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compound.api.verify import verify
from compound.core.errors import CompoundError, DeclarationError, RunDirectoryError, SpecError
from compound.execution.rng import derive_seed
from compound.optimization.runs.directory import RunDirectory, read_records
from compound.optimization.runs.recorder import Recorder
from compound.report.trackers.backends import Status, TrackedRun
from compound.report.trackers.tracking import (
    FILE,
    FINAL_SECONDS,
    NOTICE_SECONDS,
    START_SECONDS,
    event_metrics,
    send,
    tracked,
)
from compound.yaml import loads

CONFIG = {"system": "demo", "optimize": {"seed": 3, "method": "mmgrpo"}}


class Notebook:
    """A tracker in memory."""

    logs: ClassVar[list[tuple[Mapping[str, float], float]]] = []
    runs: ClassVar[list[tuple[str, str]]] = []
    ended: ClassVar[list[tuple[Status, list[str]]]] = []
    failing: ClassVar[list[str]] = []
    times: ClassVar[list[float]] = []

    def start(self, run: TrackedRun, previous: str) -> str:
        self._fail("start")
        identity = previous or f"run-{len(self.runs)}"
        self.runs.append((identity, run.name))
        return identity

    def log(self, metrics: Mapping[str, float], system_runs: float, at: float) -> None:
        self._fail("log")
        self.logs.append((metrics, system_runs))
        self.times.append(at)

    def finish(self, status: Status, files: Sequence[Path]) -> None:
        self._fail("finish")
        self.ended.append((status, [path.name for path in files]))

    def _fail(self, where: str) -> None:
        if where in self.failing:
            raise ConnectionError(f"{where}: the server is gone")


@pytest.fixture(autouse=True)
def _notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "compound.report.trackers.tracking.TRACKERS", {"mlflow": Notebook, "wandb": Notebook}
    )
    clear()


def clear() -> None:
    for kept in (Notebook.logs, Notebook.runs, Notebook.ended, Notebook.failing, Notebook.times):
        kept.clear()


def training(job: int, steps: int) -> list[tuple[str, dict[str, Any]]]:
    """Return what a training job records: a record and an event for each step, then its end."""
    found: list[tuple[str, dict[str, Any]]] = []
    for step in range(steps):
        seed = derive_seed(3, "job", job)
        found.append(
            ("memory", {"kind": "training", "seed": seed, "step": step, "reward": job + step / 10})
        )
        if step == 1:
            found.append(("progress", {"job": job, "note": "", "step": step, "evaluation": {}}))
        found.append(("progress", {"job": job, "note": "", "step": step + 1, "of": steps}))
    return [
        *found,
        ("job", {"job": job, "tried": 1, "runs": 2.0, "train_before": 0.1, "train_after": 0.2}),
    ]


def search(job: int) -> list[tuple[str, dict[str, Any]]]:
    return [
        ("memory", {"kind": "pairs", "seed": 1}),
        ("progress", {"job": job, "note": "8 candidates", "step": 1, "of": 2}),
        ("job", {"job": job, "tried": 8, "runs": 9.5, "train_before": None, "train_after": None}),
    ]


def write(recorder: Recorder, kind: str, facts: dict[str, Any]) -> None:
    if kind == "memory":
        recorder.memory.append(facts)
    else:
        recorder.event(kind, **facts)


def open_run(folder: Path) -> Recorder:
    run = RunDirectory.open(folder) if folder.exists() else RunDirectory.create(folder, "", CONFIG)
    return Recorder(run)


SCRIPT = [
    ("start", {"mean": 0.5, "n": 4, "failed": 0}),
    *training(0, 3),
    *search(1),
    *training(2, 2),
    ("done", {}),
]


def logged(
    sessions: Sequence[Sequence[tuple[str, dict[str, Any]]]], folder: Path
) -> list[Mapping[str, float]]:
    """Return what is logged of a run in several sessions."""
    clear()
    for session in sessions:
        recorder = open_run(folder)
        with tracked(("mlflow",), recorder):
            for kind, facts in session:
                write(recorder, kind, facts)
        recorder.close()
    return [metrics for metrics, _ in Notebook.logs]


def durable(position: int) -> bool:
    """Whether a session may end before a position: what follows the last event is not recorded."""
    return position == 0 or SCRIPT[position - 1][0] != "memory"


@pytest.mark.slow
@given(cuts=st.lists(st.integers(0, len(SCRIPT)).filter(durable), max_size=4))
def test_interruptions_change_nothing_of_what_is_logged(cuts: list[int]) -> None:
    with tempfile.TemporaryDirectory() as place:
        whole = logged([SCRIPT], Path(place) / "whole")
        bounds = [0, *sorted(cuts), len(SCRIPT)]
        parts = [SCRIPT[a:b] for a, b in itertools.pairwise(bounds)]
        assert logged(parts, Path(place) / "parts") == whole
        assert len({identity for identity, *_ in Notebook.runs}) == 1


def test_each_training_step_is_logged_with_its_event_at_the_time_of_the_record(
    tmp_path: Path,
) -> None:
    found = logged([SCRIPT], tmp_path / "run")
    recorded = [event["at"] for event in read_records(tmp_path / "run", "events.jsonl")]
    assert list(dict.fromkeys(Notebook.times)) == list(dict.fromkeys(recorded))
    rewards = [metrics["training/reward"] for metrics in found if "training/reward" in metrics]
    assert rewards == [0.0, 0.1, 0.2, 2.0, 2.1]
    assert [m["training/step"] for m in found if "training/step" in m] == [0, 1, 2, 0, 1]
    assert [m["job/job"] for m in found if "job/job" in m] == [0, 1, 2]


def test_a_run_that_was_not_tracked_is_sent_as_it_would_have_been_logged(tmp_path: Path) -> None:
    whole = logged([SCRIPT], tmp_path / "whole")
    clear()
    recorder = open_run(tmp_path / "later")
    for kind, facts in SCRIPT:
        write(recorder, kind, facts)
    with pytest.raises(RunDirectoryError):  # it is being written
        send("mlflow", tmp_path / "later")
    recorder.close()
    send("mlflow", tmp_path / "later")
    assert [metrics for metrics, _ in Notebook.logs] == whole
    send("mlflow", tmp_path / "later")
    assert len(Notebook.logs) == len(whole)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ValueError("x")])
def test_the_status_says_how_a_run_ended(tmp_path: Path, error: BaseException) -> None:
    recorder = open_run(tmp_path / "run")
    with pytest.raises(type(error)), tracked(("mlflow",), recorder):
        raise error
    recorder.close()
    status = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
    assert Notebook.ended == [(status, ["config.json"])]


@pytest.mark.parametrize("where", ["log", "finish"])
def test_a_tracker_that_fails_does_not_end_the_run(
    tmp_path: Path, where: str, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = open_run(tmp_path / "run")
    with tracked(("mlflow",), recorder):
        Notebook.failing.append(where)
        recorder.event("start", mean=0.5)
    recorder.close()
    Notebook.failing.clear()
    assert "compound runs track" in caplog.text
    send("mlflow", tmp_path / "run")
    assert [m["valid/mean"] for m, _ in Notebook.logs if "valid/mean" in m] == [0.5]


@pytest.mark.parametrize("where", ["start", "log", "finish"])
def test_sending_raises_if_the_tracker_fails_and_can_be_repeated(
    tmp_path: Path, where: str
) -> None:
    recorder = open_run(tmp_path / "run")
    for kind, facts in SCRIPT:
        write(recorder, kind, facts)
    recorder.close()
    Notebook.failing.append(where)
    with pytest.raises(
        CompoundError, match=f"mlflow: .* ConnectionError: {where}: the server is gone"
    ):
        send("mlflow", tmp_path / "run")
    Notebook.failing.clear()
    events = [kind for kind, _ in SCRIPT if kind != "memory"]
    assert send("mlflow", tmp_path / "run") == (0 if where == "finish" else len(events))


def test_a_damaged_position_is_found_and_named(tmp_path: Path) -> None:
    logged([SCRIPT], tmp_path / "run")
    path = tmp_path / "run" / FILE
    path.write_text(path.read_text().replace('"run-0"', '"run-9"'))
    assert any(FILE in problem for problem in verify(tmp_path / "run"))
    recorder = open_run(tmp_path / "run")
    with pytest.raises(DeclarationError, match=FILE), tracked(("mlflow",), recorder):
        pass
    recorder.close()


def test_a_file_from_someone_else_names_no_tracker() -> None:
    text = "system: s\nlm: smollm2\ninputs: {q: str}\ncomponents: {a: {llm: {prompt: Say.}, in: {q: $q}}}\n"
    text += "outputs: {y: $a}\noptimize: {trackers: [mlflow]}\n"
    assert loads(text, path="f.yaml").optimize.trackers == ("mlflow",)
    with pytest.raises(SpecError) as caught:
        loads(text, path="f.yaml", allow_import=False)
    (problem,) = caught.value.problems
    assert problem.startswith("f.yaml:6:")
    assert "optimize.trackers: the file sends the record of the run to a tracker" in problem


def test_a_decision_has_the_scores_that_it_compared() -> None:
    event = {
        "event": "decision",
        "decision": 2,
        "accepted": True,
        "level": 0.05,
        "p": 0.01,
        "before": {"mean": 0.4},
        "after": {"mean": 0.6},
        "gain": {"mean": 0.2, "low": float("nan"), "high": None},
    }
    assert event_metrics(event) == {
        "decision/decision": 2,
        "decision/p": 0.01,
        "decision/level": 0.05,
        "decision/accepted": 1,
        "decision/before/mean": 0.4,
        "decision/after/mean": 0.6,
        "decision/gain/mean": 0.2,
        "best/valid": 0.6,
    }
    assert event_metrics({**event, "accepted": False})["best/valid"] == 0.4


def test_a_server_that_does_not_answer_is_named_before_the_run_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Notebook, "server", "http://127.0.0.1:9", raising=False)
    recorder = open_run(tmp_path / "run")
    message = r"cannot be tracked: .* no server answers at http://127.0.0.1:9"
    with pytest.raises(DeclarationError, match=message), tracked(("mlflow",), recorder):
        raise AssertionError("the run must not start")
    assert not Notebook.runs
    monkeypatch.delattr(Notebook, "server")
    with tracked(("mlflow",), recorder):  # one that dies is not asked again at the end
        monkeypatch.setattr(Notebook, "server", "http://127.0.0.1:9", raising=False)
        write(recorder, *SCRIPT[0])
    recorder.close()
    assert Notebook.ended == []
    assert "compound runs track" in caplog.text


def hang(monkeypatch: pytest.MonkeyPatch, method: str) -> tuple[threading.Event, list[float]]:
    """Let a method of trackers hang until an event is set, and collect the time limits of waits."""
    hangs, waits = threading.Event(), []

    def waited(futures: Any, seconds: float) -> Any:
        waits.append(seconds)
        return SimpleNamespace(done=())

    monkeypatch.setattr("compound.report.trackers.tracking.wait", waited)
    monkeypatch.setattr(Notebook, method, lambda *_: hangs.wait())
    return hangs, waits


def test_the_end_of_a_run_does_not_wait_for_a_tracker_without_progress(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = open_run(tmp_path / "run")
    with tracked(("mlflow",), recorder):
        hangs, waits = hang(monkeypatch, "finish")
    hangs.set()
    recorder.close()
    assert waits == [NOTICE_SECONDS, FINAL_SECONDS]
    assert "waiting for mlflow" in caplog.text
    assert "`compound runs track` sends the rest" in caplog.text
    assert all(
        thread.daemon for thread in threading.enumerate() if thread.name == "compound-trackers"
    )


def test_a_tracker_without_an_answer_ends_the_start_of_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = open_run(tmp_path / "run")
    hangs, waits = hang(monkeypatch, "start")
    with (
        pytest.raises(DeclarationError, match="no answer of mlflow in 60 s"),
        tracked(("mlflow",), recorder),
    ):
        pass
    hangs.set()
    recorder.close()
    assert waits == [NOTICE_SECONDS, START_SECONDS]
    assert "waiting for mlflow" in caplog.text
