"""Prices of changes: shares worked out by hand, laws, and the runs that real evaluations take."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.simulated.systems import SHAPES, Simulated
from compound import Choice, Example, Executor, FirstOf, Function, Loop, Map, Port, System, Trace
from compound.evaluation.evaluate import Evaluation, evaluate
from compound.execution.cache import MemoryCache
from compound.graph.component import CallContext, Condition, Input, Operation, Output, Source
from compound.metrics import custom
from compound.optimization.budget_plan import planned_job_runs, planning_prices
from compound.optimization.method import Job, Method, Problem
from compound.optimization.prices import CallShare, Prices, estimate_prices, measure_prices
from compound.optimization.settings.optimize import make_settings
from compound.optimizers.baselines.random import RandomSearch
from compound.optimizers.scheduling import Uniform


@dataclass(frozen=True, eq=False)
class Add(Operation):
    """Counted step that counts on from the sum of its inputs, by 1 or, for other options, by 1001 or 2001."""

    name: str
    reads: tuple[str, ...]

    kind = "add"
    version = "add"
    cacheable = True

    @property
    def inputs(self) -> Mapping[str, Port]:
        return {name: Port(int) for name in self.reads}

    @property
    def outputs(self) -> Mapping[str, Port]:
        return {"y": Port(int)}

    @property
    def settings(self) -> Mapping[str, object]:
        return {"option": Choice(1, 1001, 2001)}

    def deterministic(self, values: Mapping[str, object]) -> bool:
        return True

    async def run(
        self, inputs: Mapping[str, object], values: Mapping[str, object], call: CallContext
    ) -> Mapping[str, object]:
        numbers = [n for n in (*inputs.values(), values["option"]) if isinstance(n, int)]
        if min(numbers) < 0:
            raise ValueError("negative")
        return {"y": sum(numbers)}


def add(name: str, **reads: Source) -> Output:
    return add_when(None, name, **reads)


def add_when(when: Condition | None, name: str, **reads: Any) -> Output:
    node = Add(name, tuple(reads))(**reads, when=when)
    assert isinstance(node, Output)
    return node


def count(n: int) -> list[int]:
    return list(range(n))


def is_large(y: int) -> bool:
    return y > 2


def same(y: int) -> int:
    return y


X = Input("x", int)


def chain() -> System:
    c = add("c", y=add("b", y=add("a", x=X)))
    return System("chain", outputs={"y": c})


def diamond() -> System:
    a = add("a", x=X)
    return System("diamond", outputs={"y": add("d", b=add("b", y=a), c=add("c", y=a))})


def loop(turns: int) -> System:
    """``a``, then turns of ``b`` and ``c`` that pass their number on, then ``d``."""
    body = System("turn", outputs={"x": add("c", y=add("b", x=X))})
    turned = Loop("loop", body, carry={"x": "x"}, max_turns=turns)(x=add("a", x=X))
    assert isinstance(turned, Output)
    return System("looped", outputs={"y": add("d", x=turned)})


def mapped() -> System:
    """``a``, whose output is the number of items; then ``b`` for each item."""
    body = System("item", outputs={"y": add("b", x=X)})
    items = Function("count", count)(n=add("a", x=X))
    return System("mapped", outputs={"ys": Map("each", body, over="x")(x=items)})


def routed() -> System:
    """``a`` decides whether ``b`` runs, or ``c`` and ``d``."""
    a = add("a", x=X)
    large = Function("large", is_large)(y=a)
    assert isinstance(large, Output)
    b = add_when(large.equals(True), "b", x=X)
    d = add("d", x=add_when(large.equals(False), "c", x=X))
    return System("routed", outputs={"y": FirstOf("pick", int)(a=b, b=d)})


def planned(system: System) -> Problem:
    """Return a problem with jobs for the first component and for the last one."""
    rows = [Example(f"e{i}", {"x": i}) for i in range(20)]
    names = list(system.components)
    jobs = [Job("numbers", (f"{name}.option",)) for name in (names[0], names[-1]) if name in "abcd"]
    options = make_settings({"minibatch": 4, "budget": {"system_runs": 200}})
    metric = custom(lambda outputs, example: 0.0, "none", bounds=(0, 1))
    method = Method("numbers", {"numbers": RandomSearch()}, jobs, Uniform())
    return Problem(system, rows, rows, [], metric, options, method, {})


def traces(system: System, xs: Sequence[int]) -> list[Trace]:
    executor = Executor()
    return [asyncio.run(executor.run(system, {"x": x}, example=str(x))) for x in xs]


def measured(system: System, *xs: int) -> Prices:
    return measure_prices(system, traces(system, xs or (1,)))


def changes(prices: Prices, names: str) -> list[Any]:
    return [pytest.approx(prices.change([name])) for name in names]


class TestComposites:
    def test_turns_of_a_loop_depend_on_the_turns_before(self) -> None:
        """Of six calls of two turns: a, b, c, b, c, d. A change of c leaves a and the first b."""
        prices = measured(loop(2))
        assert changes(prices, "abcd") == [1, 5 / 6, 4 / 6, 1 / 6]
        assert prices.change(["loop"]) == pytest.approx(5 / 6)
        assert [prices.call(na) for na in "abcd"] == [pytest.approx(n / 6) for n in (1, 2, 2, 1)]

    def test_a_plan_and_its_requests_count_the_calls_that_a_loop_may_make(self) -> None:
        """They counted one call of b and c each, or four; the plan and its prospects did not agree."""
        made = planned(loop(2))
        prices = planning_prices(made)
        assert [prices.call(na) for na in "abcd"] == [pytest.approx(n / 6) for n in (1, 2, 2, 1)]
        assert changes(prices, "abd") == [1, 5 / 6, 1 / 6]
        # a job needs 6 x 4 whole runs, reduced by the prices of changes of a and d: (2 + 7/6) / 4
        assert planned_job_runs(made, prices) == pytest.approx(24 * (2 + 7 / 6) / 4)

    def test_a_map_pays_for_each_item(self) -> None:
        """Of x = 2, there are a call of a and three of b; of x = 0, one of each. The mean is 3/4 and 1/2."""
        prices = measured(mapped(), 2, 0)
        assert prices.call("b") == pytest.approx((3 / 4 + 1 / 2) / 2)
        assert prices.change(["b"]) == pytest.approx((3 / 4 + 1 / 2) / 2)
        assert prices.change(["each"]) == pytest.approx((3 / 4 + 1 / 2) / 2)
        assert prices.change(["a"]) == pytest.approx(1)

    def test_conditions_count_as_they_come_out(self) -> None:
        """Of x = 9, a and b run; of x = 1, a, c and d."""
        prices = measured(routed(), 9, 1)
        assert prices.change(["a"]) == pytest.approx(1)
        assert prices.change(["large"]) == pytest.approx((1 / 2 + 2 / 3) / 2)
        assert prices.change(["b"]) == pytest.approx(1 / 2 / 2)
        assert prices.change(["c"]) == pytest.approx(2 / 3 / 2)
        assert prices.change(["d"]) == pytest.approx(1 / 3 / 2)


NAMES = "abcdef"
NAME_SETS = st.sets(st.sampled_from(NAMES + "z"))


@st.composite
def any_prices(draw: st.DrawFn) -> Prices:
    """Return shares that sum to 1, each with any dependencies that include the component itself."""
    weights = draw(st.lists(st.floats(0.01, 1), max_size=8))
    total = sum(weights)
    components = [draw(st.sampled_from(NAMES)) for _ in weights]
    return Prices(
        calls=[
            CallShare(
                component=name, depends=sorted({name, *draw(NAME_SETS)}), share=weight / total
            )
            for name, weight in zip(components, weights, strict=True)
        ]
    )


@st.composite
def any_graph(draw: st.DrawFn) -> System:
    """Return a static system: each node reads any of those before it; the last one reads all loose ends."""
    outputs: list[Output] = []
    read: set[int] = set()
    for name in NAMES[: draw(st.integers(1, 5))]:
        chosen = draw(st.sets(st.sampled_from(range(len(outputs))))) if outputs else set()
        sources: dict[str, Source] = {f"i{i}": outputs[i] for i in sorted(chosen)} or {"x": X}
        if draw(st.booleans()):
            outputs.append(add(name, **sources))
        else:
            joined = add(f"{name}_in", **sources)
            node = Function(name, same)(y=joined)
            assert isinstance(node, Output)
            outputs.append(node)
        read |= chosen
    return System("any", outputs={f"o{i}": out for i, out in enumerate(outputs) if i not in read})


class TestLaws:
    @given(any_prices(), NAME_SETS, NAME_SETS)
    def test_the_price_of_a_change_is_monotone_and_subadditive(
        self, prices: Prices, some: set[str], others: set[str]
    ) -> None:
        both = prices.change(some | others)
        assert 0 <= prices.change(some) <= both <= 1
        assert both <= prices.change(some) + prices.change(others) + 1e-12

    @settings(max_examples=50)
    @given(any_graph(), st.integers(0, 5))
    def test_estimates_of_plain_systems_are_exact(self, system: System, x: int) -> None:
        found, estimated = measured(system, x), estimate_prices(system)
        for name in system.components:
            assert estimated.change([name]) == pytest.approx(found.change([name]))
            assert estimated.call(name) == pytest.approx(found.call(name))
        assert sum(share.share for share in estimated.calls) == pytest.approx(1)


def spent_after_incumbent(
    world: Simulated, options: Mapping[str, int], n: int = 7
) -> list[Evaluation]:
    """Evaluate the incumbent, then a configuration with the given options, with one cache."""
    system, rows = world.system(), world.examples(n)
    changed = system.bind({f"{name}.option": option for name, option in options.items()})
    executor = Executor(cache=MemoryCache())

    async def both() -> list[Evaluation]:
        return [await evaluate(executor, made, rows, world) for made in (system, changed)]

    return asyncio.run(both())


class TestExecution:
    @settings(max_examples=40, deadline=None)
    @given(st.sampled_from(sorted(SHAPES)), st.data())
    def test_a_changed_configuration_has_its_price(self, shape: str, data: st.DataObject) -> None:
        """All outputs differ, since qualities are drawn from a continuous distribution."""
        world = Simulated(shape, noise=0.0)
        changed = data.draw(st.sets(st.sampled_from(world.names)))
        incumbent, candidate = spent_after_incumbent(world, dict.fromkeys(changed, 1))
        assert incumbent.system_runs == pytest.approx(7)
        price = estimate_prices(world.system()).change(changed)
        assert candidate.system_runs == pytest.approx(7 * price)
