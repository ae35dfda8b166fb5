"""What alignment is worth, measured on pairs of a scripted writer: no model, no reading."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from benchmarks.measure.alignment import (
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
from compound.rewards.candidates import Candidate
from compound.rewards.features import NoBackbone
from compound.rewards.fit import fit_rewards
from compound.rewards.inspection import Inspection
from compound.rewards.pairs import Draw
from optimas_settings import optimas

PLAN, FILLER = ("sail", "deck", "rope"), ("well", "often", "said", "one", "may")


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Pairs:
    """Pairs of a writer whose score is the share of its words that are in the plan, with noise."""
    rng, path = np.random.default_rng(0), tmp_path_factory.mktemp("run")
    system = System(
        "s", outputs={"y": LLM("writer")(subject=Input("subject", str), plan=Input("plan", str))}
    )
    draws = []
    for number in range(40):
        made = []
        for _ in range(4):
            kept, more = (
                rng.choice(PLAN, rng.integers(1, 4), replace=False),
                rng.choice(FILLER, rng.integers(12)),
            )
            score = float(len(kept) / (len(kept) + len(more)) + rng.normal(0, 0.1))
            made.append(Candidate({"output": " ".join([*kept, *more])}, (score,), certain=True))
        inputs = {"subject": f"ships, take {number}", "plan": " ".join(PLAN)}
        draws.append(Draw("writer", "writer", f"e{number}", "c", inputs, tuple(made)))
    buffer = PairBuffer(system.identity)
    records = buffer.add(draws, 1)
    fit_rewards(buffer, system, ["writer"], NoBackbone(), "none").model.save(
        path / "memory" / "rewards"
    )
    config = {"optimize": {"optimas": optimas(model="none").model_dump(mode="json")}}
    (path / "config.json").write_text(json.dumps(config))
    (path / "memory.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (path / "events.jsonl").touch()
    return Pairs.of(Inspection.open(path), "writer")


def test_shuffled_labels_cost_accuracy_until_nothing_is_left(pairs: Pairs) -> None:
    def mean(wrong: float) -> float:
        found = [
            pairs.learn(*pairs.split(seed), wrong, seed).accuracy.mean for seed in range(SPLITS)
        ]
        return float(np.mean(found))

    right, some, none = mean(0.0), mean(0.75), mean(1.0)
    assert right > 0.7
    assert right > some > none - 0.1
    assert 0.25 < none < 0.75


def test_what_no_configuration_holds_is_no_choice() -> None:
    """Draws at another temperature were bound as if it were a parameter."""
    llm = LLM("writer", prompt=Text("Write."))
    system = System("s", outputs={"y": llm(q=Input("q", str))}, lm="lm")
    settings: list[dict[str, Any]] = [{}, {"temperature": 1.0}, {"prompt": "Be brief."}, {}]
    candidates = tuple(
        Candidate({"output": f"{i}"}, (0.0,), given) for i, given in enumerate(settings)
    )
    buffer = PairBuffer(system.identity)
    buffer.add([Draw("writer", "writer", "e", "c", {"q": "?"}, candidates)], 1)
    assert settings_drawn(buffer, "writer", system) == [{}, {"prompt": "Be brief."}]


def test_better_rewards_choose_better_settings(pairs: Pairs) -> None:
    """Of three writers, one is brief and keeps to the topic, one rambles, one says nothing of use."""

    def choice(value: float, *outputs: str) -> Choice:
        inputs = {"subject": "ships", "plan": "sail deck"}
        return Choice({}, [(inputs, {"output": output}) for output in outputs], value)

    rambling = (
        "sail deck well it is often said that one may perhaps also think of other things here."
    )
    among = [choice(0.2, rambling), choice(0.9, "sail deck"), choice(0.1, f"{rambling} {rambling}")]
    steps = by_alignment(pairs, "writer", among)

    def chosen(wrong: float) -> list[float]:
        return [row["global"] for row in steps if row["wrong"] == wrong]

    assert chosen(0.0) == [0.9] * SPLITS
    assert np.mean(chosen(1.0)) < 0.9
    assert {row["wrong"] for row in steps} == set(WRONG)
    shown: Drawn = {"steps": steps, "data": by_data(pairs), "start": 0.2}
    assert "ranking accuracy on other inputs" in figure(shown)
