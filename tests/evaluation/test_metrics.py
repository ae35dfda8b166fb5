"""Metrics: hand-computed values, the traps of label finding, and what a metric may return."""

from __future__ import annotations

import asyncio
import dataclasses
import datetime as dt
import enum
import math
from collections.abc import Mapping
from decimal import Decimal
from typing import Annotated, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from compound import Example, Port, Score
from compound.core.errors import CallError, DataError, DeclarationError, MissingOutput
from compound.evaluation.metrics.named import METRICS
from compound.evaluation.metrics.scoring import apply_metric
from compound.evaluation.metrics.text import bare_number, find_label, normalize
from compound.ext import Metric
from compound.metrics import accuracy, custom, exact_match, mrr, recall_at_k, token_f1

WORDS = st.lists(
    st.sampled_from(["red", "Green", "blue", "the", "x1", "é", "no,"]), max_size=6
).map(" ".join)
LABELS = ["yes", "no", "maybe"]

JUDGES: Mapping[str, dict[str, Any]] = {
    "rubric": {"lm": "judge", "criteria": {"true": "It is."}},
    "pairwise": {"lm": "judge"},
}
COMPARISONS = [name for name in METRICS if name not in JUDGES]


def example(**gold: Any) -> Example:
    return Example("e7", {}, gold)


def value(metric: Metric, output: Any, gold: Any) -> float:
    score = metric.score({"answer": output}, example(answer=gold))
    assert isinstance(score, Score)
    return score.value


@pytest.mark.parametrize(
    ("output", "gold", "expected"),
    [
        ("The Eiffel Tower!", "eiffel  tower", 1.0),
        ("Lyon", "Paris", 0.0),
        ("paris", ["Lyon", "Paris"], 1.0),
        ("", "A", 0.0),
        ("the", "A", 0.0),
        ("B", "A", 0.0),
        ("1,000", 1000, 1.0),
        ("3.5", 35, 0.0),
        ("3.50", 3.5, 1.0),
        ("about 35", 35, 0.0),
        (42, 42, 1.0),
        (42, "42", 1.0),
        ("True", True, 1.0),
        ("1", True, 0.0),
    ],
)
def test_exact_match_normalises_text_and_numbers(output: Any, gold: Any, expected: float) -> None:
    assert value(exact_match("answer"), output, gold) == expected


@pytest.mark.parametrize(
    ("output", "gold", "f1", "precision", "recall"),
    [
        ("in Paris", "Paris", 2 / 3, 1 / 2, 1.0),
        ("a b c b", "b b d", 2 * 2 / (4 + 3), 2 / 4, 2 / 3),
        ("Lyon", "Paris", 0.0, 0.0, 0.0),
        ("", "Paris", 0.0, 0.0, 0.0),
        ("", "", 1.0, 1.0, 1.0),
        ("red", ["blue", "red green"], 2 / 3, 1.0, 1 / 2),
        ("12", 12.0, 1.0, 1.0, 1.0),
    ],
)
def test_token_f1_equals_the_number_computed_by_hand(
    output: str, gold: Any, f1: float, precision: float, recall: float
) -> None:
    score = token_f1("answer").score({"answer": output}, example(answer=gold))
    assert score.value == pytest.approx(f1)
    assert score.parts == pytest.approx({"precision": precision, "recall": recall})


@given(WORDS, WORDS)
def test_token_f1_is_symmetric_bounded_and_one_for_equal_bags_of_words(a: str, b: str) -> None:
    there, back = value(token_f1("answer"), a, b), value(token_f1("answer"), b, a)
    assert there == back
    assert 0 <= there <= 1
    assert (there == 1) == (sorted(normalize(a).split()) == sorted(normalize(b).split()))


@given(WORDS, st.lists(WORDS, min_size=1, max_size=3), WORDS)
def test_another_gold_answer_never_lowers_a_score(output: str, gold: list[str], more: str) -> None:
    for metric in (exact_match("answer"), token_f1("answer")):
        assert value(metric, output, [*gold, more]) >= value(metric, output, gold)


@given(WORDS)
def test_normalising_twice_changes_nothing(text: str) -> None:
    assert normalize(normalize(text)) == normalize(text)


