"""Optimization runs on simulated systems, without a report; measures the result and the system runs."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict, Unpack, cast

from compound.api.description import describe, open_run
from compound.benchmarks.simulated.systems import Simulated, options_of
from compound.concurrency.blocking import run_blocking
from compound.graph.configuration import component_of
from compound.loop.loop import OptimizationLoop
from compound.narrowing import entry
from compound.optimization.problem import Problem
from compound.optimizers.methods import method
from compound.registry.engines import find_engine
from compound.runs.events import Event
from compound.runs.recorder import Recorder
from compound.settings.optimize import OptimizeSettings

# Conditions of the searches: outputs like those of a language model (each setting draws another answer),
# metric noise larger than the gain of one component, and too many options for an exhaustive search.
NOISE, BLUR, OPTIONS = 0.1, 0.5, 16


class Changed(TypedDict, total=False):
    """Fields of `Simulated` that a benchmark sets."""

    options: int
    interaction: float
    noise: float
    blur: float
    spread: tuple[float, ...]


def world(shape: str, seed: int, **changed: Unpack[Changed]) -> Simulated:
    """Return a simulated system with the conditions of the searches."""
    given: Changed = {"noise": NOISE, "blur": BLUR, "options": OPTIONS, **changed}
    return Simulated(shape, seed=seed, common=False, **given)


@dataclass(frozen=True)
class Outcome:
    """Result of an optimization.

    Attributes:
        start, reached: the expected reward before and after, as a share of the optimum.
        working: system runs spent and expected reward of the working configuration after each job.
        single: the gain of the best change of one component, as a share of the optimum; 0 at a component-wise
            maximum (theorem 4.2).
        accepted: number of accepted changes.
        runs: system runs spent.
    """

    start: float
    reached: float
    working: tuple[tuple[float, float], ...]
    single: float
    accepted: int
    runs: float


def search(world: Simulated, settings: OptimizeSettings) -> Outcome:
    """Optimize a simulated system, starting from the first option of each component."""
    received: list[Mapping[str, object]] = []
    with tempfile.TemporaryDirectory() as folder:
        system = world.system()
        problem = Problem(
            system, world.examples(100), world.examples(settings.valid_examples or 40, "valid"), [], world,
            settings, method(settings.method, system, settings), find_engine,
        )  # fmt: skip
        recorder = Recorder(open_run(Path(folder) / "run", "", describe(problem)), listener=received.append)
        try:
            run_blocking(OptimizationLoop(problem, recorder).run())
        finally:
            recorder.close()
        best = options_of(recorder.state.best or {}, world.names)
    optimum = world.optimum()[1] or 1.0  # if the optimum is 0, all shares are 0
    start = dict.fromkeys(world.names, 0)
    events = cast("list[Event]", received)
    accepted = sum(e["event"] == "decision" and e["accepted"] for e in events)
    return Outcome(
        world.value(start) / optimum, world.value(best) / optimum, _working(world, events, optimum),
        world.single(best) / optimum, accepted, float(events[-1]["spent"]["system_runs"]),
    )  # fmt: skip


def _working(world: Simulated, events: Sequence[Event], optimum: float) -> tuple[tuple[float, float], ...]:
    """Return system runs and share of the optimum after each job; a rejected sweep is rolled back."""
    best = dict.fromkeys(world.names, 0)
    working, found = dict(best), []
    for event in events:
        if event["event"] == "job":
            values = event["values"]
            working |= {component_of(key): entry(values, key, int) for key in values}
            found.append((float(event["spent"]["system_runs"]), world.value(working) / optimum))
        elif event["event"] == "decision":
            best = dict(working) if event["accepted"] else best
            working = dict(best)
    return tuple(found)
