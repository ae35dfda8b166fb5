"""The relay benchmark: its file, its steps, whole runs with a scripted model, and its questions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import compound as cp
from benchmark_systems import BENCHMARKS, data_folder, evaluated, needs_data
from benchmarks.measure.controls.score_settings import combinations
from benchmarks.relay import facts, write_facts
from compound.core.narrowing import entry
from compound.testing import ScriptedLM
from compound.yaml import load
from compound.yaml.program import Program

CONTEXT: list[dict[str, Any]] = [
    {"title": "Peru", "text": "Peru is a country in South America. Its capital is Lima."},
    {"title": "Lima", "text": "Lima was founded by Francisco Pizarro. It lies on the coast."},
]
QUESTION = "Who founded Lima?"
ROW: dict[str, Any] = {
    "id": "a",
    "question": QUESTION,
    "context": CONTEXT,
    "answer": "Francisco Pizarro",
}
HEAD = ("presenter.order", "presenter.words", "searcher.k", "splitter.unit")


@pytest.fixture(scope="module")
def program() -> Program:
    return load(BENCHMARKS / "relay.yaml")


def replies(message: str) -> str:
    """Answer like a model that finds the fact only in the passages shown."""
    if message.startswith("Copy the sentence"):
        shown = message.rsplit("Passages:", 1)[1]
        return "Lima was founded by Francisco Pizarro." if "Pizarro" in shown else "Nothing."
    if message.startswith("Answer the question in one sentence"):
        return (
            "It was Francisco Pizarro."
            if "Pizarro" in message.rsplit("Quote:", 1)[1]
            else "It is unknown."
        )
    assert message.startswith("Give only the answer")
    return "Francisco Pizarro" if "Pizarro" in message.rsplit("Draft:", 1)[1] else "unknown"


def run(program: Program, **values: Any) -> cp.Trace:
    system = program.system.bind({name.replace("__", "."): value for name, value in values.items()})
    engines = {"smollm2": ScriptedLM(replies)}
    return cp.run(system, {"question": QUESTION, "context": CONTEXT}, engines=engines)


def test_only_the_head_is_tuned_and_its_spaces_are_small(program: Program) -> None:
    parameters = program.system.parameters
    assert tuple(sorted(parameters)) == HEAD
    assert len(list(combinations(parameters))) == 2 * 3 * 4 * 2


def test_three_of_four_counted_calls_follow_the_tuned_nodes(program: Program) -> None:
    lm = ScriptedLM(replies)
    found = evaluated(program, [ROW], lm)
    assert (found.mean, found.failed, found.system_runs, len(lm.requests)) == (1.0, 0, 1.0, 3)
    order = [call.address for call in run(program).calls]
    assert order == ["splitter", "searcher", "presenter", "quoter", "drafter", "shortener"]


def test_the_head_decides_what_the_model_reads(program: Program) -> None:
    def shown(**values: Any) -> str:
        return entry(run(program, **values).call("quoter").inputs, "passages", str)

    assert (
        shown(searcher__k=1) == "Lima: Lima was founded by Francisco Pizarro. It lies on the coast."
    )
    assert (
        shown(searcher__k=1, splitter__unit="sentence")
        == "Lima: Lima was founded by Francisco Pizarro."
    )
    assert shown().splitlines()[::-1] == shown(presenter__order="best_last").splitlines()


def wiki_row(**values: Any) -> dict[str, Any]:
    return {"id": "7", "context": CONTEXT, "evidences": [], **values}


@pytest.mark.parametrize(
    ("triple", "wanted"),
    [
        (["Lima", "inception", "francisco"], [("When was Lima founded?", "francisco")]),
        (["Lima", "inception", "1535"], []),  # not stated
        (["Cusco", "inception", "coast"], []),  # no paragraph
        (["Lima", "twin city", "coast"], []),  # unknown relation
    ],
)
def test_stated_triples_become_questions(triple: list[str], wanted: list[tuple[str, str]]) -> None:
    found = facts(wiki_row(evidences=[triple]))
    assert [(fact["question"], fact["answer"]) for fact in found] == wanted


@needs_data
def test_every_real_question_runs(program: Program, tmp_path: Path) -> None:
    counts = write_facts(data_folder() / "2wikimultihopqa", tmp_path)
    assert counts == {"train": 482, "dev": 143, "test": 292}
    found = evaluated(program, cp.Dataset(tmp_path), ScriptedLM(lambda message: "2007"))
    assert found.failed == 0
    assert 0 < found.mean < 0.1  # few answers are that year
