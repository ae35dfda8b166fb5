"""MIPROv2 against DSPy's: the recorded comparison holds, and is repeated where DSPy is installed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.simulated.baseline_parity import COMPARED, compare, ours
from compound.optimizers.baselines.mipro_proposer import TIPS

RECORDED = json.loads(
    (Path(__file__).parents[3] / "benchmarks" / "data" / "baseline_parity.json").read_text()
)


def check(found: Any, components: int = 2) -> None:
    """Check that ours asks and evaluates as DSPy does, and tells the model no less."""
    own, other = found["ours"], found["dspy"]
    assert own["evaluations"] == other["evaluations"]
    wasted = dict.fromkeys(("system", "component", "instruction"), components)
    assert other["requests"] == {
        kind: n + wasted.get(kind, 0) for kind, n in own["requests"].items()
    }
    for kind, information in other["information"].items():
        for name, share in information.items():
            assert own["information"][kind].get(name, 0.0) >= share, (kind, name)


@pytest.mark.parametrize("name", COMPARED)
class TestComparison:
    def test_the_record_shows_the_same_requests_and_evaluations(self, name: str) -> None:
        check(RECORDED[name])

    @pytest.mark.slow
    def test_the_record_is_what_ours_does(self, name: str) -> None:
        assert ours(*COMPARED[name]).facts(TIPS) == RECORDED[name]["ours"]

    @pytest.mark.slow
    @pytest.mark.filterwarnings("ignore:Implementing custom LMs")
    def test_both_sides_live(self, name: str) -> None:
        pytest.importorskip("dspy")
        check(compare(*COMPARED[name]))


def test_every_size_is_recorded() -> None:
    assert set(RECORDED) == {"dspy", *COMPARED}
