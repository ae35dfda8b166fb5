"""Every metric of this package passes the checks of its role."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from compound.evaluation.metrics.built_in import METRICS, accuracy, exact_match, mrr, recall_at_k, token_f1
from compound.evaluation.metrics.custom import custom
from compound.example import Example, Metric, Score, Values
from compound.testing import MetricKit
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
        return [({"label": "yes"}, gold(label="yes"), 1.0), ({"label": True}, gold(label=False), 0.0)]


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
        return [({"ranked": ["x", "y"]}, gold(item="y"), 0.5), ({"ranked": []}, gold(item="y"), 0.0)]


class TestRecallAtK(MetricKit):
    def make(self) -> Metric:
        return recall_at_k("hits", "titles", k=2, key="title")

    def cases(self) -> Sequence[Case]:
        hits = [{"title": title} for title in "ACB"]
        return [({"hits": hits}, gold(titles=["A", "B"]), 0.5), ({"hits": []}, gold(titles=["A"]), 0.0)]


class TestCustom(MetricKit):
    def make(self) -> Metric:
        return custom(brevity, bounds=(0, 1))

    def cases(self) -> Sequence[Case]:
        return [({"answer": "short"}, gold(), 1.0), ({"answer": "much too long an answer"}, gold(), 0.2)]


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
    assert {type(make("output")) for make in METRICS.values()} <= tested
