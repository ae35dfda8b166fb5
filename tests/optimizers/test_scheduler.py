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