@pytest.mark.parametrize(
    ("text", "label"),
    [
        ("The diagnosis is X. Answer: yes", "yes"),
        ("The diagnosis is X.", None),
        ("It is not known. No study says so. Answer: maybe", "maybe"),
        ("yes", "yes"),
        (" 'Maybe.' ", "maybe"),
        ("Yes, it does.", "yes"),
        ("Some say yes, some say no.", None),
        ("Answer: no. Correction, answer: yes", "yes"),
        ("Answer: yes. There is no doubt.", "yes"),
        ("Answer: not yes but no", "no"),
        ("**Answer:** **No**", "no"),
        ("The answer is: _maybe_", "maybe"),
        ("ANSWER : YES", "yes"),
        ("Answer: unclear", None),
        ("No-one knows, so maybe.", "maybe"),
        ("yesterday, a nobody", None),
        ("It is not yes.", None),
        ("Answer: not maybe", None),
        ("It isn't yes but maybe", "maybe"),
        ("", None),
    ],
)
def test_d11_a_label_is_found_as_a_word_never_inside_one(text: str, label: str | None) -> None:
    assert find_label(text, LABELS) == label


def test_texts_are_compared_in_linear_time() -> None:
    """Models and servers write them."""
    assert find_label(f"a{'_' * 1_000_000}a yes", LABELS) == "yes"
    assert bare_number(" " * 1_000_000) is None
    assert bare_number(f"{'$' * 1_000_000}{'1' * 10_000}a") is None


@given(st.sampled_from(LABELS), st.text(alphabet="knowledge diagnosis. ", max_size=40))
def test_a_label_after_the_marker_beats_any_text_before_it(label: str, before: str) -> None:
    assert find_label(f"{before} no yes maybe. Answer: {label}", LABELS) == label


def test_accuracy_with_choices_scores_the_label_found_and_says_what_was_found() -> None:
    metric = accuracy("text", "label", choices=LABELS)
    right = metric.score({"text": "The diagnosis is X. Answer: yes"}, example(label="Yes"))
    wrong = metric.score({"text": "no"}, example(label="yes"))
    silent = metric.score({"text": "who can tell"}, example(label="yes"))
    assert (right.value, wrong.value, silent.value) == (1.0, 0.0, 0.0)
    assert wrong.feedback == "expected 'yes', got 'no'"
    assert silent.feedback == "no single label in 'who can tell'"


@pytest.mark.parametrize(
    ("output", "gold", "expected"),
    [
        ("yes", "yes", 1.0),
        ("Yes", "yes", 0.0),
        (3, "3", 1.0),
        (True, True, 1.0),
        ("b", ["a", "b"], 1.0),
    ],
)
def test_accuracy_without_choices_is_strict(output: Any, gold: Any, expected: float) -> None:
    assert value(accuracy("answer"), output, gold) == expected


def test_a_gold_label_outside_the_choices_is_refused() -> None:
    with pytest.raises(DataError, match=r"example 'e7': gold label 'perhaps' .*: yes, no, maybe"):
        accuracy("text", "label", choices=LABELS).score({"text": "yes"}, example(label="perhaps"))


@pytest.mark.parametrize("choices", [[True, False], ["yes", "Yes"], "yes", [""]])
def test_choices_that_are_no_distinct_words_are_refused(choices: Any) -> None:
    with pytest.raises(DeclarationError, match="choices .*must be"):
        accuracy("text", choices=choices)


@pytest.mark.parametrize(
    ("ranked", "gold", "rank", "first", "among_five"),
    [
        ("xyz", "y", 1 / 2, 0.0, 1.0),
        ("xyz", ["z", "y"], 1 / 2, 0.0, 1.0),
        ("x", "y", 0.0, 0.0, 0.0),
        ("", "y", 0.0, 0.0, 0.0),
        ([3, 4], 4, 1 / 2, 0.0, 1.0),
        ("xy", "x", 1.0, 1.0, 1.0),
        ("abcdx", ["x", "b"], 1 / 2, 0.0, 1.0),
        ("abcdx", "x", 1 / 5, 0.0, 1.0),
        ("abcdex", "x", 1 / 6, 0.0, 0.0),
    ],
)
def test_mrr_is_one_over_the_rank_of_the_first_right_item_with_hits_as_parts(
    ranked: Any, gold: Any, rank: float, first: float, among_five: float
) -> None:
    score = mrr("answer").score({"answer": list(ranked)}, example(answer=gold))
    assert score == Score(rank, score.feedback, {"hit@1": first, "hit@5": among_five})


