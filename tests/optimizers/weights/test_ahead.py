"""Where samples may be an update old, the next step's are drawn while a step is trained."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("peft")

from benchmarks.measure import learning_curves  # noqa: E402
from benchmarks.measure.learning_curves import SHARED, Case, train  # noqa: E402
from compound.engines.local.engine import TransformersEngine  # noqa: E402
from compound.optimizers.weights.learner.samples import Sample  # noqa: E402
from compound.optimizers.weights.learner.trainer import Trainer  # noqa: E402

LONG = 120.0  # seconds after which what should have begun will not


pytestmark = pytest.mark.filterwarnings("ignore")


def test_sampling_goes_on_while_a_step_is_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = 4
    settings = {
        **SHARED,
        "steps": steps,
        "rollouts": {"examples": 2, "runs": 4, "max_staleness": 1},
    }
    monkeypatch.setattr(learning_curves, "METHODS", {"chain": {"mmgrpo": settings}})
    asked, generate, step = threading.Event(), TransformersEngine.generate, Trainer.step
    met: list[bool] = []
    sampled_by: list[set[str]] = []
    present: list[set[str]] = []

    async def noted(engine: Any, request: Any) -> Any:
        asked.set()
        return await generate(engine, request)

    def waiting(trainer: Any, samples: Sequence[Sample], number: int, **named: Any) -> Any:
        asked.clear()
        met.append(asked.wait(LONG if number + 1 < steps else 0.0))
        sampled_by.append({sample.tokens.adapter for sample in samples})
        present.append({versions[-1] for versions in trainer.versions.values()})
        return step(trainer, samples, number, **named)

    monkeypatch.setattr(TransformersEngine, "generate", noted)
    monkeypatch.setattr(Trainer, "step", waiting)
    train(Case("chain", "mmgrpo", 0))
    assert met == [True] * (steps - 1) + [False]
    assert sampled_by[0] == sampled_by[1] == present[0] == {""}
    for number in range(2, steps):
        assert sampled_by[number] == present[number - 1] != present[number]
