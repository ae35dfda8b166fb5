"""Templates of prompts: matching, filling, and the laws that connect them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compound.components.gateway.templates import PromptTemplate, fill
from compound.core.errors import DeclarationError

TEXTS = st.text(st.characters(exclude_characters="{}"), max_size=20)
NAMES = ["a", "b", "c"]


@st.composite
def cases(draw: Any) -> tuple[str, dict[str, str]]:
    count = draw(st.integers(0, 3))
    inner = st.text(st.characters(exclude_characters="{}"), min_size=1, max_size=20)
    parts = [
        draw(TEXTS),
        *(draw(inner) for _ in range(count - 1)),
        *([draw(TEXTS)] if count else []),
    ]
    text = parts[0] + "".join(
        f"{{{{{name}}}}}{part}" for name, part in zip(NAMES, parts[1:], strict=False)
    )
    return text, {name: draw(TEXTS) for name in NAMES[:count]}


@given(cases())
def test_a_filled_template_matches_and_its_values_give_the_text_again(case: Any) -> None:
    text, values = case
    filled = fill(text, values)
    found = PromptTemplate(text).match(filled)
    assert found is not None
    assert fill(text, found) == filled


@given(cases(), TEXTS)
def test_a_match_reproduces_any_text_that_matches(case: Any, other: str) -> None:
    found = PromptTemplate(case[0]).match(other)
    assert found is None or fill(case[0], found) == other


@pytest.mark.parametrize(
    ("template", "text", "values"),
    [
        ("Answer.", "Answer.", {}),
        ("Answer.", "Answer", None),
        ("{{x}}", "", {"x": ""}),
        ("a{{x}}a", "a", None),  # one character cannot be both ends
        ("a{{x}}a", "aa", {"x": ""}),
        ("Q: {{q}}\nC: {{c}}", "Q: C: ?\nC: x\nC: y", {"q": "C: ?", "c": "x\nC: y"}),
        ("{{ q }}!", "hm!", {"q": "hm"}),
        ('JSON {"a": 1} {{q}}', 'JSON {"a": 1} hm', {"q": "hm"}),
    ],
)
def test_examples_of_matches(template: str, text: str, values: dict[str, str] | None) -> None:
    assert PromptTemplate(template).match(text) == values


@pytest.mark.parametrize(
    ("text", "words"), [("{{a}} and {{a}}", "twice"), ("{{a}}{{b}}", "without text")]
)
def test_ambiguous_templates_are_refused(text: str, words: str) -> None:
    with pytest.raises(DeclarationError, match=words):
        PromptTemplate(text)


def test_a_text_that_omits_a_value_gets_it_appended_and_values_are_not_expanded() -> None:
    assert fill("Be brief.", {"topic": "rivers", "empty": " "}) == "Be brief.\n\ntopic: rivers"
    assert fill("{{a}} {{b}} {{c}}", {"a": "{{b}}", "b": "2"}) == "{{b}} 2 {{c}}"


def test_matching_takes_linear_time_on_a_hostile_text() -> None:
    template = PromptTemplate("x{{a}}x{{b}}x{{c}}x{{d}}xy")
    assert template.match("x" * 200_000) is None
