"""Where samples may be an update old, the next step's are drawn while a step is trained."""

from __future__ import annotations

import json
import threading
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("peft")

from benchmarks.measure import learning_curves  # noqa: E402
from benchmarks.measure.learning_curves import SHARED, Case, train  # noqa: E402
from compound.core.engine import TokenRecord  # noqa: E402
from compound.engines.local.engine import TransformersEngine  # noqa: E402
from compound.optimizers.weights.learner.samples import Sample  # noqa: E402
from compound.optimizers.weights.learner.trainer import StaleSamples, Trainer  # noqa: E402
from compound.optimizers.weights.recipes.recipe import CreditedSamples  # noqa: E402
from compound.optimizers.weights.steps import DRAWN, StepBatch  # noqa: E402

LONG = 120.0  # seconds after which what should have begun will not


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


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


def test_samples_that_are_an_update_old_are_learned_from(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {
        **SHARED,
        "steps": 20,
        "optimizer": {"lr": 5e-3},
        "rollouts": {"examples": 8, "runs": 8, "max_staleness": 1},
    }
    monkeypatch.setattr(learning_curves, "METHODS", {"chain": {"mmgrpo": settings}})
    found: Any = train(Case("chain", "mmgrpo", 0))
    assert found["after"]["score"] - found["before"]["score"] > 0.4, found


def test_what_was_drawn_comes_back_from_a_file_to_the_last_digit(tmp_path: Path) -> None:
    tokens = TokenRecord((1, 2), (3, 4), (-0.1, -1 / 3), "stop", "9f")
    samples = [
        Sample(
            "a",
            "e",
            "a[0]",
            0,
            tokens,
            1 / 3,
            ("e", "a", 0),
            2,
            False,
            (0.1, 0.2),
            (0.3, 0.4),
            (1.0, 1.0),
        ),
        Sample("b", "e", "b", 1, TokenRecord((1,), (2,), (), "length"), 0.0),
    ]
    drawn = StepBatch(CreditedSamples(samples, [1 / 3, 0.0], {"groups": 2}), {"lost": 0}, version=6)
    drawn.write(tmp_path)
    assert StepBatch.read(tmp_path, step=7) == drawn


def test_batches_of_earlier_releases_were_drawn_one_step_ahead(tmp_path: Path) -> None:
    StepBatch(CreditedSamples([], []), {}, version=3).write(tmp_path)
    found = json.loads((tmp_path / DRAWN).read_text())
    del found["version"]
    (tmp_path / DRAWN).write_text(json.dumps(found))
    assert StepBatch.read(tmp_path, step=7).version == 6


def test_batches_of_weights_that_are_too_old_are_refused() -> None:
    drawn = StepBatch(CreditedSamples([], []), {}, version=3)
    drawn.check_staleness(4, 1, "optimize.mygo")
    with pytest.raises(
        StaleSamples, match=r"step 6 were drawn with the weights of step 3, which are 2 steps"
    ):
        drawn.check_staleness(5, 1, "optimize.mygo")
