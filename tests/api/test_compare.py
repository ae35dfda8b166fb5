"""`compound runs compare`: paired numbers of common examples, and no comparison of other data."""

from __future__ import annotations

import json
import re
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
    counts = (
        f"{sum(d > 0 for d in differences)} better, {sum(d < 0 for d in differences)} worse, 35"
    )
    assert f"40 common examples (test): {counts} equal" in printed.out
    assert "\nlargest losses:\n" in printed.out
    assert "What is the number" in printed.out  # the question of a changed example
    assert "No significant difference in score, tokens, dollars, seconds." in printed.out
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


def rescored(run: Path, score: float) -> None:
    """Let all test examples of a run's result have one score."""
    document = json.loads((run / "checkpoint.json").read_text())
    document.pop("checksum")
    for row in document["state"]["test_after"]["evaluation"]["rows"]:
        row[2] = score
    (run / "checkpoint.json").write_text(json.dumps(document))


def test_a_trade_off_is_told_in_words(runs: tuple[Path, Path], cli: Any) -> None:
    rescored(runs[0], 0.25)
    rescored(runs[1], 0.75)
    change(runs[1], "traces.jsonl", ": 400,", ": 500,")
    told = compare(*runs).text(60).split("\n\n")[0]
    assert all(len(line) <= 60 for line in told.split("\n"))
    found = " ".join(told.split())
    assert re.match(
        r"The second result scores higher \(\+0\.500 \[0\.\d+, 0\.\d+\], ×3\), but takes more tokens "
        r"\(\+200, ×1\.25\)\. No significant difference in dollars, seconds\.",
        found,
    )
    assert "scores lower (−0.500" in str(compare(*runs[::-1]))


def test_unknown_dollars_are_not_compared(runs: tuple[Path, Path]) -> None:
    traces = runs[0] / "traces.jsonl"
    traces.write_text(traces.read_text().replace('"unpriced": 0', '"unpriced": 1'))
    change(runs[0], "traces.jsonl", "nothing else", "")  # writes the checksums
    assert "Not known for all examples: dollars." in str(compare(*runs))


def test_scores_of_different_metrics_are_told_apart(runs: tuple[Path, Path]) -> None:
    assert "Warning" not in str(compare(*runs))
    config = json.loads((runs[1] / "config.json").read_text())
    change(runs[1], "config.json", config["metric"], "another")
    assert "different metrics" in str(compare(*runs))
