"""Engines on the GPUs of the trainer sleep while it computes, and only then."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import AsyncIterator, Collection
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("peft")

from benchmarks.measure.learning_curves import SHARED, Case, Setup, train  # noqa: E402
from compound.core.engine import Completion, Request  # noqa: E402
from compound.engines.local.devices import Placement  # noqa: E402
from compound.engines.local.engine import TransformersEngine  # noqa: E402
from compound.optimizers.weights.distributed.learner import LearnerSettings  # noqa: E402
from compound.optimizers.weights.learner.trainer import Trainer  # noqa: E402

FEW = {**SHARED, "steps": 2, "rollouts": {"examples": 2, "runs": 4}}
CRITIC = {"critic": {"lr": 1e-2, "kl_reward": 0.01}}


class Sleeper(TransformersEngine):
    """Engine on the GPU 7 that notes when it answers and sleeps."""

    events: list[str]

    @contextlib.asynccontextmanager
    async def asleep(self, gpus: Collection[str]) -> AsyncIterator[bool]:
        if "7" not in gpus:
            yield False
            return
        self.events.append("sleep")
        try:
            yield True
        finally:
            self.events.append("wake")

    async def generate(self, request: Request) -> Completion:
        self.events.append("call")
        return await super().generate(request)


def trained(
    monkeypatch: pytest.MonkeyPatch,
    method: str,
    gpus: list[str],
    events: list[str],
    **settings: Any,
) -> None:
    """Train on some GPUs, and note what sampler and trainer do."""

    def note(name: str) -> None:
        made = getattr(Trainer, name)

        def compute(trainer: Any, *arguments: Any, **named: Any) -> Any:
            events.append(name)
            return made(trainer, *arguments, **named)

        monkeypatch.setattr(Trainer, name, compute)

    def engine(folder: str) -> Sleeper:
        sleeper = Sleeper(folder, dtype="float32")
        sleeper.events = events
        return sleeper

    for name in ("step", "values", "divergences", "save", "release_cache"):
        note(name)
    monkeypatch.setattr(LearnerSettings, "gpus", lambda *_: gpus)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        train(Case("chain", method, 0), Setup({**FEW, **settings}, engine=engine))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "settings", "before"),
    [
        ("mmgrpo", {}, []),
        ("mappo", CRITIC, ["sleep", "values", "divergences", "release_cache", "wake"]),
    ],
)
def test_the_sampler_sleeps_whenever_the_trainer_computes(
    monkeypatch: pytest.MonkeyPatch, method: str, settings: dict[str, Any], before: list[str]
) -> None:
    events: list[str] = []
    trained(monkeypatch, method, ["6", "7"], events, **settings)
    turn = [*before, "sleep", "step", "save", "release_cache", "wake"]
    assert [name for name in events if name != "call"] == turn * 2
    assert events.count("call") > 2
    naps = [i for i, event in enumerate(events) if event == "sleep"]
    assert not any("call" in events[i : events.index("wake", i)] for i in naps)


def test_on_other_devices_nothing_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    trained(monkeypatch, "mmgrpo", ["6"], events)
    assert not {"sleep", "release_cache"} & set(events)
    assert events.count("step") == 2


def test_the_sampler_is_awake_after_a_step_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(Trainer, "step", failing)
    events: list[str] = []
    with pytest.raises(ZeroDivisionError):
        trained(monkeypatch, "mmgrpo", ["7"], events)
    assert events[-3:] == ["sleep", "step", "wake"]


@pytest.mark.parametrize(
    ("device", "processes", "visible", "wanted"),
    [
        ("auto", 1, None, ["1"]),
        ("cuda:0", 1, None, ["0"]),
        ("cuda:1", 1, "4,5", ["5"]),
        ("cuda", 3, None, ["0", "1", "2"]),
        ("cuda", 2, "GPU-a,GPU-b", ["GPU-a", "GPU-b"]),
        ("cpu", 2, None, []),
    ],
)
def test_the_gpus_of_a_trainer_are_named_as_those_of_servers(
    monkeypatch: pytest.MonkeyPatch,
    device: str,
    processes: int,
    visible: str | None,
    wanted: list[str],
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert LearnerSettings(processes=processes).gpus(Placement(device)) == wanted
