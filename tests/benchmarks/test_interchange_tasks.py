"""The tasks of the interchange benchmark: their splits are disjoint, and the scripted model needs help."""

from __future__ import annotations

import pytest

from compound.benchmarks.measure.interchange.tasks import Task, countries, scripted, things, uppercase


@pytest.mark.parametrize("task", [uppercase(), things(), countries()])
def test_splits_share_no_rows(task: Task) -> None:
    questions = [str(row["question"]) for split in task.rows.values() for row in split]
    assert len(questions) == len(set(questions)) == 90


@pytest.mark.parametrize("task", [uppercase(), things()])
def test_the_shown_examples_are_those_of_the_train_split(task: Task) -> None:
    train = {(row["question"], row["answer"]) for row in task.rows["train"]}
    assert task.shown
    assert set(task.shown) <= train


def test_the_scripted_model_needs_a_demonstration() -> None:
    def ask(*contents: str) -> str:
        return scripted([{"role": "user", "content": content} for content in contents])

    assert ask("Question: word17") == "no idea"
    assert ask("Question: word20") == "WORD20"
    assert ask("Question: word1\nAnswer: WORD1\n\nQuestion: word17") == "WORD17"
    assert ask("word1", "WORD1", "word17") == "WORD17"
    chat = (
        "[[ ## question ## ]]\nword17\n\nRespond with `[[ ## answer ## ]]`, end with `[[ ## completed ## ]]`."
    )
    assert ask("[[ ## answer ## ]]\nWORD1", chat) == "[[ ## answer ## ]]\nWORD17\n\n[[ ## completed ## ]]"
