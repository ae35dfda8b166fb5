"""Controls of a sweep: the constant answer and the direct call, with hand-computed scores."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import pytest

import compound as cp
from compound import LLM, Choice, Example, Function, Input, Port, System
from compound.api.result import read_result
from compound.api.sweeps.controls import NotApplicable, constant_answer, direct_system
from compound.api.sweeps.sweep import plan, sweep
from compound.evaluation.metrics.comparison import Comparison
from compound.metrics import accuracy, custom, exact_match, mrr, token_f1
from compound.testing import ScriptedLM
from compound.yaml import load

pytestmark = pytest.mark.usefixtures("without_reports")

SYSTEM = """
system: quiz
lm: mine
engines: {mine: {class: "quiz:Engine"}}
inputs: {question: str}
components:
  answerer:
    llm: {prompt: "Name the colour.", max_tokens: {choice: [4, 8]}, stop: ["\\n"]}
    in: {question: $question}
    out: {answer: str}
outputs: {answer: $answerer}
data: {path: data, train: train, valid: valid, test: test}
metric: {exact_match: {output: answer, gold: answer}}
optimize: {budget: {system_runs: 60}, candidates: 2, concurrency: 1}
"""
ENGINE = """
from pathlib import Path

from compound.core.errors import CallError
from compound.testing import ScriptedLM


def reply(text):
    with Path("calls.log").open("a") as log:
        log.write(text.splitlines()[0] + "\\n")
    if not text.startswith("Read the question"):
        return "red"
    if Path("interrupt").exists() and direct_calls() == 3:
        Path("interrupt").unlink()
        raise KeyboardInterrupt
    if Path("outage").exists():
        raise CallError("no answer")
    return "blue"


def direct_calls():
    return Path("calls.log").read_text().count("Read the question")


class Engine(ScriptedLM):
    def __init__(self):
        super().__init__(reply, name="quiz", price=0.5)
