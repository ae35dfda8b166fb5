"""Evaluations of a race: the system runs that missing ones are expected to take, by hand."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from compound.benchmarks.simulated.relays import Relay
from compound.benchmarks.simulated.systems import Simulated
from compound.optimization.prices import estimate_prices
from compound.optimizers.optimas.evaluation_table import Cell, Conditions, EvaluationTable
from compound.optimizers.optimas.part import part_of
from compound.rewards.model import make_backbone
from compound.rewards.template import Template


def table_of(job: Any, world: Relay | Simulated, rows: int = 5) -> EvaluationTable:
    """Return a table of the other options of component b of a chain, without evaluations."""
    task = job(world.system(), world, world.examples(rows), keys=("b.option",)).task
    part = part_of(task.system, ["b"], estimate_prices(task.system))
    template = Template.of(task.system.components["b"])
    conditions = Conditions(part, task.prices.change(["b"]), template, make_backbone("none", 8))
    candidates = [{"b.option": option} for option in range(1, world.options)]
    return EvaluationTable(task, conditions, candidates, task.train)


class TestCost:
    """The second of four steps: the part is half a run for the incumbent, whose first step is not cached.

    A candidate costs a quarter of a run locally and three quarters globally. The incumbent has local
    evaluations on examples 0 and 1, candidate 0 (row 1) on example 0, and candidate 1 (row 2) on example 1.
    """

    @pytest.fixture
    def table(self, job: Any) -> EvaluationTable:
        made = table_of(job, Relay(4, 2, options=4, seed=3))
        asyncio.run(made.evaluate_locally([(1, 0), (2, 1)]))
        assert [made.local_columns(row) for row in range(4)] == [[0, 1], [0], [1], []]
        return made

    @pytest.mark.parametrize(
        ("cells", "runs"),
        [
            ([], 0.0),
            ([(0, 3)], 1.0),
            ([(1, 3)], 0.75),
            ([(0, 0)], 1.0 - 0.5),  # the local run is known, and only what follows executes
            ([(1, 0)], 0.75 - 0.25),
            ([(1, 1)], 0.75),  # another row has a local run
            ([(0, 1), (1, 1), (2, 1), (3, 1)], 0.5 + 0.75 + 0.5 + 0.75),
            ([(0, 0), (0, 3), (1, 0), (1, 3), (2, 0), (2, 1)], 0.5 + 1.0 + 0.5 + 0.75 + 0.75 + 0.5),
        ],
    )
    def test_global_evaluations(self, table: EvaluationTable, cells: list[Cell], runs: float) -> None:
        assert table.cost([0, 1, 2], cells, 0) == pytest.approx(runs)

    @pytest.mark.parametrize(
        ("alive", "n_local", "runs"),
        [
            ([0, 1, 2], 1, 2 * 0.25),  # of rows 2 and 3
            ([0, 1, 2], 3, 0.5 + (2 + 2 + 3) * 0.25),
            ([0], 3, 0.5 + 2 * 0.25),  # eliminated candidates have no further evaluations
            ([], 5, 3 * 0.5),
        ],
    )
    def test_local_evaluations(
        self, table: EvaluationTable, alive: list[int], n_local: int, runs: float
    ) -> None:
        assert table.cost(alive, [], n_local) == pytest.approx(runs)

    def test_a_global_evaluation_includes_the_local_one(self, table: EvaluationTable) -> None:
        """Planned on examples 0 and 2 with rows 0 and 1; row 2 is missing locally on both, row 1 on 1."""
        cells = [(0, 0), (1, 0), (0, 2), (1, 2)]
        planned = 0.5 + 0.5 + 1.0 + 0.75
        assert table.cost([0, 1], cells, 3) == pytest.approx(planned + 0.25 + 2 * 0.25)

    def test_no_local_evaluation_is_planned_where_a_global_one_was_made(self, table: EvaluationTable) -> None:
        """After a transient failure an example has a score, but no local run."""
        table.scored[0, 2] = table.scored[1, 2] = True
        assert table.cost([0, 1], [], 3) == pytest.approx((1 + 2) * 0.25)


def test_the_cost_is_what_evaluations_take_if_all_outputs_differ(job: Any) -> None:
    """Candidates without outputs in common share nothing but the prefix."""
    table = table_of(job, Simulated("chain", options=4, noise=0.0))
    meter = table._task.context.executor.meter
    steps: list[tuple[list[int], list[Cell], int]] = [
        ([0, 1, 2], [], 2),
        ([0, 1, 2], [(0, 0), (1, 0), (3, 0), (0, 4), (2, 4)], 3),
        ([1], [(0, 1), (2, 1), (0, 3), (2, 3)], 5),
    ]
    for alive, cells, n_local in steps:
        expected, before = table.cost(alive, cells, n_local), meter.system_runs
        asyncio.run(table.evaluate(alive, cells, n_local))
        assert meter.system_runs - before == pytest.approx(expected)
        assert table.cost(alive, [], n_local) == 0
