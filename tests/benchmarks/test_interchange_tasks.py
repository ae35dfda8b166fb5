"""The tasks of the interchange benchmark: their splits are disjoint, and the scripted model needs help."""

from __future__ import annotations

from compound.benchmarks.measure.interchange.tasks import capitals, scripted, things


def test_splits_share_no_rows() -> None:
    for rows, key in ((capitals(), "question"), (things(), "thing")):
        values = [str(row[key]) for split in rows.values() for row in split]
        assert len(values) == len(set(values)) >= 60


def test_the_scripted_model_needs_a_demonstration_or_the_right_style() -> None:
    def ask(*contents: str) -> str:
        return scripted([{"role": "user", "content": content} for content in contents])

    assert ask("Question: word17") == "no idea"
    assert ask("Question: word20") == "WORD20"
    assert ask("Question: word1\nAnswer: WORD1\n\nQuestion: word17") == "WORD17"
    assert ask("loud: word17") == "WORD17"
    chat = (
        "[[ ## question ## ]]\nword17\n\nRespond with `[[ ## answer ## ]]`, end with `[[ ## completed ## ]]`."
    )
    assert ask("[[ ## answer ## ]]\nWORD1", chat) == "[[ ## answer ## ]]\nWORD17\n\n[[ ## completed ## ]]"
