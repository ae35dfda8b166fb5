"""The prompts of a program that are found in its requests, and templates that recognize them."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compound.components.gateway.clustering import RecordedRequest, find_prompts
from compound.components.gateway.templates import PromptTemplate, fill
from compound.core.errors import DeclarationError

WORDS = st.lists(
    st.sampled_from(["lima", "rimac", "peru", "quito", "andes", "north", "or", "the", "of"]),
    min_size=1,
    max_size=6,
)
TEMPLATES = (
    "You are a careful translator. Translate the following text.\nText: {{text}}\nTranslation:",
    "Summarize what the user wants in one sentence, without names.\nConversation: {{conversation}}",
    "Rate this answer between one and five stars! Answer = {{answer}}",
)


def system_texts(texts: list[tuple[int, str]]) -> list[str]:
    requests = [RecordedRequest(str(run), {"system": text}) for run, text in texts]
    return [prompt.match["system"] for prompt in find_prompts(requests)]


@given(st.lists(st.tuples(st.integers(0, 3), st.text("ab :\n.xyz", max_size=40)), max_size=8))
@settings(deadline=None)
def test_every_template_matches_texts_of_several_runs(texts: Any) -> None:
    for found in system_texts(texts):
        matches = [(run, text, PromptTemplate(found).match(text)) for run, text in texts]
        assert all(fill(found, values) == text for _, text, values in matches if values is not None)
        assert len({run for run, _, values in matches if values is not None}) > 1


@given(
    st.lists(WORDS, min_size=4, max_size=6, unique_by=lambda words: " ".join(words)),
    st.permutations(range(3)),
)
@settings(deadline=None, max_examples=50)
def test_different_prompts_are_found_again(values: Any, order: Any) -> None:
    texts = [
        (run, re.sub(r"\{\{.*?\}\}", " ".join(words), TEMPLATES[kind]))
        for run, words in enumerate(values)
        for kind in order
    ]
    found = system_texts(texts)
    assert len(found) == len(TEMPLATES)
    for template in found:
        matched = [run for run, text in texts if PromptTemplate(template).match(text) is not None]
        assert matched == [*range(len(values))]


def test_placeholders_have_the_names_of_labels() -> None:
    text = "Answer the question with the documents.\nQuestion: {}\nSearch results: {}\nBe brief."
    questions = ["what is Lima", "who sings", "where to go"]
    assert system_texts([(i, text.format(q, f"{i} {i}")) for i, q in enumerate(questions)]) == [
        text.format("{{question}}", "{{search_results}}")
    ]


def test_constant_prompts_that_share_much_are_kept_apart() -> None:
    shared = "You are a helpful assistant of the travel agency. Always be polite. "
    requests = [
        RecordedRequest(str(run), {"system": f"{shared}{task}", "user": f"{run} question {run}"})
        for run in range(3)
        for task in ("Plan the trip.", "Write the invoice.")
    ]
    found = find_prompts(requests)
    assert [prompt.match for prompt in found] == [
        {"system": f"{shared}Write the invoice."},
        {"system": f"{shared}Plan the trip."},
    ]
    assert [(prompt.requests, prompt.runs) for prompt in found] == [(3, 3), (3, 3)]
    assert len({prompt.name for prompt in found}) == 2


def test_a_single_run_shows_nothing() -> None:
    requests = [RecordedRequest("a", {"system": "You are a planner of trips."})] * 3
    assert find_prompts(requests) == []


def test_names_are_not_taken_twice() -> None:
    requests = [
        RecordedRequest(str(run), {"system": "You are a trip planner. Plan!"}) for run in range(2)
    ]
    (found,) = find_prompts(requests, ["trip_planner"])
    assert found.name == "trip_planner_2"


def test_a_value_that_occurs_twice_does_not_make_its_text_constant() -> None:
    languages = ["French", "Italian", "French", "Danish"]
    texts = [(run, f"Translate into {to}, word by word.") for run, to in enumerate(languages)]
    assert system_texts(texts) == ["Translate into {{text}}, word by word."]


def test_questions_that_are_alike_do_not_divide_a_system_prompt() -> None:
    questions = [
        "Where is Lima? (0)",
        "Best food of Peru? (6)",
        "Can we swim there? (1)",
        "Where is Lima? (4)",
    ]
    requests = [
        RecordedRequest(str(run), {"system": "You are a trip planner. Plan!", "user": question})
        for run, question in enumerate(questions)
    ]
    (found,) = find_prompts(requests)
    assert found.match == {"system": "You are a trip planner. Plan!"}


def found_in(*calls: dict[str, Any], runs: int = 4) -> list[dict[str, str]]:
    """Return the prompts of runs that make the same calls; each value is a text, or one for each run."""
    requests = [
        RecordedRequest(
            str(run),
            {role: at(call[role], run) for role in ("system", "user") if role in call},
            frozenset(at(value, run) for value in call.get("inputs", ())),
            frozenset(at(value, run) for value in call.get("answers", ())),
            call.get("continues", False),
        )
        for run in range(runs)
        for call in calls
    ]
    prompts = [prompt.match for prompt in find_prompts(requests)]
    for prompt in prompts:
        for request in requests:
            for role, text in prompt.items():
                values = PromptTemplate(text).match(request.texts.get(role, ""))
                assert values is None or fill(text, values) == request.texts[role]
    return prompts


def at(value: Any, run: int) -> str:
    return value if isinstance(value, str) else value[run]


TICKETS = [
    "The app crashes at the start.",
    "I was billed twice.",
    "Please add a dark mode.",
    "Where is my key?",
]
PRICES = [
    f"What is the price of {thing}?" for thing in ("tea", "a red bicycle", "two tickets", "salt")
]


def test_short_system_prompts_are_found_and_answers_are_not() -> None:
    same = "The topic is bug."
    found = found_in(
        {"system": "Name the topic.", "user": TICKETS, "inputs": [TICKETS], "answers": [same]},
        {"system": "Lower case.", "user": same, "inputs": [TICKETS], "answers": [same]},
        {"user": same, "inputs": [TICKETS], "answers": [same]},
        {"user": "Topic: bug", "inputs": [TICKETS], "answers": ["bug"]},
    )
    assert sorted(found, key=str) == [
        {"system": "Lower case."},
        {"system": "Name the topic."},
        {"user": "Topic: {{topic}}"},
    ]


@pytest.mark.parametrize(
    "inputs", [[PRICES], [], [["a", "b", "c", "d"]], [[q.upper() for q in PRICES]]]
)
@pytest.mark.parametrize("system", ["Be brief.", None])
def test_questions_that_are_alike_are_never_prompts(inputs: Any, system: str | None) -> None:
    call = {"user": PRICES, "inputs": inputs, **({"system": system} if system else {})}
    assert found_in(call) == ([{"system": system}] if system else [])


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (  # two inputs in one message
            {
                "user": [
                    f"Translate: {t}\nInto: {x}" for t, x in zip(TICKETS, "abcd", strict=True)
                ],
                "inputs": [TICKETS, "abcd"],
            },
            {"user": "Translate: {{translate}}\nInto: {{into}}"},
        ),
        (  # a short instruction
            {"user": [f"Summarize: {t}" for t in TICKETS], "inputs": [TICKETS]},
            {"user": "Summarize: {{summarize}}"},
        ),
        (  # an input that is equal in all runs
            {"system": "Translate into French.", "user": TICKETS, "inputs": [TICKETS, "French"]},
            {"system": "Translate into {{text}}."},
        ),
        (  # a date
            {"system": "Today is 2026-11-27. Plan the trip.", "user": TICKETS, "inputs": [TICKETS]},
            {"system": "Today is {{text}}. Plan the trip."},
        ),
        (
            {"system": "Plan. It is Friday, November 27, 2026, 10:45 AM.", "user": "Go."},
            {"system": "Plan. It is {{text}}.", "user": "Go."},
        ),
        (  # answers that are labels of the prompt
            {
                "system": "Say bug, feature request or question.",
                "user": TICKETS,
                "inputs": [TICKETS],
                "answers": [["bug", "feature request", "bug", "question"]],
            },
            {"system": "Say bug, feature request or question."},
        ),
        (  # a demonstration, and an earlier turn
            {
                "system": "Label.",
                "user": "Ticket: it is slow",
                "inputs": [TICKETS],
                "continues": True,
            },
            {"system": "Label."},
        ),
        (
            {
                "system": "Chat.",
                "user": "Hello there, my friend",
                "inputs": ["Hello there, my friend"],
            },
            {"system": "Chat."},
        ),
        (  # results of tools or of other models, beside the question
            {
                "user": [
                    f"Question: {q}\nNotes: {t}\nReply."
                    for q, t in zip(PRICES, TICKETS, strict=True)
                ],
                "inputs": [PRICES],
                "answers": [TICKETS],
            },
            {"user": "Question: {{question}}\nNotes: {{notes}}\nReply."},
        ),
    ],
)
def test_data_become_placeholders(call: dict[str, Any], expected: dict[str, str]) -> None:
    assert found_in(call) == [expected]


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
