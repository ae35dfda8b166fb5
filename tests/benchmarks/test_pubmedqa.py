"""The pubmedqa benchmark: its file, its functions, and whole runs with a scripted model."""

from __future__ import annotations

from typing import Any

import pytest

import compound as cp
from benchmark_systems import BENCHMARKS
from benchmarks.pubmedqa import How, prepare, verdict
from compound.core.example import Example
from compound.testing import ScriptedLM
from compound.yaml import load
from compound.yaml.program import Program

FILE = BENCHMARKS / "pubmedqa.yaml"
ABSTRACT = [
    "Sleep may matter. We followed 90 nurses.",
    "Night shifts raised blood pressure (P = 0.02). Age had no effect. Further work is planned.",
]
QUESTION = "Do night shifts raise blood pressure?"
ROWS: list[dict[str, Any]] = [
    {"id": "a", "question": QUESTION, "context": ABSTRACT, "answer": "yes"},
    {
        "id": "b",
        "question": "Does tea cure colds?",
        "context": ["Tea did not help."],
        "answer": "no",
    },
]


@pytest.fixture(scope="module")
def program() -> Program:
    return load(FILE)


def replies(message: str) -> str:
    """Answer like a model, depending on the instruction at the start of the message."""
    if message.startswith("State the main result"):
        return "Shifts raised pressure." if "shifts" in message else "Tea did not help."
    if message.startswith("Answer the question"):
        return "Yes" if "raised" in message else "No, it"
    assert message.startswith("Think about the finding")
    return "The diagnosis is known. The answer is " + ("yes." if "raised" in message else "no.")


def outcome(program: Program, row: dict[str, Any], **values: Any) -> tuple[Any, list[str]]:
    system = program.system.bind({name.replace("__", "."): value for name, value in values.items()})
    lm = ScriptedLM(replies)
    inputs = {name: row[name] for name in ("question", "context")}
    trace = cp.run(system, inputs, engines={"smollm2": lm})
    return trace.outputs["answer"], [request.cued[-1].text.split()[0] for request in lm.requests]


@pytest.mark.parametrize(
    ("solver", "asked"),
    [("direct", ["State", "Answer"]), ("reasoned", ["State", "Think"]), ("rule", ["State"])],
)
def test_the_selector_decides_which_solver_runs(
    program: Program, solver: str, asked: list[str]
) -> None:
    for row in ROWS:
        assert outcome(program, row, solver_selector__choice=solver) == (row["answer"], asked)


def test_a_text_without_a_verdict_is_wrong_but_no_failure(program: Program) -> None:
    lm = ScriptedLM(lambda message: "nothing known")
    trace = cp.run(
        program.system, {"question": QUESTION, "context": ABSTRACT}, engines={"smollm2": lm}
    )
    assert dict(trace.outputs) == {"answer": "unclear"}
    assert program.metric is not None
    for gold in ("yes", "no", "maybe"):
        score: Any = program.metric.score(trace.outputs, Example("e", {}, {"answer": gold}))
        assert score.value == 0.0


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("The diagnosis was confirmed. Answer: yes", "yes"),
        ("It is not known. Answer: maybe", "maybe"),
        ("yes", "yes"),
        (" No.", "no"),
        ("Maybe, more work is needed", "maybe"),
        ("Yes the drug", "yes"),
        ("**Answer:** No", "no"),
        ('The answer to this question is "No."', "no"),
        ("The answer is yes, as nothing else was found. No.", "yes"),
        ("Answer: yes. On reflection, the answer is no", "no"),
        ("First: no. Then: yes.", "yes"),
        ("I would say maybe", "maybe"),
    ],
)
def test_the_verdict_is_the_last_one_stated(text: str, wanted: str) -> None:
    assert verdict(text) == wanted


@pytest.mark.parametrize(
    "text",
    [
        "",
        "nothing was known yesterday",
        "No difference was found",
        "The answer is not possible.",
        "no-one knows",
        "Answer yes, no or maybe.",
        "Answer: yes, no, or maybe",
        "The diagnosis",
    ],
)
def test_parts_of_words_and_options_repeated_are_no_verdict(text: str) -> None:
    assert verdict(text) == "unclear"


@pytest.mark.parametrize(
    ("how", "keep", "wanted"),
    [
        ("whole", 1, " ".join(ABSTRACT)),
        ("ending", 2, "Age had no effect. Further work is planned."),
        ("ending", 99, " ".join(ABSTRACT)),
        ("matching", 1, "Night shifts raised blood pressure (P = 0.02)."),
    ],
)
def test_an_abstract_is_prepared_in_three_ways(how: How, keep: int, wanted: str) -> None:
    assert prepare(ABSTRACT, QUESTION, how, keep) == wanted


@pytest.mark.parametrize("analyst", ["smollm2", "gemma3-270m"])
@pytest.mark.parametrize("solver", ["smollm2", "gemma3-270m"])
def test_selectors_choose_the_model_of_each_call(analyst: str, solver: str) -> None:
    system = load(FILE.with_name("pubmedqa_models.yaml")).system
    system = system.bind({"analyst_model.choice": analyst, "solver_model.choice": solver})
    engines = {name: ScriptedLM(replies) for name in ("smollm2", "gemma3-270m")}
    inputs = {name: ROWS[0][name] for name in ("question", "context")}
    assert cp.run(system, inputs, engines=engines).outputs["answer"] == "yes"
    expected: dict[str, list[str]] = {"smollm2": [], "gemma3-270m": []}
    expected[analyst].append("State")
    expected[solver].append("Answer")
    asked = {
        name: [request.messages[-1].text.split()[0] for request in lm.requests]
        for name, lm in engines.items()
    }
    assert asked == expected
