"""Simulated systems and relays: known optima, searches that measure them, and the committed results."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks.measure import local_rewards
from benchmarks.simulated.ablations import FitToShuffled
from benchmarks.simulated.relay_searches import (
    METHODS,
    OUTPUT,
    SYSTEMS,
    budgets_of,
    settings_of,
    share,
    value_of,
)
from benchmarks.simulated.systems import SHAPES, Simulated
from compound.rewards.buffer import Entry
from compound.rewards.candidates import Candidate
from compound.rewards.features import NoBackbone, Template
from compound.rewards.gains import fit_critic
from compound.rewards.pairs import Draw


@pytest.mark.parametrize("shape", SHAPES)
def test_the_optimum_by_component_is_that_of_trying_all(shape: str) -> None:
    """Without negative interactions, no combination is better than each component's best option."""
    made = Simulated(shape, options=3, interaction=0.4, seed=2)
    hindering = Simulated(shape, options=3, interaction=-1e-9, seed=2)
    assert made.optimum()[0] == hindering.optimum()[0]


def test_shuffled_labels_rank_like_chance() -> None:
    made = Simulated("chain", noise=0.0, options=8)
    template, entries = Template.of(made.system().components["b"]), []
    rng = np.random.default_rng(0)
    for i in range(30):
        values = rng.normal(size=4)
        candidates = tuple(Candidate({"y": float(y)}, (float(y),)) for y in values)
        entries.append(Entry(Draw("b", "b", f"e{i}", "", {"a": 0.5}, candidates), 1))
    right, wrong = (
        fit(entries, template, NoBackbone(), certain=True) for fit in (fit_critic, FitToShuffled())
    )
    assert right is not None
    assert wrong is not None
    assert np.mean(right.margins > 0) > 0.95
    assert np.mean(wrong.margins > 0) < 0.75


def test_the_committed_results_contain_every_part() -> None:
    found = json.loads(Path(local_rewards.OUTPUT).read_text(encoding="utf-8"))
    assert found.keys() == local_rewards.PARTS.keys()
    for name, part in local_rewards.PARTS.items():
        assert {shape: len(rows) for shape, rows in found[name]["rows"].items()} == dict.fromkeys(
            part.shapes, part.seeds
        )
        assert local_rewards.rounded(part.summary(found[name]["rows"])) == found[name]["summary"]


SYSTEM, SEED = "4 calls, 1 tuned", 2


def test_a_search_takes_its_runs_and_improves_the_start() -> None:
    """With five validation examples no change could be accepted, which must not end the search."""
    world = SYSTEMS[SYSTEM](SEED)
    start = value_of(world, {}) / world.optimum()[1]
    assert share(SYSTEM, "optimas", 100, SEED) > start


def test_a_committed_score_is_measured_again() -> None:
    stored = json.loads(Path(OUTPUT).read_text(encoding="utf-8"))["methods"]
    assert (
        round(share(SYSTEM, "random", 130, SEED), 4)
        == stored["random"][SYSTEM]["130"]["values"][SEED]
    )


@pytest.mark.parametrize("name", METHODS)
def test_every_method_is_measured_with_all_budgets(name: str) -> None:
    found = json.loads(Path(OUTPUT).read_text(encoding="utf-8"))["methods"][name]
    assert {system: [*map(int, rows)] for system, rows in found.items()} == {
        system: [*budgets_of(name, system)] for system in SYSTEMS if budgets_of(name, system)
    }


def test_runs_of_the_start_and_the_decision_are_additional() -> None:
    assert settings_of("optimas", 100, 0).budget.system_runs == 110
