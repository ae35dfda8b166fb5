"""Killed while it samples, trains or stores, a training of weights goes on to the end it would have had."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("peft")
pytest.importorskip("litellm")

from benchmarks.simulated.toy_model import make_toy_model
from chaos.kills import Reference, killed_run, reference
from chaos.launcher import Death, Launcher
from chaos.workloads import Workload, workloads
from compound.optimizers.weights.recipes.mmgrpo import MMGRPOSettings
from training_settings import placed

pytestmark = pytest.mark.slow
LEARNER = "compound.optimizers.weights.learner."
CHECKPOINT = "compound.optimization.runs.directory:RunDirectory.checkpoint"
PLACES = {
    "sampling": Death("compound.engines.local.engine:TransformersEngine._answer", 5),
    "training": Death(f"{LEARNER}trainer:Trainer._loss", 4),
    "an adapter": Death(f"{LEARNER}adapters:Adapters._probe", 4, "before"),
    "optimizer states": Death(f"{LEARNER}trainer:Trainer._write", 2),
    "before the checkpoint": Death(CHECKPOINT, 4, "before"),
    "after the checkpoint": Death(CHECKPOINT, 4),
}
STEPS = {"steps": 3, "examples": 3, "runs": 3, "lr": 0.01, "minibatches": 2}
WORKLOADS = {
    **{workload.name: workload for workload in workloads() if workload.trains},
    **{
        name: Workload(
            name,
            "mmgrpo",
            trains=True,
            optimize={"mmgrpo": placed(MMGRPOSettings, **STEPS, **more)},
        )
        for name, more in {
            "ahead": {"max_staleness": 1},
            "evaluated": {"evaluation__every": 1, "evaluation__examples": 2},
        }.items()
    },
}
Find = Callable[[str], Reference]


@pytest.fixture(scope="module")
def launcher() -> Iterator[Launcher]:
    with Launcher() as launcher:
        yield launcher


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_toy_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def whole(launcher: Launcher, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Find:
    """Return what a training comes to when nobody kills it."""
    known: dict[str, Reference] = {}

    def find(name: str) -> Reference:
        if name not in known:
            folder = tmp_path_factory.mktemp("whole")
            known[name] = reference(launcher, WORKLOADS[name], folder, model)
        return known[name]

    return find


@pytest.mark.user_cache
@pytest.mark.parametrize(
    ("name", "place"),
    [
        *(("mmgrpo", place) for place in PLACES),
        *(("ahead", p) for p in ("training", "optimizer states", "after the checkpoint")),
        *(("evaluated", place) for place in ("an adapter", "before the checkpoint")),
        *((name, "optimizer states") for name in ("mappo", "mhgpo_rr", "mygo", "better_together")),
    ],
)
def test_a4_killed_anywhere_it_goes_on_to_the_same_weights(
    name: str, place: str, launcher: Launcher, whole: Find, model: Path, tmp_path: Path
) -> None:
    expected, death = whole(name), [PLACES[place]]
    record = killed_run(launcher, WORKLOADS[name], expected, death, tmp_path / "run", model)
    assert not record.problems, record
    assert record.codes == (-signal.SIGKILL, 0)
    assert record.same_spent


def test_sampling_ahead_is_another_training(whole: Find) -> None:
    assert whole("ahead").ending.records != whole("mmgrpo").ending.records
