"""Settings of additional draws: different ones as long as there are any."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from benchmarks.simulated.systems import Simulated
from compound.components.function import Function
from compound.components.llm import LLM
from compound.core.narrowing import entry
from compound.execution.executor import Executor
from compound.graph.component import Component
from compound.graph.space import Choice, Float, Int, Space, Text
from compound.rewards.candidates import Sampling
from compound.rewards.pairs import CallSettings, collect, settings_of_draws


def step(x: float, by: object = 1, rounds: int = 1) -> float:
    return x


def made(
    component: Component, current: CallSettings, *proposals: CallSettings, draws: int, seed: int = 0
) -> list[CallSettings]:
    return settings_of_draws(component, current, proposals, draws, np.random.default_rng(seed))


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("space", [Choice(1, 2, 3, 4), Int(1, 4), Int(1, 4, log=True)])
def test_a_small_space_is_drawn_without_replacement(space: Space, seed: int) -> None:
    """Independent draws found 1.74 of the 3 other values, and drew the current one again."""
    found = made(Function("step", step, by=space), {"by": 2}, draws=3, seed=seed)
    assert sorted(entry(settings, "by", int) for settings in found) == [1, 3, 4]


def test_a_deterministic_component_is_not_drawn_twice_with_equal_settings() -> None:
    component = Function("step", step, by=Choice(1, 2, 3), rounds=Choice(1, 2))
    found = made(component, {"by": 1, "rounds": 1}, draws=20)
    assert len({(s["by"], s["rounds"]) for s in found}) == len(found) == 5


def test_all_draws_of_a_number_differ() -> None:
    found = made(Function("step", step, by=Float(0.0, 1.0)), {"by": 0.0}, draws=8)
    assert len({entry(settings, "by", float) for settings in found}) == 8


def test_proposals_come_first_and_each_once() -> None:
    """Every second draw of a stochastic component keeps its settings; half of the proposals were skipped."""
    llm = LLM("llm", prompt=Text("Own."), temperature=1.0)
    proposals = [{"prompt": name} for name in ("Own.", "one", "two", "three")]
    found = made(llm, {"prompt": "Own.", "temperature": 1.0}, *proposals, draws=8)
    assert sorted(entry(found[i], "prompt", str) for i in (0, 2, 4)) == ["one", "three", "two"]
    assert [found[i] for i in (1, 3, 5, 6, 7)] == [{}] * 5


def test_numbers_follow_proposals_and_a_temperature_comes_last() -> None:
    llm = LLM("llm", prompt=Text("Own."), temperature=0.0, max_tokens=Choice(8, 16))
    own = {"prompt": "Own.", "temperature": 0.0, "max_tokens": 8}
    found = made(llm, own, {"prompt": "Other."}, {"prompt": "Other."}, draws=4)
    assert found == [
        {"prompt": "Other."},
        {"max_tokens": 16},
        {"temperature": 1.0},
        {"temperature": 1.0},
    ]


def test_without_anything_to_vary_there_are_no_draws() -> None:
    assert made(Function("step", step), {}, draws=3) == []


def test_collecting_finds_all_other_options() -> None:
    world = Simulated("chain", options=4, noise=0.0)
    executor, system = Executor(), world.system()

    async def draws() -> list[int]:
        rows = world.examples(10)
        traced = [
            (row, executor.settle(await executor.run(system, row.inputs, example=row.id)))
            for row in rows
        ]
        found = await collect(executor, system, traced, ["a"], world, sampling=Sampling(samples=3))
        return [len(draw.candidates) for draw in found.draws]

    assert asyncio.run(draws()) == [4] * 10
