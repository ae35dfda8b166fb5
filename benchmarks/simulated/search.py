"""Whole optimizations of simulated systems, without a report: what a method reaches, and in how many runs."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict, Unpack, cast

from compound.api.optimize import describe, open_run
from compound.benchmarks.simulated.systems import Simulated, options_of
from compound.concurrency.blocking import blocking
from compound.graph.configuration import component_of
from compound.loop.loop import OptimizationLoop
from compound.narrowing import entry
from compound.optimization.problem import Problem
from compound.optimizers.methods import method
from compound.registry.engines import find_engine
from compound.runs.events import Event
from compound.runs.recorder import Recorder
from compound.settings.optimize import OptimizeSettings

# What the searches run under: outputs as a language model's (another setting draws another answer), a metric
# whose noise is larger than what one component can gain, and more options than can be tried one by one.
NOISE, BLUR, OPTIONS = 0.1, 0.5, 16


class Changed(TypedDict, total=False):
    """Fields of `Simulated` that a benchmark sets."""

    options: int
    interaction: float
    noise: float
    blur: float
    spread: tuple[float, ...]


def world(shape: str, seed: int, **changed: Unpack[Changed]) -> Simulated:
    """Return a simulated system of the searches."""
    given: Changed = {"noise": NOISE, "blur": BLUR, "options": OPTIONS, **changed}
    return Simulated(shape, seed=seed, common=False, **given)


@dataclass(frozen=True)
class Outcome:
    """What an optimization came to.

    Attributes:
        start, reached: the expected reward before and after, as a share of the optimum.
        working: that of the configuration under way at the end of each job, with the system runs spent.
        single: what the best change of one component would still add, as a share of the optimum: nothing, at
            a component-wise maximum (theorem 4.2).
        accepted: how many changes were accepted.
        runs: system runs spent.
    """

    start: float
    reached: float
    working: tuple[tuple[float, float], ...]
    single: float
    accepted: int
    runs: float


def search(world: Simulated, settings: OptimizeSettings) -> Outcome:
    """Optimize a simulated system from its first options on."""
    heard: list[Mapping[str, object]] = []
    with tempfile.TemporaryDirectory() as folder:
        system = world.system()
        problem = Problem(
            system, world.examples(100), world.examples(settings.valid_size or 40, "valid"), [], world,
            settings, method(settings.method, system, settings), find_engine,
        )  # fmt: skip
        recorder = Recorder(open_run(Path(folder) / "run", "", describe(problem)), listener=heard.append)
        try:
            blocking(OptimizationLoop(problem, recorder).run())
        finally:
            recorder.close()
        best = options_of(recorder.state.best or {}, world.names)
    optimum = world.optimum()[1] or 1.0  # where nothing can be gained, all shares are 0
    start = dict.fromkeys(world.names, 0)
    events = cast("list[Event]", heard)
    accepted = sum(e["event"] == "decision" and e["accepted"] for e in events)
    return Outcome(
        world.value(start) / optimum, world.value(best) / optimum, _working(world, events, optimum),
        world.single(best) / optimum, accepted, float(events[-1]["spent"]["system_runs"]),
    )  # fmt: skip


def _working(world: Simulated, events: Sequence[Event], optimum: float) -> tuple[tuple[float, float], ...]:
    """Return system runs and share of the optimum after each job; a refused sweep falls back."""
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
