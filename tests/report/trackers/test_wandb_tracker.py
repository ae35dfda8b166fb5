"""Runs in Weights & Biases, in its offline mode: what its files contain."""

from __future__ import annotations

import struct
import time
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # wandb's imports
    import wandb
    from wandb.proto import wandb_internal_pb2

import compound as cp
from compound.optimization.runs.directory import read_json, read_records
from compound.report.trackers.tracking import FILE, send
from compound.testing import ScriptedLM
from tracked_runs import optimize as optimize_small

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("WANDB_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("WANDB_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "config"))
    return tmp_path


def optimize(folder: Path, **changes: Any) -> cp.Result:
    return optimize_small(folder, trackers=("wandb",), **changes)


HEADER, BLOCK = 7, 32_768  # of the file and of each chunk; bytes of a block
FULL, LAST = 1, 4  # types of a chunk that ends a record


def log_records(content: bytes) -> Iterator[bytes]:
    """Yield the records of a log in LevelDB's format, in which records are split at the ends of blocks."""
    at, record = HEADER, b""
    while at + HEADER <= len(content):
        if BLOCK - at % BLOCK < HEADER:  # padding
            at += BLOCK - at % BLOCK
            continue
        _, length, kind = struct.unpack_from("<IHB", content, at)
        record += content[at + HEADER : at + HEADER + length]
        at += HEADER + length
        if kind in (FULL, LAST):
            yield record
            record = b""


class Offline:
    """Records of an offline run."""

    def __init__(self, folder: Path) -> None:
        (path,) = folder.glob("*.wandb")
        self.history: list[Mapping[str, str]] = []
        self.artifacts: list[str] = []
        for data in log_records(path.read_bytes()):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            kind = record.WhichOneof("record_type")
            if kind == "history":
                rows = {i.key or "/".join(i.nested_key): i.value_json for i in record.history.item}
                self.history.append(rows)
            elif kind == "run":
                self.run = record.run
            elif kind == "exit":
                self.exit_code = record.exit.exit_code
            elif kind == "metric":
                self.axis = record.metric.step_metric
            elif kind == "request" and record.request.HasField("log_artifact"):
                self.artifacts += [
                    e.path for e in record.request.log_artifact.artifact.manifest.contents
                ]
            elif kind == "artifact":
                self.artifacts += [e.path for e in record.artifact.manifest.contents]


def recorded(folder: Path) -> list[Offline]:
    """Read all runs, once their last record is there: the process of the library writes them on its own."""
    deadline = time.monotonic() + 120
    while True:
        found = [Offline(path) for path in sorted(folder.glob("wandb/offline-run-*"))]
        if all(hasattr(run, "exit_code") for run in found) or time.monotonic() > deadline:
            return found
        time.sleep(0.1)


@pytest.mark.slow
def test_a_run_and_its_baseline_are_recorded(offline: Path) -> None:
    result = optimize(offline / "run", baselines=("random",))
    found = {run.run.run_id: run for run in recorded(offline)}
    main = found[read_json(offline / "run", FILE)["wandb"]["id"]]
    baseline = found[read_json(offline / "run" / "baselines" / "random", FILE)["wandb"]["id"]]
    assert len(found) == 2
    assert main.run.project == "qa"
    assert main.run.display_name == "run"
    assert baseline.run.run_group == main.run.run_group == main.run.run_id
    assert (main.run.job_type, baseline.run.job_type) == ("optimize", "baseline")
    config = {item.key: item.value_json for item in main.run.config.update}
    assert config["optimize.method"] == '"random"'
    events = list(read_records(offline / "run", "events.jsonl"))
    runs = [float(row["budget/system_runs"]) for row in main.history]
    assert runs == [event["spent"]["system_runs"] for event in events]
    assert main.axis == "budget/system_runs"
    best = [float(row["best/valid"]) for row in main.history if "best/valid" in row]
    assert best[-1] == result.after.mean
    assert {"best.json", "report.md"} <= set(main.artifacts)
    assert (main.exit_code, baseline.exit_code) == (0, 0)
    assert wandb.run is None  # none is left open


def test_a_stopped_run_is_continued_under_its_id(offline: Path) -> None:
    with pytest.raises(cp.CompoundError, match="stopped"):
        _optimize_and_stop(offline / "run")
    optimize(offline / "run")
    first, second = recorded(offline)
    assert first.run.run_id == second.run.run_id
    assert first.exit_code == 130
    events = list(read_records(offline / "run", "events.jsonl"))
    assert len(first.history) + len(second.history) == len(events)


def test_a_run_directory_names_no_run_of_someone_else(offline: Path) -> None:
    optimize(offline / "run")
    (offline / "run" / FILE).write_text('{"wandb": {"id": "3k9zq1x7", "events": 0}}')
    send("wandb", offline / "run")
    found = {run.run.run_id: run for run in recorded(offline)}
    assert "3k9zq1x7" not in found
    sent = found[read_json(offline / "run", FILE)["wandb"]["id"]]
    assert len(sent.history) == len(list(read_records(offline / "run", "events.jsonl")))


def _optimize_and_stop(folder: Path) -> None:
    def stop_soon(self: ScriptedLM, request: cp.ext.Request, number: int) -> object:
        if number == 20:
            (folder / "STOP").touch()
        return answer(self, request, number)

    answer = ScriptedLM._reply
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(ScriptedLM, "_reply", stop_soon)
        optimize(folder)
