"""Decisions: their levels, the test that they use, and scores outside the bounds that a metric declares."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from compound.benchmarks.simulated.acceptance import DECISIONS, WORLDS, problem
from compound.components.function import Function
from compound.evaluation.metrics import custom
from compound.example import Example
from compound.graph.component import Input
from compound.graph.space import Text
from compound.graph.system import System
from compound.loop.loop import OptimizationLoop
from compound.optimization.method import Job, Method, Progress, Proposal, Task
from compound.optimization.problem import Problem
from compound.optimizers.scheduling.scheduler import Uniform
from compound.optimizers.weights.methods import InOrder
from compound.runs.directory import RunDirectory
from compound.runs.recorder import Recorder
from compound.runs.state import RunState
from compound.settings.optimize import OptimizeSettings

VALID = [Example(f"v{i}", {"x": i}) for i in range(10)]
TRAIN = [Example(f"t{i}", {"x": 100 + i}) for i in range(10)]


def run(made: Problem, folder: Path) -> tuple[list[dict[str, Any]], RunState]:
    """Run an optimization; return its events and final state."""
    recorder = Recorder(RunDirectory.create(folder / "run", "", {}))
    try:
        asyncio.run(OptimizationLoop(made, recorder).run())
    finally:
        recorder.close()
    lines = (folder / "run" / "events.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines], recorder.state


def kinds(events: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [event for event in events if event["event"] == kind]


@dataclass
class Sometimes:
    """Proposes a better label in some rounds, and nothing in the others."""

    proposes: list[bool]
    rounds: list[int] = field(default_factory=list)

    async def propose(self, task: Task) -> AsyncIterator[Progress | Proposal]:
        self.rounds.append(task.seed)
        useful = self.proposes[len(self.rounds) - 1]
        yield Proposal({"step.label": f"0.0 {len(self.rounds)}"} if useful else {})


def score(x: int, label: str) -> float:
    """Return the number that a label states for train examples, or for all others."""
    valid, _, train = label.partition(" ")
    return float(train or valid) if x >= 100 else float(valid)


def labelled(optimizer: Any, values: Mapping[str, Any], *, start: str = "0.5", jobs_each: int | None = None,
             decisions: int | None = None, bounds: Any = (0, 1)) -> Problem:  # fmt: skip
    step = Function("step", score, label=Text(start))
    system = System("labelled", outputs={"answer": step(x=Input("x", int))})
    metric = custom(lambda outputs, example: outputs["answer"], "stars", bounds=bounds)
    settings = OptimizeSettings.model_validate({"concurrency": 1, "minibatch": 1, **values})
    jobs = [Job("named", ("step.label",))]
    method = Method(
        "named", {"named": optimizer}, jobs, InOrder() if jobs_each else Uniform(),
        jobs_each=jobs_each, decisions=decisions,
    )  # fmt: skip
    return Problem(system, TRAIN, VALID, [], metric, settings, method, {})


class TestLevels:
    def test_the_levels_of_three_decisions_are_equal_parts_of_alpha(self, tmp_path: Path) -> None:
        events, _ = run(problem(WORLDS["equal"], 0), tmp_path)
        assert [event["level"] for event in kinds(events, "decision")] == [0.05 / DECISIONS] * DECISIONS

    @pytest.mark.parametrize(
        ("proposes", "levels"),
        [
            ([True, True, True], [0.02, 0.02, 0.02]),
            ([False, True, True], [0.03, 0.03]),
            ([True, False, True], [0.02, 0.04]),
            ([False, False, True], [0.06]),
        ],
    )
    def test_a_decision_without_a_proposal_leaves_its_level_to_the_later_ones(
        self, proposes: list[bool], levels: list[float], tmp_path: Path
    ) -> None:
        made = labelled(Sometimes(proposes), {"alpha": 0.06, "iterations": 3}, jobs_each=1, decisions=3)
        events, state = run(made, tmp_path)
        found = [event["level"] for event in kinds(events, "decision")]
        assert found == pytest.approx(levels)
        assert sum(found) <= 0.06 * (1 + 1e-12)
        assert state.search is not None
        assert state.search.skipped == [i + 1 for i, useful in enumerate(proposes) if not useful]


@dataclass(frozen=True)
class Named:
    """Scores a label on train examples, and proposes it."""

    label: str

    async def propose(self, task: Task) -> AsyncIterator[Progress | Proposal]:
        values = {"step.label": self.label}
        await task.scorer.score([values], task.train[:2])
        yield Proposal(values)


class TestBounds:
    """A score outside the declared bounds: named, kept, and not relied on."""

    def test_scores_within_the_bounds_use_the_bounded_test(self, tmp_path: Path) -> None:
        events, state = run(labelled(Named("0.9"), {"iterations": 1}), tmp_path)
        (decision,) = kinds(events, "decision")
        # ten gains of 0.4: P(0.4 Gamma(10) <= Gamma(1)) = (1 / 1.4)**10
        assert (decision["test"], decision["p"]) == ("bounded mean", pytest.approx(1.4**-10))
        assert (decision["accepted"], state.bounds_violation) == (True, "")

    def test_small_gains_on_ten_examples_are_no_evidence_against_a_rare_loss(self, tmp_path: Path) -> None:
        events, _ = run(labelled(Named("0.55"), {"iterations": 1}), tmp_path)
        (decision,) = kinds(events, "decision")
        assert decision["p"] == pytest.approx(1.05**-10)
        assert not decision["accepted"]

    @pytest.mark.parametrize("label", ["1.5", "0.9 7"], ids=["on validation", "on train"])
    def test_a_score_outside_the_declared_bounds_changes_the_test_and_is_named(
        self, label: str, tmp_path: Path
    ) -> None:
        events, state = run(labelled(Named(label), {"iterations": 1}), tmp_path)
        first = "7 on example 't0'" if " " in label else "1.5 on example 't0'"
        violation = f"metric 'stars' returned {first}, outside its declared bounds [0, 1]"
        assert state.bounds_violation == violation
        (note,) = kinds(events, "note")
        assert note["note"].startswith(f"{violation}; decisions use the test for scores of unknown range")
        (decision,) = kinds(events, "decision")
        assert (decision["test"], decision["p"]) == ("sign flips and t", 2**-10)

    def test_a_start_outside_the_bounds_is_said_at_the_start(self, tmp_path: Path) -> None:
        events, _ = run(labelled(Named("1.7"), {"iterations": 2}, start="1.5"), tmp_path)
        assert [event["event"] for event in events[:2]] == ["start", "note"]
        assert "returned 1.5 on example 'v0'" in events[1]["note"]
        assert len(kinds(events, "note")) == 1  # once, although every score is outside
        assert {event["test"] for event in kinds(events, "decision")} == {"sign flips and t"}

    def test_without_declared_bounds_nothing_is_violated(self, tmp_path: Path) -> None:
        events, state = run(labelled(Named("7"), {"iterations": 1}, bounds=None), tmp_path)
        assert (state.bounds_violation, kinds(events, "note")) == ("", [])
        assert kinds(events, "decision")[0]["test"] == "sign flips and t"
