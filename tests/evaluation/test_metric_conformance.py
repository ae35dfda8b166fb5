"""Every metric of this package passes the checks of its role."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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


CRITERIA = {"true": "It is.", "short": "At most ten words."}
HITS = [{"title": title} for title in "ACB"]


def brevity(outputs: Values, example: Example) -> Score:
    words = len(str(outputs["answer"]).split())
    return Score(1 / words, f"{words} words", {"words": float(words)})


async def later(outputs: Values, example: Example) -> Score:
    return brevity(outputs, example)


def of_library(library: str, make: Callable[[], Metric]) -> Callable[[], Metric]:
    def made() -> Metric:
        pytest.importorskip(library)
        return make()

    return made


def prefer(message: str) -> str:
    first, second = message.split("Answer B:")
    return "Verdict: B" if "good" in second and "good" not in first else "Verdict: A"


GRADES = {"Lima": "Fine.\n**true**: 5\nshort: 3", "Quito": "Wrong.\ntrue: 1\nShort: 3"}
JUDGES: Mapping[str, ScriptedLM] = {
    "Rubric": ScriptedLM(GRADES),
    "PassAtKOfAJudge": ScriptedLM(GRADES),
    "Pairwise": ScriptedLM(prefer),
}
BREVITY: list[Case] = [
    ({"answer": "short"}, gold(), 1.0),
    ({"answer": "much too long an answer"}, gold(), 0.2),
]
KITS: Mapping[str, tuple[Callable[[], Metric], Sequence[Case]]] = {
    "ExactMatch": (
        lambda: exact_match("answer"),
        [
            ({"answer": "the city of Paris."}, gold(answer=["Paris", "City of Paris"]), 1.0),
            ({"answer": "Lyon"}, gold(answer="Paris"), 0.0),
            ({"answer": "1,000"}, gold(answer=1000), 1.0),
            ({"answer": "", "reason": "none"}, gold(answer="Paris"), 0.0),
        ],
    ),
    "TokenF1": (
        lambda: token_f1("answer"),
        [
            ({"answer": "in Paris"}, gold(answer="Paris"), 2 / 3),
            ({"answer": ""}, gold(answer="Paris"), 0.0),
            ({"answer": "the"}, gold(answer=["a", "the"]), 1.0),
        ],
    ),
    "Accuracy": (
        lambda: accuracy("label"),
        [({"label": "yes"}, gold(label="yes"), 1.0), ({"label": True}, gold(label=False), 0.0)],
    ),
    "AccuracyOfATextThatHoldsALabel": (
        lambda: accuracy("text", "label", choices=["yes", "no"]),
        [
            ({"text": "So the answer is: no"}, gold(label="no"), 1.0),
            ({"text": "?"}, gold(label="yes"), 0.0),
        ],
    ),
    "MRR": (
        lambda: mrr("ranked", "item"),
        [({"ranked": ["x", "y"]}, gold(item="y"), 0.5), ({"ranked": []}, gold(item="y"), 0.0)],
    ),
    "RecallAtK": (
        lambda: recall_at_k("hits", "titles", k=2, key="title"),
        [({"hits": HITS}, gold(titles=["A", "B"]), 0.5), ({"hits": []}, gold(titles=["A"]), 0.0)],
    ),
    "RegexMatch": (
        lambda: regex_match("text", r"####\s*(\w+)", gold="n"),
        [
            ({"text": "so #### 42"}, gold(n=42), 1.0),
            ({"text": "so ####  the 43"}, gold(n=42), 0.0),
            ({"text": 42}, gold(n=42), 0.0),
        ],
    ),
    "PatternsInTheData": (
        lambda: regex_match("text", whole=True, ignore_case=True),
        [
            ({"text": "PARIS"}, gold(text=["par.s", "lyon"]), 1.0),
            ({"text": "Paris!"}, gold(text="par.s"), 0.0),
        ],
    ),
    "NumericMatch": (
        lambda: numeric_match("answer", relative=0.01, absolute=0.5),
        [
            ({"answer": "It costs $1,000.40."}, gold(answer=[1001, "7"]), 1.0),
            ({"answer": 12}, gold(answer=10), 0.0),
            ({"answer": "no idea"}, gold(answer=10), 0.0),
        ],
    ),
    "JsonMatch": (
        lambda: json_match("order"),
        [
            (
                {"order": '```json\n{"b": [1, {"c": null}], "a": 1.0}\n```'},
                gold(order={"a": 1, "b": [1, {"c": None}]}),
                1.0,
            ),
            ({"order": {"a": True}}, gold(order='{"a": 1}'), 0.0),
            ({"order": "{"}, gold(order={"a": 1}), 0.0),
        ],
    ),
    "Rouge": (
        of_library("rouge_score", lambda: rouge("summary", variant="rouge1")),
        [
            ({"summary": "the cat sat"}, gold(summary=["a dog ran", "The cat sat."]), 1.0),
            ({"summary": "the cat"}, gold(summary="the cat sat"), 0.8),
            ({"summary": ""}, gold(summary="the cat sat"), 0.0),
        ],
    ),
    "SemanticSimilarity": (
        of_library("sentence_transformers", lambda: semantic_similarity("answer")),
        [
            ({"answer": "A cat sleeps."}, gold(answer=["A cat sleeps.", "Stocks fell."]), 1.0),
            ({"answer": "A kitten naps."}, gold(answer="A cat sleeps.")),
        ],
    ),
    "Rubric": (
        lambda: rubric("answer", "judge", CRITERIA, scale=5),
        [({"answer": "Lima"}, gold(), 0.75), ({"answer": "Quito"}, gold(), 0.25)],
    ),
    "Pairwise": (
        lambda: pairwise("answer", "judge"),
        [
            ({"answer": "a good one"}, gold(answer="Lima"), 1.0),
            ({"answer": "Quito"}, gold(answer=["so good"]), 0.0),
            ({"answer": "Quito"}, gold(answer="Lima"), 0.5),
            ({"answer": "Lima"}, gold(answer="Lima"), 0.5),
        ],
    ),
    "PassAtK": (
        lambda: pass_at_k(token_f1("answer"), k=3, threshold=0.6),
        [
            ({"answer": "in Paris"}, gold(answer="Paris"), 1.0),
            ({"answer": "Lyon"}, gold(answer="Paris"), 0.0),
        ],
    ),
    "PassAtKOfAJudge": (
        lambda: pass_at_k(rubric("answer", "judge", CRITERIA), 2, 0.7),
        [({"answer": "Lima"}, gold(), 1.0), ({"answer": "Quito"}, gold(), 0.0)],
    ),
    "Custom": (lambda: custom(brevity, bounds=(0, 1)), BREVITY),
    "AsyncCustom": (lambda: custom(later), BREVITY),
}


def kit_of(name: str) -> type[MetricKit]:
    class Kit(MetricKit):
        def make(self) -> Metric:
            return KITS[name][0]()

        def engines(self) -> Mapping[str, Engine]:
            return {"judge": JUDGES[name]} if name in JUDGES else {}

        def cases(self) -> Sequence[Case]:
            return KITS[name][1]

    return Kit


globals().update({f"Test{name}": kit_of(name) for name in KITS})


def test_every_metric_has_a_kit_here() -> None:
    tested = {type(make()) for make, _ in KITS.values()}
    settings: dict[str, dict[str, Any]] = {
        "rubric": {"lm": "judge", "criteria": {"true": "It is."}},
        "pairwise": {"lm": "judge"},
    }
    assert {type(make("output", **settings.get(n, {}))) for n, make in METRICS.items()} <= tested
