"""Scores of many settings: combinations of choices, named settings, and their scores."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.measure.controls.score_settings import combinations, main
from compound.graph.space import Choice, Float


def test_only_choices_are_combined() -> None:
    spaces = {"a.x": Choice(1, 2), "a.y": Float(0.0, 1.0), "b.z": Choice("u", "v")}
    assert [tuple(found.values()) for found in combinations(spaces)] == [
        (1, "u"),
        (1, "v"),
        (2, "u"),
        (2, "v"),
    ]
    assert list(combinations({})) == [{}]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with a system that computes n % k, and rows whose right answer is n % 5."""
    monkeypatch.setenv("COMPOUND_CACHE", str(tmp_path / "cache"))
    (tmp_path / "pick.py").write_text(
        "def pick(n: int, k: int) -> list[int]:\n    return [n % k, n % 5]\n"
    )
    (tmp_path / "pick.yaml").write_text(
        "system: pick\ninputs: {n: int}\ncomponents:\n  picker:\n"
        '    function: {call: "pick:pick", k: {choice: [2, 3, 5], value: 2}}\n    in: {n: $n}\n'
        "outputs: {left: $picker}\ndata: {path: rows}\nmetric: {mrr: {output: left, gold: left}}\n"
    )
    (tmp_path / "rows").mkdir()
    for name in ("train", "valid", "test"):
        rows = [{"id": f"{name}{n}", "n": n, "left": n % 5} for n in range(10)]
        (tmp_path / "rows" / f"{name}.jsonl").write_text(
            "".join(json.dumps(row) + "\n" for row in rows)
        )
    return tmp_path


def measure(folder: Path, *arguments: str) -> Any:
    main([str(folder / "pick.yaml"), *arguments, "--output", str(folder / "found.json")])
    return json.loads((folder / "found.json").read_text())


def test_every_combination_is_scored_on_the_same_examples(folder: Path) -> None:
    found = measure(folder, "--limit", "10")
    # The first item is right for n = 0, 1 with k = 2, for 0, 1, 2 with k = 3; otherwise the second
    # one is.
    assert [(row["settings"]["picker.k"], row["mean"], row["n"]) for row in found["rows"]] == [
        (5, 1.0, 10),
        (3, pytest.approx(0.65), 10),
        (2, pytest.approx(0.6), 10),
    ]
    assert [row["parts"] for row in found["rows"]] == [
        {"hit@1": 1.0, "hit@5": 1.0},
        {"hit@1": pytest.approx(0.3), "hit@5": 1.0},
        {"hit@1": pytest.approx(0.2), "hit@5": 1.0},
    ]
    assert (found["split"], found["start"]) == ("train", {"picker.k": 2})
    assert found["mean"] == pytest.approx(0.75)
    assert found["deviation"] == pytest.approx(((0.25**2 + 0.1**2 + 0.15**2) / 3) ** 0.5)
