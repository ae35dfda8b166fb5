"""Defects of other implementations of these methods that no test of one module would show: whole steps of training.

The list of all of them, and what guards against each, is docs/evidence/peer_defects.md.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("peft")

from benchmarks.simulated.toys import toy  # noqa: E402
from compound import System  # noqa: E402
from compound.api.optimize import run_optimization  # noqa: E402
from compound.core.example import Metric  # noqa: E402
from compound.engines.local.engine import TransformersEngine  # noqa: E402
from compound.evaluation.dataset import Dataset  # noqa: E402
from compound.evaluation.metrics.custom import custom  # noqa: E402
from compound.execution.rng import derive_seed  # noqa: E402
from compound.optimizers.weights.learner.samples import Sample  # noqa: E402
from compound.optimizers.weights.learner.trainer import Trainer  # noqa: E402
from training_settings import training  # noqa: E402


def trained_on(
    system: System,
    data: Dataset,
    metric: Metric,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    **weights: Any,
) -> list[tuple[str | None, list[Sample], list[Sample]]]:
    """Train with mmGRPO; return of each step the version at its beginning, what was given, and what had gradients."""
    steps: list[tuple[str | None, list[Sample], list[Sample]]] = []
    step, loss = Trainer.step, Trainer._loss

    def noted(self: Trainer, samples: Sequence[Sample], number: int, **how: Any) -> Any:
        steps.append((self.versions[next(iter(self.versions))][-1], list(samples), []))
        return step(self, samples, number, **how)

    def counted(self: Trainer, model: Any, batch: Any, *rest: Any) -> Any:
        steps[-1][2].extend(batch)
        return loss(self, model, batch, *rest)

    monkeypatch.setattr(Trainer, "step", noted)
    monkeypatch.setattr(Trainer, "_loss", counted)
    settings = training("mmgrpo", weights)
    engine = TransformersEngine(system.lm or "", dtype="float32")
    run_optimization(
        system, data, metric, settings, run_dir=folder / "run", engines=lambda _: engine
    )
    return steps


def rows(examples: Sequence[Any]) -> list[dict[str, Any]]:
    return [{"id": e.id, **e.inputs, **e.gold} for e in examples]


def drawn(outputs: Any, example: Any) -> float:
    """Score whatever was said, so that no group is without variance."""
    return derive_seed(0, json.dumps(outputs["said"])) % 1000 / 1000


def test_m1_a_step_trains_on_all_of_its_own_rollouts_and_on_no_others(
    toy_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = toy("chain", str(toy_model))
    data = Dataset.of(train=rows(task.train), valid=rows(task.valid[:5]))
    weights = {"steps": 3, "examples": 2, "runs": 4, "scale": "none"}  # no group is skipped
    steps = trained_on(task.system, data, custom(drawn, "drawn"), tmp_path, monkeypatch, **weights)
    assert len(steps) == 3
    assert len({version for version, _, _ in steps}) == 3
    for version, given, used in steps:
        assert len(given) == 2 * 4 * 3  # examples, runs, agents
        assert sorted(map(id, used)) == sorted(map(id, given))
        firsts = {s.tokens.adapter for s in given if s.component == "first"}
        assert firsts == {version}  # drawn with the weights of this step
