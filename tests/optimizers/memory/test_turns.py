"""Engines on the GPUs of the trainer sleep while it computes, and only then."""

from __future__ import annotations

import asyncio
import contextlib
import warnings
from collections.abc import AsyncIterator, Collection, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("peft")

from benchmarks.measure.learning_curves import SHARED, Case, Setup, train  # noqa: E402
from compound.core.engine import Completion, Request  # noqa: E402
from compound.engines.local.devices import Placement  # noqa: E402
from compound.engines.local.engine import TransformersEngine  # noqa: E402
from compound.optimizers.weights import training  # noqa: E402
from compound.optimizers.weights.bases import trainer_gpus, trainer_turn  # noqa: E402
from compound.optimizers.weights.distributed.learner import LearnerSettings  # noqa: E402
from compound.optimizers.weights.learner.trainer import Trainer  # noqa: E402
from compound.testing import ScriptedLM  # noqa: E402

FEW = {**SHARED, "steps": 2, "rollouts": {"examples": 2, "runs": 4}}


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


class Sleeper(TransformersEngine):
    """Engine that notes when it answers and sleeps; calls while it sleeps are errors."""

    events: list[str]
    gpus = ("7",)

    @contextlib.asynccontextmanager
    async def asleep(self, gpus: Collection[str]) -> AsyncIterator[bool]:
        if set(gpus).isdisjoint(self.gpus):
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
    monkeypatch: pytest.MonkeyPatch, method: str, gpus: tuple[str, ...], **settings: Any
) -> list[str]:
    """Train with an engine on the GPU 7 and a trainer on others; return what they did."""
    events: list[str] = []

    def noted(name: str) -> None:
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
        noted(name)
    monkeypatch.setattr(training, "trainer_gpus", lambda *_: gpus)
    train(Case("chain", method, 0), Setup({**FEW, **settings}, engine=engine))
    return events


def test_the_sampler_sleeps_in_every_step_of_the_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    events = trained(monkeypatch, "mmgrpo", ("6", "7"))
    steps = [event for event in events if event != "call"]
    assert steps == ["sleep", "step", "save", "release_cache", "wake"] * 2
    assert all("call" not in block for block in blocks(events))
    assert "call" in events[events.index("wake") : events.index("sleep", events.index("wake"))]


def test_the_sampler_sleeps_while_a_critic_computes_values(monkeypatch: pytest.MonkeyPatch) -> None:
    critic = {"critic": {"lr": 1e-2, "kl_reward": 0.01}}
    events = trained(monkeypatch, "mappo", ("7",), **critic)
    assert {event for block in blocks(events) for event in block} == {
        "step",
        "save",
        "values",
        "divergences",
        "release_cache",
    }
    assert len(blocks(events)) == 4
    outside = [event for event in events if event in ("step", "values", "divergences")]
    assert len(outside) == sum(event in outside for block in blocks(events) for event in block)


def blocks(events: list[str]) -> list[list[str]]:
    """Return the events between sleep and wake."""
    starts = [i for i, event in enumerate(events) if event == "sleep"]
    return [events[i + 1 : events.index("wake", i)] for i in starts]


@pytest.mark.parametrize("gpus", [(), ("6",)])
def test_on_other_devices_nothing_sleeps(
    monkeypatch: pytest.MonkeyPatch, gpus: tuple[str, ...]
) -> None:
    events = trained(monkeypatch, "mmgrpo", gpus)
    assert not {"sleep", "release_cache"} & set(events)
    assert events.count("step") == 2


def test_the_sampler_is_awake_after_a_step_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(Trainer, "step", failing)
    events: list[str] = []
    monkeypatch.setattr(Sleeper, "events", events, raising=False)
    monkeypatch.setattr(training, "trainer_gpus", lambda *_: ("7",))
    with pytest.raises(ZeroDivisionError):
        train(
            Case("chain", "mmgrpo", 0),
            Setup(FEW, engine=lambda folder: Sleeper(folder, dtype="float32")),
        )
    assert events[-2:] == ["sleep", "wake"]


def test_engines_that_cannot_sleep_are_left_alone() -> None:
    async def turn() -> None:
        async with trainer_turn([ScriptedLM(["a"])], ["0"], Any):  # type: ignore[arg-type]  # not used
            pass

    asyncio.run(turn())


@pytest.mark.parametrize(
    ("device", "processes", "visible", "wanted"),
    [
        ("auto", 1, None, ("1",)),
        ("cuda:0", 1, None, ("0",)),
        ("cuda:1", 1, "4,5", ("5",)),
        ("cuda", 3, None, ("0", "1", "2")),
        ("cuda", 2, "GPU-a,GPU-b", ("GPU-a", "GPU-b")),
        ("cpu", 1, None, ()),
        ("cpu", 2, None, ()),
    ],
)
def test_the_gpus_of_a_trainer_are_named_as_those_of_servers(
    monkeypatch: pytest.MonkeyPatch,
    device: str,
    processes: int,
    visible: str | None,
    wanted: tuple[str, ...],
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert trainer_gpus(Placement(device), LearnerSettings(processes=processes)) == wanted
