"""Finished runs: their report is written even after a kill, and failed test rows can be run again."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from compound import Dataset, Float, Function, Input, OptimizeSettings, System
from compound.api.optimize import run_optimization
from compound.api.result import Result, read_result
from compound.api.verify import verify
from compound.core.errors import RunDirectoryError
from compound.metrics import custom
from compound.optimization.runs.directory import RunDirectory, read_records
from compound.optimization.settings.base import BudgetSettings
from compound.report import summarize

DOWN: set[str] = set()  # examples whose calls fail, and how
UNREADABLE: set[str] = set()
CALLS: list[str] = []


@pytest.fixture(autouse=True)
def _forget() -> None:
    for known in (DOWN, UNREADABLE, CALLS):
        known.clear()


def guess(case: str, x: float, aim: float) -> float:
    CALLS.append(case)
    if case in DOWN:
        raise ConnectionError("the server is gone")
    if case in UNREADABLE:
        return "seven"  # type: ignore[return-value]  # of another type than declared
    return x * aim


def near(outputs: Mapping[str, Any], example: Any) -> float:
    return max(0.0, 1.0 - abs(float(outputs["y"]) - float(example.gold["target"])) / 10)


def rows(n: int, kind: str) -> list[dict[str, Any]]:
    return [
        {"id": f"{kind}{i}", "case": f"{kind}{i}", "x": float(i % 5), "target": 2.0 * (i % 5)}
        for i in range(n)
    ]


def run(path: Path, **changes: Any) -> Result:
    guesser = Function("guesser", guess, aim=Float(0.0, 4.0, value=0.25))
    system = System("game", outputs={"y": guesser(case=Input("case", str), x=Input("x", float))})
    data = Dataset.of(train=rows(20, "tr"), valid=rows(20, "va"), test=rows(20, "te"))
    settings = OptimizeSettings(
        method="search",
        seed=3,
        budget=BudgetSettings(system_runs=300),
        valid_size=20,
        candidates=6,
    )
    return run_optimization(system, data, custom(near), settings, run_dir=path, **changes)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Result:
    """Return a finished run without failures."""
    return run(tmp_path_factory.mktemp("whole") / "run")


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Result:
    """Return a finished run in which two test rows have no answer, and one has an unreadable one."""
    DOWN.update({"te1", "te7", "va3"})
    UNREADABLE.add("te2")
    return run(tmp_path_factory.mktemp("first") / "run")


def copied(run: Result, folder: Path) -> Path:
    return Path(shutil.copytree(run.path, folder / "run"))


def events(path: Path, kind: str) -> list[dict[str, Any]]:
    return [e for e in read_records(path, "events.jsonl") if e["event"] == kind]


class TestRetrying:
    def test_rows_that_failed_without_an_answer_alone_run_again(
        self, whole: Result, first: Result, tmp_path: Path
    ) -> None:
        assert first.test_before is not None
        assert first.test_before.failed == 3
        path = copied(first, tmp_path)
        decisions, valid = events(path, "decision"), first.after.to_json()
        again = run(path, retry_failed=True)
        assert {*CALLS} == {"te1", "te7"}
        assert again.test_before is not None
        assert again.test_after is not None
        assert whole.test_before is not None
        assert (
            again.test_before.failed == again.test_after.failed == 1
        )  # the answer of another type stays
        expected = {row.example: row.score for row in whole.test_before.rows} | {"te2": 0.0}
        assert {row.example: row.score for row in again.test_before.rows} == expected
        assert events(path, "decision") == decisions
        assert again.after.to_json() == valid
        assert again.best == first.best
        assert again.before == first.before
        assert verify(tmp_path / "run") == []

    def test_it_is_recorded_counted_and_shown(self, first: Result, tmp_path: Path) -> None:
        path = copied(first, tmp_path)
        again = run(path, retry_failed=True)
        retries = events(path, "retry")
        assert [(e["evaluation"], e["failed"], e["retried"], e["recovered"]) for e in retries] == [
            ("test_before", 2, 2, 2),
            ("test_after", 2, 2, 2),
        ]
        assert again.spent["test_runs"] == first.spent["test_runs"] + 4
        assert "4 test runs failed at first and succeeded when retried." in summarize(path)["notes"]
        told = "2 of 2 failed test rows of the unoptimized system were retried; 2 succeeded"
        assert told in again.report
        assert "Acceptance decisions and validation scores did not change" in again.report

    def test_a_kill_loses_nothing(
        self, first: Result, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        copied(first, tmp_path)
        appended = RunDirectory.append

        def killed(self: RunDirectory, name: str, record: Mapping[str, Any]) -> None:
            if record.get("evaluation") == "test_after":
                raise KeyboardInterrupt
            appended(self, name, record)

        with monkeypatch.context() as patch:
            patch.setattr(RunDirectory, "append", killed)
            with pytest.raises(KeyboardInterrupt):
                run(tmp_path / "run", retry_failed=True)
        again = run(tmp_path / "run", retry_failed=True)
        assert again.test_before is not None
        assert again.test_after is not None
        assert again.test_before.failed == again.test_after.failed == 1
        assert [e["evaluation"] for e in events(tmp_path / "run", "retry")] == [
            "test_before",
            "test_after",
        ]
        assert verify(tmp_path / "run") == []

    def test_a_run_that_is_not_finished_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(RunDirectoryError, match="is not finished: .* without --retry-failed"):
            run(tmp_path / "run", retry_failed=True)

    def test_a_run_of_other_settings_is_refused(self, whole: Result, tmp_path: Path) -> None:
        config = copied(whole, tmp_path) / "config.json"
        stored = json.loads(config.read_text())
        del stored["checksum"]
        stored["optimize"]["seed"] = 99
        config.write_text(json.dumps(stored))
        with pytest.raises(RunDirectoryError, match=r"changed: optimize\.seed"):
            run(tmp_path / "run", retry_failed=True)


class TestReporting:
    @pytest.mark.parametrize(
        "stale", [False, True], ids=["no report", "a report of the unfinished run"]
    )
    def test_a_run_killed_before_its_report_gets_it_from_the_same_call(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stale: bool
    ) -> None:
        """Regression test: the same command refused the run as finished, and there was no report."""

        def killed(path: Path) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr("compound.report.write", killed)
            with pytest.raises(KeyboardInterrupt):
                run(tmp_path / "run")
        if stale:
            for name in ("report.md", "report.html"):
                (tmp_path / "run" / name).write_text("of an earlier moment")
        CALLS.clear()
        result = run(tmp_path / "run")
        assert CALLS == []
        assert "Unfinished" not in result.report
        assert "## Decisions" in result.report
        assert (tmp_path / "run" / "report.html").stat().st_size > 1000
        assert result.to_json() == read_result(tmp_path / "run").to_json()
        with pytest.raises(RunDirectoryError, match="holds a finished run"):
            run(tmp_path / "run")

    def test_a_run_of_an_earlier_version_is_not_continued(
        self, whole: Result, tmp_path: Path
    ) -> None:
        path = copied(whole, tmp_path) / "checkpoint.json"
        stored = json.loads(path.read_text())
        del stored["checksum"]
        path.write_text(json.dumps({**stored, "format": 2, "state": {"done": True}}))
        with pytest.raises(RunDirectoryError, match="has format 2, but .* version reads format 3"):
            run(tmp_path / "run")
