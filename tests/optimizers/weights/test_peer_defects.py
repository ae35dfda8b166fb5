"""Defects of other implementations of these methods that no test of one module would show: whole steps of training.

The list of all of them, and what guards against each, is docs/evidence/peer_defects.md.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("peft")

from compound.execution.rng import derive_seed
from compound.metrics import custom
from compound.optimizers.weights.learner.samples import Sample
from compound.optimizers.weights.learner.trainer import Trainer
from trainings.jobs import train_toy


def drawn(outputs: Any, example: Any) -> float:
    """Score whatever was said, so that no group is without variance."""
    return derive_seed(0, json.dumps(outputs["said"])) % 1000 / 1000


def test_m1_a_step_trains_on_all_of_its_own_rollouts_and_on_no_others(
    toy_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # of each step the version at its beginning, what was given, and what had gradients
    steps: list[tuple[str | None, list[Sample], list[Sample]]] = []
    step, loss = Trainer.step, Trainer._loss

    def noted(self: Trainer, samples: Sequence[Sample], number: int) -> Any:
        steps.append((self.versions["first"][-1], list(samples), []))
        return step(self, samples, number)

    def counted(self: Trainer, model: Any, batch: Any, *rest: Any) -> Any:
        steps[-1][2].extend(batch)
        return loss(self, model, batch, *rest)

    monkeypatch.setattr(Trainer, "step", noted)
    monkeypatch.setattr(Trainer, "_loss", counted)
    given: dict[str, Any] = {"steps": 3, "examples": 2, "runs": 4, "scale": "none"}  # none skipped
    train_toy(toy_model, tmp_path / "run", metric=custom(drawn, "drawn"), **given)
    assert len(steps) == len({version for version, _, _ in steps}) == 3
    for version, samples, used in steps:
        assert len(samples) == 2 * 4 * 3  # examples, runs, agents
        assert sorted(map(id, used)) == sorted(map(id, samples))
        firsts = {s.tokens.adapter for s in samples if s.component == "first"}
        assert firsts == {version}  # drawn with the weights of this step
