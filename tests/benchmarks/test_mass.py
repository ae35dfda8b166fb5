"""The multi-agent search system of MHGPO: its file, its steps, and whole runs with a scripted model."""

from __future__ import annotations

import pytest

import compound as cp
from benchmark_systems import BENCHMARKS, evaluated
from benchmarks.mass import answerer_penalty, reranker_penalty, rewriter_penalty
from compound.testing import ScriptedLM
from compound.yaml import load
from compound.yaml.program import Program

CONTEXT = [
    {"title": "Emma", "text": "Emma is a novel by Jane Austen."},
    {"title": "Jane Austen", "text": "Jane Austen was born in Steventon."},
    {"title": "Bath", "text": "Bath is a city in Somerset."},
]
ROW = {
    "id": "a",
    "question": "Where was the author of Emma born?",
    "context": CONTEXT,
    "answer": "Steventon",
}


@pytest.fixture(scope="module")
def program() -> Program:
    return load(BENCHMARKS / "mass.yaml")


def replies(message: str) -> str:
    if message.startswith("Write up to four"):
        return "1. author of Emma\n2. Jane Austen born"
    if message.startswith("Give only the numbers"):
        lines = [line for line in message.splitlines() if "Steventon" in line]
        return lines[0].split("]")[0].lstrip("[")
    assert message.startswith("Answer the question")
    return "Steventon" if "Steventon" in message else "unknown"


def run(program: Program, lm: ScriptedLM) -> cp.Trace:
    inputs = {name: ROW[name] for name in ("question", "context")}
    return cp.run(program.system, inputs, engines={"smollm2": lm}, check=False)


def test_a_right_run_is_scored_right_and_costs_no_penalty(program: Program) -> None:
    lm = ScriptedLM(replies)
    found = evaluated(program, [ROW], lm)
    assert (found.mean, found.failed, len(lm.requests)) == (1.0, 0, 3)
    trace = run(program, ScriptedLM(replies))
    penalties = {
        "rewriter": rewriter_penalty,
        "reranker": reranker_penalty,
        "answerer": answerer_penalty,
    }
    for name, penalty in penalties.items():
        (call,) = trace.calls_of(name)
        assert penalty(call.inputs, call.outputs) == 0.0


def test_penalties_read_the_calls_of_a_bad_run(program: Program) -> None:
    def bad(message: str) -> str:
        if message.startswith("Write up"):
            return "\n".join("abcde")
        return "all" if message.startswith("Give only") else "so " * 31

    trace = run(program, ScriptedLM(bad))
    calls = {name: trace.calls_of(name)[0] for name in ("rewriter", "reranker", "answerer")}
    assert rewriter_penalty(calls["rewriter"].inputs, calls["rewriter"].outputs) == -0.5
    assert reranker_penalty(calls["reranker"].inputs, calls["reranker"].outputs) == -1.0
    assert answerer_penalty(calls["answerer"].inputs, calls["answerer"].outputs) == -1.0
    assert len(trace.calls_of("searcher")) == 4  # the fifth query is not searched


def test_each_query_is_searched_and_the_answerer_reads_only_what_was_chosen(
    program: Program,
) -> None:
    lm = ScriptedLM(replies)
    trace = run(program, lm)
    assert [call.inputs["query"] for call in trace.calls_of("searcher")] == [
        "author of Emma",
        "Jane Austen born",
    ]
    ranked, read = (request.messages[-1].content for request in lm.requests[1:])
    assert (
        "[1] Emma: Emma is a novel by Jane Austen.\n[2] Jane Austen: Jane Austen was born" in ranked
    )
    assert "Jane Austen was born in Steventon." in read
    assert "Somerset" not in read


SHOWN = {"candidates": ["a", "b", "c", "d", "e"], "question": "?"}


@pytest.mark.parametrize(
    "ids",
    ["1", " 5 ", "2, 5", "2 5", "[2] [5]", "[2], [5]", "[1, 2, 3, 4, 5]", "1, 2.", "3\n4"],
)
def test_well_formed_ids_cost_nothing(ids: str) -> None:
    assert reranker_penalty(SHOWN, {"ids": ids}) == 0.0


MALFORMED = ["", "none", "passages 1 and 2", "1, 2 because they fit", "1; 2", "1,,2", ", 1", "1,"]
MALFORMED += ["[1", "1]", "[1 2]", "[]", "-1", "1.5", "1 - 3", "٣", "9" * 5000]
UNKNOWN = ["0", "6", "1, 6", "[0, 1]", "999999999"]
REPEATED = ["1, 1", "[2] [3] [2]", "1 01", "1, 2, 3, 4, 5, 1", f"1{' ' * 1_000_000}x"]


@pytest.mark.parametrize("ids", [*MALFORMED, *UNKNOWN, *REPEATED], ids=lambda ids: ids[:20])
def test_malformed_unknown_and_repeated_ids_cost_one(ids: str) -> None:
    assert reranker_penalty(SHOWN, {"ids": ids}) == -1.0 == reranker_penalty.malformed


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("", 0.0),
        (" ".join(["word"] * 30), 0.0),
        *((between.join(["word"] * 31), -1.0) for between in (" ", "-", "_", "\n", "\u00a0")),
        (" ".join(["don't"] * 30), 0.0),
        (" . , ! " * 40, 0.0),
    ],
)
def test_more_than_thirty_words_cost_one(text: str, wanted: float) -> None:
    assert answerer_penalty({}, {"answer": text}) == wanted
