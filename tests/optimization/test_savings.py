"""What local rewards may save: by hand, in words and in JSON, before the run and on measured prices."""

from __future__ import annotations

import asyncio
import json
import math
from pathlib import Path
from typing import Any

import pytest

from compound.api.estimate import estimate
from compound.api.optimize import make_problem, optimize
from compound.benchmarks.simulated.relays import Relay, RelayStep
from compound.components.flow import Map
from compound.components.function import Function
from compound.evaluation.dataset import Dataset
from compound.execution.executor import Executor
from compound.graph.component import Input, Output
from compound.graph.space import Choice
from compound.graph.system import System
from compound.optimization.bounds import Outlook
from compound.optimization.prices import Prices, estimate_prices, measure_prices
from compound.optimization.prospects import outlook
from compound.optimization.savings import LocalSavings, SystemSavings
from compound.optimizers.optimas.local_gains import RewardGuide, savings_of
from compound.optimizers.search.joint import JointSearch
from compound.optimizers.search.sources import CandidateSources
from compound.report.forecast import forecast
from compound.rewards.settings import RewardLearning
from compound.settings.optimize import OptimizeSettings, make_settings
from compound.spec import Program

SEARCH = JointSearch(CandidateSources(()), RewardGuide(RewardLearning()))
NOTHING = "nothing counted follows it"


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
    return make_settings({
        "method": method, "valid_size": 20, "candidates": 2, "minibatch": 4,
        "budget": {"system_runs": runs}, **own,
    })  # fmt: skip


def data(world: Relay) -> Dataset:
    def rows(split: str) -> list[dict[str, object]]:
        return [{"id": e.id, **e.inputs, **e.gold} for e in world.examples(30, split)]

    return Dataset.of(train=rows("train"), valid=rows("valid"), test=rows("test"))


def bound(system: System, component: str, prices: Prices) -> LocalSavings:
    keys = tuple(key for key in system.parameters if key.startswith(f"{component}."))
    (found,) = SEARCH.bound(Outlook(system, keys, [], 8, 8, 100, prices=prices)).savings
    return found


class TestByHand:
    def test_a_head_saves_its_tail(self) -> None:
        """Locally the searcher makes one of four calls, and the presenter, which makes none, shows its output."""
        system = headed()
        prices = estimate_prices(system)
        assert bound(system, "searcher", prices) == LocalSavings("searcher", 1.0, 0.25)
        assert bound(system, "searcher", prices).at_most == 4
        assert bound(system, "presenter", prices) == LocalSavings("presenter", 0.75, 0.0)
        assert bound(system, "presenter", prices).at_most == math.inf

    def test_the_last_component_saves_nothing(self) -> None:
        system = headed()
        found = bound(system, "shortener", estimate_prices(system))
        assert found == LocalSavings("shortener", 0.25, 0.25, NOTHING)
        assert (found.at_most, found.price) == (1.0, 0.25)

    def test_little_that_follows_is_not_worth_a_reward(self) -> None:
        """Seven calls of a component and one after it: 8/7 is less than 1.2."""
        system = Relay(2, 2).system()
        found = savings_of(system, "a", estimate_prices(system, {"a": 7, "b": 1}))
        assert found.unused_reason == "a global evaluation costs less than 1.2 local ones"
        assert found.at_most == 1

    def test_without_counted_calls_there_is_nothing_to_save(self) -> None:
        only = Function("only", show, order=Choice(0, 1))(found=Input("found", str))
        system = System("only", outputs={"answer": only})
        assert savings_of(system, "only", estimate_prices(system)).unused_reason == NOTHING

    def test_the_mean_over_jobs(self) -> None:
        """Of prices 1, 0.75, 0.5 and 0.25, local rewards leave 0.25 each: 2.5 / 1."""
        system = Relay(4, 4).system()
        prices = estimate_prices(system)
        whole = SystemSavings([(savings_of(system, name, prices), 1.0) for name in "abcd"])
        assert [each.at_most for each in whole.components] == [4, 3, 2, 1]
        assert whole.at_most == pytest.approx(2.5)
        twice = SystemSavings([(whole.components[0], 2.0), (whole.components[3], 1.0)])
        assert twice.at_most == pytest.approx((2 + 0.25) / (0.5 + 0.25))

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
        before = bound(system, "head", estimate_prices(system))
        after = bound(system, "head", measure_prices(system, [trace]))
        assert (before.global_price, before.local_price, before.at_most) == (1, 1 / 2, 2)
        assert (after.global_price, after.local_price, after.at_most) == (1, 1 / 4, 4)


class TestDocuments:
    @pytest.mark.parametrize(
        "savings",
        [
            LocalSavings("a", 1.0, 0.25),
            LocalSavings("b", 0.75, 0.0),
            LocalSavings("c", 0.25, 0.25, NOTHING),
        ],
    )
    def test_json_round_trip(self, savings: LocalSavings) -> None:
        document = json.loads(json.dumps(savings.to_json(), allow_nan=False))
        assert LocalSavings.from_json(document) == savings
        assert document["at_most"] == (None if savings.at_most == math.inf else savings.at_most)

    def test_words(self) -> None:
        system = headed()
        prices = estimate_prices(system)
        names = ("searcher", "presenter", "shortener")
        assert str(SystemSavings([(savings_of(system, name, prices), 1.0) for name in names])) == (
            "local rewards may make an evaluation of a candidate cheaper: "
            "searcher 4 times (1 of a run globally, 0.25 locally); "
            "presenter without limit (0.75 of a run globally, 0 locally); "
            "shortener none: nothing counted follows it; at most 4 times over all jobs"
        )


class TestBeforeARun:
    def test_the_outlook_declares_the_savings_of_optimas(self) -> None:
        world = Relay(4, 4)
        made = make_problem(world.system(), data(world), world, settings("optimas"), {})
        found = outlook(made)
        assert [row["component"] for row in found["savings"]["components"]] == list("abcd")
        assert [row["at_most"] for row in found["savings"]["components"]] == [4, 3, 2, 1]
        assert found["savings"]["at_most"] == pytest.approx(2.5)
        assert found["told"][-1].endswith(
            "d none: nothing counted follows it; at most 2.5 times over all jobs"
        )

    @pytest.mark.parametrize("method", ["search", "random"])
    def test_methods_without_local_rewards_declare_none(self, method: str) -> None:
        world = Relay(4, 4)
        made = make_problem(world.system(), data(world), world, settings(method), {})
        assert "savings" not in outlook(made)

    def test_the_dry_run_prints_them(self, tmp_path: Path) -> None:
        world = Relay(4, 4)
        program = Program(
            tmp_path / "relay.yaml", "", world.system(), data(world), world, settings("optimas"), {}
        )
        facts = estimate(program)
        assert json.loads(json.dumps(facts))["prospects"]["savings"]["at_most"] == 2.5
        assert "at most 2.5 times over all jobs" in forecast({**facts, "run": "runs/relay"})

    def test_the_run_records_them_before_anything_is_spent(self, tmp_path: Path) -> None:
        world = Relay(4, 4)
        optimize(
            world.system(), data(world), world, settings("optimas", 100), run_dir=tmp_path / "run", engines={}
        )
        first, *_ = map(json.loads, (tmp_path / "run" / "events.jsonl").read_text().splitlines())
        assert first["event"] == "outlook"
        assert first["savings"]["at_most"] == pytest.approx(2.5)
        assert first["spent"]["system_runs"] == 0
        assert any("at most 2.5 times over all jobs" in line for line in first["told"])
