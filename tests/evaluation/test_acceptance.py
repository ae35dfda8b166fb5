"""Acceptance is a claim with evidence: false claims stay within alpha, true gains are found.

Every run here is a whole optimization: baseline, jobs, decisions on fresh samples, checkpoints.
Only the optimizer is trivial, so that what is true of its proposals is known.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from benchmarks.simulated.acceptance.worlds import WORLDS, supported
from compound import Example, Function, Input, OptimizeSettings, System, Text
from compound.execution.rng import generator
from compound.metrics import custom
from compound.optimization.loop.loop import OptimizationLoop
from compound.optimization.method import Job, Method, Problem, Progress, Proposal, Task
from compound.optimization.runs.directory import RunDirectory, read_records
from compound.optimization.runs.recorder import Recorder
from compound.optimization.runs.state import SearchState
from compound.optimizers.scheduling import Uniform

ALPHA = 0.05
DECISIONS = 3
VALID = 20
SIGNIFICANT = 1e-3  # how sure these tests are when they fail


def answer(x: int, label: str, rng: np.random.Generator) -> float:
    """Be right with a chance that the label states, drawn anew for each label: ``"0.4 anything"``."""
    own = generator("answer", label, int(rng.integers(2**62)))
    return float(own.random() < float(label.split(maxsplit=1)[0]))


SYSTEM = System(
    "labelled",
    outputs={"answer": Function("step", answer, label=Text("0.4 start"))(x=Input("x", int))},
)
RIGHT = custom(lambda outputs, example: outputs["answer"], "right", bounds=(0, 1))
ROWS = [Example(f"e{i}", {"x": i}) for i in range(VALID)]


@dataclass(frozen=True)
class Relabel:
    """Proposes another label, which is right with the chance given."""

    chance: float

    async def propose(self, task: Task) -> AsyncIterator[Progress | Proposal]:
        yield Proposal({"step.label": f"{self.chance} number {task.seed}"})


def optimized(folder: Path, seed: int, chance: float) -> tuple[SearchState, int]:
    """Run one optimization; return its final state and the number of supported changes."""
    settings = OptimizeSettings(
        seed=seed, iterations=DECISIONS, alpha=ALPHA, concurrency=1, minibatch=1
    )
    method = Method(
        "relabel", {"relabel": Relabel(chance)}, [Job("relabel", ("step.label",))], Uniform()
    )
    problem = Problem(SYSTEM, ROWS[:1], ROWS, [], RIGHT, settings, method, {})
    recorder = Recorder(RunDirectory.create(folder / str(seed), "", {}))
    try:
        asyncio.run(OptimizationLoop(problem, recorder).run())
    finally:
        recorder.close()
    events = list(read_records(folder / str(seed), "events.jsonl"))
    decisions = [event for event in events if event["event"] == "decision"]
    assert len(decisions) == DECISIONS
    assert all(decision["changes"] for decision in decisions)
    assert recorder.state.search
    return recorder.state.search, sum(decision["verdict"] == "supported" for decision in decisions)


def runs_that_accept(folder: Path, runs: int, chance: float) -> int:
    return sum(optimized(folder, seed, chance)[1] > 0 for seed in range(runs))


def significantly_above(level: float, successes: int, n: int) -> bool:
    """Return whether a success rate of ``level`` explains the successes with a p-value below 0.001."""
    return bool(stats.binom.sf(successes - 1, n, level) < SIGNIFICANT)


class TestNoDifference:
    """A/A: candidates that are exactly as good as the incumbent, under another name."""

    @pytest.mark.slow
    def test_false_accepts_stay_within_alpha_over_whole_runs(self, tmp_path: Path) -> None:
        falsely = runs_that_accept(tmp_path, 200, chance=0.4)
        assert not significantly_above(ALPHA, falsely, 200)

    @pytest.mark.slow
    def test_skewed_losses_are_not_accepted_more_often_than_alpha_over_whole_runs(self) -> None:
        """Each candidate gains 0.05 on most examples and loses 0.95 on one in nineteen: worse on average."""
        world = WORLDS["worse, skewed"]
        assert world.gain < 0
        assert not significantly_above(ALPHA, sum(supported(world, s) > 0 for s in range(60)), 60)

    def test_samples_that_chose_a_configuration_do_not_judge_the_next(self, tmp_path: Path) -> None:
        """Each decision draws fresh ones, so luck of the incumbent is not carried along."""
        optimized(tmp_path, 0, chance=0.4)
        samples = [t["sample"] for t in read_records(tmp_path / "0", "traces.jsonl")]
        by_evaluation = [samples[i : i + VALID] for i in range(0, len(samples), VALID)]
        assert all(len(set(some)) == 1 for some in by_evaluation)
        assert [some[0] for some in by_evaluation] == [0, 1, 1, 2, 2, 3, 3]


class TestTrueGain:
    def test_what_was_accepted_is_the_best_and_its_scores_are_told(self, tmp_path: Path) -> None:
        state, times = optimized(tmp_path, 0, chance=0.95)
        assert str(state.best["step.label"]).startswith("0.95")
        assert state.incumbent.mean > 0.7
        assert times >= 1
