"""`compound runs compare`: paired numbers of common examples, and no comparison of other data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.measure.studio import write_run
from compound.api.compare import compare
from compound.core.errors import RunDirectoryError
from studio_runs import change


@pytest.fixture
def runs(tmp_path: Path) -> tuple[Path, Path]:
    paths = tmp_path / "one", tmp_path / "two"
    for path in paths:
        write_run(path, examples=40, candidates=3)
    return paths


def test_equal_results_do_not_differ(runs: tuple[Path, Path]) -> None:
    found = compare(*runs)
    assert [row.name for row in found.rows] == [
        "score",
        "tokens per run",
        "dollars per run",
        "seconds per run, with waits",
    ]
    assert all(row.difference.mean == 0 for row in found.rows)
    # two calls of 400 and 8 tokens, for 0.0001 dollars and half a second each, one after the other
    assert [row.first.mean for row in found.rows[1:]] == pytest.approx([816, 0.0002, 1.0])
    assert (found.examples, found.changed) == (40, [])


def test_changed_examples_are_listed_losses_first(runs: tuple[Path, Path], cli: Any) -> None:
    checkpoint = runs[1] / "checkpoint.json"
    document = json.loads(checkpoint.read_text())
    document.pop("checksum")
    rows = document["state"]["test_after"]["evaluation"]["rows"]
    before = {row[0]: row[2] for row in rows}
    for row in rows[:5]:
        row[2] = 1 - row[2]
    checkpoint.write_text(json.dumps(document))
    found = compare(*runs)
    assert {name: old for name, old, _ in found.changed} == {
        f"e{i}": before[f"e{i}"] for i in range(5)
    }
    differences = [new - old for _, old, new in found.changed]
    assert differences == sorted(differences)
    assert found.rows[0].difference.mean == pytest.approx(sum(differences) / 40)
    printed = cli("runs", "compare", *map(str, runs))
    assert "40 common examples (test)" in printed.out
    assert json.loads(cli("runs", "compare", *map(str, runs), "--json").out)["examples"] == 40


def test_examples_of_other_data_with_equal_names_are_not_compared(runs: tuple[Path, Path]) -> None:
    change(runs[1], "config.json", "digest-of-test-rows", "another")
    assert compare(*runs).examples == 40  # the same inputs
    change(runs[1], "traces.jsonl", "What is the number", "What is the other number")
    with pytest.raises(RunDirectoryError, match="no scored test or validation examples in common"):
        compare(*runs)


def test_what_is_no_run_is_refused(runs: tuple[Path, Path], tmp_path: Path) -> None:
    with pytest.raises(RunDirectoryError, match="not a run directory"):
        compare(runs[0], tmp_path)


@pytest.mark.parametrize(
    "text", ['{"split": 3}', '{"split": "test", "configuration": "x"}', "no JSON"]
)
def test_damaged_traces_are_named(runs: tuple[Path, Path], text: str) -> None:
    lines = (runs[0] / "traces.jsonl").read_text()
    (runs[0] / "traces.jsonl").write_text(f"{text}\n{lines}")
    with pytest.raises(RunDirectoryError, match="one"):
        compare(*runs)
