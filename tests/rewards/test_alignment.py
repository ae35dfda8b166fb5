"""What alignment is worth, measured on the run that comes with the notebook: no model, no reading."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from compound.benchmarks.measure.alignment import (
    SPLITS,
    WRONG,
    Choice,
    Drawn,
    Pairs,
    by_alignment,
    by_data,
    figure,
    settings_drawn,
)
from compound.components.llm import LLM
from compound.graph.component import Input
from compound.graph.space import Text
from compound.graph.system import System
from compound.rewards.buffer import PairBuffer
from compound.rewards.inspection.inspect import Inspection
from compound.rewards.pairs import Draw
from compound.rewards.sampling.candidates import Candidate

TINY = Path(__file__).parents[2] / "docs" / "notebooks" / "tiny_run"


@pytest.fixture(scope="module")
def pairs() -> Pairs:
    return Pairs.of(Inspection.open(TINY), "writer")


def test_inputs_are_either_learned_from_or_judged_on(pairs: Pairs) -> None:
    for seed in range(3):
        seen, apart = pairs.split(seed)
        assert sorted(seen + apart) == sorted(pairs.inputs)
    assert pairs.split(0) != pairs.split(1)


def test_shuffled_labels_cost_accuracy_until_nothing_is_left(pairs: Pairs) -> None:
    def mean(wrong: float) -> float:
        found = [pairs.learn(*pairs.split(seed), wrong, seed).accuracy.mean for seed in range(SPLITS)]
        return float(np.mean(found))

    right, some, none = mean(0.0), mean(0.75), mean(1.0)
    assert right > 0.7
    assert right > some > none - 0.1
    assert 0.25 < none < 0.75


def test_more_inputs_rank_no_worse(pairs: Pairs) -> None:
    rows = by_data(pairs)
    counts = sorted({row["inputs"] for row in rows})
    few, most = (
        float(np.mean([row["accuracy"] for row in rows if row["inputs"] == count]))
        for count in (counts[0], counts[-1])
    )
    assert len(rows) == len(counts) * SPLITS
    assert most > few - 0.02


def test_what_no_configuration_holds_is_no_choice() -> None:
    """Draws at another temperature were bound as if it were a parameter."""
    llm = LLM("writer", prompt=Text("Write."))
    system = System("s", outputs={"y": llm(q=Input("q", str))}, lm="lm")
    settings: list[dict[str, Any]] = [{}, {"temperature": 1.0}, {"prompt": "Be brief."}, {}]
    candidates = tuple(Candidate({"output": f"{i}"}, (0.0,), given) for i, given in enumerate(settings))
    buffer = PairBuffer(system.identity)
    buffer.add([Draw("writer", "writer", "e", "c", {"q": "?"}, candidates)], 1)
    assert settings_drawn(buffer, "writer", system) == [{}, {"prompt": "Be brief."}]


def test_better_rewards_choose_better_settings(pairs: Pairs) -> None:
    """Of three writers, one is brief and keeps to the topic, one rambles, one says nothing of use."""

    def choice(value: float, *outputs: str) -> Choice:
        inputs = {"subject": "ships", "plan": "sail deck"}
        return Choice({}, [(inputs, {"output": output}) for output in outputs], value)

    rambling = "sail deck well it is often said that one may perhaps also think of other things here."
    among = [choice(0.2, rambling), choice(0.9, "sail deck"), choice(0.1, f"{rambling} {rambling}")]
    steps = by_alignment(pairs, "writer", among)

    def chosen(wrong: float) -> list[float]:
        return [row["global"] for row in steps if row["wrong"] == wrong]

    assert chosen(0.0) == [0.9] * SPLITS
    assert np.mean(chosen(1.0)) < 0.9
    assert {row["wrong"] for row in steps} == set(WRONG)
    shown: Drawn = {"steps": steps, "data": by_data(pairs), "start": 0.2}
    assert "ranking accuracy on other inputs" in figure(shown)
