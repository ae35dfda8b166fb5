"""Formatting of values as prompts, and parsing of realistic model outputs into typed fields."""

from __future__ import annotations

import json
import string
from typing import Any, Literal

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st
from pydantic import BaseModel

from compound.components.answers.type_notes import Layout
from compound.components.fields import (
    answer_cue,
    format_inputs,
    format_outputs,
    format_value,
    parse,
    render,
)
from compound.core.errors import ParseError
from compound.graph.space import Demo
from compound.graph.types import Port


class Person(BaseModel):
    name: str
    age: int


def ports(**types: Any) -> dict[str, Port]:
    return {name: Port(kind) for name, kind in types.items()}


def test_a_prompt_puts_the_shared_part_first_and_the_inputs_last() -> None:
    demo: Demo = {
        "inputs": {"question": "1+1"},
        "outputs": {"reason": "one more than one", "answer": 2},
    }
    text = render("Solve.", [demo], {"question": "2+2"}, ports(reason=str, answer=int), "fields")
    assert text == (
        "Solve.\n\nReply in this format:\nreason: <str>\nanswer: <int>\n\n"
        "Question: 1+1\nreason: one more than one\nanswer: 2\n\nQuestion: 2+2"
    )


def test_a_demonstration_reads_like_the_question_whatever_order_its_parts_were_saved_in() -> None:
    demo = {
        "inputs": {"context": "c", "question": "q", "z": 1, "b": 2},
        "outputs": {"answer": 2, "reason": "r"},
    }
    text = render(
        "", [demo], {"question": "Q", "context": "C"}, ports(reason=str, answer=int), "fields"
    )
    assert (
        "Question: q\nContext: c\nB: 2\nZ: 1\nreason: r\nanswer: 2\n\nQuestion: Q\nContext: C"
        in text
    )


def test_the_json_layout_shows_the_shape_and_writes_demonstrations_as_json() -> None:
    demo: Demo = {"inputs": {"q": "1+1"}, "outputs": {"answer": 2}}
    text = render("Solve.", [demo], {"q": "2+2"}, ports(answer=int), "json")
    assert (
        text
        == 'Solve.\n\nReply with one JSON object: {"answer": int}\n\nQ: 1+1\n{"answer":2}\n\nQ: 2+2'
    )


def test_a_single_text_field_begins_with_a_cue() -> None:
    assert render("", [], {"search_query": "x"}, ports(output=str), "text") == "Search query: x"
    assert answer_cue(ports(output=str), "text") == "Answer:"
    assert parse("Answer: Lima", ports(output=str), "text") == {"output": "Lima"}


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("as it is", "as it is"),
        (3, "3"),
        (True, "true"),
        (["a", "b"], "[1] a\n[2] b"),
        ([{"title": "Peru", "text": "Lima"}, {"text": "Oslo"}], "Peru: Lima\nOslo"),
        ([1, 2], "[1,2]"),
        ([], "[]"),
        ({"b": 1, "a": 2}, '{"a":2,"b":1}'),
        ([{"title": "no text"}], '[{"title":"no text"}]'),
        (["mixed", 3], '["mixed",3]'),
        (Person(name="Ada", age=36), '{"age":36,"name":"Ada"}'),
        # an object with other fields than a passage is shown whole
        ([{"role": "user", "text": "Hi"}], '[{"role":"user","text":"Hi"}]'),
        ([{"text": "great", "rating": 1}], '[{"rating":1,"text":"great"}]'),
        ([{"title": None, "text": None}], '[{"text":null,"title":null}]'),
        ([{"text": 3}], '[{"text":3}]'),
        ([[{"text": "a", "by": "b"}]], '[[{"by":"b","text":"a"}]]'),
        ([{"title": None, "text": "a"}, {"id": "2", "title": "T", "text": "b"}], "a\nT: b"),
    ],
)
def test_a_value_is_shown_as_text(value: Any, text: str) -> None:
    assert format_value(value) == text


def test_texts_of_several_lines_start_on_their_own_line_and_absent_inputs_are_not_shown() -> None:
    assert format_inputs({"notes": "a\nb", "nothing": None, "k": 0}) == "Notes:\na\nb\nK: 0"


def test_a_demonstration_of_a_yes_or_no_reads_as_the_note_says() -> None:
    demos: list[Demo] = [{"inputs": {"q": "a"}, "outputs": {"output": True}}]
    assert "Q: a\nAnswer: yes\n\nQ: x" in render("", demos, {"q": "x"}, ports(output=bool), "text")


