"""Systems of `benchmarks` on rows of the real data sets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

import compound as cp
from benchmark_systems import BENCHMARKS, data_folder, evaluated, needs_data
from compound.testing import ScriptedLM
from compound.yaml import load

MUJICA_TURN = '<search>who?</search><action>Search([0], "who?")</action>'
PROMPT_R1_END = "<think>Good.</think><answer>Steventon</answer>"
PROMPT_R1_ASK = "<think>Who?</think><interaction_prompt>Who wrote Emma?</interaction_prompt>"


def choose_pages(message: str) -> str:
    return "1, 2" if message.startswith("Give only") else "the author"


def plan(message: str) -> str:
    shown = message.rsplit("\n\n", maxsplit=1)[-1]
    return "<answer>x</answer>" if "Obs:" in shown else MUJICA_TURN


def converse(message: str) -> str:
    if "Question:" not in message:
        return "Jane Austen."
    asked = message.rsplit("Question:", maxsplit=1)[-1]
    return PROMPT_R1_END if "response" in asked else PROMPT_R1_ASK


@needs_data
@pytest.mark.filterwarnings("ignore:'searcher' found no passage")
@pytest.mark.parametrize(
    ("name", "data", "reply", "limit", "lowest", "highest"),
    [
        # copying titles decides by their shared words
        ("amazon", "amazon_next_item", lambda text: text.rsplit(": ", 1)[1], None, 0.5, 1),
        ("mass", "hotpotqa", choose_pages, 10, 0, 1),
        ("mass", "2wikimultihopqa", choose_pages, 10, 0, 1),
        ("mujica", "2wikimultihopqa", plan, 10, 0, 1),
        ("mujica_kg", "2wikimultihopqa", plan, 10, 0, 1),
        # the request tells everything
        ("papillon", "pupa", lambda text: text.rsplit("Query:", 1)[-1].strip(), None, 0, 0.4),
        ("prompt_r1", "2wikimultihopqa", converse, 10, -1, 1),
        ("prompt_r1", "promptr1_eval", converse, 10, -1, 1),
        ("pubmedqa", "pubmedqa", lambda text: "Answer: no", None, 0.2, 0.5),
    ],
)
def test_real_rows_run(
    name: str,
    data: str,
    reply: Callable[[str], str],
    limit: int | None,
    lowest: float,
    highest: float,
) -> None:
    program = load(BENCHMARKS / f"{name}.yaml")
    rows = cp.Dataset(data_folder() / data)
    if data == "promptr1_eval":
        rows = replace(rows, valid="test_hotpotqa")
    found = evaluated(program, rows, ScriptedLM(reply), limit=limit)
    assert found.failed == 0
    assert lowest <= found.mean <= highest
