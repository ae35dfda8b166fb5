"""Searches of relays: the measured scores come from searches, and are the committed ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.simulated.relay_searches import (
    METHODS,
    OUTPUT,
    SYSTEMS,
    budgets_of,
    settings_of,
    share,
    value_of,
)

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
