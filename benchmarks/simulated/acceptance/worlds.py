"""Whole optimization runs with candidates whose true gain is known, for counting supported changes.

Everything except the optimizer is that of a real run: the initial evaluation, jobs, decisions on
fresh samples, and checkpoints. The optimizer proposes the same kind of candidate in every round, so
that a run takes a fraction of a second.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from compound.components.function import Function
from compound.core.example import Example
from compound.evaluation.metrics.custom import custom
from compound.evaluation.statistics import UNIT, Bounds
from compound.execution.rng import generator
from compound.graph.component import Input
from compound.graph.space import Text
from compound.graph.system import System
from compound.optimization.loop.loop import OptimizationLoop
from compound.optimization.method import Job, Method, Problem, Progress, Proposal, Task
from compound.optimization.runs.directory import RunDirectory
from compound.optimization.runs.recorder import Event, Recorder, is_supported
from compound.optimization.settings.optimize import OptimizeSettings
from compound.optimizers.scheduling import Uniform

DECISIONS = 3
VALID = 20
HIGH = 0.95  # score of every example under the start of `SKEWED`
COLLAPSE = 0.053  # probability that a candidate of `SKEWED` scores 0; else it scores 1


@dataclass(frozen=True)
class World:
    """A start and candidates, each described by a text of a kind and a number.

    Attributes:
        start: the initial configuration.
        candidate: the kind of every candidate.
        bounds: the range that the metric declares.
        gain: true mean gain of a candidate.
    """

    start: str
    candidate: str
    bounds: Bounds | None
    gain: float


WORLDS = {
    "equal": World("chance 0.4", "chance 0.4", UNIT, 0.0),
    "worse, skewed": World(
        "constant 0", "skewed 0", UNIT, (1 - HIGH) * (1 - COLLAPSE) - HIGH * COLLAPSE
    ),
}


def answer(x: int, label: str, rng: np.random.Generator) -> float:
    """Return the score of an example; another label, or another sample, draws another one."""
    kind, number, *_ = label.split()
    own = generator("answer", label, x, int(rng.integers(2**62)))
    match kind:
        case "chance":
            return float(own.random() < float(number))
        case "skewed":
            return float(own.random() >= COLLAPSE)
        case _:
            return HIGH


@dataclass(frozen=True)
class Relabel:
    """Optimizer that always proposes another label of the same kind."""

    kind: str

    async def propose(self, task: Task) -> AsyncIterator[Progress | Proposal]:
        """Propose the next label."""
        yield Proposal({"step.label": f"{self.kind} {task.seed}"})


def problem(
    world: World,
    seed: int,
    *,
    alpha: float = 0.05,
    valid: int = VALID,
    further: int = 0,
    decisions: int = DECISIONS,
) -> Problem:
    """Return the problem of one run."""
    step = Function("step", answer, label=Text(f"{world.start} start"))
    system = System("labelled", outputs={"answer": step(x=Input("x", int))})
    metric = custom(lambda outputs, example: outputs["answer"], "answered", bounds=world.bounds)
    rows = [Example(f"e{i}", {"x": i}) for i in range(valid + further)]
    settings = OptimizeSettings(
        seed=seed, iterations=decisions, alpha=alpha, concurrency=1, minibatch=1
    )
    jobs = [Job("relabel", ("step.label",))]
    method = Method("relabel", {"relabel": Relabel(world.candidate)}, jobs, Uniform())
    return Problem(
        system, rows[:1], rows[:valid], [], metric, settings, method, {}, further=rows[valid:]
    )


def decisions_of(made: Problem) -> list[Event]:
    """Run an optimization and return its decisions."""
    events: list[Event] = []
    with tempfile.TemporaryDirectory() as folder:
        recorder = Recorder(
            RunDirectory.create(Path(folder) / "run", "", {}),
            listener=events.append,
        )
        try:
            asyncio.run(OptimizationLoop(made, recorder).run())
        finally:
            recorder.close()
    return [event for event in events if event["event"] == "decision"]


def supported(
    world: World, seed: int, *, alpha: float = 0.05, valid: int = VALID, further: int = 0
) -> int:
    """Run an optimization and return the number of changes that a test supported."""
    found = decisions_of(problem(world, seed, alpha=alpha, valid=valid, further=further))
    assert len(found) == DECISIONS
    return sum(map(is_supported, found))
