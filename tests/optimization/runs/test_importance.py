"""The importance of parameters among the candidates of a run."""

from __future__ import annotations

import random

import pytest

from compound.optimization.runs.candidate_record import CandidateRecord, importance


def candidate(gain: float, **values: object) -> CandidateRecord:
    return CandidateRecord(
        digest=str(values),
        values=values,
        parent="",
        source="",
        job=0,
        fate="not proposed",
        chosen=False,
        evaluations=10,
        mean=gain,
        low=None,
        high=None,
        gain=gain,
        prompt_tokens=1,
        completion_tokens=1,
        usd=None,
        seconds=1,
    )


def test_the_parameter_that_decides_is_the_most_important_one() -> None:
    rng = random.Random(0)
    effects: dict[str, dict[object, float]] = {
        "k": {1: 0.0, 2: 0.1, 3: 0.2},
        "prompt": {"a": 0.0, "b": 0.4},
        "unused": {1: 0, 2: 0},
    }
    rows = []
    for _ in range(80):
        values = {key: rng.choice([*levels]) for key, levels in effects.items()}
        rows.append(candidate(sum(effects[k][v] for k, v in values.items()), **values))
    found = {row.key: row for row in importance(rows)}
    # variances of uniform draws: 0.04 for the prompt, 0.02/3 for k
    assert found["prompt"].share == pytest.approx(0.04 / (0.04 + 0.02 / 3), abs=0.03)
    assert found["unused"].share < 0.01
    assert (found["prompt"].best, found["k"].best) == ("b", 3)
    assert found["prompt"].effect == pytest.approx(0.2, abs=0.03)


@pytest.mark.parametrize("count", [0, 5])
def test_few_candidates_say_nothing(count: int) -> None:
    assert importance([candidate(0.1 * i, k=i) for i in range(count)]) == []


def test_candidates_without_changes_say_nothing() -> None:
    assert importance([candidate(0.1) for _ in range(9)]) == []