def test_recall_counts_gold_items_among_the_first_k() -> None:
    hits = [{"title": title} for title in "ABCD"]
    gold = example(titles=["A", "D", "E", "A"])
    scores = [
        recall_at_k("hits", "titles", k=k, key="title").score({"hits": hits}, gold) for k in (1, 4)
    ]
    assert [score.value for score in scores] == pytest.approx([1 / 3, 2 / 3])
    assert scores[1].feedback == "missing 'E'"
    assert recall_at_k("hits", k=3).name == "recall_at_3"


@given(st.lists(st.integers(0, 9), max_size=8), st.lists(st.integers(0, 9), min_size=1, max_size=4))
def test_recall_grows_with_k(found: list[int], gold: list[int]) -> None:
    values = [value(recall_at_k("answer", k=k), found, gold) for k in range(1, 9)]
    assert values == sorted(values)
    assert values[-1] == pytest.approx(len(set(found) & set(gold)) / len(set(gold)))


@pytest.mark.parametrize(
    ("metric", "error"),
    [(mrr("hits", "titles"), DataError), (recall_at_k("hits", "titles", key="name"), CallError)],
)
def test_ranked_objects_need_an_existing_key(metric: Metric, error: type[Exception]) -> None:
    with pytest.raises(error, match="choose one with key=: id, title"):
        metric.score({"hits": [{"id": "1", "title": "A"}]}, example(titles=["A"]))


@pytest.mark.parametrize("metric", [mrr("hits", "titles"), recall_at_k("hits", "titles")])
def test_a_text_is_no_ranked_list(metric: Metric) -> None:
    with pytest.raises(CallError, match="must be a list, got str"):
        metric.score({"hits": "A"}, example(titles=["A"]))


@pytest.mark.parametrize("name", COMPARISONS)
def test_a_missing_gold_field_names_the_example_and_the_fields_there_are(name: str) -> None:
    with pytest.raises(DataError, match=r"example 'e7': no gold field 'answer'; .*id, answers"):
        METRICS[name]("answer").score({"answer": "x"}, example(id="e7", answers="x"))


@pytest.mark.parametrize("name", COMPARISONS)
def test_a_missing_output_names_the_outputs_there_are(name: str) -> None:
    with pytest.raises(DataError, match=r"no output 'answer'; outputs: reply, text"):
        METRICS[name]("answer").score({"reply": "x", "text": "y"}, example(answer="x"))


@pytest.mark.parametrize("gold", [None, [], ["x", None]])
def test_gold_without_a_value_is_refused(gold: Any) -> None:
    with pytest.raises(DataError, match="must hold a value to compare with"):
        value(exact_match("answer"), "x", gold)


def test_feedback_says_what_was_expected_and_stays_short() -> None:
    score = exact_match("answer").score({"answer": "word " * 100}, example(answer=list("abcde")))
    assert score.feedback.startswith("expected 'a' or 'b' or 'c' or 2 more, got 'word word")
    assert len(score.feedback) < 140


def length(outputs: Mapping[str, Any], example: Example) -> float:
    return len(outputs["answer"]) / 10


async def later(outputs: Mapping[str, Any], example: Example) -> Score:
    await asyncio.sleep(0)
    return Score(length(outputs, example), "waited", {"length": 5})


@pytest.mark.parametrize(("function", "feedback"), [(length, ""), (later, "waited")])
def test_a_function_becomes_a_metric_sync_or_async(function: Any, feedback: str) -> None:
    metric = custom(function)
    score = asyncio.run(apply_metric(metric, {"answer": "Paris"}, example()))
    assert (metric.name, score.value, score.feedback) == (function.__name__, 0.5, feedback)


@pytest.mark.parametrize("function", [length, later])
def test_a_function_that_reads_a_missing_output_names_the_outputs_there_are(function: Any) -> None:
    """It was `KeyError: 'answer'`, of an unnamed metric, once for each run."""
    wanted = rf"{function.__name__}, example 'e7': no output 'answer'; outputs: reply, text"
    with pytest.raises(MissingOutput, match=wanted):
        asyncio.run(apply_metric(custom(function), {"reply": "x", "text": "y"}, example()))


def test_a_function_may_look_for_an_output_that_is_not_there() -> None:
    def either(outputs: Mapping[str, Any], example: Example) -> float:
        assert "answer" not in outputs
        assert outputs.get("answer") is None
        assert outputs == {"reply": 1}
        try:
            return float(outputs["answer"])
        except KeyError:
            return float(outputs["reply"])

    assert asyncio.run(apply_metric(custom(either), {"reply": 1}, example())).value == 1.0


