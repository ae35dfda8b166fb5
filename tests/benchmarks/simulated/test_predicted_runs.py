"""Predicted against spent system runs on a simulated system."""

from __future__ import annotations

import pytest

from compound.benchmarks.simulated.predicted_runs import RUNS, WORLDS, measure


@pytest.mark.parametrize("name", ["search", "coordinate"])
def test_jobs_spend_the_shares_that_the_dry_run_predicts(name: str) -> None:
    rows = measure(WORLDS["diamond"], name)
    first = [row for row in rows if row["predicted"] is not None]
    limited = [row for row in rows if row["ended"] == "share"]
    assert first
    assert limited
    assert all(row["share"] == pytest.approx(row["predicted"], rel=0.05) for row in first)
    assert all(row["share"] - row["spent"] <= max(0.1 * row["share"], 8) for row in limited)  # a minibatch
    assert all(row["spent"] <= row["share"] + 1e-6 for row in rows)
    assert sum(row["spent"] for row in rows) <= RUNS
    if name == "coordinate":
        assert {row["keys"][0]: row["price"] for row in rows} == pytest.approx(
            {"a.option": 0.75, "b.option": 0.75, "c.option": 0.5, "d.option": 0.25}
        )