"""
TRAIN = ["red"] * 4 + ["blue"] * 3 + ["green"] * 3
TEST = ["red"] * 2 + ["blue"] * 5 + ["green"]  # on which another constant answer would be best


@pytest.fixture
def quiz(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a system, its engine and its data, which is the working directory."""
    (tmp_path / "quiz.yaml").write_text(SYSTEM)
    (tmp_path / "quiz.py").write_text(ENGINE)
    (tmp_path / "data").mkdir()
    for split, answers in (("train", TRAIN), ("valid", TRAIN * 2), ("test", TEST)):
        rows = [
            {"id": f"{split}-{i}", "question": f"Item {split} {i}?", "answer": answer}
            for i, answer in enumerate(answers)
        ]
        (tmp_path / "data" / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(
    *seeds: int, sets: Sequence[tuple[str, str]] = (), methods: str = "random", **how: Any
) -> Any:
    program = load(Path("quiz.yaml"), overrides=list(sets))
    folder = Path("out")
    return sweep(plan([program], methods.split(","), seeds or (0,), folder), folder, **how)


def rows(facts: Any) -> dict[str, Any]:
    return {row["method"]: row for row in facts["rows"]}


def direct_calls() -> int:
    return Path("calls.log").read_text().count("Read the question")


def test_controls_are_rows_with_the_scores_of_the_test_examples(quiz: Path) -> None:
    facts = run(0, 1)
    assert list(rows(facts)) == ["unoptimized", "constant: red", "direct call: mine", "random"]
    constant, direct = rows(facts)["constant: red"], rows(facts)["direct call: mine"]
    assert constant["test"]["mean"] == pytest.approx(2 / 8)
    assert direct["test"]["mean"] == pytest.approx(5 / 8)
    for row in (constant, direct):
        assert (row["test"]["seeds"], row["test"]["examples"], row["gain"]) == (2, 8, None)
    assert (constant["calls"], constant["cost"]) == (0, 0)
    assert (direct["calls"], direct["completion_tokens"]) == (8, 8)
    assert direct["cost"] == pytest.approx(0.5 * (direct["prompt_tokens"] + 8))
    assert [(each["name"], each["seed"], each["status"]) for each in facts["controls"]] == [
        ("constant", 0, "finished"),
        ("direct call", 0, "finished"),
        ("constant", 1, "finished"),
        ("direct call", 1, "finished"),
    ]
    page = (quiz / "out" / "sweep.md").read_text()
    assert "| constant: red | 2 × 8 | 0.250" in page
    assert "| direct call: mine | 2 × 8 | 0.625" in page
    assert json.loads((quiz / "out" / "sweep.json").read_text()) == facts


def test_controls_use_the_test_examples_of_each_seed(quiz: Path) -> None:
    facts = run(0, 1, 2, sets=[("optimize.test_size", "4")])
    for seed, (constant, direct) in enumerate(batched(facts["controls"])):
        ran = read_result(quiz / "out/quiz/random" / str(seed)).test_before
        assert ran is not None
        answers = [TEST[int(row.example.split("-")[1])] for row in ran.rows]
        assert constant["test"] == pytest.approx(answers.count("red") / 4)
        assert direct["test"] == pytest.approx(answers.count("blue") / 4)


def batched(pairs: list[Any]) -> Any:
    return zip(pairs[::2], pairs[1::2], strict=True)


def test_calls_of_controls_are_outside_the_budget_of_the_runs(quiz: Path) -> None:
    limits = [("optimize.budget.calls", "200")]
    without = run(sets=limits, controls=False)
    assert direct_calls() == 0
    spent = rows(without)["random"]["calls"]
    with_controls = run(sets=limits)
    assert direct_calls() == 8
    assert rows(with_controls)["random"]["calls"] == spent
    assert list(rows(without)) == ["unoptimized", "random"]
    assert without["controls"] == []


def test_stored_controls_are_not_repeated(quiz: Path) -> None:
    first = run(0)
    said: list[str] = []
    assert run(0, log=said.append) == first
    assert direct_calls() == 8
    assert said[0] == "[1 of 1] quiz, random, seed 0: finished before"
    run(0, 1)
    assert direct_calls() == 16


def test_an_interrupted_direct_call_resumes_with_equal_costs(quiz: Path) -> None:
    (quiz / "interrupt").touch()
    with pytest.raises(KeyboardInterrupt):
        run()
    assert direct_calls() == 3
    facts = run()
    assert direct_calls() == 9  # the interrupted call is repeated, the two before it are not
    direct = rows(facts)["direct call: mine"]
    assert (direct["calls"], direct["test"]["mean"]) == (8, pytest.approx(5 / 8))


def test_a_failed_direct_call_is_noted_and_retried(quiz: Path) -> None:
    (quiz / "outage").touch()
    facts = run()
    assert [run["status"] for run in facts["runs"]] == ["finished"]
    assert "direct call: mine" not in rows(facts)
    page = (quiz / "out" / "sweep.md").read_text()
    assert "control 'direct call', seed 0: failed: 8 of 8 runs failed" in page
    (quiz / "outage").unlink()
    assert rows(run())["direct call: mine"]["test"]["mean"] == pytest.approx(5 / 8)


def examples(answers: Sequence[object]) -> list[Example]:
    return [Example(str(i), {}, {"answer": answer}) for i, answer in enumerate(answers)]


@pytest.mark.parametrize(
    ("metric", "answers", "expected"),
    [
        # "x" shares a word with all answers: (6 * 2/3 + 2) / 8 = 0.75, and "x y" (3 + 3 * 1/2 + 2 *
        # 2/3) / 8
        (token_f1("answer"), ["x y"] * 3 + ["x z"] * 3 + ["x"] * 2, "x"),
        (exact_match("answer"), ["b", "a", "a", "b"], "b"),  # a tie: the first
        (exact_match("answer"), [["a", "c"], ["b"], ["c"]], "c"),  # each acceptable answer counts
        (accuracy("answer", choices=["yes", "no"]), ["no", "no", "yes"], "no"),
        (accuracy("answer"), [2, 3, 3], "3"),  # the output is a text
    ],
)
def test_the_constant_answer_is_the_best_on_train(
    metric: Comparison, answers: list[object], expected: str
) -> None:
    assert constant_answer(metric, {"answer": Port(str)}, examples(answers)) == expected
    numbers = {"answer": Port(int)}
    assert constant_answer(accuracy("answer"), numbers, examples([2, 3, 3])) == 3


@pytest.mark.parametrize(
    ("metric", "answers", "reason"),
    [
        (
            custom(lambda outputs, example: 1.0, "own"),
            ["a"],
            "metric 'own' does not compare an output",
        ),
        (mrr("answer"), ["a"], "metric 'mrr' scores a list"),
        (exact_match("answer"), [{"a": 1}], "gold answers are of type dict"),
    ],
)
def test_a_metric_without_labels_or_texts_has_no_constant_answer(
    metric: Any, answers: list[object], reason: str
) -> None:
    with pytest.raises(NotApplicable, match=reason):
        constant_answer(metric, {"answer": Port(str)}, examples(answers))


def yes_or_no(text: str, prompt: str = "") -> Literal["yes", "no"]:
    return "yes" if text else prompt  # type: ignore[return-value]


def test_a_direct_call_takes_over_how_its_writer_ends_answers() -> None:
    answerer = LLM("answerer", prompt="Think.", max_tokens=Choice(4, 8, value=8), stop=("\n",))
    system = System("demo", {"answer": answerer(question=Input("question"))}, lm="lm")
    made = direct_system(system, exact_match("answer"))
    component = made.components["direct"]
    assert isinstance(component, LLM)
    assert (component.max_tokens, component.stop, component.temperature) == (8, ("\n",), 0.0)
    assert component.prompt == "Read the question, then give the answer."
    assert (made.lm, list(made.inputs), list(made.outputs)) == ("lm", ["question"], ["answer"])


def test_a_direct_call_states_the_type_of_the_output_and_keeps_all_inputs() -> None:
    """An input with the name of a setting must not replace the setting."""
    node = Function("judge", yes_or_no)(text=Input("text"), prompt=Input("prompt"))
    made = direct_system(System("demo", {"label": node}, lm="lm"), accuracy("label"))
    lm = ScriptedLM(["Answer: No."])
    trace = cp.run(made, {"text": "Snow.", "prompt": "Is it hot?"}, engines={"lm": lm})
    assert trace.outputs == {"label": "no"}
    (request,) = lm.requests
    assert (request.max_tokens, request.stop, request.temperature) == (256, (), 0.0)
    assert request.messages[0].content == (
        "Read the prompt and the text, then give the label.\n\nThe label must be one of: yes, no\n\n"
        "Given prompt: Is it hot?\nText: Snow."
    )


@pytest.mark.parametrize("name", ["name", "when", "lm", "self"])
def test_inputs_may_have_any_name(name: str) -> None:
    system = System("demo", {"label": LLM("judge")(question=Input(name))}, lm="lm")
    made = direct_system(system, exact_match("label"))
    assert list(made.inputs) == [name]
    assert cp.run(made, {name: "?"}, engines={"lm": ScriptedLM(["ok"])}).outputs == {"label": "ok"}


def test_a_system_without_a_default_model_has_no_direct_call(quiz: Path) -> None:
    system = System("demo", {"label": Function("judge", yes_or_no)(text=Input("text"))})
    with pytest.raises(NotApplicable, match=r"system 'demo' has no default model \(lm\)"):
        direct_system(system, accuracy("label"))
