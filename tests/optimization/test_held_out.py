"""New prompts that contain the answers of held-out examples are refused."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

import compound as cp
from compound.core.example import Example
from compound.optimization.scorer import HeldOutAnswers
from compound.testing import ScriptedLM

pytestmark = pytest.mark.usefixtures("without_reports")


def examples(*golds: object) -> list[Example]:
    return [Example(f"e{i}", {"q": str(i)}, {"answer": gold}) for i, gold in enumerate(golds)]


@pytest.mark.parametrize(
    ("held_out", "train", "text", "found"),
    [
        (["Serekunda"], ["Banjul"], "Name a city, such as SEREKUNDA.", "serekunda"),
        (["Jane Austen"], [], "It was Jane  Austen, not Emma", "jane austen"),
        ([["no", "Köln am Rhein"]], [], "Write Köln am Rhein.", "köln am rhein"),
        ([{"city": "Lisbon", "n": 3}], [], "Lisbon is a city.", "lisbon"),
        (
            ["北京市朝阳区"],
            [],
            "例如北京市朝阳区是一个区。",
            "北 京 市 朝 阳 区",
        ),  # no spaces between words
        (["Ｓｅｒｅｋｕｎｄａ"], [], "such as *Serekunda*", "serekunda"),
        (["Serekunda"], ["serekunda"], "such as Serekunda", ""),  # train examples have it, too
        (["billing", "billing", "billing"], [], "Answer billing or technical.", ""),  # a label
        (["yes", "12", 12.5, True, None], [], "Answer yes or 12, 12.5, True or None.", ""),
        (["Paris"], [], "Comparison of parisians", ""),  # only whole words
        (["1234567"], [], "Write 1234567.", ""),  # numbers alone occur by chance
    ],
)
def test_what_counts_as_a_leak(
    held_out: Sequence[object], train: Sequence[object], text: str, found: str
) -> None:
    assert HeldOutAnswers(examples(*held_out), examples(*train)).found_in(text) == found


def test_what_the_request_showed_is_no_leak() -> None:
    answers = HeldOutAnswers(examples("Serekunda"), [])
    assert answers.found_in("such as Serekunda", "The prompt: such as Serekunda") == ""


@pytest.mark.parametrize("method", ["search", "opro", "textgrad", "gepa", "mipro"])
def test_a_search_refuses_it_and_says_so(method: str, tmp_path: Path) -> None:
    """The writer knows the data set by heart: its prompts name the city of a validation question."""

    def reply(message: str) -> str:
        if message.startswith("Answer.") and len(message) < 60:
            return "Banjul" if message.endswith("1") else "I do not know"
        return "<prompt>Answer Serekunda.</prompt>\n```\nAnswer Serekunda.\n```"

    answer = cp.LLM("answer", prompt=cp.Text("Answer."))(question=cp.Input("question"))
    system = cp.System("qa", outputs={"answer": answer}, lm="m")
    train = [{"question": f"Where? {i}", "answer": "Banjul"} for i in range(20)]
    valid = [
        {"question": f"Where? {i + 20}", "answer": "Banjul" if i else "Serekunda"}
        for i in range(10)
    ]
    result = cp.optimize(
        system,
        {"train": train, "valid": valid},
        "exact_match",
        budget=80,
        method=method,
        progress=False,
        engines={"m": ScriptedLM(reply, writes_prompts=True)},
        run_dir=tmp_path / "run",
        iterations=1,
    )
    assert result.best["answer.prompt"] == "Answer."
    events = [json.loads(li) for li in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    notes = [event["note"] for event in events if event["event"] == "proposals"]
    refused = "a new prompt by 'm' was refused: it contains 'serekunda', the expected answer of a held-out example"
    assert refused in notes
    assert notes.count(refused) == 1