THREE = ports(reason=str, score=float, label=Literal["yes", "no"])
EXPECTED = {"reason": "It fits.", "score": 0.5, "label": "yes"}


@pytest.mark.parametrize(
    "text",
    [
        "reason: It fits.\nscore: 0.5\nlabel: yes",
        "Reason: It fits.\nSCORE: 0.5\nLabel: Yes",
        "**reason**: It fits.\n**score**: 0.5\n**label**: **yes**",
        "**reason:** It fits.\n**score:** 0.5\n**label:** yes",
        "- reason: It fits.\n- score: 0.5\n- label: yes",
        "* `reason`: It fits.\n* `score`: `0.5`\n* `label`: `yes`",
        "## reason: It fits.\n## score: 0.5\n## label: yes",
        "> reason: It fits.\n> score: 0.5\n> label: yes",
        "reason = It fits.\nscore = 0.5\nlabel = yes",
        "label: yes\nscore: 0.5\nreason: It fits.",
        "Sure! Here is my answer.\n\nreason: It fits.\n\nscore: 0.5\n\nlabel: yes\n",
        "reason: a draft\nlabel: no\nreason: It fits.\nscore: 0.5\nlabel: yes",
        "reason:\nIt fits.\nscore:\n0.5\nlabel:\nyes",
        "**reason: It fits.**\n**score: 0.5**\n**label: yes**",
        "reason: *It fits.*\nscore: `0.5`\nlabel: ***yes***",
    ],
)
def test_fields_are_found_however_a_model_marks_them(text: str) -> None:
    assert parse(text, THREE, "fields") == EXPECTED


@pytest.mark.parametrize(
    "text",
    [
        '{"reason": "It fits.", "score": 0.5, "label": "yes"}',
        '```json\n{"reason": "It fits.",\n "score": 0.5, "label": "yes"}\n```',
        'Sure, here it is: {"reason": "It fits.", "score": "0.5", "label": "Yes", "extra": {}} Anything else?',
        'The set {a, b} is not JSON, but {"reason": "It fits.", "score": 0.5, "label": "yes"} is.',
        'First {} or {"note": 1}, then {"reason": "It fits.", "score": 0.5, "label": "yes"}',
        '[{"reason": "It fits.", "score": 0.5, "label": "yes"}]',
    ],
)
def test_a_json_object_is_found_inside_prose(text: str) -> None:
    assert parse(text, THREE, "json") == EXPECTED


@pytest.mark.parametrize("layout", ["fields", "text", "json"])
def test_d13_a_value_keeps_all_its_lines(layout: Layout) -> None:
    # the reference's `Solution:\s*(.*)` without DOTALL keeps the first line of a proposal
    solution = "Answer step by step.\n\n1. Read: the passage.\n2. Quote it.\n\nBe brief."
    text = format_outputs({"solution": solution}, layout)
    if layout == "text":
        text = text.removeprefix("Solution: ")
    assert parse(text, ports(solution=str), layout) == {"solution": solution}


def test_d13_a_value_of_several_lines_ends_where_the_next_field_begins() -> None:
    text = "solution: first\nsecond\n\n- third\nscore: 1"
    assert parse(text, ports(solution=str, score=int), "fields") == {
        "solution": "first\nsecond\n\n- third",
        "score": 1,
    }


def test_a_field_whose_name_begins_like_another_is_its_own() -> None:
    fields = ports(answer=str, answer_type=str, search_query=str)
    text = "answer_type: place\nAnswer: Lima\nSearch query: capital of Peru"
    assert parse(text, fields, "fields") == {
        "answer": "Lima",
        "answer_type": "place",
        "search_query": "capital of Peru",
    }


def test_code_in_a_value_keeps_its_fence_and_its_indentation() -> None:
    code = "```python\nif x:\n    y = 1\n```"
    assert (
        parse(f"note: see below\ncode:\n{code}", ports(note=str, code=str), "fields")["code"]
        == code
    )
    indented = "code:\n    if x:\n        y = 1\n"
    assert parse(indented, ports(code=str), "fields") == {"code": "if x:\n    y = 1"}


def test_what_did_parse_is_kept_when_a_field_did_not() -> None:
    with pytest.raises(ParseError) as error:
        parse("reason: It fits.\nscore: high", THREE, "fields")
    assert error.value.outputs == {"reason": "It fits."}
    assert "'score': 'high' holds no number; 'label' is missing in 'reason: It fits." in str(
        error.value
    )
    assert error.value.kind == "parse"


@pytest.mark.parametrize("text", ["", "no object here", "{", '{"reason": ', "[1, 2]", "{" * 5000])
def test_a_text_without_json_misses_every_field(text: str) -> None:
    with pytest.raises(ParseError, match="'reason' is .*'score' is .*'label' is missing") as error:
        parse(text, THREE, "json")
    assert error.value.outputs == {}


