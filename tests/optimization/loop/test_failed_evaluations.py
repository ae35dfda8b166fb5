"""Failures of the test split, or of one candidate, end no run: they are a part of its result."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import compound as cp
from compound.core.errors import RunDirectoryError, TooManyFailures

CALLS: list[int] = []


def optimize(path: Path, line: Any, **settings: Any) -> cp.Result:
    CALLS.clear()
    node = cp.Function("line", line, slope=cp.Choice(1, 3))
    system = cp.System("line", {"answer": node(number=cp.Input("number", int))})
    rows = [{"id": str(i), "number": i, "answer": str(i * 3)} for i in range(62)]
    data = {"train": rows[:20], "valid": rows[20:60], "test": rows[60:]}
    chosen = {"budget": 400, "method": "random", "progress": False, **settings}
    return cp.optimize(system, data, "exact_match", run_dir=path, **chosen)


def test_the_failure_that_is_named_is_the_most_common_of_the_split(tmp_path: Path) -> None:
    def line(number: int, slope: int) -> str:
        if number == 61:
            raise ValueError("of the test split")
        if number in (20, 21, 22) or (number == 60 and slope == 3):
            raise ValueError("of both splits")
        return str(number * slope)

    found = optimize(tmp_path / "run", line)
    assert found.best["line.slope"] == 3
    notes = cp.load_result(tmp_path / "run").report
    assert "3 of these runs failed, mostly error: ValueError: of the test split" in notes


def test_a_failed_test_split_is_reported_beside_the_result(tmp_path: Path) -> None:
    def line(number: int, slope: int) -> str:
        CALLS.append(number)
        if number >= 60:
            raise ValueError("no answer")
        return str(number * slope)

    found = optimize(tmp_path / "run", line)
    assert found.best["line.slope"] == 3
    assert found.verdict == "supported"
    assert found.test_after is not None
    assert found.test_after.failed == 2
    notes = cp.load_result(tmp_path / "run").report
    assert "4 of these runs failed, mostly error: " in notes
    assert "optimize --retry-failed" in notes
    with pytest.raises(RunDirectoryError, match="holds a finished run"):
        optimize(tmp_path / "run", line)
    assert CALLS == []


def test_a_candidate_that_fails_on_validation_examples_is_rejected(tmp_path: Path) -> None:
    def line(number: int, slope: int) -> str:
        if slope == 3 and 20 <= number < 60:
            raise ValueError("no answer")
        return str(number * slope)

    found = optimize(tmp_path / "run", line)
    assert found.best["line.slope"] == 1
    assert found.verdict == "unchanged"


def test_a_candidate_whose_runs_were_lost_is_decided_on_later(tmp_path: Path) -> None:
    down = [True]

    def line(number: int, slope: int) -> str:
        if slope == 3 and 20 <= number < 60 and down:
            raise ConnectionError("refused")
        return str(number * slope)

    with pytest.raises(TooManyFailures, match=r"40 of 40 runs failed.*refused"):
        optimize(tmp_path / "run", line)
    down.clear()
    assert optimize(tmp_path / "run", line).best["line.slope"] == 3
