"""``compound init`` writes a file that passes ``check``, whatever the header, or says why it cannot."""

from __future__ import annotations

import csv
import inspect
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import pytest

from compound.components.llm import LLM
from compound.yaml import load

LABELS = ["bug", "billing", "how to"]
HOSTILE = [
    "Ticket text",
    "prompt",
    "temperature",
    "lm",
    "name",
    "2nd",
    "class",
    "a.b",
    "on",
    "null",
    "日本",
    "$x",
    "a: b",
    "'q\"",
    "output",
    "{x}",
    "#c",
    "demos",
    "max_tokens",
    "a,b",
    "*",
    "in",
    "answerer",
    "system",
    "{{x}}",
]


def table(path: Path, header: Sequence[str], rows: Sequence[Sequence[str]], bom: str = "") -> Path:
    with path.open("w", newline="", encoding="utf-8") as file:
        file.write(bom)
        csv.writer(file).writerows([header, *rows])
    return path


def tickets(path: Path, header: Sequence[str] = ("id", "text", "label"), **options: Any) -> Path:
    return table(
        path, header, [(f"t{i}", f"ticket {i}", LABELS[i % 3]) for i in range(90)], **options
    )


@pytest.fixture
def init(cli: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    monkeypatch.chdir(tmp_path)
    return lambda *arguments: cli("init", *map(str, arguments))


def test_labels_ids_inputs_are_found_and_the_file_runs(init: Any, cli: Any, tmp_path: Path) -> None:
    ran = init(tickets(tmp_path / "tickets.csv", bom="\ufeff"))
    assert ran.code == 0, ran.err
    program = load(tmp_path / "system.yaml")
    system = program.system
    assert (system.lm, dict(system.inputs)) == ("smollm2", {"text": str})
    assert list(system.outputs) == ["label"]
    node = system.components["answerer"]
    assert isinstance(node, LLM)
    assert node.outputs["output"].type == Literal["billing", "bug", "how to"]
    assert program.data is not None
    assert program.data.examples("train", ["text"])[0].id.startswith("t")
    assert cli("check", "system.yaml").code == 0
    assert cli("optimize", "system.yaml", "--dry-run", "--set", "lm=openai/gpt-4o-mini").code == 0


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("is_gold", [False, True])
def test_any_header_gives_a_valid_file(init: Any, tmp_path: Path, name: str, is_gold: bool) -> None:
    header = ("id", "some text", name) if is_gold else ("id", name, "label")
    ran = init(tickets(tmp_path / "data.csv", header), "--lm", "openai/gpt-4o-mini")
    assert ran.code == 0, ran.err
    program = load(tmp_path / "system.yaml")
    assert program.data is not None
    names = set(program.system.inputs)
    assert not names & set(inspect.signature(LLM).parameters)
    example = program.data.examples("valid", list(names))[0]
    column = "label" if not is_gold else name
    assert example.gold[next(iter(program.system.outputs))] == example.gold[column] in LABELS


def test_the_prompt_names_columns_as_they_are_called(init: Any, tmp_path: Path) -> None:
    rows = [
        ("train" if i % 2 else "test", f"一{i}", f"{i}", ["a much longer text"]) for i in range(20)
    ]
    names = ("split", "The 问题", "答案 {{x}}", "context")
    lines = (json.dumps(dict(zip(names, (a, b, d, c), strict=True))) for a, b, c, d in rows)
    (tmp_path / "d.jsonl").write_text("".join(f"{line}\n" for line in lines))
    assert init("d.jsonl", "--lm", "openai/gpt-4o-mini").code == 0
    system = load(tmp_path / "system.yaml").system
    assert system.parameters["answerer.prompt"].value == "Give the context of the 问题."
    assert len(system.inputs) == 2


@pytest.mark.parametrize(
    ("header", "rows", "problem"),
    [
        ([], [], "has no rows"),
        (["text;label"], [["a;b"]] * 20, "separate the columns by commas"),
        (["text", "label"], [], "has no rows"),
        (["text", "label"], [["a", "b"]] * 3, "has 3 rows"),
        (["text", "label"], [["a", "b"]], "has 1 row\n"),
        (["text"], [["a"]] * 20, "an input and an answer need two columns"),
        (["", "label"], [["a", "b"]] * 20, "an input and an answer need two columns"),
        (["text", "text", "label"], [["a", "b", "c"]], "two columns have the same name"),
        (["text", "label"], [["a", ""], ["b", ""]] * 10, "an input and an answer need two columns"),
    ],
)
def test_what_cannot_be_used_is_said(
    init: Any, tmp_path: Path, header: list[str], rows: list[list[str]], problem: str
) -> None:
    ran = init(table(tmp_path / "data.csv", header, rows))
    assert ran.code == 2
    assert problem in ran.err
    assert not (tmp_path / "system.yaml").exists()


def test_a_file_is_replaced_only_if_asked(init: Any, tmp_path: Path) -> None:
    (tmp_path / "system.yaml").write_text("mine")
    ran = init(tickets(tmp_path / "tickets.csv"))
    assert ran.code != 0
    assert "--force" in ran.err
    assert (tmp_path / "system.yaml").read_text() == "mine"
    assert "missing.csv" in init(tmp_path / "missing.csv").err  # before the file that exists
    assert init(tmp_path / "tickets.csv", "--force").code == 0


def test_a_file_that_needs_a_missing_library_is_said_to_be_written(
    init: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "litellm", None)
    ran = init(tickets(tmp_path / "tickets.csv"), "--lm", "openai/gpt-4o-mini")
    assert ran.code == 2
    assert "system.yaml is written, but cannot be used yet" in ran.err
    assert (tmp_path / "system.yaml").exists()


ROW: Mapping[str, object] = {
    "question": "2 + 2?",
    "context": ["a"],
    "n": 3,
    "answer": "It is four, I think.",
}


@pytest.mark.parametrize("kind", ["jsonl", "json", "folder", "column"])
def test_other_formats_and_splits(init: Any, tmp_path: Path, kind: str) -> None:
    rows = [
        {**ROW, "answer": f"It is {i}.", "split": ("train", "val", "test")[i % 3]}
        for i in range(90)
    ]
    for row in rows if kind != "column" else ():
        del row["split"]
    path = tmp_path / f"data.{kind}"
    if kind == "json":
        path.write_text(json.dumps(rows))
    elif kind == "folder":
        path.mkdir()
        for name in ("train", "dev"):
            (path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    else:
        path = path.with_suffix(".jsonl")
        path.write_text("\n".join(map(json.dumps, rows)))
    ran = init(path)
    assert ran.code == 0, ran.err
    program = load(tmp_path / "system.yaml")
    assert program.system.inputs == {"question": str, "context": list, "n": int}
    assert program.system.outputs["answer"]
    assert program.data is not None
    assert len(program.data.examples("train", ["n"])) >= 30
    assert program.data.has("test") == (kind != "folder")
