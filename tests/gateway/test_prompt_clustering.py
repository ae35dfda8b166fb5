"""Prompts found by aligning recorded texts: every member matches, and known templates are found again."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from compound.gateway.clustering import (
    RecordedRequest,
    RecordedText,
    cluster_texts,
    find_prompts,
)
from compound.gateway.templates import Template, fill

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


@given(st.lists(st.tuples(st.integers(0, 3), st.text("ab :\n.xyz", max_size=40)), max_size=8))
@settings(deadline=None)
def test_every_template_matches_its_members_and_runs_are_several(given_texts: Any) -> None:
    texts = [RecordedText(str(run), text) for run, text in given_texts]
    clusters = cluster_texts(texts)
    for cluster in clusters:
        template = Template(cluster.template)
        for member in cluster.members:
            values = template.match(texts[member].text)
            assert values is not None
            assert fill(cluster.template, values) == texts[member].text
        assert len({texts[member].run for member in cluster.members}) > 1
    members = [member for cluster in clusters for member in cluster.members]
    assert len(members) == len(set(members))


@given(
    st.lists(WORDS, min_size=4, max_size=6, unique_by=lambda words: " ".join(words)),
    st.permutations(range(3)),
)
@settings(deadline=None, max_examples=50)
def test_different_prompts_are_found_again(values: Any, order: Any) -> None:
    texts = [
        RecordedText(
            str(run), fill(TEMPLATES[kind], dict.fromkeys(Template(TEMPLATES[kind]).names, " ".join(words)))
        )
        for run, words in enumerate(values)
        for kind in order
    ]
    clusters = cluster_texts(texts)
    assert len(clusters) == len(TEMPLATES)
    for cluster in clusters:
        runs = [texts[member].run for member in cluster.members]
        assert runs == [str(run) for run in range(len(values))]


def test_placeholders_have_the_names_of_labels() -> None:
    text = "Answer the question with the documents.\nQuestion: {}\nSearch results: {}\nBe brief."
    questions = ["what is Lima", "who sings", "where to go"]
    texts = [RecordedText(str(i), text.format(q, f"{i} {i}")) for i, q in enumerate(questions)]
    (cluster,) = cluster_texts(texts)
    assert cluster.template == (
        "Answer the question with the documents.\nQuestion: {{question}}\nSearch results: {{search_results}}\nBe brief."
    )


def test_constant_prompts_that_share_much_are_kept_apart() -> None:
    shared = "You are a helpful assistant of the travel agency. Always be polite. "
    requests = [
        RecordedRequest(str(run), {"system": f"{shared}{task}", "user": f"{run} question {run}"})
        for run in range(3)
        for task in ("Plan the trip.", "Write the invoice.")
    ]
    found = find_prompts(requests)
    assert [prompt.match for prompt in found] == [
        {"system": f"{shared}Write the invoice."}, {"system": f"{shared}Plan the trip."},
    ]  # fmt: skip
    assert [(prompt.requests, prompt.runs) for prompt in found] == [(3, 3), (3, 3)]
    assert len({prompt.name for prompt in found}) == 2


def test_questions_alone_are_no_prompts() -> None:
    questions = ["What is the capital of Peru?", "Who wrote Don Quixote?", "How far is the moon from here?"]
    requests = [RecordedRequest(str(i), {"user": question}) for i, question in enumerate(questions)]
    assert find_prompts(requests) == []


def test_a_single_run_shows_nothing() -> None:
    requests = [RecordedRequest("a", {"system": "You are a planner of trips."})] * 3
    assert find_prompts(requests) == []


def test_names_are_not_taken_twice() -> None:
    requests = [RecordedRequest(str(run), {"system": "You are a trip planner. Plan!"}) for run in range(2)]
    (found,) = find_prompts(requests, ["trip_planner"])
    assert found.name == "trip_planner_2"


def test_a_value_that_occurs_twice_does_not_make_its_text_constant() -> None:
    texts = [
        RecordedText(str(run), f"Translate into {language}, word by word.")
        for run, language in enumerate(["French", "Italian", "French", "Danish"])
    ]
    (cluster,) = cluster_texts(texts)
    assert cluster.template == "Translate into {{text}}, word by word."
    assert sorted(cluster.members) == [0, 1, 2, 3]


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
