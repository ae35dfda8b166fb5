"""Savings of local rewards: by hand, in words, before the run and on measured prices."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path
from typing import Any

import pytest

from benchmarks.simulated.relays import Relay, RelayStep
from compound import Choice, Dataset, Executor, Function, Map, System
from compound.api.estimate import estimate
from compound.graph.component import Input, Output
from compound.graph.registry.engines import find_engine
from compound.optimization.prices import estimate_prices, measure_prices
from compound.optimization.settings.optimize import OptimizeSettings, make_settings
from compound.optimizers.search.local_gains import (
    LocalSavings,
    savings_of,
    total_savings,
)
from compound.report import forecast
from compound.yaml import Program


def step(name: str, first: bool = False, options: int = 2, **reads: Any) -> Output:
    node = RelayStep(name, first, (0.5,) * options, 0.1, 0)(**reads)
    assert isinstance(node, Output)
    return node


def show(found: str, order: int) -> str:
    return found


def headed() -> System:
    """A counted step, a tuned function, a tail of two counted steps, and a tuned last one: four counted calls."""
    question = Input("question", str)
    first = step("searcher", True, question=question)
    shown = Function("presenter", show, order=Choice(0, 1))(found=first)
    drafted = step("quoter", options=1, question=question, found=shown)
    drafted = step("drafter", options=1, question=question, found=drafted)
    last = step("shortener", question=question, found=drafted)
    return System("headed", outputs={"answer": last})


def settings(method: str, runs: float = 400) -> OptimizeSettings:
    own = {"optimas": {"backbone": {"model": "none"}}} if method == "optimas" else {}
    return make_settings(
        {
            "method": method,
            "valid_size": 20,
            "candidates": 2,
            "minibatch": 4,
            "budget": {"system_runs": runs},
            **own,
        }
    )


def data(world: Relay) -> Dataset:
    def rows(split: str) -> list[dict[str, object]]:
        return [{"id": e.id, **e.inputs, **e.gold} for e in world.examples(30, split)]

    return Dataset.of(train=rows("train"), valid=rows("valid"), test=rows("test"))


class TestByHand:
    def test_a_head_saves_its_tail(self) -> None:
        """Locally the searcher makes one of four calls, and the presenter, which makes none, shows its output."""
        system = headed()
        prices = estimate_prices(system)
        searcher, presenter = (savings_of(system, n, prices) for n in ("searcher", "presenter"))
        assert searcher == LocalSavings("searcher", 1.0, 0.25)
        assert total_savings([searcher]) == 4
        assert presenter == LocalSavings("presenter", 0.75, 0.0)
        assert total_savings([presenter]) == math.inf

    def test_measured_prices_replace_the_estimates(self) -> None:
        """The number of items is known from traces only: two calls per run before, four after."""
        each = step("each", options=1, question=Input("q", str), found=Input("y", str))
        body = System("item", outputs={"y": each})

        def items(found: str) -> list[str]:
            return ["s1", "s2", "s3"]

        question = Input("question", str)
        listed = Function("items", items)(found=step("head", True, question=question))
        mapped = Map("all", body, over="y")(y=listed, q=question)
        system = System("mapped", outputs={"ys": mapped})
        executor = Executor()
        trace = asyncio.run(executor.run(system, {"question": "?"}, example="e"))
        before = savings_of(system, "head", estimate_prices(system))
        after = savings_of(system, "head", measure_prices(system, [trace]))
        assert before == LocalSavings("head", 1, 1 / 2)
        assert after == LocalSavings("head", 1, 1 / 4)


@pytest.mark.parametrize(("method", "told"), [("optimas", True), ("search", False)])
def test_a_dry_run_tells_them_of_local_rewards(method: str, told: bool, tmp_path: Path) -> None:
    world = Relay(4, 4)
    path, world_data = tmp_path / "relay.yaml", data(world)
    program = Program(path, "", world.system(), world_data, world, settings(method), find_engine)
    text = forecast({**estimate(program), "run": "runs/relay"})
    assert ("d none: nothing counted follows it; at most 2.5 times in all" in text) is told
