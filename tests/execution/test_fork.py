"""Forks: only what depends on the changed call runs again, and the result is what a whole run would give."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from compound import LLM, Executor, Function, Input, Int, Loop, Map, Port, System
from compound.core.errors import DeclarationError
from compound.core.narrowing import entry
from compound.execution.cache import MemoryCache
from compound.execution.trace import Trace, to_json
from compound.ext import CallContext, Operation
from compound.testing import ScriptedLM

X = Input("x", int)
XS = Input("xs", list[int])


@dataclass
class Lab:
    """Makes functions that note when they really run."""

    ran: list[str] = field(default_factory=list)
    executor: Executor = field(default_factory=Executor)

    def f(self, name: str, function: Callable[..., Any]) -> Function:
        @functools.wraps(function)
        def noted(**arguments: Any) -> Any:
            self.ran.append(name)
            return function(**arguments)

        return Function(name, noted)

    def run(self, system: System, inputs: Mapping[str, Any], **options: Any) -> Trace:
        trace = asyncio.run(self.executor.run(system, inputs, **options))
        self.ran.clear()
        return trace

    def fork(self, system: System, trace: Trace, address: str, **options: Any) -> Trace:
        self.ran.clear()
        return asyncio.run(self.executor.fork(system, trace, address, **options))


def plus(x: int) -> int:
    return x + 1


def times(x: int) -> int:
    return x * 10


def add(a: int, b: int) -> int:
    return a + b


def total(xs: list[int]) -> int:
    return sum(xs)


def upto(x: int) -> list[int]:
    return list(range(x))


def noisy(x: int, rng: np.random.Generator) -> int:
    return x + int(rng.integers(10**9))


def executed(trace: Trace) -> list[str]:
    return [call.address for call in trace.calls if not call.reused]


def values(trace: Trace) -> dict[str, Any]:
    return {call.address: (dict(call.outputs), call.failure) for call in trace.calls}


def chain(lab: Lab, length: int) -> System:
    value: Any = X
    for i in range(1, length + 1):
        value = lab.f(f"n{i}", plus)(x=value)
    return System("chain", outputs={"y": value})


@pytest.mark.parametrize(("n", "k"), [(n, k) for n in (1, 2, 5) for k in range(1, n + 1)])
def test_a_fork_at_node_k_of_a_chain_of_n_runs_the_n_minus_k_nodes_after_it(n: int, k: int) -> None:
    lab = Lab()
    system = chain(lab, n)
    trace = lab.run(system, {"x": 0})
    put_in = lab.fork(system, trace, f"n{k}", outputs={"output": 100})
    assert lab.ran == [f"n{i}" for i in range(k + 1, n + 1)]
    assert put_in.outputs == {"y": 100 + n - k}
    assert executed(put_in) == lab.ran
    resampled = lab.fork(system, trace, f"n{k}", resample=1)
    assert lab.ran == [f"n{i}" for i in range(k, n + 1)]
    assert resampled.outputs == trace.outputs
    assert [c.sample for c in resampled.calls] == [1 if i == k else 0 for i in range(1, n + 1)]


def test_a_fork_of_a_chain_of_models_makes_only_the_requests_it_needs_and_says_its_share() -> None:
    lm = ScriptedLM(lambda message: str(len(message)))
    value: Any = Input("q")
    for i in range(1, 5):
        value = LLM(f"n{i}", temperature=1.0)(q=value)
    system = System("s", outputs={"y": value}, lm="m")
    lab = Lab(executor=Executor({"m": lm}))
    trace = lab.run(system, {"q": "?"})
    assert (len(lm.requests), trace.equivalents) == (4, 1.0)
    lm.requests.clear()
    put_in = lab.fork(system, trace, "n2", outputs={"output": "z"})
    assert (len(lm.requests), put_in.equivalents, put_in.usage.calls) == (2, 0.5, 2)
    lm.requests.clear()
    resampled = lab.fork(system, trace, "n2", resample=5)
    assert (len(lm.requests), resampled.equivalents, resampled.usage.calls) == (3, 0.75, 3)


def test_the_trace_that_is_forked_stays_as_it_was_and_a_fork_can_be_forked() -> None:
    lab = Lab()
    system = chain(lab, 4)
    trace = lab.run(system, {"x": 0})
    before = to_json(trace)
    fork = lab.fork(system, trace, "n1", outputs={"output": 10})
    again = lab.fork(system, fork, "n3", outputs={"output": 50})
    assert lab.ran == ["n4"]
    assert (again.outputs, again.call("n2").outputs) == ({"y": 51}, {"output": 11})
    assert to_json(trace) == before


class Mix(Operation):
    """A small number made from the inputs that are there."""

    kind = "mix"
    version = "1"

    def __init__(self, name: str, ports: tuple[str, ...], constant: int | None = None) -> None:
        self.name, self._ports, self._constant = name, ports, constant

    @property
    def inputs(self) -> Mapping[str, Port]:
        return {port: Port(int, optional=True, default=2) for port in self._ports}

    @property
    def outputs(self) -> Mapping[str, Port]:
        return {"output": Port(int)}

    async def run(
        self, inputs: Mapping[str, Any], values: Mapping[str, Any], call: CallContext
    ) -> Any:
        if self._constant is not None:
            return {"output": self._constant}
        if sum(inputs.values()) % 7 == 5:
            raise ValueError("five")
        return {"output": (3 * sum(inputs.values()) + len(inputs)) % 4}


@dataclass(frozen=True)
class Plan:
    """Which earlier nodes each node reads, and which one it obeys."""

    reads: tuple[tuple[int, ...], ...]
    obeys: tuple[tuple[int, int] | None, ...]

    def system(self, constants: Mapping[int, int] | None = None) -> System:
        nodes: list[Any] = []
        for i, (above, guard) in enumerate(zip(self.reads, self.obeys, strict=True)):
            constant = (constants or {}).get(i)
            if constant is not None:
                nodes.append(Mix(f"n{i}", (), constant)())
                continue
            wires = {f"p{j}": nodes[j] for j in above} or {"x": X}
            when = nodes[guard[0]].equals(guard[1]) if guard else None
            nodes.append(Mix(f"n{i}", tuple(wires))(when=when, **wires))
        return System("random", outputs={f"n{i}": node for i, node in enumerate(nodes)})


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    n = draw(st.integers(1, 7))
    reads, obeys = [], []
    for i in range(n):
        reads.append(tuple(sorted(draw(st.sets(st.integers(0, i - 1), max_size=3)))) if i else ())
        guarded = i > 0 and draw(st.booleans())
        obeys.append((draw(st.integers(0, i - 1)), draw(st.integers(0, 3))) if guarded else None)
    return Plan(tuple(reads), tuple(obeys))


@given(plans(), st.integers(0, 3), st.data())
def test_a_fork_equals_a_run_of_the_system_with_the_node_replaced_by_a_constant(
    plan: Plan, value: int, data: st.DataObject
) -> None:
    lab, system = Lab(), plan.system()
    trace = lab.run(system, {"x": 1})
    address = data.draw(st.sampled_from([call.address for call in trace.calls]))
    fork = lab.fork(system, trace, address, outputs={"output": value})
    replaced = plan.system({int(address[1:]): value})
    reference = lab.run(replaced, {"x": 1} if "x" in replaced.inputs else {})
    assert values(fork) == values(reference)
    assert (fork.outputs, fork.failure) == (reference.outputs, reference.failure)
    assert set(executed(fork)) == set(values(fork)) & system.descendants(address)
    assert [call.address for call in fork.calls] == [call.address for call in reference.calls]


def mapped(lab: Lab) -> System:
    first = lab.f("first", plus)(x=X)
    body = System("item", outputs={"y": lab.f("second", times)(x=first)})
    return System(
        "mapped", outputs={"y": lab.f("total", total)(xs=Map("each", body, over="x")(x=XS))}
    )


def test_a_fork_inside_a_map_runs_the_rest_of_that_item_and_what_reads_the_list() -> None:
    lab = Lab()
    system = mapped(lab)
    trace = lab.run(system, {"xs": [1, 2, 3]})
    fork = lab.fork(system, trace, "each[1]/first", outputs={"output": 0})
    assert lab.ran == ["second", "total"]
    assert executed(fork) == ["each[1]/second", "total"]
    assert fork.outputs == {"y": 20 + 0 + 40}


def test_a_fork_before_a_map_follows_the_list_as_it_grows_and_shrinks() -> None:
    lab = Lab()
    body = System("item", outputs={"y": lab.f("work", times)(x=X)})
    made = lab.f("made", upto)(x=Input("n", int))
    system = System(
        "s", outputs={"y": lab.f("total", total)(xs=Map("each", body, over="x")(x=made))}
    )
    trace = lab.run(system, {"n": 3})
    longer = lab.fork(system, trace, "made", outputs={"output": [5, 5, 5, 5]})
    assert (longer.outputs, len(longer.calls_of("work"))) == ({"y": 200}, 4)
    shorter = lab.fork(system, trace, "made", outputs={"output": [5]})
    assert (shorter.outputs, len(shorter.calls_of("work"))) == ({"y": 50}, 1)
    empty = lab.fork(system, trace, "made", outputs={"output": []})
    assert (empty.outputs, len(empty.calls_of("work"))) == ({"y": 0}, 0)
    assert lab.ran == ["total"]


def test_what_does_not_read_the_list_is_kept_when_the_list_changes() -> None:
    lab = Lab()
    shared = lab.f("shared", plus)(x=Input("k", int))
    body = System("item", outputs={"y": lab.f("sum", add)(a=X, b=shared)})
    made = lab.f("made", upto)(x=Input("n", int))
    each = Map("each", body, over="x")(x=made, k=Input("k", int))
    system = System("s", outputs={"y": lab.f("total", total)(xs=each)})
    trace = lab.run(system, {"n": 2, "k": 10})
    fork = lab.fork(system, trace, "made", outputs={"output": [1, 2, 3]})
    assert fork.outputs == {"y": 12 + 13 + 14}
    assert executed(fork) == [
        "each[0]/sum",
        "each[1]/sum",
        "each[2]/shared",
        "each[2]/sum",
        "total",
    ]


def looped(lab: Lab, turns: int = 4) -> System:
    step = lab.f("step", plus)(x=X)
    side = lab.f("side", times)(x=Input("s", int))
    body = System("turn", outputs={"x": step, "s": side})
    loop = Loop("rounds", body, carry={"x": "x"}, max_turns=turns)(x=X, s=Input("s", int))
    return System("looped", outputs={"y": lab.f("after", times)(x=loop.x), "s": loop.s})


class Search:
    """A loop that halves until small, within a limit another node sets; and the same in plain Python."""

    def __init__(self, lab: Lab) -> None:
        half = lab.f("halve", halve)(x=X)
        body = System("turn", outputs={"x": half, "done": lab.f("small", small)(x=X), "seen": X})
        limit = lab.f("limit", plus)(x=Input("turns", int))
        loop = Loop("search", body, carry={"x": "x"}, until="done", max_turns=9)(
            x=X, max_turns=limit
        )
        after = {"y": lab.f("after", plus)(x=loop.x), "seen": lab.f("seen", times)(x=loop.seen)}
        self.system = System("s", outputs=after)

    @staticmethod
    def expected(x: int, turns: int, address: str = "", value: Any = None) -> dict[str, int]:
        limit = value if address == "limit" else turns + 1
        seen = half = x
        for turn in range(limit):
            seen = x
            half = value if address == f"search[{turn}]/halve" else x // 2
            if value if address == f"search[{turn}]/small" else seen < 6:
                break
            x = half
        return {"y": half + 1, "seen": seen * 10}


def halve(x: int) -> int:
    return x // 2


def small(x: int) -> bool:
    return x < 6


@given(st.integers(0, 60), st.integers(0, 4), st.data())
def test_a_fork_of_a_loop_gives_what_a_run_gives(x: int, turns: int, data: st.DataObject) -> None:
    lab = Lab()
    search = Search(lab)
    trace = lab.run(search.system, {"x": x, "turns": turns})
    assert trace.outputs == search.expected(x, turns)
    inner = [call.address for call in trace.calls if call.address not in ("after", "seen")]
    address = data.draw(st.sampled_from(inner))
    kind = {"limit": st.integers(1, 6), "small": st.booleans(), "halve": st.integers(0, 60)}
    value = data.draw(kind[address.rpartition("/")[2]])
    fork = lab.fork(search.system, trace, address, outputs={"output": value})
    assert fork.outputs == search.expected(x, turns, address, value)


def test_two_forks_share_their_downstream_randomness() -> None:
    lab = Lab()
    system = System("s", outputs={"y": lab.f("noisy", noisy)(x=lab.f("first", plus)(x=X))})
    trace = lab.run(system, {"x": 0}, example="e")

    def noise(value: int, **options: Any) -> int:
        fork = lab.fork(system, trace, "first", outputs={"output": value}, **options)
        return entry(fork.outputs, "y", int) - value

    assert noise(1000) == noise(2000) == entry(trace.outputs, "y", int) - 1
    assert noise(1000, sample=1) == noise(2000, sample=1)
    assert noise(1000, sample=1) != noise(1000)


def test_a_resampled_call_draws_what_a_run_with_that_sample_index_would_draw() -> None:
    lab = Lab(executor=Executor(seed=4))
    system = System("s", outputs={"y": lab.f("second", noisy)(x=lab.f("first", noisy)(x=X))})
    trace = lab.run(system, {"x": 0}, example="e", sample=2)
    other = lab.run(system, {"x": 0}, example="e", sample=7)
    fork = lab.fork(system, trace, "first", resample=7)
    assert fork.call("first").outputs == other.call("first").outputs
    assert fork.outputs != other.outputs
    assert lab.fork(system, trace, "first", resample=7, sample=7).outputs == other.outputs
    assert lab.fork(system, trace, "first", resample=2).outputs == trace.outputs
    assert (fork.seed, fork.sample, fork.example) == (4, 2, "e")


def test_a_fork_keeps_the_seed_of_its_trace_whatever_executor_runs_it() -> None:
    system = System("s", outputs={"y": Function("second", noisy)(x=Function("first", noisy)(x=X))})
    trace = asyncio.run(Executor(seed=1).run(system, {"x": 0}))
    fork = asyncio.run(Executor(seed=2).fork(system, trace, "first", resample=0))
    assert fork.outputs == trace.outputs


def test_a_resampled_model_call_that_was_made_before_comes_from_the_cache() -> None:
    lm = ScriptedLM(lambda _, rng: str(rng.integers(10**9)))
    system = System("s", outputs={"y": LLM("llm", temperature=1.0)(x=X)}, lm="m")
    lab = Lab(executor=Executor({"m": lm}, cache=MemoryCache()))
    first, second = (lab.run(system, {"x": 1}, sample=i) for i in range(2))
    fork = lab.fork(system, first, "llm", resample=1)
    assert (len(lm.requests), fork.outputs, fork.call("llm").reused) == (2, second.outputs, True)
    assert first.outputs != second.outputs


@pytest.mark.parametrize(
    ("address", "options", "message"),
    [
        ("n9", {"resample": 1}, "the trace has no call at 'n9'; possible: n1"),
        ("each[7]/first", {"resample": 1}, "the trace has no call at 'each[7]/first'"),
        ("n1", {}, "fork requires exactly one of outputs and resample"),
        (
            "n1",
            {"outputs": {"output": 1}, "resample": 1},
            "fork requires exactly one of outputs and resample",
        ),
        ("n1", {"outputs": {}}, "fork at 'n1' must have the outputs ['output'], but got []"),
        (
            "n1",
            {"outputs": {"y": 1}},
            "fork at 'n1' must have the outputs ['output'], but got ['y']",
        ),
        ("n1", {"outputs": {"output": "1"}}, "fork at 'n1': output must be int, but got '1'"),
    ],
)
def test_a_wrong_fork_is_refused_before_anything_runs(
    address: str, options: dict[str, Any], message: str
) -> None:
    lab = Lab()
    system = chain(lab, 1)
    trace = lab.run(system, {"x": 1})
    with pytest.raises(DeclarationError) as error:
        lab.fork(system, trace, address, **options)
    assert message in str(error.value)
    assert lab.ran == []


def test_a_fork_of_a_trace_of_another_configuration_is_refused() -> None:
    lab = Lab()

    def scale(x: int, by: int) -> int:
        return x * by

    system = System("s", outputs={"y": Function("scale", scale, by=Int(1, 9, value=2))(x=X)})
    trace = lab.run(system, {"x": 1})
    with pytest.raises(DeclarationError, match="recorded with another .*; bind the system to it"):
        lab.fork(system.bind({"scale.by": 3}), trace, "scale", resample=0)
    assert lab.fork(system.bind({"scale.by": 2}), trace, "scale", resample=0).outputs == {"y": 2}


def test_a_fork_with_another_system_is_refused() -> None:
    lab = Lab()
    trace = lab.run(chain(lab, 1), {"x": 1})
    fixed = System("chain", outputs={"y": Function("n1", plus, retries=1)(x=X)})
    others = [chain(lab, 2), chain(lab, 1).with_lm("other"), fixed]
    for other in others:
        with pytest.raises(DeclarationError, match="recorded with another system; pass the system"):
            lab.fork(other, trace, "n1", resample=0)
    assert lab.fork(chain(lab, 1), trace, "n1", resample=0).outputs == trace.outputs


def test_a_loop_or_map_that_failed_as_a_whole_cannot_be_forked_itself() -> None:
    lab = Lab()
    body = System("item", outputs={"y": lab.f("work", plus)(x=X)})
    system = System("s", outputs={"ys": Map("each", body, over="x")(x=Input("xs", Any))})
    trace = lab.run(system, {"xs": 3})
    with pytest.raises(DeclarationError, match="cannot fork at 'each'.*; fork at a call inside it"):
        lab.fork(system, trace, "each", outputs={"y": [1]})


def test_one_call_may_run_with_other_settings() -> None:
    lab = Lab()

    def scale(x: int, by: int) -> int:
        return x * by

    scaled = Function("scale", scale, by=Int(1, 9, value=2))
    second = scaled(x=Function("add", plus)(x=scaled(x=X)), name="again")
    system = System("s", outputs={"y": second})
    trace = lab.run(system, {"x": 1})
    assert trace.outputs == {"y": 6}
    forked = lab.fork(system, trace, "scale", resample=0, settings={"by": 5})
    assert forked.outputs == {"y": 12}  # the other use of the component keeps its own
    with pytest.raises(DeclarationError, match="scale has no setting 'bi'; possible: by"):
        lab.fork(system, trace, "scale", resample=0, settings={"bi": 5})
    with pytest.raises(DeclarationError, match="settings are not allowed with outputs"):
        lab.fork(system, trace, "scale", outputs={"output": 3}, settings={"by": 5})


def test_settings_of_a_rollout_reach_every_call_of_the_component_also_in_a_fork() -> None:
    engine = ScriptedLM(lambda text, rng: str(rng.integers(1000)))
    first, second = LLM("first", prompt="a"), LLM("second", prompt="b")
    system = System("two", outputs={"y": second(x=first(x=Input("x")))}, lm="lm")
    executor = Executor({"lm": engine}, cache=MemoryCache())
    hot = {"first": {"temperature": 1.0}, "second": {"temperature": 0.5}}
    trace = asyncio.run(executor.run(system, {"x": "?"}, settings=hot))
    asyncio.run(executor.fork(system, trace, "first", resample=5, sample=5, others=hot))
    asyncio.run(executor.run(system, {"x": "?"}))
    assert [r.temperature for r in engine.requests] == [1.0, 0.5, 1.0, 0.5, 0.0, 0.0]
    assert trace.configuration == system.configuration.digest
