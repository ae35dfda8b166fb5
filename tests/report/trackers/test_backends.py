"""Runs in each tracker: what its own store or files contain."""

from __future__ import annotations

import json
import os
import signal
import struct
import subprocess
import sys
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # the libraries' imports
    import mlflow
    import wandb
    from mlflow import MlflowClient
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from wandb.proto import wandb_internal_pb2

import compound as cp
from compound.core.errors import DeclarationError, RunDirectoryError
from compound.optimization.runs.directory import read_json, read_records
from compound.report.trackers.tracking import FILE, Follower, send
from compound.report.training import records
from compound.testing import ScriptedLM
from local_mlflow import empty_store, local_store
from tracked_runs import DATA, often_right, optimize
from training_settings import trainings

pytestmark = pytest.mark.filterwarnings("ignore")
ROOT = Path(__file__).parents[3]
LOCAL = ("tensorboard", "mlflow")
Points = list[tuple[float, float]]  # rounded system runs and value


class Shown:
    """What a tracker shows of the run of a directory."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.id = folder, read_json(folder, FILE)[self.name]["id"]

    name = ""
    files: set[str] | None = None  # None: they stay in the run directory

    def points(self, metric: str) -> Points:
        raise NotImplementedError

    def parameters(self) -> Mapping[str, str]:
        raise NotImplementedError


class InMLflow(Shown):
    name = "mlflow"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.client = MlflowClient()
        self.run = self.client.get_run(self.id)
        self.status = self.run.info.status
        self.files = {item.path for item in self.client.list_artifacts(self.id)}

    def points(self, metric: str) -> Points:
        return [(m.step, m.value) for m in self.client.get_metric_history(self.id, metric)]

    def parameters(self) -> Mapping[str, str]:
        return dict(self.run.data.params)


class InTensorBoard(Shown):
    name = "tensorboard"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        place = str(folder / "tensorboard")
        self.board = EventAccumulator(place, size_guidance={"scalars": 0}).Reload()

    def points(self, metric: str) -> Points:
        return [(event.step, event.value) for event in self.board.Scalars(metric)]

    def parameters(self) -> Mapping[str, str]:
        (event,) = self.board.Tensors("parameters")
        lines = event.tensor_proto.string_val[0].decode().splitlines()[2:]
        return dict(line.strip("| ").split(" | ", 1) for line in lines)


HEADER, BLOCK = 7, 32_768  # of the file and of each chunk; bytes of a block
FULL, LAST = 1, 4  # types of a chunk that ends a record


def log_records(content: bytes) -> Iterator[Any]:
    """Yield the records of a log in LevelDB's format, in which records are split at the ends of blocks."""
    at, data = HEADER, b""
    while at + HEADER <= len(content):
        if BLOCK - at % BLOCK < HEADER:  # padding
            at += BLOCK - at % BLOCK
            continue
        _, length, kind = struct.unpack_from("<IHB", content, at)
        if at + HEADER + length > len(content):  # it is being written
            return
        data += content[at + HEADER : at + HEADER + length]
        at += HEADER + length
        if kind in (FULL, LAST):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            yield record
            data = b""


class InWandb(Shown):
    """Offline runs: a resumed one has a file for each part, which a process of the library writes."""

    name = "wandb"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.history: list[Mapping[str, str]] = []
        self.exits: list[int] = []
        files: set[str] = set()
        deadline = time.monotonic() + 120
        paths = Path(os.environ["WANDB_CACHE_DIR"]).glob(f"*/wandb/offline-run-*{self.id}/*.wandb")
        for path in sorted(paths):
            found: defaultdict[str, list[Any]] = defaultdict(list)
            while not found["exit"] and time.monotonic() < deadline:
                time.sleep(0.1)
                found = defaultdict(list)
                for record in log_records(path.read_bytes()):
                    found[record.WhichOneof("record_type")].append(record)
            files |= self._read(found)
        self.files = files

    def _read(self, found: Mapping[str, list[Any]]) -> set[str]:
        (self.run,) = (record.run for record in found["run"][:1])
        self.exits += [record.exit.exit_code for record in found["exit"]]
        for record in found["history"]:
            items = record.history.item
            self.history.append({i.key or "/".join(i.nested_key): i.value_json for i in items})
        logged = [r.request.log_artifact.artifact for r in found["request"]]
        logged += [record.artifact for record in found["artifact"]]
        return {entry.path for made in logged for entry in made.manifest.contents}

    def points(self, metric: str) -> Points:
        rows = [row for row in self.history if metric in row]
        return [(round(float(r["budget/system_runs"])), float(r[metric])) for r in rows]

    def parameters(self) -> Mapping[str, str]:
        return {item.key: json.loads(item.value_json) for item in self.run.config.update}


