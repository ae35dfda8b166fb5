"""Runs in MLflow, in a local database: parameters, metrics, files, baselines, resumed and interrupted runs."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # mlflow's imports
    import mlflow
    from mlflow import MlflowClient
    from mlflow.entities import Run

import compound as cp
from compound.core.errors import DeclarationError
from compound.optimization.runs.directory import read_records
from compound.report.trackers.backends import PARENT
from compound.report.trackers.tracking import FILE
from compound.testing import ScriptedLM
from local_mlflow import empty_store, local_store
from tracked_runs import often_right
from tracked_runs import optimize as optimize_small

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MlflowClient]:
    with local_store(tmp_path, monkeypatch) as client:
        yield client


def optimize(folder: Path, lm: Any = often_right, **changes: Any) -> cp.Result:
    return optimize_small(folder, lm, **{"trackers": ("mlflow",), **changes})


def runs(store: MlflowClient, experiment: str = "qa") -> list[Run]:
    found = store.get_experiment_by_name(experiment)
    assert found is not None
    return list(store.search_runs([found.experiment_id], order_by=["attributes.start_time ASC"]))


def history(store: MlflowClient, run: Run, name: str) -> list[tuple[int, float]]:
    return [(m.step, m.value) for m in store.get_metric_history(run.info.run_id, name)]


def spent(
    events: Iterable[Mapping[str, Any]], unit: str = "system_runs"
) -> list[tuple[int, float]]:
    """Return the steps and values of events; MLflow stores equal ones of the same millisecond once."""
    points = (
        (int(1000 * e["at"]), round(e["spent"]["system_runs"]), float(e["spent"][unit]))
        for e in events
    )
    return [point[1:] for point in dict.fromkeys(points)]


def artifacts(store: MlflowClient, run: Run) -> set[str]:
    return {item.path for item in store.list_artifacts(run.info.run_id)}


def test_a_search_and_its_baseline_are_tracked_with_parameters_metrics_and_files(
    store: MlflowClient, tmp_path: Path
) -> None:
    result = optimize(tmp_path / "run", baselines=("random",))
    run, baseline = runs(store)
    assert (run.info.status, run.info.run_name) == ("FINISHED", "run")
    assert run.data.params["optimize.method"] == "random"
    assert run.data.params["optimize.budget.system_runs"] == "120.0"
    assert run.data.params["data.train.n"] == "12"
    assert run.data.metrics["valid/mean"] == result.before.mean
    assert result.test_after is not None
    assert run.data.metrics["test_after/mean"] == result.test_after.mean
    assert run.data.metrics["best/valid"] == result.after.mean
    assert run.data.metrics["budget/calls"] == result.spent["calls"]
    assert artifacts(store, run) >= {"report.md", "report.html", "best.json", "events.jsonl"}
    best = store.download_artifacts(run.info.run_id, "best.json", str(tmp_path))
    assert json.loads(Path(best).read_text())["values"] == result.best.to_json()
    events = list(read_records(tmp_path / "run", "events.jsonl"))
    assert history(store, run, "budget/system_runs") == spent(events)
    jobs = [e for e in events if e["event"] == "job"]
    assert [value for _, value in history(store, run, "job/job")] == [e["job"] for e in jobs]
    assert spent(events)[-1][1] == result.spent["system_runs"]
    assert baseline.data.tags[PARENT] == run.info.run_id
    assert PARENT not in run.data.tags
    assert baseline.info.run_name == "random (random)"
    assert baseline.data.params["optimize.method"] == "random"
    found = result.baselines["random"].test_after
    assert found is not None
    assert baseline.data.metrics["test_after/mean"] == found.mean
    assert "best.json" in artifacts(store, baseline)


def test_a_resumed_run_continues_the_same_run_without_repetitions(
    store: MlflowClient, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    optimize(tmp_path / "whole")
    (whole,) = runs(store)
    with pytest.raises(KeyboardInterrupt):
        optimize(folder, Stopping(30))
    _, interrupted = runs(store)
    assert interrupted.info.status == "KILLED"
    optimize(folder)
    _, run = runs(store)
    assert run.info.run_id == interrupted.info.run_id
    assert run.info.status == "FINISHED"
    assert history(store, run, "budget/system_runs") == spent(read_records(folder, "events.jsonl"))
    for name in ("budget/system_runs", "best/valid", "test_after/mean"):
        assert {*history(store, run, name)} == {*history(store, whole, name)}


class Stopping(ScriptedLM):
    """A model during whose last request the user interrupts."""

    def __init__(self, requests: int) -> None:
        super().__init__(often_right, concurrency=1)
        self._left = requests

    async def generate(self, request: cp.ext.Request) -> cp.ext.Completion:
        self._left -= 1
        if self._left < 0:
            raise KeyboardInterrupt
        return await super().generate(request)


def test_a_run_that_was_not_tracked_can_be_sent_once_to_a_named_experiment_of_each_store(
    store: MlflowClient, tmp_path: Path, cli: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "prompts")
    optimize(tmp_path / "run", trackers=(), baselines=("random",))
    for _ in range(2):
        assert cli("runs", "track", str(tmp_path / "run"), "--to", "mlflow").code == 0
    main, baseline = runs(store, "prompts")
    assert baseline.data.tags[PARENT] == main.info.run_id
    events = list(read_records(tmp_path / "run", "events.jsonl"))
    assert history(store, main, "budget/calls") == spent(events, "calls")
    empty_store(tmp_path / "other.db")
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path / 'other.db'}")
    assert cli("runs", "track", str(tmp_path / "run"), "--to", "mlflow").code == 0
    again, _ = runs(other := MlflowClient(), "prompts")
    assert history(other, again, "budget/calls") == spent(events, "calls")
    assert json.loads((tmp_path / "run" / FILE).read_text())["mlflow"]["id"] == again.info.run_id
    assert cli("runs", "track", str(tmp_path / "run"), "--to", "mlfow").err.startswith(
        "error: unknown tracker 'mlfow'"
    )


@pytest.mark.slow
def test_a_run_directory_names_no_run_of_someone_else(
    store: MlflowClient, tmp_path: Path, cli: Any
) -> None:
    optimize(tmp_path / "run", trackers=())
    victim = store.create_run(store.create_experiment("other"), run_name="victim").info.run_id
    (tmp_path / "run" / FILE).write_text(json.dumps({"mlflow": {"id": victim, "events": 0}}))
    assert cli("runs", "track", str(tmp_path / "run"), "--to", "mlflow").code == 0
    untouched = store.get_run(victim)
    assert not untouched.data.params
    assert not untouched.data.metrics
    assert untouched.info.status == "RUNNING"
    assert artifacts(store, untouched) == set()
    assert len(runs(store)) == 1


def test_a_store_that_cannot_be_opened_is_an_error_before_anything_runs(
    store: MlflowClient, tmp_path: Path
) -> None:
    mlflow.set_tracking_uri("nowhere://at-all")
    engine = ScriptedLM(often_right)
    with pytest.raises(DeclarationError, match="optimize.trackers: the run cannot be tracked"):
        optimize(tmp_path / "run", engine)
    assert engine.requests == []
    assert not (tmp_path / "run").exists()
