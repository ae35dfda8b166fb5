"""Schedulers: choices computed by hand, and laws of each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from scipy import stats

from compound.execution.rng import generator
from compound.optimization.method import Job, JobRecord
from compound.optimizers.scheduling.scheduler import UCB, RewardGapScheduler, Thompson, Uniform


class TestSchedulers:
    JOBS = tuple(Job("local", (f"{name}.option",)) for name in "abcd")

    def step(
        self, name: str, gain: float = 0.0, runs: float = 10.0, gaps: Mapping[str, float] | None = None
    ) -> JobRecord:
        return JobRecord(
            job=0, optimizer="local", keys=(f"{name}.option",), values={"v": 1} if gain else {},
            train_before=0.0, train_after=gain, runs=runs, facts={"gaps": gaps or {}},
        )  # fmt: skip

    def test_gaps_are_drawn_as_printed(self) -> None:
        """Appendix E: in proportion to the gap, whatever was drawn before. Rounds visited a in 33 %, not 90 %."""
        gaps = {"a": 0.9, "b": 0.04, "c": 0.03, "d": 0.03}
        counts: Counter[str] = Counter()
        for seed in range(40):
            history = [self.step("x", gaps=gaps)]
            for _ in range(25):
                history.append(
                    self.step(RewardGapScheduler().choose(self.JOBS, history, seed).keys[0][0], gaps=gaps)
                )
            counts.update(record.keys[0][0] for record in history[1:])
        expected = [1000 * gap for gap in gaps.values()]
        assert stats.chisquare([counts[name] for name in gaps], expected).pvalue > 1e-3

    def test_a_component_without_a_gap_is_not_drawn(self) -> None:
        history = [self.step("x", gaps={"a": 0.4, "b": 0.1, "c": 0.0, "d": 0.0})]
        names = {RewardGapScheduler().choose(self.JOBS, history, seed).keys[0][0] for seed in range(100)}
        assert names == {"a", "b"}

    def test_untried_jobs_of_unmeasured_components_come_first(self) -> None:
        """A round of as many jobs as components then leaves none out, which independent draws often do."""
        gaps = {"a": 0.5, "b": 0.1}
        for seed in range(20):
            history = [self.step("a", gaps=gaps)]
            for _ in range(2):
                job = RewardGapScheduler().choose(self.JOBS, history, seed)
                history.append(self.step(job.keys[0][0], gaps=gaps))
            assert {record.keys[0][0] for record in history[1:]} == {"c", "d"}

    def test_an_unmeasured_component_counts_as_the_mean_of_the_others(self) -> None:
        """Jobs of c and d measured no gap."""
        history = [self.step(name, gaps={"a": 0.5, "b": 0.1}) for name in "cd"]
        chosen = [RewardGapScheduler().choose(self.JOBS, history, seed) for seed in range(50)]
        chances = {job.keys[0][0]: (job.reason["gap"], job.reason["probability"]) for job in chosen}
        assert chances["c"] == chances["d"] == pytest.approx((0.3, 0.25))
        assert chances["a"] == pytest.approx((0.5, 0.5 / 1.2))

    @pytest.mark.parametrize("gaps", [{}, {"a": 0.0, "b": 0.0, "c": 0.0, "d": 0.0}])
    def test_without_gaps_all_are_equally_likely(self, gaps: Mapping[str, float]) -> None:
        history = [self.step(name, gaps=gaps) for name in "abcd"]
        chosen = [RewardGapScheduler().choose(self.JOBS, history, i) for i in range(40)]
        assert {job.reason["probability"] for job in chosen} == {0.25}
        assert {job.keys[0][0] for job in chosen} == set("abcd")

    @pytest.mark.parametrize("gaps", [{"a": 0.1, "b": 0.3}, {"a": 0.0, "b": 0.0}])
    def test_the_jobs_of_a_component_share_its_probability(self, gaps: Mapping[str, float]) -> None:
        jobs = [Job("local", ("b.prompt",)), *self.JOBS[:2]]
        chosen = [RewardGapScheduler().choose(jobs, [self.step("x", gaps=gaps)], i) for i in range(40)]
        share = 0.75 if any(gaps.values()) else 0.5
        for job in chosen:
            own = 1 - share if job.keys == ("a.option",) else share / 2
            assert job.reason["probability"] == pytest.approx(own)
        assert {job.keys[0] for job in chosen} == {"a.option", "b.option", "b.prompt"}

    def test_d1_every_component_is_visited(self) -> None:
        """D1: a reseeded generator and frozen probabilities chose one component for ever."""
        for scheduler in (RewardGapScheduler(), UCB(), Thompson(), Uniform()):
            for seed in range(7):
                history: list[JobRecord] = []
                for _ in range(24):
                    chosen = scheduler.choose(self.JOBS, history, seed)
                    gaps = dict.fromkeys("abcd", 0.1)
                    history.append(self.step(chosen.keys[0][0], gain=0.01, gaps=gaps))
                assert {step.keys[0] for step in history} == {f"{name}.option" for name in "abcd"}

    def test_gaps_are_live(self) -> None:
        """What counts is the last measurement, not the first."""
        history = [self.step("x", gaps={"a": 1.0, "b": 0.0}), self.step("x", gaps={"a": 0.0, "b": 1.0})]
        scheduler = RewardGapScheduler()
        assert {scheduler.choose(self.JOBS[:2], history, seed).keys[0] for seed in range(20)} == {"b.option"}

    def test_every_choice_says_what_it_was_made_from(self) -> None:
        history = [self.step(name, gain=0.1, gaps={"a": 0.2}) for name in "abcd"]
        for scheduler in (RewardGapScheduler(), UCB(), Thompson(), Uniform()):
            reason = scheduler.choose(self.JOBS, history, 0).reason
            assert reason
            assert all(isinstance(value, float) for value in reason.values())

    def test_ucb_by_hand(self) -> None:
        """Gains of 0.2 and 0.1 a run after three tries: 1 + sqrt(2 ln 3 / 1) against 0.5 + sqrt(2 ln 3 / 2)."""
        history = [self.step("a", 2.0), self.step("b", 1.0), self.step("b", 1.0)]
        reason = UCB().choose(self.JOBS[:2], history, 0).reason
        assert reason["gain_per_run"] == pytest.approx(0.2)
        assert reason["bound"] == pytest.approx(1 + np.sqrt(2 * np.log(3)))

    def test_the_width_of_ucb_by_hand(self) -> None:
        """Gains of 0.2 and 0.1 after one and eight tries: without a width, the mean decides."""
        history = [self.step("a", 1.0), *(self.step("b", 2.0) for _ in range(8))]
        for width, name, mean, bound in (
            (0.0, "b", 0.2, 1.0),
            (0.5, "a", 0.1, 0.5 + 0.5 * np.sqrt(2 * np.log(9))),
        ):
            job = UCB(width=width).choose(self.JOBS[:2], history, 0)
            assert job.keys == (f"{name}.option",)
            assert job.reason == {"gain_per_run": pytest.approx(mean), "bound": pytest.approx(bound)}

    def test_gains_are_scaled_by_the_largest(self) -> None:
        """Gains of 0.1 and 0.3, and of 0.2: means of 0.2 / 0.3 each; the job with one try is less certain."""
        history = [self.step("a", 1.0), self.step("a", 3.0), self.step("b", 2.0)]
        job = UCB().choose(self.JOBS[:2], history, 0)
        assert job.keys == ("b.option",)
        assert job.reason["bound"] == pytest.approx(2 / 3 + np.sqrt(2 * np.log(3)))

    def test_ucb_tries_every_job_once_first(self) -> None:
        history = [self.step("a", 1.0), self.step("c", 1.0)]
        chosen = [UCB().choose(self.JOBS, history, seed) for seed in range(20)]
        assert {job.keys[0] for job in chosen} == {"b.option", "d.option"}
        assert all(job.reason == {"untried": 2.0} for job in chosen)

    def test_ucb_without_any_gain_takes_turns(self) -> None:
        """All means are 0: the job with fewer tries has the higher bound, and ties are broken at random."""
        history = [self.step("a"), self.step("a"), self.step("b")]
        reason = UCB().choose(self.JOBS[:2], history, 0).reason
        assert reason == {"gain_per_run": 0.0, "bound": pytest.approx(np.sqrt(2 * np.log(3)))}
        names = {UCB().choose(self.JOBS[:2], history[1:], seed).keys[0] for seed in range(20)}
        assert names == {"a.option", "b.option"}

    @pytest.mark.parametrize(
        ("record", "gain"),
        [
            ({}, 0.3 / 20),
            ({"runs": 0.5}, 0.3),  # less than one run counts as one
            ({"train_after": 0.1}, 0.0),  # a loss
            ({"values": {}}, 0.0),  # nothing was proposed
            ({"train_before": None}, 0.0),  # nothing was compared
            ({"train_after": None}, 0.0),
        ],
    )
    def test_the_gain_per_run_by_hand(self, record: Mapping[str, Any], gain: float) -> None:
        """From 0.2 to 0.5 on train examples in 20 runs."""
        facts = {"values": {"v": 1}, "train_before": 0.2, "train_after": 0.5, "runs": 20.0, **record}
        made = JobRecord(job=0, optimizer="local", keys=("a.option",), **facts)
        others = [self.step("a"), made.model_copy(update={"keys": ("z.option",)})]
        for records, n in (([made], 1), ([made, *others], 2)):
            reason = UCB().choose(self.JOBS[:1], records, 0).reason
            assert reason["gain_per_run"] == pytest.approx(gain / n)

    def test_thompson_by_hand(self) -> None:
        """Gains per run: a 0.4 and 0.2, b 0.0. Their mean is 0.2, their standard deviation 0.163.

        The posterior mean of a is (0.6 + 0.2) / 3, that of b (0 + 0.2) / 2, that of c 0.2 alone.
        """
        history = [self.step("a", 4.0), self.step("a", 2.0), self.step("b")]
        jobs, spread = self.JOBS[:3], np.sqrt((0.2**2 + 0.0 + 0.2**2) / 3)
        means, tries = {"a": 0.8 / 3, "b": 0.1, "c": 0.2}, {"a": 2, "b": 1, "c": 0}
        seen = set()
        for seed in range(40):
            rng = generator(seed, "schedule", 3)
            drawn = {n: means[n] + spread / np.sqrt(tries[n] + 1) * rng.normal() for n in means}
            best = max(drawn, key=lambda name: drawn[name])
            job = Thompson().choose(jobs, history, seed)
            assert job.keys == (f"{best}.option",)
            expected = {"gain_per_run": means[best], "drawn": drawn[best]}
            assert job.reason == pytest.approx(expected)
            seen.add(best)
        assert seen == set("abc")

    def test_the_spread_of_two_gains(self) -> None:
        """Gains of 0.1 and 0.3: mean 0.2, standard deviation 0.1."""
        rng = generator(5, "schedule", 2)
        job = Thompson().choose(self.JOBS[:1], [self.step("a", 1.0), self.step("a", 3.0)], 5)
        assert job.reason["drawn"] == pytest.approx(0.2 + 0.1 / np.sqrt(3) * rng.normal())

    @pytest.mark.parametrize(
        ("gains", "center", "spread"),
        [([], 0.0, 1.0), ([3.0], 0.3, 0.3), ([2.0, 2.0], 0.2, 0.2), ([0.0], 0.0, 1.0)],
    )
    def test_thompson_without_a_spread_of_gains(
        self, gains: Sequence[float], center: float, spread: float
    ) -> None:
        """It uses their mean, or 1."""
        history = [self.step("a", gain) for gain in gains]
        n = len(gains)
        rng = generator(5, "schedule", n)
        job = Thompson().choose(self.JOBS[:1], history, 5)
        assert job.reason["gain_per_run"] == pytest.approx(center)
        assert job.reason["drawn"] == pytest.approx(center + spread / np.sqrt(n + 1) * rng.normal())

    def test_uniform_says_which_round_it_is_and_how_many_wait(self) -> None:
        history = [self.step(name) for name in "abcda"]
        job = Uniform().choose(self.JOBS, history, 3)
        assert job.keys[0] != "a.option"
        assert job.reason == {"rounds": 1.0, "waiting": 3.0}

    @pytest.mark.parametrize("scheduler", [UCB(width=0.3), Thompson()])
    def test_bandits_lose_less_than_uniform_where_components_differ(self, scheduler: Any) -> None:
        """Twenty seeds, four components with gains of 0.02 to 0.2 a run: regret over 40 choices, paired."""
        gains = dict(zip("abcd", (0.02, 0.05, 0.1, 0.2), strict=True))

        def regret(chooser: Any, seed: int) -> float:
            history: list[JobRecord] = []
            rng = generator("regret", seed)
            for _ in range(40):
                name = chooser.choose(self.JOBS, history, seed).keys[0][0]
                history.append(self.step(name, gain=max(0.0, gains[name] + 0.05 * rng.normal()) * 10))
            return sum(0.2 - gains[step.keys[0][0]] for step in history)

        differences = [regret(Uniform(), seed) - regret(scheduler, seed) for seed in range(20)]
        assert stats.ttest_1samp(differences, 0, alternative="greater").pvalue < 1e-3
