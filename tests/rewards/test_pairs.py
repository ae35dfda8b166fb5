"""Preference pairs, on simulated systems whose downstream values are known."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import numpy as np
import pytest

from benchmarks.simulated.systems import SHAPES, Simulated, options_of
from compound import LLM, Budget, Choice, Example, Executor, Function, Input, System, Trace
from compound.core.errors import BudgetExhausted, DeclarationError
from compound.core.narrowing import entry
from compound.evaluation.evaluate import EvaluationRules
from compound.execution.budget import Meter
from compound.execution.cache import MemoryCache
from compound.metrics import custom, exact_match
from compound.rewards.candidates import Candidate, Sampling, is_decided
from compound.rewards.pairs import WARM, Collection, Draw, collect, ordered_pairs
from compound.testing import ScriptedLM


def traces(executor: Executor, system: System, rows: list[Example]) -> list[tuple[Example, Trace]]:
    async def run() -> list[Trace]:
        return [await executor.run(system, row.inputs, example=row.id) for row in rows]

    return [
        (row, executor.settle(trace)) for row, trace in zip(rows, asyncio.run(run()), strict=True)
    ]


def collected(
    world: Simulated, n: int = 6, executor: Executor | None = None, **more: Any
) -> Collection:
    executor = executor or Executor()
    system = world.system()
    given_ = {"sampling": Sampling(), **more}
    traced = traces(executor, system, world.examples(n))
    return asyncio.run(collect(executor, system, traced, world.names, world, **given_))


def draw(*rewards: tuple[float, ...]) -> Draw:
    candidates = tuple(
        Candidate({"y": i}, values, certain=len(values) == 1) for i, values in enumerate(rewards)
    )
    return Draw("a", "a", "e", "digest", {"x": 1}, candidates)


def test_d4_pairs_go_in_both_directions_and_the_largest_gaps_come_first() -> None:
    """D4: of two candidates only the later could win, which dropped half of the pairs."""
    found = ordered_pairs(draw((0.5,), (1.0,), (0.2,)), Sampling())
    assert [(p.chosen["y"], p.rejected["y"], round(p.gap, 9)) for p in found] == [
        (1, 2, 0.8),
        (1, 0, 0.5),
        (0, 2, 0.3),
    ]
    assert len(ordered_pairs(draw((0.5,), (1.0,), (0.2,)), Sampling(pairs=2))) == 2


@pytest.mark.parametrize("shape", SHAPES)
def test_without_noise_downstream_every_pair_has_the_known_order(shape: str) -> None:
    """Outputs vary by the settings drawn; what follows is certain, so that one run of it tells all."""
    world = Simulated(shape, interaction=0.3, noise=0.0, seed=2)
    found = collected(world, sampling=Sampling(samples=4))
    options = options_of(world.system().configuration, world.names)
    x = {example.id: entry(example.inputs, "x", float) for example in world.examples(6)}
    assert {pair.component for pair in found.pairs} == set(world.names)
    for pair in found.pairs:
        known = [
            world.downstream(
                options, {pair.component: entry(outputs, "y", (int, float))}, x[pair.example]
            )
            for outputs in (pair.chosen, pair.rejected)
        ]
        assert known[0] - known[1] == pytest.approx(pair.gap)
    assert all(len(c.rewards) == 1 for d in found.draws for c in d.candidates)


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
def test_d4_the_current_output_wins_and_loses_like_any_other(shape: str) -> None:
    """D4: pairs were taught to prefer the status quo; here every decided pair is there, whoever wins."""
    world = Simulated(shape, noise=0.3, seed=4)
    found = collected(world, n=40)
    current = {(d.component, d.example): d.candidates[0].outputs for d in found.draws}
    won, lost = 0, 0
    for pair in found.pairs:
        own = current[pair.component, pair.example]
        won, lost = won + (pair.chosen == own), lost + (pair.rejected == own)
    assert len(found.pairs) == sum(
        is_decided(a, b, Sampling().level)
        for d in found.draws
        for a, b in itertools.combinations(d.candidates, 2)
    )
    assert min(won, lost) > 0.25 * (won + lost) > 10


def test_d4_a_gold_answer_is_never_a_candidate() -> None:
    """The reference added it to the last component's outputs with score 1: no model writes like that."""
    lm = ScriptedLM(lambda _, rng: f"{rng.integers(5)}")
    llm = LLM("llm", prompt="Say.", temperature=1.0)
    system = System("one", outputs={"y": llm(question=Input("question"))}, lm="lm")
    executor = Executor({"lm": lm})
    rows = [
        Example(f"e{i}", {"question": f"q{i}"}, {"y": "gold", "gd_answer": "gold"})
        for i in range(8)
    ]
    found = asyncio.run(
        collect(executor, system, traces(executor, system, rows), ["llm"], exact_match("y"))
    )
    written = {
        candidate.outputs["output"] for draw_ in found.draws for candidate in draw_.candidates
    }
    assert written == set("01234")


def test_d9_a_component_without_chance_is_drawn_at_a_temperature() -> None:
    """D9: the sampling temperature never reached the component, and at 0 all its outputs were one."""
    lm = ScriptedLM(lambda message, rng: f"{rng.integers(10**9)}")
    llm = LLM("llm", prompt="Say.", temperature=0.0)
    system = System("one", outputs={"y": llm(question=Input("question"))}, lm="lm")
    executor = Executor({"lm": lm}, cache=MemoryCache())
    traced = traces(executor, system, [Example("e", {"question": "q"}, {"y": "1"})])
    found = asyncio.run(
        collect(executor, system, traced, ["llm"], custom(lambda o, _: float(o["y"])))
    )
    assert [request.temperature for request in lm.requests] == [0.0, WARM, WARM, WARM]
    assert len(found.draws[0].candidates) == 4
    assert found.pairs