@pytest.mark.parametrize(
    "returned", [True, 1, np.float32(1), np.bool_(True), Score(True), Score(1), Decimal(1)]
)
def test_any_real_number_becomes_a_float(returned: Any) -> None:
    score = asyncio.run(apply_metric(custom(lambda outputs, example: returned, "m"), {}, example()))
    assert score == Score(1.0)
    assert type(score.value) is float


@pytest.mark.parametrize(
    "returned",
    [
        math.nan,
        Decimal("sNaN"),
        math.inf,
        "1",
        None,
        1j,
        Score(math.nan),
        Score(1.0, parts={"p": math.inf}),
        [1.0],
    ],
)
def test_anything_but_a_finite_number_is_a_failed_call(returned: Any) -> None:
    with pytest.raises(CallError, match=r"m.* must return a finite real number, got "):
        asyncio.run(apply_metric(custom(lambda outputs, example: returned, "m"), {}, example()))


class Mood(enum.Enum):
    GOOD = "good"
    BAD = "bad"


class Label(str, enum.Enum):  # noqa: UP042 - formatted by its name, unlike a StrEnum
    GOOD = "good"
    BAD = "bad"


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


class Order(BaseModel):
    day: dt.date
    mood: Mood


@dataclasses.dataclass
class Visit:
    day: dt.date


DAY = dt.date(2024, 1, 2)


class TestOtherClasses:
    """A file holds the JSON form of a value, a data frame the value itself."""

    @pytest.mark.parametrize("name", ["accuracy", "exact_match", "json_match", "token_f1"])
    @pytest.mark.parametrize(
        ("output", "gold", "wrong"),
        [
            (Mood.GOOD, "good", "bad"),
            (Mood.GOOD, Mood.GOOD, Mood.BAD),
            (Label.GOOD, "good", "bad"),
            (Label.GOOD, Label.GOOD, Label.BAD),
            (Level.HIGH, 2, 1),
            (Level.HIGH, "2", "1"),
            (DAY, "2024-01-02", "2024-01-03"),
            (DAY, DAY, dt.date(2024, 1, 3)),
            (dt.datetime(2024, 1, 2, 10), "2024-01-02T10:00:00", "2024-01-02T11:00:00"),
            (Decimal("1.5"), 1.5, 2.5),
            (Decimal("1.5"), Decimal("1.50"), Decimal("2.5")),
            (1.5, Decimal("1.5"), Decimal("2.5")),
            (Decimal("3"), "3", "4"),
        ],
    )
    def test_a_value_equals_its_text(self, name: str, output: Any, gold: Any, wrong: Any) -> None:
        metric = METRICS[name]("answer")
        assert value(metric, output, gold) == 1.0
        assert value(metric, output, wrong) < 1.0

    @pytest.mark.parametrize(
        ("output", "gold"),
        [
            (Order(day=DAY, mood=Mood.GOOD), {"day": "2024-01-02", "mood": "good"}),
            (Visit(DAY), '{"day": "2024-01-02"}'),
            ({"day": DAY, 1: [Mood.BAD]}, {"day": "2024-01-02", "1": ["bad"]}),
            ([Label.GOOD, None], ["good", None]),
            ({Mood.BAD}, ["bad"]),
        ],
    )
    def test_documents_are_compared_in_their_json_form(self, output: Any, gold: Any) -> None:
        assert value(METRICS["json_match"]("answer"), output, gold) == 1.0

    def test_lists_are_compared_by_the_form_of_their_items(self) -> None:
        assert value(mrr("answer"), [Mood.BAD, Mood.GOOD], "good") == 0.5
        assert value(recall_at_k("answer"), [DAY], ["2024-01-02"]) == 1.0
        assert value(METRICS["numeric_match"]("answer"), Decimal("1.5"), Decimal("1.5")) == 1.0

    @pytest.mark.parametrize("name", ["accuracy", "exact_match", "json_match"])
    @pytest.mark.parametrize("kind", [Mood, Label, Mood | None, Annotated[Mood, "note"]])
    def test_gold_that_is_no_member_is_reported_before_the_run(self, name: str, kind: Any) -> None:
        metric: Any = METRICS[name]("answer")
        metric.check({"answer": Port(kind)}, [example(answer="good"), example(answer=Mood.BAD)])
        with pytest.raises(DataError, match="no label of output 'answer' matches .* 'GOOOD'"):
            metric.check({"answer": Port(kind)}, [example(answer="GOOOD")])
