"""Rewards that flow back through the calls teach every agent of a chain, and nothing else does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from statistics import fmean
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("peft")

from benchmarks.measure import learning_curves  # noqa: E402
from benchmarks.measure.learning_curves import SHARED, Case, train  # noqa: E402
from compound.optimizers.weights.credit import propagate  # noqa: E402
from compound.optimizers.weights.recipes import recipe  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
SHORT = {**SHARED, "steps": 20, "optimizer": {"lr": 5e-3}}
NODES = ("first", "second", "third")


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    methods = {"chain": dict.fromkeys(("mmgrpo", "mhgpo_fof", "mhgpo_rr"), SHORT)}
    monkeypatch.setattr(learning_curves, "METHODS", methods)


def learned(method: str) -> Mapping[str, Any]:
    found: Any = train(Case("chain", method, 0))
    return {name: found["after"][name] - found["before"][name] for name in NODES}


@pytest.mark.slow
@pytest.mark.parametrize("method", ["mmgrpo", "mhgpo_fof", "mhgpo_rr"])
def test_every_agent_of_a_chain_learns(method: str) -> None:
    gains = learned(method)
    assert min(gains.values()) > 0.2, gains
    assert fmean(gains.values()) > 0.4, gains


@pytest.mark.slow
def test_agents_that_no_reward_flows_back_to_do_not_learn(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the test above would say of a propagation that ends at the last agent."""
    whole = propagate

    def broken(*arguments: Any, **named: Any) -> Any:
        found, unreached = whole(*arguments, **named)
        own = [c if c.call.component == "third" else replace(c, shared=0.0) for c in found]
        return own, unreached

    monkeypatch.setattr(recipe, "propagate", broken)
    gains = learned("mhgpo_fof")
    assert gains["third"] > 0.2, gains
    assert max(gains["first"], gains["second"]) < 0.2, gains
