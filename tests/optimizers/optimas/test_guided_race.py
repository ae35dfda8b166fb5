"""Guided races: the plan of probes and rungs, and what follows from estimates, by hand."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import numpy as np
import pytest

from compound.benchmarks.simulated.relays import Relay
from compound.optimization.prices import estimate_prices
from compound.optimizers.optimas.evaluation_table import StoredEvaluations
from compound.optimizers.optimas.guided import BufferDraws, GuidedSearch
from compound.optimizers.optimas.guided_race import GuidedRace, GuidedRacer, _accuracy
from compound.optimizers.optimas.part import part_of
from compound.optimizers.optimas.rewarding import RunRewards
from compound.optimizers.search.prompts import PromptSearch
from compound.rewards.features import FeatureMap, NoBackbone
from compound.rewards.gains.critic import Critic
from compound.rewards.gains.estimates import Evaluations, Gains
from compound.rewards.template import Template
from optimas_settings import learning, optimas

LEARNING = learning(optimas(model="none"))
COUNT = 4  # candidates


def racer(job: Any, share: float = 60.0, examples: int = 40) -> GuidedRacer:
    """Return a race of the first of four steps: an evaluation costs a run globally, and a quarter locally."""
    world = Relay(4, 1, seed=3)
    task = job(
        world.system(), world, world.examples(examples), keys=("a.option",), share=share, minibatch=8
    ).task
    part = part_of(task.system, ["a"], task.prices)
    price = task.prices.change(["a"])
    assert (part.weight, part.price, price) == (0.25, 0.25, 1.0)
    conditions = GuidedSearch(LEARNING, PromptSearch(()))._conditions(task, part, price)
    draws = BufferDraws(RunRewards.open(task, LEARNING), "a")
    candidates = [{"a.option": i} for i in range(1, COUNT + 1)]
    return GuidedRacer(task, conditions, candidates, task.train, draws, 1)


def rung(**values: Any) -> GuidedRace:
    return GuidedRace(alive=list(range(COUNT)), rungs=3, **values)


def gains(slope: float) -> Gains:
    zeros = np.zeros(COUNT)
    return Gains(zeros, zeros, zeros, zeros, np.zeros(COUNT, int), slope, 1.0, 1.0, 0.0, 1.0)


class TestProbes:
    def test_their_size_by_hand(self, job: Any) -> None:
        """A third of 40 % of 60 runs holds two examples with the incumbent and two candidates each."""
        cells, n_local = racer(job)._plan(rung(probes=3))
        assert n_local == 0
        assert [column for _, column in cells] == [0] * 3 + [1] * 3
        assert [row for row, _ in cells[::3]] == [0, 0]
        assert sorted(row for row, _ in cells if row) == [1, 2, 3, 4]  # every candidate has its turn

    def test_the_runs_spent_so_far_count(self, job: Any) -> None:
        """The second probe is as large as the first: of 54 runs left and 6 spent."""
        cells, _ = racer(job, 54.0)._plan(rung(probes=2, spent=6.0, n_global=2))
        assert [column for _, column in cells] == [2] * 3 + [3] * 3

    @pytest.mark.parametrize(("share", "examples"), [(2.9, 0), (3.0, 1), (22.0, 1), (45.0, 2)])
    def test_at_least_one_example_if_the_runs_hold_it(self, job: Any, share: float, examples: int) -> None:
        """An example costs three runs; 40 % of 22 and 45 runs, by three, are 2.93 and 6."""
        cells, _ = racer(job, share)._plan(rung(probes=3))
        assert len(cells) == 3 * examples

    def test_without_a_limit_they_take_a_minibatch(self, job: Any) -> None:
        cells, _ = racer(job, math.inf)._plan(rung(probes=3))
        assert len({column for _, column in cells}) == 8

    def test_no_more_examples_than_there_are(self, job: Any) -> None:
        cells, _ = racer(job, math.inf, examples=5)._plan(rung(probes=3, n_global=3))
        assert {column for _, column in cells} == {3, 4}


class TestRungs:
    @pytest.mark.parametrize(
        ("spent", "predicted", "done", "examples"),
        [
            (0.0, 0.0, 0, 4),  # 60 / 3 runs at 5 for each example
            (0.0, 0.0, 1, 6),  # 60 / 2
            (0.0, 0.0, 2, 12),
            (15.0, 20.0, 0, 5),  # predictions are too high by a third: 20 / 0.75
            (10.0, 20.0, 0, 8),
            (5.0, 20.0, 0, 8),  # at most by half
            (30.0, 20.0, 0, 4),  # too low: no correction
            (10.0, 20.0, 2, 12),  # never more than what is left
        ],
    )
    def test_without_a_reward_all_runs_are_global(
        self, job: Any, spent: float, predicted: float, done: int, examples: int
    ) -> None:
        cells, n_local = racer(job)._plan(rung(spent=spent, predicted=predicted, done=done))
        assert n_local == examples
        assert sorted(cells) == [(row, column) for row in range(5) for column in range(examples)]

    @pytest.mark.parametrize(("done", "examples"), [(0, 8), (1, 16), (2, 32), (3, 40)])
    def test_without_a_limit_rungs_double(self, job: Any, done: int, examples: int) -> None:
        state = GuidedRace(alive=[0], rungs=5, done=done)
        cells, n_local = racer(job, math.inf)._plan(state)
        assert (len(cells), n_local) == (2 * examples, examples)

    def test_runs_are_divided_for_the_least_variance(self, job: Any) -> None:
        """Of 20 runs, g examples cost 5 each globally and 1.25 locally; 1 / (1 + g) + 1 / n is least at g = 3.

        g = 2: 1/3 + 1/10 = 0.433; g = 3: 1/4 + 1/7 = 0.393; g = 4: 1/5 + 1/4 = 0.45.
        """
        state = rung(slope=1.0, noise=1.0, spread=1.0, local_sd=1.0)
        cells, n_local = racer(job)._plan(state)
        assert (len(cells), n_local) == (15, 7)

    def test_the_division_counts_the_evaluations_of_the_candidates_only(self, job: Any) -> None:
        """Of 10 runs, g examples cost 2 each globally and 0.5 locally: n = 20 - 3 g; least at g = 4.

        g = 3: 1/4 + 1/11 = 0.341; g = 4: 1/5 + 1/8 = 0.325; g = 5: 1/6 + 1/5 = 0.367.
        """
        state = GuidedRace(alive=[0], rungs=1, slope=1.0, noise=1.0, spread=1.0, local_sd=1.0)
        cells, n_local = racer(job, 10.0)._plan(state)
        assert (len(cells), n_local) == (8, 8)

    def test_a_reward_that_explains_everything_takes_all_runs(self, job: Any) -> None:
        """20 runs are 16 local evaluations of five outputs."""
        state = rung(slope=1.0, noise=0.0, spread=0.0, local_sd=1.0)
        assert racer(job)._plan(state) == ([], 16)

    def test_a_reward_that_explains_nothing_takes_none(self, job: Any) -> None:
        state = rung(slope=1.0, noise=10.0, spread=math.inf, local_sd=0.01)
        cells, n_local = racer(job)._plan(state)
        assert (len(cells), n_local) == (20, 4)

    @pytest.mark.parametrize(
        ("spread", "doubt", "n_global", "n_local", "variance"),
        [
            (3.0, 0.0, 4, 10, 36 / 40 + 0.1),  # 9 · 4 / (9 · 4 + 4), and 1 / 10
            (3.0, 4.0, 4, 10, 36 / 40 + 0.1),  # a plan takes the spread at its estimate
            (3.0, 0.0, 0, 10, 9 + 0.1),
            (math.inf, 0.0, 4, 10, 1 + 0.1),
            (math.inf, 0.0, 0, 10, math.inf),
            (3.0, 0.0, 4, 0, math.inf),
        ],
    )
    def test_the_variance_by_hand(
        self, job: Any, spread: float, doubt: float, n_global: int, n_local: int, variance: float
    ) -> None:
        state = rung(noise=2.0, spread=spread, doubt=doubt, local_sd=1.0)
        assert state.variance(n_global, n_local) == pytest.approx(variance)

    def test_the_largest_number_within_the_runs(self, job: Any) -> None:
        made = racer(job)
        assert made._largest(lambda n: 1.5 * n, 10.0) == 6
        assert made._largest(lambda n: 0.1 * n, 0.3) == 3  # sums of fractions are rounded
        assert made._largest(lambda n: n, 1000.0) == 40
        assert made._largest(lambda n: 1.0 + n, 0.5) == 0


class TestAfterRungs:
    def test_the_numbers_of_a_rung_by_hand(self, job: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        """As in the test of estimates: slope 2.5, gains 5.5 and 2. Local gains have a deviation of 1."""
        scores, local = np.full((COUNT, 4), math.nan), np.full((COUNT, 4), math.nan)
        scores[:2, :2] = [[2.0, 4.0], [1.0, 3.0]]
        local[:2] = [[1.0, 1.0, 3.0, 3.0], [1.0, 1.0, 0.0, 2.0]]
        made = racer(job)
        monkeypatch.setattr(made._table, "gains", lambda critic: Evaluations(scores, local))
        monkeypatch.setattr(made._table, "gap", lambda data, slope: None)  # reads outputs, which are not made
        after = asyncio.run(made._rank(rung(done=1)))
        assert (after.alive, after.done) == ([0, 1], 2)
        assert after.gains == [pytest.approx(5.5), pytest.approx(2.0), None, None]
        assert after.sds[:2] == pytest.approx([math.sqrt(2.5625)] * 2)
        assert [after.slope, after.local_sd] == pytest.approx([2.5, 2.5])
        assert [after.noise, after.ratio] == pytest.approx([math.sqrt(2), 2.5625])
        assert (after.spread, after.accuracy) == (math.inf, None)
        assert after.local_gains == [pytest.approx(5.0), pytest.approx(2.5), None, None]
        assert after.global_gains == [pytest.approx(3.0), pytest.approx(2.0), None, None]
        assert after.counts == [2, 2, 0, 0]

    @pytest.mark.parametrize(("gain", "done"), [(0.5, 2), (0.0, 3), (-0.5, 3)])
    def test_a_last_candidate_without_a_gain_ends_the_race(
        self, job: Any, monkeypatch: pytest.MonkeyPatch, gain: float, done: int
    ) -> None:
        scores = np.full((COUNT, 4), math.nan)
        scores[0, :2] = gain
        made = racer(job)
        monkeypatch.setattr(made._table, "gains", lambda critic: Evaluations(scores, 0 * scores))
        after = asyncio.run(made._rank(GuidedRace(alive=[0], rungs=3, done=1)))
        assert (after.alive, after.done) == ([0], done)

    @pytest.mark.parametrize(("margins", "share"), [([1.0, 0.0, -1.0, 2.0], 0.625), ([], None)])
    def test_the_accuracy_counts_ties_half(self, job: Any, margins: list[float], share: float | None) -> None:
        part = part_of(Relay(4, 1).system(), ["a"], estimate_prices(Relay(4, 1).system()))
        template = Template.of(part.system.components["a"])
        features = FeatureMap(template, (), (), 0)
        critic = Critic(template, features, [], {}, NoBackbone(), np.array(margins), ["e"] * len(margins))
        assert _accuracy(critic) == share
        assert _accuracy(None) is None

    @pytest.mark.parametrize(("alive", "left"), [(5, 3), (4, 2), (3, 2), (2, 1), (1, 1)])
    def test_the_better_half_remains(self, job: Any, alive: int, left: int) -> None:
        ranked = list(reversed(range(alive)))
        found = racer(job)._next(rung(done=1), ranked, gains(1.0), hopeless=False)
        assert found == {"alive": ranked[:left], "done": 2}

    def test_a_hopeless_race_ends(self, job: Any) -> None:
        assert racer(job)._next(rung(), [2], gains(1.0), hopeless=True) == {"alive": [2], "done": 3}

    @pytest.mark.parametrize(
        ("slope", "n_global", "probes", "left"),
        [(1.0, 8, 3, 0), (1.0, 7, 3, 2), (0.0, 8, 3, 2), (0.0, 20, 2, 1), (1.0, 7, 1, 0)],
    )
    def test_probes_end_when_the_reward_is_learned_from_enough_examples(
        self, job: Any, slope: float, n_global: int, probes: int, left: int
    ) -> None:
        state = rung(probes=probes, n_global=n_global)
        assert racer(job)._next(state, [3, 2, 1, 0], gains(slope), hopeless=False) == {"probes": left}

    @pytest.mark.parametrize(("share", "count", "rungs"), [(60.0, 4, 3), (3.0, 1, 1)])
    def test_without_a_reward_as_many_remain_as_the_runs_can_compare(
        self, job: Any, share: float, count: int, rungs: int
    ) -> None:
        found = racer(job, share)._next(rung(probes=1), [3, 2, 1, 0], gains(0.0), hopeless=False)
        assert found == {"probes": 0, "alive": [3, 2, 1, 0][:count], "rungs": rungs}


class TestStatistics:
    def test_the_best_is_the_first_left_that_gains(self) -> None:
        assert rung(gains=[0.3, -0.1, 0.2, None]).best == 0
        assert rung(gains=[None, -0.1, 0.2, 0.4]).best == 2
        assert rung(gains=[0.0, -0.1, None, None]).best is None

    def test_before_is_the_incumbents_mean_without_lost_runs(self) -> None:
        scores: list[dict[int, float | None]] = [{0: 0.25, 1: None, 4: 0.75}, {0: 1.0}]
        assert rung(evaluations=StoredEvaluations(scores=scores)).before == 0.5
        assert rung().before is None
        assert rung(evaluations=StoredEvaluations(scores=[{0: None}])).before is None

    def test_the_note_names_examples_and_the_best_gain(self) -> None:
        state = rung(n_global=3, n_local=7, gains=[-0.2, None, 0.125, 0.1])
        assert state.note() == "3 global and 7 local examples: best gain +0.125"

    def test_an_earlier_race_with_a_reward_needs_no_probes(self, job: Any) -> None:
        made = racer(job)
        assert made._start(None).probes == made._start(rung(slope=0.0, noise=2.0)).probes == 3
        known = rung(
            slope=0.5, noise=2.0, spread=1.5, doubt=0.1, ratio=0.3, accuracy=0.8, local_sd=0.7, spent=9.0
        )
        started = made._start(known)
        names = ("slope", "noise", "spread", "doubt", "ratio", "accuracy", "local_sd")
        assert [getattr(started, name) for name in names] == [0.5, 2.0, 1.5, 0.1, 0.3, 0.8, 0.7]
        assert (started.probes, started.rungs, started.spent, started.done) == (0, 3, 0.0, 0)
