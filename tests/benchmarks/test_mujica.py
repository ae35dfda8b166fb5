"""Mujica over texts and graphs: its files, parsing of planner and worker outputs, and whole runs."""

from __future__ import annotations

from typing import Any

import pytest

import compound as cp
from benchmark_systems import BENCHMARKS, evaluated
from benchmarks.mujica import (
    read_actions,
    read_plan,
)
from compound.core.narrowing import entry
from compound.testing import ScriptedLM
from compound.yaml import load
from compound.yaml.program import Program

EVIDENCES = [
    ["Alpha (film)", "director", "Ann Lee"],
    ["Beta (film)", "director", "Bob Ray"],
    ["Ann Lee", "date of birth", "1950"],
    ["Bob Ray", "date of birth", "1940"],
]
ROW: dict[str, Any] = {
    "id": "a",
    "question": "Which film has the older director, Alpha or Beta?",
    "answer": "Beta",
    "evidences": EVIDENCES,
    "context": [
        {"title": head, "text": f"{head}: {relation} {tail}."} for head, relation, tail in EVIDENCES
    ],
}


@pytest.fixture(scope="module")
def text() -> Program:
    return load(BENCHMARKS / "mujica.yaml")


def last(message: str) -> str:
    return message.rsplit("\n\n", maxsplit=1)[-1]


def replies(message: str) -> str:
    """Play both roles over texts: directors first, both at once, then their birth dates, then the answer."""
    shown = last(message)
    if "Passages:" in shown:
        asked = shown.split("Question: ")[1].split("\n")[0]
        wanted = asked.rsplit(" ", 1)[1].rstrip("?")
        line = next(
            line for line in shown.splitlines() if line.startswith("[") and f"] {wanted}" in line
        )
        return f"<think>.</think><select>{line[:3]}</select><sentence>{line[4:]}</sentence>"
    if "1940" in shown:
        return "<think>1940 is earlier.</think><answer>Beta</answer>"
    if "Bob" in shown:
        return "<think>Dates.</think><search>birth of Ann</search><search>birth of Bob</search>"
    return "<think>Directors.</think><search>director of Alpha</search><search>director of Beta</search>"


def graph_replies(message: str) -> str:
    shown = last(message)
    if "Materials:" in shown:
        line = next(line for line in shown.splitlines() if "] " in line).split("] ")[1]
        return f"<think>.</think><select>[0]</select><sentence>{line}.</sentence>"
    if "1940" in shown.split("History:")[1]:
        return "<think>1940 is earlier.</think><answer>Beta</answer>"
    if "Bob Ray" in shown:
        return '<think>Dates.</think><action>Search([2], "Born when?")\nSearch([Bob Ray], "Born when?")</action>'
    return '<think>Directors.</think><action>Search([0], "Director?")\nSearch([1], "Director?")</action>'


def run(program: Program, lm: ScriptedLM) -> cp.Trace:
    return cp.run(
        program.system,
        {name: ROW[name] for name in program.system.inputs},
        engines={"smollm2": lm},
        check=False,
    )


@pytest.mark.parametrize(("name", "play"), [("mujica", replies), ("mujica_kg", graph_replies)])
def test_two_rounds_of_two_questions_lead_to_the_answer(name: str, play: Any) -> None:
    program = load(BENCHMARKS / f"{name}.yaml")
    assert set(program.system.parameters) == {"planner.weights", "worker.weights"}
    lm = ScriptedLM(play)
    found = evaluated(program, [ROW], lm)
    assert (found.mean, found.failed, len(lm.requests)) == (1.0, 0, 7)


def test_the_planner_sees_its_turns_and_what_the_workers_found(text: Program) -> None:
    lm = ScriptedLM(replies)
    run(text, lm)
    planners = [
        last(r.messages[-1].text)
        for r in lm.requests
        if "Passages:" not in last(r.messages[-1].text)
    ]
    assert planners[1].endswith(
        "<think>Directors.</think><search>director of Alpha</search><search>director of Beta</search>\n"
        "Obs: Alpha (film): Alpha (film): director Ann Lee. Beta (film): Beta (film): director Bob Ray."
    )


@pytest.mark.parametrize(
    ("said", "turns", "answer"),
    [
        ("I do not know", 1, ""),
        ("<answer>Beta</answer>", 1, "Beta"),
        ("<search>again</search>", 5, ""),
        ("<search>again</search><answer>Beta</answer>", 5, ""),
        ("", 1, ""),
    ],
)
def test_planners_end_by_answering_by_saying_nothing_or_out_of_turns(
    text: Program, said: str, turns: int, answer: str
) -> None:
    trace = run(text, ScriptedLM(lambda message: "none" if "Passages:" in last(message) else said))
    assert trace.failure is None
    assert trace.outputs == {"answer": answer}
    assert len(trace.calls_of("planner")) == turns


@pytest.mark.parametrize(
    ("said", "questions"),
    [
        ("<search>a?</search>", ["a?"]),
        ("<search> a? </search>\n<search>b?</search>", ["a?", "b?"]),
        ("<search>a?</search><search>a?</search>", ["a?"]),
        ("<search>1</search><search>2</search><search>3</search>", ["1", "2"]),
        ("<search></search>", []),
        ("<search>a?", []),
        ("search: a?", []),
    ],
)
def test_sub_questions_are_read(said: str, questions: list[str]) -> None:
    plan = read_plan(said, most=2)
    assert plan["questions"] == questions
    assert plan["over"] == (not questions)


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ('Search([0], "Who?")', [("Emma", "Who?")]),
        ('Search( [1] , "Who?" )', [("Bath", "Who?")]),
        ("Search([0], 'Who?')", [("Emma", "Who?")]),
        ("Search([0], “Who?”)", [("Emma", "Who?")]),
        ('Search([0], "Who is "X"?")', [("Emma", 'Who is "X"?')]),
        ('Search([Jane Austen], "Who?")', [("Jane Austen", "Who?")]),
        ('Search([0], "a?") Search([1], "b?")', [("Emma", "a?"), ("Bath", "b?")]),
        (
            'Search([0], "a?")\nSearch([1], "b?")\nSearch([0], "c?")',
            [("Emma", "a?"), ("Bath", "b?")],
        ),
        ('Search([2], "Who?")', []),
        ('Search([-1], "Who?")', [("-1", "Who?")]),
        ('Search([], "Who?")', []),
        ('Search([0], " ")', []),
        ('Search(0, "Who?")', []),
        ("Search([0], Who?)", []),
        ('search([0], "Who?")', []),
        (f'Search([{"9" * 5000}], "Who?")', [("9" * 5000, "Who?")]),
    ],
)
def test_action_lines_are_read(line: str, found: list[tuple[str, str]]) -> None:
    plan = read_actions(f"<think>.</think><action>\n{line}\n</action>", ["Emma", "Bath"], most=2)
    assert [
        (search["entity"], search["question"]) for search in entry(plan, "searches", list)
    ] == found
    assert plan["over"] == (not found)