TRACKERS = [InMLflow, InTensorBoard, pytest.param(InWandb, marks=pytest.mark.slow)]


@pytest.fixture(autouse=True)
def _stores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Empty stores of all trackers, for this process and its children."""
    place = tmp_path / "stores"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'mlflow.db'}")
    monkeypatch.setenv("WANDB_MODE", "offline")
    for name in ("CACHE_DIR", "DATA_DIR", "CONFIG_DIR"):
        monkeypatch.setenv(f"WANDB_{name}", str(place))
    for part in ("1", "2"):
        (place / part).mkdir(parents=True)
    monkeypatch.setenv("WANDB_DIR", str(place / "1"))
    with ExitStack() as stack:
        stack.enter_context(local_store(tmp_path, monkeypatch))
        yield


def unique(points: Iterable[tuple[float, float]]) -> list[Any]:
    """Leave out repetitions: a store may keep one of equal points, and a kill may repeat the last ones."""
    return [pytest.approx(point) for point in dict.fromkeys(points)]


def spent(folder: Path) -> list[tuple[float, float]]:
    amounts = [e["spent"]["system_runs"] for e in read_records(folder, "events.jsonl")]
    return list(dict.fromkeys((round(n), n) for n in amounts))


@pytest.mark.parametrize("tracker", TRACKERS)
def test_a_search_is_tracked_and_nothing_is_printed(
    tracker: type[Shown], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    result = optimize(folder, trackers=(tracker.name,))
    assert capsys.readouterr().out == ""
    run = tracker(folder)
    assert unique(run.points("budget/system_runs")) == spent(folder)
    assert spent(folder)[-1][1] == result.spent["system_runs"]
    decisions = [e for e in read_records(folder, "events.jsonl") if e["event"] == "decision"]
    accepted = [value for _, value in run.points("decision/accepted")]
    assert accepted == [event["accepted"] for event in decisions] != []
    assert run.points("valid/mean")[0][1] == pytest.approx(result.before.mean)
    assert run.points("best/valid")[-1][1] == pytest.approx(result.after.mean)
    assert result.test_after is not None
    assert run.points("test_after/mean")[-1][1] == pytest.approx(result.test_after.mean)
    assert run.parameters()["optimize.method"] == "random"
    assert run.files is None or "best.json" in run.files
    assert run.parameters()["data.train.n"] == "12"
    assert run.files is None or {"report.md", "report.html", "events.jsonl"} <= run.files
    assert wandb.run is None  # none is left open


@pytest.mark.parametrize("tracker", TRACKERS)
def test_a_stopped_run_is_continued(
    tracker: type[Shown], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, answer = tmp_path / "run", ScriptedLM._reply

    def stop_soon(self: ScriptedLM, request: cp.ext.Request, number: int) -> object:
        if number == 20:
            (folder / "STOP").touch()
        return answer(self, request, number)

    monkeypatch.setattr(ScriptedLM, "_reply", stop_soon)
    with pytest.raises(cp.CompoundError, match="stopped"):
        optimize(folder, trackers=(tracker.name,))
    first = tracker(folder)
    monkeypatch.setattr(ScriptedLM, "_reply", answer)
    # the parts have the same name if they start within one second
    monkeypatch.setenv("WANDB_DIR", str(Path(os.environ["WANDB_DIR"]).parent / "2"))
    optimize(folder, trackers=(tracker.name,))
    whole = tracker(folder)
    assert whole.id == first.id
    assert unique(whole.points("budget/system_runs")) == spent(folder)
    if isinstance(first, InMLflow) and isinstance(whole, InMLflow):
        assert (first.status, whole.status) == ("KILLED", "FINISHED")
    if isinstance(whole, InWandb):
        assert whole.exits == [130, 0]


@pytest.mark.parametrize("tracker", [InMLflow, InWandb])
def test_a_run_directory_names_no_run_of_someone_else(tracker: Any, tmp_path: Path) -> None:
    folder, client = tmp_path / "run", MlflowClient()
    optimize(folder)
    victim = client.create_run(client.create_experiment("other")).info.run_id
    other = {"mlflow": victim, "wandb": "3k9zq1x7"}[tracker.name]
    (folder / FILE).write_text(json.dumps({tracker.name: {"id": other, "events": 0}}))
    send(tracker.name, folder)
    shown = tracker(folder)
    assert shown.id != other
    assert unique(shown.points("budget/system_runs")) == spent(folder)
    assert client.get_run(victim).data.metrics == {}
    assert client.get_run(victim).info.status == "RUNNING"


def test_a_run_that_was_not_tracked_is_sent_once_to_a_named_experiment_of_each_store(
    tmp_path: Path, cli: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "prompts")
    folder = tmp_path / "run"
    optimize(folder)
    events = len([*read_records(folder, "events.jsonl")])
    for output in (f"{events} events sent to mlflow\n", "mlflow has all events already\n"):
        assert cli("runs", "track", str(folder), "--to", "mlflow").out == output
    before = InMLflow(folder)
    empty_store(tmp_path / "other.db")
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path / 'other.db'}")
    assert cli("runs", "track", str(folder), "--to", "mlflow").code == 0
    after = InMLflow(folder)
    assert after.id != before.id
    assert after.points("budget/system_runs") == before.points("budget/system_runs")
    assert MlflowClient().get_experiment(after.run.info.experiment_id).name == "prompts"
    unknown = cli("runs", "track", str(folder), "--to", "mlfow")
    assert unknown.err.startswith("error: unknown tracker 'mlfow'")


def test_a_store_that_cannot_be_opened_is_an_error_before_anything_runs(tmp_path: Path) -> None:
    mlflow.set_tracking_uri("nowhere://at-all")
    engine = ScriptedLM(often_right)
    with pytest.raises(DeclarationError, match="optimize.trackers: the run cannot be tracked"):
        optimize(tmp_path / "run", engine, trackers=("mlflow",))
    assert engine.requests == []
    assert not (tmp_path / "run").exists()


KILLED = """
import os, signal, sys, warnings
from pathlib import Path
warnings.simplefilter("ignore")
from compound.testing import ScriptedLM
from tracked_runs import optimize

