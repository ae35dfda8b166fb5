"""Schedulers: choices computed by hand, and laws of each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import pytest
from scipy import stats

from compound.optimization.method import Job, JobRecord
from compound.optimizers.scheduling import RewardGapScheduler, Uniform


class TestSchedulers:
    JOBS = tuple(Job("local", (f"{name}.option",)) for name in "abcd")

    def step(
        self,
        name: str,
        gain: float = 0.0,
        runs: float = 10.0,
        gaps: Mapping[str, float] | None = None,
    ) -> JobRecord:
        return JobRecord(
            job=0,
            optimizer="local",
            keys=(f"{name}.option",),
            values={"v": 1} if gain else {},
            train_before=0.0,
            train_after=gain,
            runs=runs,
            facts={"gaps": gaps or {}},
        )

    def test_gaps_are_drawn_as_printed(self) -> None:
        """Appendix E: in proportion to the gap, whatever was drawn before. Rounds visited a in 33 %, not 90 %."""
        gaps = {"a": 0.9, "b": 0.04, "c": 0.03, "d": 0.03}
        counts: Counter[str] = Counter()
        for seed in range(40):
            history = [self.step("x", gaps=gaps)]
            for _ in range(25):
                history.append(
                    self.step(
                        RewardGapScheduler().choose(self.JOBS, history, seed).keys[0][0], gaps=gaps
                    )
                )
            counts.update(record.keys[0][0] for record in history[1:])
        expected = [1000 * gap for gap in gaps.values()]
        assert stats.chisquare([counts[name] for name in gaps], expected).pvalue > 1e-3

    def test_a_component_without_a_gap_is_not_drawn(self) -> None:
        history = [self.step("x", gaps={"a": 0.4, "b": 0.1, "c": 0.0, "d": 0.0})]
        names = {
            RewardGapScheduler().choose(self.JOBS, history, seed).keys[0][0] for seed in range(100)
        }
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
        chosen = [
            RewardGapScheduler().choose(jobs, [self.step("x", gaps=gaps)], i) for i in range(40)
        ]
        share = 0.75 if any(gaps.values()) else 0.5
        for job in chosen:
            own = 1 - share if job.keys == ("a.option",) else share / 2
            assert job.reason["probability"] == pytest.approx(own)
        assert {job.keys[0] for job in chosen} == {"a.option", "b.option", "b.prompt"}

    def test_d1_every_component_is_visited(self) -> None:
        """D1: a reseeded generator and frozen probabilities chose one component for ever."""
        for scheduler in (RewardGapScheduler(), Uniform()):
            for seed in range(7):
                history: list[JobRecord] = []
                for _ in range(24):
                    chosen = scheduler.choose(self.JOBS, history, seed)
                    gaps = dict.fromkeys("abcd", 0.1)
                    history.append(self.step(chosen.keys[0][0], gain=0.01, gaps=gaps))
                assert {step.keys[0] for step in history} == {f"{name}.option" for name in "abcd"}

    def test_gaps_are_live(self) -> None:
        """What counts is the last measurement, not the first."""
        history = [
            self.step("x", gaps={"a": 1.0, "b": 0.0}),
            self.step("x", gaps={"a": 0.0, "b": 1.0}),
        ]
        scheduler = RewardGapScheduler()
        assert {scheduler.choose(self.JOBS[:2], history, seed).keys[0] for seed in range(20)} == {
            "b.option"
        }

    def test_every_choice_says_what_it_was_made_from(self) -> None:
        history = [self.step(name, gain=0.1, gaps={"a": 0.2}) for name in "abcd"]
        for scheduler in (RewardGapScheduler(), Uniform()):
            reason = scheduler.choose(self.JOBS, history, 0).reason
            assert reason
            assert all(isinstance(value, float) for value in reason.values())

    def test_uniform_says_which_round_it_is_and_how_many_wait(self) -> None:
        history = [self.step(name) for name in "abcda"]
        job = Uniform().choose(self.JOBS, history, 3)
        assert job.keys[0] != "a.option"
        assert job.reason == {"rounds": 1.0, "waiting": 3.0}
