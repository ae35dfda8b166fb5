"""Comparison of methods on a real system: shared completions, resumption, and the summary."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from benchmarks.measure.searches.compare import earlier_run, main, summarize
from benchmarks.measure.searches.completions import StoredCompletions
from compound.core.engine import Message, Request
from compound.core.errors import DataError
from compound.execution.cache import DiskCache
from compound.testing import ScriptedLM

SYSTEM = """
system: letters
lm: scripted
inputs: {question: str}
components:
  answerer:
    llm: {prompt: {tune: "Answer."}}
    in: {question: $question}
    out: {answer: str}
outputs: {answer: $answerer}
data: {path: ., train: train, valid: valid, test: test}
metric: {exact_match: {output: answer}}
engines: {scripted: {class: "engine:make"}}
optimize: {minibatch: 4, candidates: 3, valid_size: 20}
"""
ENGINE = """
from compound.testing import ScriptedLM

def make():
    return ScriptedLM(lambda message: "no" if message.startswith("Answer.\\n") else "yes", remote=False)
"""


@pytest.fixture
def system(tmp_path: Path) -> Path:
    for split, count in (("train", 40), ("valid", 20), ("test", 12)):
        rows = [
            {"id": f"{split}{i}", "question": f"{split} {i}?", "answer": "yes"}
            for i in range(count)
        ]
        (tmp_path / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    (tmp_path / "engine.py").write_text(ENGINE, encoding="utf-8")
    (tmp_path / "letters.yaml").write_text(SYSTEM, encoding="utf-8")
    return tmp_path / "letters.yaml"


def ask(text: str, **how: Any) -> Request:
    return Request((Message("user", text),), **how)


def test_a_run_starts_from_one_with_another_seed(tmp_path: Path) -> None:
    pattern = f"{tmp_path}/optimas-240-{{seed}}"
    with pytest.raises(SystemExit, match="a seed other than 3"):
        earlier_run(pattern, 3)
    for seed in (3, 4, 8):
        (tmp_path / f"optimas-240-{seed}").mkdir()
        (tmp_path / f"optimas-240-{seed}" / "best.json").touch()
    (tmp_path / "optimas-240-9").mkdir()  # not finished
    found = [earlier_run(pattern, seed).name for seed in (3, 4, 8)]
    assert found == ["optimas-240-4", "optimas-240-8", "optimas-240-3"]


def test_greedy_completions_are_shared_whatever_the_seed(tmp_path: Path) -> None:
    lm = ScriptedLM(lambda message: message[::-1], price=1.0)
    engine = StoredCompletions(lm, DiskCache(tmp_path / "completions.sqlite"))
    first = asyncio.run(engine.generate(ask("abc", seed=1)))
    again = asyncio.run(engine.generate(ask("abc", seed=2, timeout=3.0)))
    assert first == again
    assert (first.text, len(lm.requests)) == ("cba", 1)
    for other in (
        ask("abd"),
        ask("abc", stop=("b",)),
        ask("abc", max_tokens=3),
        ask("abc", cue="x"),
    ):
        asyncio.run(engine.generate(other))
    assert len(lm.requests) == 5


def test_sampled_completions_are_not_stored(tmp_path: Path) -> None:
    lm = ScriptedLM(lambda message: message)
    engine = StoredCompletions(lm, DiskCache(tmp_path / "completions.sqlite"))
    for request in (ask("abc", temperature=0.5), ask("abc", want_tokens=True)):
        for _ in range(2):
            asyncio.run(engine.generate(request))
    assert len(lm.requests) == 4


@pytest.mark.slow
def test_methods_are_compared_on_the_same_examples_and_the_file_is_extended(
    system: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "found.json"

    def command(methods: str, seeds: str, examples: int = 10) -> list[str]:
        return [
            str(system),
            "--runs",
            str(tmp_path / "runs"),
            "--output",
            str(output),
            "--methods",
            methods,
            "--budgets",
            "60,90",
            "--seeds",
            seeds,
            "--examples",
            str(examples),
        ]

    main(command("search", "0-1"))
    found = json.loads(output.read_text(encoding="utf-8"))
    assert (found["system"], found["examples"], found["start"]) == ("letters", 10, [0.0] * 10)
    assert found["controls"] == {"constant": 1.0, "direct call": 1.0}
    assert {budget: list(runs) for budget, runs in found["runs"]["search"].items()} == {
        "60": ["0", "1"],
        "90": ["0", "1"],
    }
    for run in found["runs"]["search"]["90"].values():
        assert run["scores"] == [1.0] * 10
        assert run["system_runs"] <= 90
    shutil.rmtree(tmp_path / "runs")  # the file is enough to continue
    main(command("search,random", "1-2"))
    extended = json.loads(output.read_text(encoding="utf-8"))
    assert {method: list(runs["60"]) for method, runs in extended["runs"].items()} == {
        "search": ["0", "1", "2"],
        "random": ["1", "2"],
    }
    assert extended["runs"]["search"]["60"]["1"] == found["runs"]["search"]["60"]["1"]
    assert len([*(tmp_path / "runs").glob("*/checkpoint.json")]) == 6
    with pytest.raises(DataError, match="holds runs with examples 10, not 12"):
        main(command("search", "0", examples=12))
    assert "0 60 search 1.0" in capsys.readouterr().out


def test_the_gain_is_paired_by_example_over_the_seeds() -> None:
    common = {"accepted": 1, "system_runs": 10.0, "calls": 20, "seconds": 1.0}
    runs = [{"scores": [1.0, 0.0, 1.0, 1.0], **common}, {"scores": [1.0, 1.0, 0.0, 1.0], **common}]
    found: Any = summarize(runs, [0.0, 0.0, 0.0, 1.0])
    assert found["scores"] == [0.75, 0.75]
    assert found["gain"]["mean"] == pytest.approx((1 + 0.5 + 0.5 + 0) / 4)
    assert found["mean"]["mean"] == 0.75
    assert summarize(runs[:1], [0.0] * 4)["mean"] is None