def test_d10_outputs_of_two_components_are_scored_in_forks_too() -> None:
    """D10: where the final outputs came from two components, every rollout scored minus infinity."""

    def noisy(x: float, rng: np.random.Generator) -> float:
        return x + float(rng.normal())

    x = Input("x", float)
    system = System("two", outputs={"a": Function("a", noisy)(x=x), "b": Function("b", noisy)(x=x)})
    executor = Executor()
    traced = traces(executor, system, [Example("e", {"x": 0.0}, {})])
    found = asyncio.run(
        collect(executor, system, traced, ["a", "b"], custom(lambda o, _: o["a"] + 2 * o["b"]))
    )
    base = traced[0][1].outputs
    for draw_ in found.draws:
        for candidate in draw_.candidates:
            outputs: dict[str, Any] = {**base, draw_.component: candidate.outputs["output"]}
            (reward,) = candidate.rewards
            assert reward == pytest.approx(outputs["a"] + 2 * outputs["b"])


@pytest.mark.parametrize("failure_score", [0.0, -1.0])
def test_d10_an_output_that_breaks_what_follows_gets_the_failure_score(
    failure_score: float,
) -> None:
    """D10: crashes vanished from the mean or were minus infinity; here they are a reward like any other."""

    def scale(x: float, by: int) -> float:
        return x * by

    def picky(x: float) -> float:
        if x > 2:
            raise RuntimeError("too much")
        return x

    step = Function("scale", scale, by=Choice(1, 2, 3))(x=Input("x", float))
    system = System("s", outputs={"y": Function("picky", picky)(x=step)})
    executor = Executor()
    traced = traces(executor, system, [Example("e", {"x": 1.0}, {})])
    found = asyncio.run(
        collect(
            executor,
            system,
            traced,
            ["scale"],
            custom(lambda o, _: o["y"]),
            sampling=Sampling(samples=12),
            rules=EvaluationRules(failure_score=failure_score),
        )
    )
    rewards = {c.outputs["output"]: c.rewards for c in found.draws[0].candidates}
    assert rewards == {1.0: (1.0,), 2.0: (2.0,), 3.0: (failure_score,)}
    assert (2.0, 3.0) in {(p.chosen["output"], p.rejected["output"]) for p in found.pairs}


@pytest.mark.parametrize("n", [1, 2, 5])
def test_calls_are_those_of_the_formula(n: int) -> None:
    """Node k of a chain of n: S draws of it, and m runs of the n - k after it for each of S + 1 candidates."""
    noise = 0.2

    def noisy(x: float, rng: np.random.Generator) -> float:
        return x + noise * float(rng.normal())

    source: Any = Input("x", float)
    for k in range(1, n + 1):
        source = Function(f"s{k}", noisy)(x=source)
    system = System("line", outputs={"y": source})
    executor = Executor()
    traced = traces(executor, system, [Example("e", {"x": 0.0}, {})])
    metric = custom(lambda outputs, _: outputs["y"], "y")
    sampling = Sampling(samples=3, rollouts=2, max_rollouts=2)
    for k in range(1, n + 1):
        found = asyncio.run(collect(executor, system, traced, [f"s{k}"], metric, sampling=sampling))
        rollouts = 2 if k < n else 1  # nothing follows the last: its output is the result
        assert found.calls == 3 + rollouts * 4 * (n - k)
        assert found.system_runs == pytest.approx(found.calls / n)


def test_settings_are_drawn_where_drawing_again_gives_nothing_new() -> None:
    def scale(x: float, by: int) -> float:
        return x * by

    system = System(
        "s", outputs={"y": Function("scale", scale, by=Choice(1, 2, 3))(x=Input("x", float))}
    )
    executor = Executor()
    traced = traces(executor, system, [Example("e", {"x": 1.0}, {})])
    metric = custom(lambda o, _: -abs(o["y"] - 2), "near")
    found = asyncio.run(
        collect(executor, system, traced, ["scale"], metric, sampling=Sampling(samples=12))
    )
    assert {c.outputs["output"]: c.settings.get("by") for c in found.draws[0].candidates[1:]} == {
        2.0: 2,
        3.0: 3,
    }
    assert [p.chosen["output"] for p in found.pairs] == [2.0, 2.0]


def test_a_call_that_failed_and_a_draw_that_fails_are_no_candidates() -> None:
    def picky(x: float, by: int) -> float:
        if by * x > 2:
            raise RuntimeError("too much")
        return by * x

    system = System(
        "s", outputs={"y": Function("picky", picky, by=Choice(1, 2, 3))(x=Input("x", float))}
    )
    executor = Executor()
    rows = [Example("fine", {"x": 1.0}, {}), Example("broken", {"x": 9.0}, {})]
    metric = custom(lambda o, _: o["y"])
    traced = traces(executor, system, rows)
    found = asyncio.run(
        collect(executor, system, traced, ["picky"], metric, sampling=Sampling(samples=12))
    )
    (only,) = found.draws
    assert only.example == "fine"
    assert {c.outputs["output"] for c in only.candidates} == {1.0, 2.0}


def test_a_budget_holds_and_an_unknown_component_is_named() -> None:
    world = Simulated("five", noise=0.2)
    system = world.system()
    executor = Executor(meter=Meter(Budget(system_runs=12)))
    traced = traces(executor, system, world.examples(6))

    def work(names: list[str]) -> Collection:
        return asyncio.run(collect(executor, system, traced, names, world))

    with pytest.raises(DeclarationError, match="no component 'aa'; did you mean 'a'"):
        work(["aa"])
    with pytest.raises(BudgetExhausted):
        work(world.names)
    assert executor.meter.system_runs <= 12
