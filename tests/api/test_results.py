"""Results of finished runs: loaded again from their directories, and fresh runs beside them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import compound as cp
from compound.core.errors import RunDirectoryError
from compound.core.storage.records import read_document, to_document
from compound.evaluation.metrics.built_in import exact_match


def double(x: int, factor: int) -> int:
    return x * factor


def system() -> cp.System:
    node = cp.Function("double", double, factor=cp.Choice(1, 2, 3, value=1))(x=cp.Input("x", int))
    return cp.System("doubling", outputs={"y": node})


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> cp.Dataset:
    monkeypatch.chdir(tmp_path)
    rows = [json.dumps({"id": str(i), "x": i + 1, "y": 2 * i + 2}) for i in range(60)]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    return cp.Dataset("rows.jsonl", split_by={"train": 0.4, "valid": 0.4, "test": 0.2})


def finished(data: cp.Dataset, path: str | Path = "run", **changes: Any) -> cp.Result:
    budget = cp.Budget(system_runs=300)
    return cp.optimize(
        system(), data, exact_match("y"), budget=budget, run_dir=path, progress=False, **changes
    )


def test_a_finished_run_is_loaded_as_the_result_that_optimize_returned(data: cp.Dataset) -> None:
    result = finished(data)
    loaded = cp.load_result("run")
    assert loaded == result
    assert dict(loaded.best) == {"double.factor": 2}
    assert loaded.test_gain == result.test_gain is not None
    assert loaded.report == result.report


def test_a_result_is_loaded_without_data_and_writing(data: cp.Dataset, tmp_path: Path) -> None:
    result = finished(data)
    (tmp_path / "rows.jsonl").unlink()
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    before = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in files}
    for path in files:
        path.chmod(0o444)
    (tmp_path / "run").chmod(0o555)
    try:
        assert cp.load_result(tmp_path / "run").to_json() == {
            **result.to_json(),
            "run": str(tmp_path / "run"),
        }
    finally:
        (tmp_path / "run").chmod(0o755)
    assert {path for path in (tmp_path / "run").rglob("*") if path.is_file()} == set(files)
    assert {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in files} == before


def test_a_copied_run_is_loaded_from_where_it_is(data: cp.Dataset, tmp_path: Path) -> None:
    result = finished(data)
    shutil.move(tmp_path / "run", tmp_path / "elsewhere")
    loaded = cp.load_result("elsewhere")
    assert (loaded.best, loaded.after) == (result.best, result.after)


def test_what_is_no_finished_run_is_refused(data: cp.Dataset) -> None:
    damages: list[tuple[Callable[[Path], object], str]] = [
        (lambda run: (run / "config.json").unlink(), "is not a run directory"),
        (lambda run: (run / "checkpoint.json").unlink(), "checkpoint.json is missing"),
        (lambda run: edit(run, done=False), "is not finished"),
        (lambda run: edit(run, before={"rows": 3}), "OptimizationState cannot be read: before"),
        (lambda run: edit(run, search=[1]), "OptimizationState cannot be read: search"),
        (lambda run: (run / "events.jsonl").write_text(""), "events.jsonl is shorter than stated"),
    ]
    finished(data)
    for number, (damage, message) in enumerate(damages):
        damage(copy := Path(shutil.copytree("run", f"run-{number}")))
        with pytest.raises(RunDirectoryError, match=message):
            cp.load_result(copy)


def edit(run: Path, **changes: object) -> None:
    stored: dict[str, Any] = read_document((run / "checkpoint.json").read_bytes())
    stored["state"].update(changes)
    (run / "checkpoint.json").write_text(to_document(stored))


def test_new_starts_a_fresh_run_beside_an_existing_one(data: cp.Dataset) -> None:
    first = finished(data, "runs/a")
    with pytest.raises(RunDirectoryError, match="holds a finished run"):
        finished(data, "runs/a")
    again, third = (finished(data, "runs/a", new=True) for _ in range(2))
    assert [str(result.path) for result in (first, again, third)] == [
        "runs/a",
        "runs/a-2",
        "runs/a-3",
    ]
    assert again.best == first.best


def test_new_is_a_plain_run_where_there_is_none(data: cp.Dataset) -> None:
    assert finished(data, "runs/b", new=True).path == Path("runs/b")
