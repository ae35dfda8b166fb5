"""Comparison of rewards with and without gold answers on the pairs of a run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.measure.gold_accuracy import (
    compare_rewards,
    has_gold_features,
    remove_gold_features,
)
from benchmarks.simulated.relay_searches import TRAIN, VALID, settings_of
from benchmarks.simulated.relays import Relay
from compound.api.description import describe, open_run
from compound.core.loops import run_blocking
from compound.evaluation.metrics.custom import custom
from compound.graph.registry.engines import find_engine
from compound.optimization.loop.loop import OptimizationLoop
from compound.optimization.method import Problem
from compound.optimization.runs.recorder import Recorder
from compound.optimizers.methods import method
from compound.rewards.inspection import Inspection

WORLD = Relay(4, 1, seed=3)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of `optimas` on a relay, in which only gold answers tell which outputs of the first step are good."""
    settings, system = settings_of("optimas", 800, 3), WORLD.system()
    made = method(settings.method, system, settings)
    valid = WORLD.examples(VALID, "valid")
    metric = custom(WORLD.score, thread="never")
    problem = Problem(system, WORLD.examples(TRAIN), valid, [], metric, settings, made, find_engine)
    folder = tmp_path_factory.mktemp("relay") / "run"
    recorder = Recorder(open_run(folder, "", describe(problem)))
    try:
        run_blocking(OptimizationLoop(problem, recorder).run())
    finally:
        recorder.close()
    return folder


@pytest.mark.slow
def test_only_the_reward_with_gold_answers_orders_the_outputs_of_a_relay(run: Path) -> None:
    found = compare_rewards(WORLD.system(), [run])
    assert list(found) == ["a"]  # the other steps have nothing to tune
    gold, without, difference = found["a"].gold, found["a"].without, found["a"].difference
    assert gold.inputs == without.inputs == difference.n >= 10
    assert gold.mean > 0.7
    assert without.mean < 0.6
    assert difference.mean == pytest.approx(gold.mean - without.mean)


@pytest.mark.slow
def test_only_gold_features_are_removed(run: Path) -> None:
    entry = next(e for e in Inspection.open(run).buffer.entries if has_gold_features(e))
    candidates = [replace(c, signals={**c.signals, "other": 1.0}) for c in entry.draw.candidates]
    kept = remove_gold_features(
        [replace(entry, draw=replace(entry.draw, candidates=tuple(candidates)))]
    )
    assert [c.signals for c in kept[0].draw.candidates] == [{"other": 1.0}] * len(candidates)
    assert kept[0].draw.inputs == entry.draw.inputs
    assert not has_gold_features(remove_gold_features([entry])[0])
