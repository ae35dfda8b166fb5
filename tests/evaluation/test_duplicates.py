"""Equal examples in several splits are found, told, and refused where that is asked for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from compound import Dataset, Example
from compound.evaluation.examples import find_in_data, find_overlaps

GAME = Path(__file__).parents[1] / "files" / "game"


def example(name: str, question: Any, **gold: Any) -> Example:
    return Example(name, {"question": question}, {"id": name, "question": question, **gold})


def test_examples_are_compared_exactly_and_normalised() -> None:
    train = [
        example("t1", "Which river crosses Lima?", answer="Rímac"),
        example("t2", "Who?", answer="he"),
    ]
    test = [
        example("x1", "Which river crosses Lima?", answer="Rímac"),
        example("x2", " WHICH  river\ncrosses Lima? ", answer="rímac"),
        example("x3", "Ｗｈｏ?", answer="she"),
        example("x4", "What?", answer="that"),
    ]
    found, within = find_overlaps({"train": train, "test": test})
    assert (within.first, within.second, within.example) == ("test", "test", ("x1", "x2"))
    assert (found.first, found.second) == ("train", "test")
    assert (found.exact, found.normalised, found.with_gold) == (1, 3, 2)
    assert found.example == ("t1", "x1")
    assert str(found) == (
        "of the test examples, 3 have the inputs of a train example (1 exactly, 2 after normalisation; 1 of "
        "them with different gold values), such as test 'x1' and train 't1'"
    )


def test_repetitions_within_a_split_are_told_apart_from_those_across() -> None:
    found = find_overlaps(
        {"train": [example(str(i), "Who?") for i in range(3)], "valid": [example("v", "What?")]}
    )
    assert [(o.first, o.second, o.normalised, o.across) for o in found] == [
        ("train", "train", 2, False)
    ]


def test_lists_and_objects_are_compared_by_what_they_hold() -> None:
    one = example("a", [{"title": "Lima", "text": "A  city"}])
    two = example("b", [{"text": "a city", "title": "LIMA"}])
    assert [o.normalised for o in find_overlaps({"train": [one], "valid": [two]})] == [1]
    three = example("c", [{"text": "a village", "title": "LIMA"}])
    assert find_overlaps({"train": [one], "valid": [three]}) == []


def test_a_lone_surrogate_is_compared_like_any_character() -> None:
    assert (
        len(find_overlaps({"train": [example("a", "\ud800")], "test": [example("b", "\ud800")]}))
        == 1
    )


def test_all_rows_of_a_file_are_compared(tmp_path: Path) -> None:
    for split, questions in {"train": ["a", "b"], "dev": ["c"], "test": ["B"]}.items():
        text = "\n".join(json.dumps({"question": q}) for q in questions)
        (tmp_path / f"{split}.jsonl").write_text(text)
    (found,) = find_in_data(Dataset(tmp_path), ["question"])
    assert (found.first, found.second, found.example) == ("train", "test", ("train-2", "test-1"))


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a system whose splits share two questions."""
    for name in ("game.py", "game.yaml"):
        (tmp_path / name).write_text((GAME / name).read_text())
    text = (tmp_path / "game.yaml").read_text()
    split = "data: {path: rows, train: train, valid: valid, test: test}"
    (tmp_path / "game.yaml").write_text(
        "\n".join(split if line.startswith("data:") else line for line in text.splitlines())
    )
    (tmp_path / "rows").mkdir()
    for name, start in {"train": 0, "valid": 38, "test": 80}.items():
        rows = [{"x": x, "target": 2.0 * x} for x in range(start, start + 40)]
        (tmp_path / "rows" / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    monkeypatch.chdir(tmp_path)
    return tmp_path


WARNING = "of the validation examples, 2 have the inputs of a train example (2 exactly"


def test_check_warns_and_is_content(shared: Path, cli: Any) -> None:
    ran = cli("check", "game.yaml")
    assert ran.code == 0
    assert WARNING in ran.err
    assert any(
        WARNING in text for text in json.loads(cli("check", "game.yaml", "--json").out)["warnings"]
    )


def test_the_dry_run_warns(shared: Path, cli: Any) -> None:
    ran = cli("optimize", "game.yaml", "--dry-run", "--set", "optimize.valid_size=40")
    assert ran.code == 0
    assert f"warning: {WARNING}" in ran.out


def test_the_run_and_its_report_warn(shared: Path, cli: Any) -> None:
    ran = cli("optimize", "game.yaml", "--set", "optimize.valid_size=40")
    assert ran.code == 0
    assert WARNING in ran.err
    assert WARNING in ran.out
    assert WARNING in (shared / "runs" / "game" / "report.md").read_text()


@pytest.mark.parametrize("command", [["check"], ["optimize", "--dry-run"], ["optimize"]])
def test_strict_refuses(command: list[str], shared: Path, cli: Any) -> None:
    name, *options = command
    ran = cli(name, "game.yaml", *options, "--strict", "--set", "optimize.valid_size=40")
    assert ran.code == 2
    assert WARNING in ran.err
    assert "omit --strict" in ran.err
    assert not (shared / "runs").exists()


def test_strict_is_content_where_only_one_split_repeats_itself(shared: Path, cli: Any) -> None:
    rows = shared / "rows" / "train.jsonl"
    rows.write_text(
        "\n".join(json.dumps({"x": x % 30, "target": 2.0 * (x % 30)}) for x in range(40))
    )
    ran = cli("check", "game.yaml", "--strict")
    assert ran.code == 0
    assert "10 train examples repeat the inputs of an earlier one" in ran.err