original, made = ScriptedLM._reply, [0]

def dying(*arguments):
    made[0] += 1
    if made[0] == 40:
        os.kill(os.getpid(), signal.SIGKILL)
    return original(*arguments)

ScriptedLM._reply = dying
optimize(Path(sys.argv[1]), trackers=("tensorboard", "mlflow"))
"""


def test_a_killed_run_is_continued_in_local_stores(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests" / "support")])
    killed = subprocess.run(
        [sys.executable, "-c", KILLED, str(folder)],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    before = read_json(folder, FILE)
    optimize(folder, trackers=LOCAL)
    after = read_json(folder, FILE)
    assert after["mlflow"]["id"] == before.get("mlflow", after["mlflow"])["id"]
    for shown in (InTensorBoard(folder), InMLflow(folder)):
        assert unique(shown.points("budget/system_runs")) == spent(folder)


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
    for shown in (InTensorBoard(tmp_path / "run"), InMLflow(tmp_path / "run")):
        rewards = [value for _, value in shown.points("training/reward")]
        assert rewards == pytest.approx(recorded)
        steps = [step for step, _ in shown.points("training/step")]
        assert all(a < b for a, b in pairwise(steps))  # the axis is system runs


def test_event_files_are_not_written_through_a_link(tmp_path: Path) -> None:
    optimize(tmp_path / "run")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "run" / "tensorboard").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(RunDirectoryError, match="symbolic link"):
        Follower("tensorboard", tmp_path / "run").start()
    assert not list((tmp_path / "elsewhere").iterdir())
