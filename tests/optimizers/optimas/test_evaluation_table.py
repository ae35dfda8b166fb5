"""Evaluations of a race: predicted system runs by hand, and unbiased estimates of gains with fitted rewards."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from compound.benchmarks.simulated.ablations import FitToShuffled
from compound.benchmarks.simulated.relays import Relay, RelayStep
from compound.benchmarks.simulated.systems import Simulated
from compound.example import Example
from compound.optimization.prices import estimate_prices
from compound.optimizers.optimas.evaluation_table import (
    Cell,
    Conditions,
    EvaluationTable,
    FitCritic,
    StoredEvaluations,
)
from compound.optimizers.optimas.part import part_of
from compound.rewards.buffer import Entry
from compound.rewards.features import NoBackbone
from compound.rewards.gains.critic import fit_critic
from compound.rewards.gains.estimates import Gains, estimate_unbiased
from compound.rewards.template import Template


def table_of(
    job: Any, world: Relay | Simulated, component: str, examples: Sequence[Example]
) -> EvaluationTable:
    """Return a table of the other options of a component of a chain, without evaluations."""
    key = f"{component}.option"
    task = job(world.system(), world, examples, keys=(key,)).task
    part = part_of(task.system, [component], estimate_prices(task.system))
    template = Template.of(task.system.components[component])
    conditions = Conditions(part, task.prices.change([component]), template, NoBackbone())
    candidates = [{key: option} for option in range(1, world.options)]
    return EvaluationTable(task, conditions, candidates, task.train)


class TestCost:
    """The second of four steps: the part is half a run for the incumbent, whose first step is not cached.

    A candidate costs a quarter of a run locally and three quarters globally. The incumbent has local
    evaluations on examples 0 and 1, candidate 0 (row 1) on example 0, and candidate 1 (row 2) on example 1.
    """

    @pytest.fixture
    def table(self, job: Any) -> EvaluationTable:
        world = Relay(4, 2, options=4, seed=3)
        made = table_of(job, world, "b", world.examples(5))
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
    world = Simulated("chain", options=4, noise=0.0)
    table = table_of(job, world, "b", world.examples(5))
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


@pytest.mark.parametrize("candidate", [0, 1])  # the first is the incumbent's own option
def test_failed_local_runs_are_restored_without_running_again(
    job: Any, monkeypatch: pytest.MonkeyPatch, candidate: int
) -> None:
    original = RelayStep.run

    async def run(self: RelayStep, inputs: Any, values: Any, call: Any) -> Any:
        if self.name == "a" and values["option"] == candidate and inputs["question"][-1] in "0369":
            raise ValueError("the answer cannot be read")
        return await original(self, inputs, values, call)

    monkeypatch.setattr(RelayStep, "run", run)
    world = Relay(4, 1, options=4, skill=(0.05, 0.95), seed=8)
    first = table_of(job, world, "a", world.examples(40))
    asyncio.run(first.evaluate([0, 1, 2], first.missing([0, 1, 2], 20), 40))
    stored = StoredEvaluations.from_json(json.loads(json.dumps(first.stored().to_json())))
    assert stored.failed
    second = EvaluationTable(first._task, first._given, first._values[1:], first._examples)
    meter = first._task.context.executor.meter
    before = meter.system_runs
    asyncio.run(second.restore(stored))
    assert meter.system_runs == before
    assert second.stored() == stored
    entries = [Entry(draw, 1) for draw in first.draws()]
    critic = fit_critic(entries, first._given.template, NoBackbone(), certain=True)
    assert critic is not None
    one, other = first.gains(critic), second.gains(critic)
    assert np.array_equal(one.locally, other.locally, equal_nan=True)
    assert second.gap(other, 0.5) == first.gap(one, 0.5) is not None


Matrix = NDArray[np.float64]
WORLD = Relay(4, 1, options=4, skill=(0.05, 0.95), seed=8)
TRUE = np.array([WORLD.value({"a": option}) - WORLD.value({}) for option in range(1, 4)])
REPEATS, GLOBAL, LOCAL = 80, 12, 40


@pytest.fixture(scope="module")
def repeats(job: Any) -> list[EvaluationTable]:
    """Tables of the same candidates on different questions."""
    found = []
    for repeat in range(REPEATS):
        table = table_of(job, WORLD, "a", WORLD.examples(LOCAL, f"repeat {repeat}"))
        asyncio.run(table.evaluate([0, 1, 2], table.missing([0, 1, 2], GLOBAL), LOCAL))
        found.append(table)
    return found


class TestUnbiased:
    """Estimates with fitted rewards, over repeated draws of the questions of one relay.

    The expected score of each option has a closed form. Of 40 questions 12 have global evaluations, to which
    the reward is fitted; the estimates use all of them.
    """

    @staticmethod
    def estimate(table: EvaluationTable, fit: FitCritic) -> Gains:
        """Estimate the gains with a reward fitted to the table's own draws."""
        entries = [Entry(draw, 1) for draw in table.draws()]
        critic = fit(entries, table._given.template, NoBackbone(), certain=True)
        return estimate_unbiased(table.gains(critic))

    @staticmethod
    def is_unbiased(errors: Matrix) -> bool:
        """Return whether the mean error of each candidate is within four standard errors."""
        se = errors.std(0, ddof=1) / math.sqrt(len(errors))
        return bool(np.all(np.abs(errors.mean(0)) < 4 * se))

    def test_estimates_with_a_fitted_reward(self, repeats: list[EvaluationTable]) -> None:
        found = [self.estimate(table, fit_critic) for table in repeats]
        assert sum(gains.slope > 0 for gains in found) >= 0.8 * REPEATS  # the reward is used
        errors = np.array([gains.mean for gains in found]) - TRUE
        assert self.is_unbiased(errors)
        assert not self.is_unbiased(errors + 0.1)
        assert not self.is_unbiased(errors - 0.1)

    def test_a_reward_of_shuffled_labels_biases_local_gains_but_no_estimates(
        self, repeats: list[EvaluationTable]
    ) -> None:
        found = [self.estimate(table, FitToShuffled()) for table in repeats]
        assert self.is_unbiased(np.array([gains.mean for gains in found]) - TRUE)
        assert not self.is_unbiased(np.nan_to_num([gains.locally for gains in found]) - TRUE)
