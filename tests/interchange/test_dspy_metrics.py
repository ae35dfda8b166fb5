"""Metrics that were written for DSPy, and functions with their arguments in the wrong order."""

from __future__ import annotations

import asyncio
import textwrap
from pathlib import Path
from typing import Any

import dspy
import pytest

import compound as cp
from compound.core.errors import CompoundError
from compound.graph.registry.user_code import UserCodeError
from compound.testing import ScriptedLM

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
ROWS = [{"question": f"{i}?", "label": "yes"} for i in range(30)]
ORDER = r"called as metric\(outputs, example\).*cp\.interchange\.from_dspy_metric"


def system() -> cp.System:
    return cp.System("s", {"label": cp.LLM("a", lm="m")(question=cp.Input("question"))})


def scored(metric: Any) -> tuple[Any, int]:
    """Return the evaluation, and the number of calls of the model."""
    lm = ScriptedLM(lambda _: "yes")
    return cp.evaluate(system(), ROWS, metric, engines={"m": lm}, cache=False), len(lm.requests)


def plain(example: Any, pred: Any, trace: Any = None) -> Any:
    return example.label == pred.label


def subscripts(gold: Any, pred: Any, trace: Any) -> Any:
    assert trace is None
    return float(gold["label"] == pred["label"])


def gepa(gold: Any, pred: Any, trace: Any, pred_name: Any, pred_trace: Any) -> Any:
    assert (trace, pred_name, pred_trace) == (None, None, None)
    return dspy.Prediction(
        score=float(gold.label == pred.label), feedback=f"{gold.question} is {gold.label}"
    )


def document(example: Any, prediction: Any) -> Any:
    return {"score": 1.0, "feedback": sorted(example.inputs().keys())}


async def later(example: Any, pred: Any) -> Any:
    await asyncio.sleep(0)
    return plain(example, pred)


class Weighted:
    def __call__(self, example: Any, pred: Any, trace: Any = None) -> Any:
        return 0.5 * plain(example, pred)


SAME: dict[str, Any] = {f.__name__: f for f in (plain, subscripts, gepa, document, later)}


@pytest.mark.parametrize("name", SAME)
def test_a_metric_of_dspy_scores_as_there(name: str) -> None:
    found, _ = scored(cp.interchange.from_dspy_metric(SAME[name], bounds=(0, 1)))
    assert (found.mean, found.failed) == (1.0, 0)
    feedback = {"gepa": "0? is yes", "document": "['question']"}.get(name, "")
    example = cp.Example("1", {"question": "0?"}, {"label": "yes"})
    metric = cp.interchange.from_dspy_metric(SAME[name])
    score: Any = metric.score({"label": "yes"}, example)
    assert (asyncio.run(score) if name == "later" else score) == cp.Score(1.0, feedback)


@pytest.mark.parametrize("metric", [*SAME.values(), Weighted()])
def test_the_order_of_dspy_is_recognized_before_any_call(metric: Any) -> None:
    for make in (lambda: cp.metrics.custom(metric), lambda: scored(metric)):
        with pytest.raises(UserCodeError, match=ORDER):
            make()


HIDDEN: dict[str, Any] = {  # whose parameters do not show the mistake
    "attribute of the example": "lambda a, b: b.label == 'yes'",
    "attribute of the outputs": "lambda a, b: a.label == 'yes'",
    "item of the example": "lambda a, b: b['label'] == 'yes'",
    "in the example": "lambda a, b: 'label' in b",
    "compared": "lambda a, b: a == b",
    "compared in the other order": "lambda a, b: not b != a",
    "in another function": "lambda a, b: (lambda row: row.label)(a)",
}


@pytest.mark.parametrize("kind", HIDDEN)
def test_a_mistake_at_the_first_call_ends_the_evaluation(kind: str) -> None:
    lm = ScriptedLM(lambda _: "yes")
    with pytest.raises(UserCodeError, match=ORDER):
        cp.evaluate(
            system(), ROWS, eval(HIDDEN[kind]), engines={"m": lm}, cache=False, concurrency=1
        )
    assert len(lm.requests) == 1


def test_an_output_that_the_example_has_is_named() -> None:
    rows = [{**row, "gold_label": "yes"} for row in ROWS]
    metric = eval("lambda a, b: a['gold_label'] == 'yes'")
    with pytest.raises(CompoundError, match=r"example\.gold\['gold_label'\] of the second"):
        cp.evaluate(system(), rows, metric, engines={"m": ScriptedLM(lambda _: "yes")}, cache=False)


def right(pred: Any, gold: Any) -> Any:
    return float(pred["label"] == gold.gold["label"])


@pytest.mark.parametrize("metric", [right, lambda outputs, example: 1.0])
def test_functions_of_outputs_and_example_are_not_refused(metric: Any) -> None:
    assert scored(metric)[0].mean == 1.0


def test_a_file_names_a_metric_of_dspy(tmp_path: Path) -> None:
    (tmp_path / "scores.py").write_text(
        textwrap.dedent("""
        import compound as cp
        def raw(example, pred, trace=None):
            return example.label == pred.label
        adapted = cp.interchange.from_dspy_metric(raw)
        """)
    )
    text = (
        "system: s\nlm: m\ninputs: {question: str}\ncomponents:\n  a: {llm: {}, in: {question: $question}}\n"
        "outputs: {label: $a}\nmetric: {custom: {call: 'scores:NAME', bounds: [0, 1]}}\n"
    )
    from compound.yaml import loads

    metric = loads(text.replace("NAME", "adapted"), path=tmp_path / "f.yaml", models=["m"]).metric
    assert metric is not None
    assert metric.score({"label": "yes"}, cp.Example("1", {}, {"label": "yes"})) == cp.Score(1.0)
    with pytest.raises(CompoundError, match=r"f\.yaml:7:.*metric\.custom\.call: " + f".*{ORDER}"):
        loads(text.replace("NAME", "raw"), path=tmp_path / "f.yaml", models=["m"])
