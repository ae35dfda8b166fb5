"""Replies of a model that writes prompts: thoughts, fences and quotation marks are no part of a prompt."""

from __future__ import annotations

from pathlib import Path

import pytest

import compound as cp
from compound.optimizers.search.proposers.proposing import unwrap
from compound.testing import ScriptedLM

pytestmark = pytest.mark.usefixtures("without_reports")
NEW = "Name the capital."


def optimize(
    reply: str, path: Path, method: str = "search", first: str = "Answer.", **space: object
) -> cp.Result:
    def written(message: str) -> str:
        if len(message) < 90 and "Where?" in message:
            return "Banjul" if NEW in message else "I do not know"
        return reply

    prompt = cp.Text(first, **space)  # type: ignore[arg-type]
    answer = cp.LLM("answer", prompt=prompt)(question=cp.Input("question"))
    system = cp.System("qa", outputs={"answer": answer}, lm="m")
    rows = [{"question": f"Where? {i}", "answer": "Banjul"} for i in range(40)]
    return cp.optimize(
        system,
        {"train": rows[:20], "valid": rows[20:]},
        "exact_match",
        budget=120,
        method=method,
        progress=False,
        engines={"m": ScriptedLM(written, writes_prompts=True)},
        run_dir=path / "run",
        iterations=1,
    )


@pytest.mark.parametrize(
    "reply",
    [
        f"<prompt>{NEW}</prompt>",
        f"<think>Perhaps <prompt>Say it.</prompt></think>\n<prompt>{NEW}</prompt>",
        f"<prompt><think>Short!</think>{NEW}</prompt>",
        f"<prompt>\n```text\n{NEW}\n```\n</prompt>",
        f"<prompt><prompt>{NEW}</prompt></prompt>",
        f'<prompt>"{NEW}"</prompt>',
        f"Here is an improved one:\n\n```\n{NEW}\n```\nI hope this helps.",
    ],
)
def test_the_prompt_is_found_in_a_reply(reply: str, tmp_path: Path) -> None:
    assert optimize(reply, tmp_path).best["answer.prompt"] == NEW


@pytest.mark.parametrize(
    ("text", "prompt"),
    [
        ("```\nIn:\n```\nas in\n```\nOut\n```", "```\nIn:\n```\nas in\n```\nOut\n```"),
        ("```md\nAs in\n```json\n{}\n```\nAnswer.\n```", "As in\n```json\n{}\n```\nAnswer."),
    ],
)
def test_a_fence_is_removed_only_around_the_whole_prompt(text: str, prompt: str) -> None:
    assert unwrap(text) == prompt


@pytest.mark.parametrize("method", ["search", "opro", "textgrad"])
@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        (NEW, f"no <prompt>…</prompt> in '{NEW}'"),
        ("<think>It never ends", "the thoughts do not end in '<think>It never ends'"),
        (f"<prompt>{NEW}</prompt>", "must contain 'Be polite.'"),
        (
            f"<prompt>Be polite. {NEW * 30}</prompt>",
            "must have at most 400 characters, but has 521",
        ),
    ],
)
def test_a_report_says_why_replies_are_unusable(
    method: str, reply: str, reason: str, tmp_path: Path
) -> None:
    first = "Answer. Be polite."
    found = optimize(reply, tmp_path, method, first, keep=["Be polite."], max_length=400)
    assert found.best["answer.prompt"] == first
    assert reason in (tmp_path / "run" / "events.jsonl").read_text(encoding="utf-8")