def test_lone_surrogates_in_json_are_replaced() -> None:
    kinds = ports(answer=str, tags=list[str], counts=dict[str, int])
    text = r'{"answer": "a\ud800b", "tags": ["\udfff"], "counts": {"\ud800": 1}}'
    assert parse(text, kinds, "json") == {
        "answer": "a\ufffdb",
        "tags": ["\ufffd"],
        "counts": {"\ufffd": 1},
    }
    text = 'answer: x\ntags: ["\\ud800"]\ncounts: {"\\ud800": 1}'
    assert parse(text, kinds, "fields") == {
        "answer": "x",
        "tags": ["\ufffd"],
        "counts": {"\ufffd": 1},
    }


@given(st.text(max_size=60), st.sampled_from(["fields", "json", "text"]))
@example("score: 1e999", "fields")
@example('{"score": 1e999}', "json")
@example("score: " + "9" * 400, "fields")
def test_any_text_is_parsed_or_is_a_parse_error(text: str, layout: Layout) -> None:
    kinds = ports(
        score=int,
        ratio=float,
        tags=list[int],
        label=Literal["a", "b"],
        person=Person,
        other=int | None,
    )
    try:
        parsed = parse(text, kinds, layout)
    except ParseError:
        return
    assert set(parsed) <= set(kinds)


def json_that_is_costly_to_look_for() -> list[str]:
    nested = '{"a":' * 900 + "[" + "1," * 400_000
    return ["{" * 1_000_000, nested, '{"a": 1, ' * 100_000, '{"a":[' * 200_000]


@pytest.mark.parametrize("text", json_that_is_costly_to_look_for(), ids=range(4))
def test_the_search_for_json_is_linear_in_the_text(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One answer of a server must not stop the process."""
    steps = 0
    decode = json.JSONDecoder.raw_decode

    def counted(self: json.JSONDecoder, doc: str, start: int = 0) -> Any:
        nonlocal steps
        try:
            return decode(self, doc, start)
        except (ValueError, RecursionError) as error:
            steps += getattr(
                error, "pos", len(doc)
            )  # its line and column are counted from the beginning
            raise

    monkeypatch.setattr(json.JSONDecoder, "raw_decode", counted)
    with pytest.raises(ParseError):
        parse(text, ports(label=str), "json")
    assert steps <= 20 * len(text)


WORDS = st.text(string.ascii_letters + string.digits + " .,;!?()'\"%/+\n", max_size=40)
TEXTS = WORDS.filter(lambda text: text == text.strip())
KINDS: dict[Any, st.SearchStrategy[Any]] = {
    str: TEXTS,
    int: st.integers(),
    float: st.floats(allow_nan=False, allow_infinity=False),
    bool: st.booleans(),
    Literal["yes", "no", "not sure"]: st.sampled_from(["yes", "no", "not sure"]),
    list[str]: st.lists(TEXTS, max_size=3),
    str | None: st.none() | TEXTS.filter(lambda text: text.lower() not in ("", "none", "null")),
    list[int]: st.lists(st.integers(), max_size=3),
    dict[str, int]: st.dictionaries(st.text("abc", max_size=3), st.integers(), max_size=3),
}
NAMES = ("reason", "answer", "answer_type", "k2")


@given(st.data(), st.sampled_from(["fields", "json"]))
def test_parsing_what_is_shown_gives_the_values_back(data: st.DataObject, layout: Layout) -> None:
    names = data.draw(st.lists(st.sampled_from(NAMES), min_size=1, unique=True))
    kinds = {name: data.draw(st.sampled_from(list(KINDS))) for name in names}
    values = {name: data.draw(KINDS[kind]) for name, kind in kinds.items()}
    # a line of a text that itself reads `name: ...` or `name = ...` is the one thing this layout
    # cannot hold
    lines = [
        line for value in values.values() if isinstance(value, str) for line in value.splitlines()
    ]
    assume(not any(line.strip().lower().startswith(NAMES) for line in lines))
    assert parse(format_outputs(values, layout), ports(**kinds), layout) == values


@given(st.sampled_from(list(KINDS)), st.data())
def test_a_single_value_survives_the_text_layout(kind: Any, data: st.DataObject) -> None:
    value = data.draw(KINDS[kind])
    shown = format_outputs({"output": value}, "text").removeprefix("Answer:").removeprefix(" ")
    assert parse(shown, ports(output=kind), "text") == {"output": value}
