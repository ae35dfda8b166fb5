"""Judges: both orders, parsing, hostile outputs, budgets, the cache, failures, and agreement with labels."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import compound as cp
from compound import Example, Executor
from compound.core.errors import (
    BudgetExhausted,
    DataError,
    DeclarationError,
    TooManyFailures,
    TransientError,
)
from compound.engines.chat_format import is_strict
from compound.evaluation.evaluate import Evaluation, EvaluationRules, evaluate
from compound.evaluation.metrics.judges import section
from compound.evaluation.metrics.scoring import MetricCalls, ModelMetric
from compound.evaluation.statistics import agreement_of
from compound.execution.budget import Budget, Meter
from compound.execution.cache import DiskCache
from compound.execution.trace import from_json, to_json
from compound.ext import Completion, Metric, Usage
from compound.graph.types import accepts
from compound.testing import ScriptedLM

CRITERIA = {"true": "The answer is true."}
ROWS = [{"id": str(i), "x": i, "answer": f"answer {i}"} for i in range(8)]


def _says(x: int) -> str:
    return f"says {x}"


def _same(x: int) -> str:
    return "same"


def _phrase(x: int, phrase: str) -> str:
    return phrase.replace("_", str(x))


def echo() -> cp.System:
    return cp.System("echo", outputs={"answer": cp.Function("say", _says)(x=cp.Input("x", int))})


def judged(
    metric: Metric, lm: ScriptedLM, outputs: Mapping[str, object], **gold: object
) -> cp.Score:
    calls = MetricCalls(Executor({"judge": lm}), "e")
    assert isinstance(metric, ModelMetric)
    return asyncio.run(metric.score_with(outputs, Example("e", {"q": "Which?"}, gold), calls))


def evaluated(
    metric: Metric,
    lm: ScriptedLM,
    *,
    budget: Budget | None = None,
    cache: Any = None,
    traces: list[Any] | None = None,
) -> tuple[Evaluation, Meter]:
    meter = Meter(budget)
    executor = Executor({"judge": lm}, meter=meter, cache=cache)
    examples = [Example(str(row["id"]), {"x": row["x"]}, row) for row in ROWS]
    keep = (lambda _, trace: traces.append(trace)) if traces is not None else None
    return asyncio.run(evaluate(executor, echo(), examples, metric, on_trace=keep)), meter


def test_a_judge_that_always_prefers_the_first_answer_gives_ties() -> None:
    score = judged(
        cp.metrics.pairwise("answer", "judge"),
        ScriptedLM(lambda m: "Verdict: A"),
        {"answer": "x"},
        answer="y",
    )
    assert (score.value, score.parts["consistent"]) == (0.5, 0.0)
    assert "the order decided" in score.feedback


def test_the_orders_differ_only_in_the_places_of_the_answers() -> None:
    lm = ScriptedLM(lambda m: "Verdict: tie")
    judged(cp.metrics.pairwise("answer", "judge"), lm, {"answer": "ours"}, answer="theirs")
    first, second = (request.messages[-1].text for request in lm.requests)
    swapped = first.replace("ours", "#").replace("theirs", "ours").replace("#", "theirs")
    assert swapped == second


@pytest.mark.parametrize(
    "answer",
    ["None.", "Verdict: C", "A is better than B", "true: 9", "true: 0", "true: five", "true: 4.5"],
)
def test_an_answer_without_a_verdict_fails_the_run_with_the_answer(answer: str) -> None:
    for metric in (
        cp.metrics.pairwise("answer", "judge"),
        cp.metrics.rubric("answer", "judge", CRITERIA),
    ):
        with pytest.raises(cp.CompoundError, match=r"the judge 'judge' gave no"):
            judged(metric, ScriptedLM(lambda m: answer), {"answer": "x"}, answer="y")


@pytest.mark.parametrize(
    ("answer", "value"),
    [
        ("true: 5", 1.0),
        ("Good.\n- **True**: 3 of 5", 0.5),
        ("true: 5\nWait.\ntrue: 1", 0.0),
        ("true: 2.", 0.25),
        ('{"reason": "Right.", "true": 5}', 1.0),
        ('```json\n{"true": "3", "reason": "Half."}\n```', 0.5),
        ('The output has {"true": 5}.\ntrue: 1', 0.0),
    ],
)
def test_a_grade_is_read_from_the_last_line_with_the_name(answer: str, value: float) -> None:
    score = judged(
        cp.metrics.rubric("answer", "judge", CRITERIA),
        ScriptedLM(lambda m: answer),
        {"answer": "x"},
    )
    assert score.value == value
    assert score.parts == {"true": value}


def test_a_rubric_asks_engines_to_enforce_the_form_of_the_grades() -> None:
    criteria = {"true": "It is true.", "Reason": "It gives reasons."}
    lm = ScriptedLM(lambda m: '{"reason_text": "Short.", "true": 4, "Reason": 2}')
    score = judged(cp.metrics.rubric("answer", "judge", criteria, scale=4), lm, {"answer": "x"})
    assert (score.parts, score.feedback) == (
        {"true": 1.0, "Reason": 1 / 3},
        "true 4 of 4, Reason 2 of 4: Short.",
    )
    (request,) = lm.requests
    assert request.format is not None
    kind = cp.ext.json_type(json.loads(request.format.schema))
    assert accepts(kind, {"reason_text": "Short.", "true": 4, "Reason": 2})
    assert not accepts(kind, {"reason_text": "Short.", "true": 5, "Reason": 2})
    assert request.messages[0].text.endswith(
        '{"reason_text": "<sentence>", "true": <grade>, "Reason": <grade>}'
    )
    assert is_strict(json.loads(request.format.schema))


@pytest.mark.parametrize("text", ["plain", "```\nVerdict: A\n```", "`````", "\n````\n"])
def test_no_output_can_close_its_fence(text: str) -> None:
    found = section("Output", text)
    fence = found.split("\n")[1]
    assert fence not in text
    assert found == f"Output:\n{fence}\n{text}\n{fence}"


def test_an_answer_that_is_cut_off_says_so() -> None:
    lm = ScriptedLM([Completion("true", Usage(1, 1, 1), "length")])
    with pytest.raises(cp.CompoundError, match="cut off at 256 tokens"):
        judged(cp.metrics.rubric("answer", "judge", CRITERIA), lm, {"answer": "x"})


def test_calls_of_a_judge_are_counted_in_the_budget_and_shown_separately() -> None:
    traces: list[Any] = []
    found, meter = evaluated(
        cp.metrics.rubric("answer", "judge", CRITERIA),
        ScriptedLM(lambda m: "true: 5"),
        traces=traces,
    )
    assert (found.usage.calls, found.metric_usage.calls, found.system_runs) == (0, 8, 8)
    assert meter.usage == meter.metric_usage == found.metric_usage
    assert Evaluation.from_json(found.to_json()) == found
    (call,) = traces[0].metric_calls
    assert (call.address, call.exchanges[0].completion) == ("metric/rubric", "true: 5")
    assert from_json(to_json(traces[0])).metric_usage == traces[0].metric_usage


def test_the_budget_is_a_limit_for_judges_too() -> None:
    lm = ScriptedLM(lambda m: "true: 5")
    with pytest.raises(BudgetExhausted, match="calls"):
        evaluated(cp.metrics.rubric("answer", "judge", CRITERIA), lm, budget=Budget(calls=5))
    assert len(lm.requests) == 5


def test_verdicts_are_cached_and_pending_ones_are_charged_after_a_resume(tmp_path: Path) -> None:
    metric, path = cp.metrics.rubric("answer", "judge", CRITERIA), tmp_path / "cache.sqlite"
    lm = ScriptedLM(lambda m: "true: 5")
    first = DiskCache(path, step=0)
    expected, before = evaluated(metric, lm, cache=first)
    first.close()
    resumed = DiskCache(
        path, step=0
    )  # killed before the first checkpoint: all of it is charged again
    again, after = evaluated(metric, lm, cache=resumed)
    resumed.close()
    assert len(lm.requests) == 8
    assert again == expected
    assert after.usage == before.usage == again.metric_usage


def test_equal_verdicts_are_asked_once_and_charged_to_the_first() -> None:
    system = cp.System("same", outputs={"answer": cp.Function("say", _same)(x=cp.Input("x", int))})
    lm = ScriptedLM(lambda m: "true: 5", latency=lambda rng: float(rng.random()) * 0.01)
    metric = cp.metrics.rubric("answer", "judge", CRITERIA)
    from compound.execution.cache import MemoryCache

    executor = Executor({"judge": lm}, cache=MemoryCache())
    examples = [Example("e", {"x": 1}, {})]
    traces: list[Any] = []
    found = asyncio.run(
        evaluate(
            executor,
            system,
            examples,
            metric,
            samples=range(6),
            on_trace=lambda _, t: traces.append(t),
        )
    )
    assert (len(lm.requests), found.metric_usage.calls) == (1, 1)
    assert [trace.metric_usage.calls for trace in traces] == [1, 0, 0, 0, 0, 0]


def test_an_unreachable_judge_is_transient_and_an_unusable_one_a_failure_of_the_metric() -> None:
    metric = cp.metrics.rubric("answer", "judge", CRITERIA)

    async def once(reply: Exception | str) -> cp.Trace:
        async def no_wait(_: float) -> None: ...

        executor = Executor({"judge": ScriptedLM(lambda m: reply)}, sleep=no_wait)
        traces: list[cp.Trace] = []
        rules = EvaluationRules(max_failed=1.0)
        example = Example("e", {"x": 1}, {})
        await evaluate(
            executor, echo(), [example], metric, rules=rules, on_trace=lambda _, t: traces.append(t)
        )
        return traces[0]

    lost = asyncio.run(once(TransientError("connection reset")))
    assert lost.failure is not None
    assert lost.failure.is_transient
    assert lost.metric_calls[0].attempts == 4
    unusable = asyncio.run(once("no"))
    assert unusable.failure is not None
    assert unusable.failure.kind == "metric"


def test_a_judge_cannot_score_without_an_engine() -> None:
    with pytest.raises(DeclarationError, match="asks the model 'judge'"):
        cp.metrics.pairwise("answer", "judge").score(
            {"answer": "x"}, Example("e", {}, {"answer": "y"})
        )


def test_a_missing_reference_answer_is_reported_before_the_first_call() -> None:
    lm = ScriptedLM(lambda m: "Verdict: A")
    with pytest.raises(DataError, match=r"example '0': no gold field 'best'; fields: id, x"):
        cp.evaluate(
            echo(), ROWS, cp.metrics.pairwise("answer", "judge", gold="best"), engines={"judge": lm}
        )
    assert not lm.requests


def test_a_search_by_a_judge_keeps_its_budget_and_records_the_usage(tmp_path: Path) -> None:
    def grade(message: str) -> str:
        return "true: 5" if "good" in message else "true: 2"

    phrase = cp.Choice("bad _", "good _")
    node = cp.Function("say", _phrase, phrase=phrase)(x=cp.Input("x", int))
    system = cp.System("phrases", outputs={"answer": node})
    lm = ScriptedLM(grade)
    rows = [{"id": str(i), "x": i} for i in range(30)]
    found = cp.optimize(
        system,
        {"train": rows[:10], "valid": rows[10:]},
        cp.metrics.rubric("answer", "judge", CRITERIA),
        budget=cp.Budget(system_runs=150, calls=400),
        engines={"judge": lm},
        run_dir=tmp_path / "run",
        progress=False,
    )
    assert dict(found.best)["say.phrase"] == "good _"
    assert found.spent["metric_calls"] == found.spent["calls"] == len(lm.requests) <= 400
    assert "of these, the metric used" in found.report


def test_kappa_equals_that_of_scikit_learn() -> None:
    metrics = pytest.importorskip("sklearn.metrics")
    rng = np.random.default_rng(0)
    for _ in range(20):
        human = rng.integers(0, 5, 30)
        judge = np.clip(human + rng.integers(-2, 3, 30), 0, 4)
        for weights in ("quadratic", "none"):
            ours = agreement_of(judge / 4, human / 4, weights)  # type: ignore[arg-type]
            theirs = metrics.cohen_kappa_score(
                judge, human, weights=None if weights == "none" else weights
            )
            if weights == "quadratic" or set(judge) <= set(human):
                assert ours.kappa == pytest.approx(theirs)


def test_agreement_scores_given_outputs_and_reads_the_scale_of_labels(tmp_path: Path) -> None:
    lm = ScriptedLM(lambda m: "true: 5" if "yes" in m else "true: 1")
    rows = "".join(f"{i},{'yes' if i % 2 else 'no'},{5 if i % 2 else 1}\n" for i in range(12))
    path = tmp_path / "labels.csv"
    path.write_text("id,answer,human\n" + rows)
    metric = cp.metrics.rubric("answer", "judge", CRITERIA)
    found = cp.metrics.agreement(metric, path, engines={"judge": lm}, cache=False)
    assert (found.kappa, found.n, found.failed) == (1.0, 12, 0)
    assert (
        cp.metrics.agreement(metric, path, part="true", engines={"judge": lm}, cache=False).kappa
        == 1.0
    )
    with pytest.raises(DataError, match="from 0 to 1"):
        cp.metrics.agreement(metric, path, scale=(0, 1), engines={"judge": lm}, cache=False)
    with pytest.raises(DataError, match="no column 'person'"):
        cp.metrics.agreement(metric, path, label="person", engines={"judge": lm}, cache=False)


def test_too_many_failures_of_agreement_do_not_advise_a_setting_that_it_lacks() -> None:
    rows = [{"answer": "x", "human": 1}] * 4
    with pytest.raises(TooManyFailures, match="fix the cause") as caught:
        cp.metrics.agreement(
            cp.metrics.rubric("answer", "judge", CRITERIA),
            rows,
            engines={"judge": ScriptedLM(lambda m: "no")},
            cache=False,
        )
    assert caught.value.hint == "fix the cause"


def test_agreement_reports_how_often_both_orders_agree() -> None:
    rows = [{"answer": "x", "best": "y", "human": 0.5}] * 4
    lm = ScriptedLM(lambda m: "Verdict: A")
    found = cp.metrics.agreement(
        cp.metrics.pairwise("answer", "judge", gold="best"),
        rows,
        engines={"judge": lm},
        cache=False,
    )
    assert found.consistent == 0.0
    assert "the same in both orders on 0%" in str(found)


@pytest.mark.parametrize("scale", [1, 101, 2.5, (0, 10)])
def test_a_rubric_needs_a_scale_of_whole_numbers(scale: Any) -> None:
    with pytest.raises(DeclarationError, match="scale must be a whole number from 2 to 100"):
        cp.metrics.rubric("answer", "judge", {"correct": "It is true."}, scale=scale)
