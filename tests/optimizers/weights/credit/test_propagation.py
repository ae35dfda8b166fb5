"""Rewards propagated back over the calls of runs and their forks: hand-computed graphs, and real forks."""

from __future__ import annotations

import asyncio
import zlib
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from compound import LLM, Executor, Function, Input, Loop, Map, System, Text, Trace
from compound.core.engine import TokenRecord
from compound.core.errors import DeclarationError
from compound.execution.trace import Call, Failure
from compound.optimizers.weights.credit.propagation import Credit, propagate
from compound.testing import ScriptedLM


def call(
    address: str, *parents: str, sample: int = 0, failed: bool = False, tokens: int | None = None
) -> Call:
    failure = Failure("parse", "no field") if failed else None
    made = (TokenRecord((1,), (tokens,), (-1.0,), "stop"),) if tokens is not None else ()
    component = address.split("[", maxsplit=1)[0]
    return Call(address, component, component, parents, {}, {}, failure, sample=sample, tokens=made)


def run(
    *calls: Call,
    score: float | None = None,
    ends: tuple[str, ...] | None = None,
    failed: bool = False,
) -> Trace:
    failure = Failure("parse", "no field") if failed else None
    return Trace("e", "", 0, 0, {}, calls, failure=failure, score=score, ends=ends)


Found = tuple[list[Credit], list[Call]]


def shared(found: Found) -> dict[str, float]:
    return {credit.call.address: credit.shared for credit in found[0]}


def test_a_chain_hands_the_reward_back() -> None:
    found = propagate([run(call("a"), call("b", "a"), call("c", "b"), score=0.7)], {"a", "b", "c"})
    assert shared(found) == {"a": 0.7, "b": 0.7, "c": 0.7}
    assert [credit.traces for credit in found[0]] == [(0,)] * 3
    assert found[1] == []


def test_only_direct_successors_count() -> None:
    # a -> b -> c in both runs, and b is drawn twice: a's successors are b and b', whatever followed
    # them
    first = run(call("a"), call("b", "a", sample=1), call("c", "b"), score=0.0)
    second = run(call("a"), call("b", "a", sample=2), call("c", "b"), score=1.0)
    third = run(call("a"), call("b", "a", sample=2), call("c", "b", sample=9), score=0.5)
    found = propagate([first, second, third], set("abc"))
    by_call = {(c.call.address, c.traces): c.shared for c in found[0]}
    assert by_call == {
        ("a", (0, 1, 2)): (0.0 + 0.75) / 2,  # not (0 + 1 + .5) / 3
        ("b", (0,)): 0.0,
        ("c", (0,)): 0.0,
        ("b", (1, 2)): 0.75,
        ("c", (1,)): 1.0,
        ("c", (2,)): 0.5,
    }


def test_a_tool_between_agents_is_transparent() -> None:
    calls = (call("a"), call("tool", "a"), call("other", "tool"), call("b", "other"))
    assert shared(propagate([run(*calls, score=0.5)], {"a", "b"})) == {"a": 0.5, "b": 0.5}


def test_a_successor_reached_along_two_ways_counts_once() -> None:
    # a's successors are b, directly and through a tool, and c
    def fork(which: int, score: float) -> Trace:
        calls = (call("a"), call("t", "a"), call("b", "a", "t", sample=which), call("c", "a"))
        return run(*calls, score=score, ends=("b",) if which else ("b", "c"))

    found = propagate([fork(0, 1.0), fork(1, 0.0)], set("abc"))
    assert shared(propagate([fork(0, 1.0)], set("abc"))) == {"a": 1.0, "b": 1.0, "c": 1.0}
    first = {credit.call.address: credit for credit in found[0] if credit.traces[0] == 0}
    assert first["a"].shared == (1.0 + 0.0 + 1.0) / 3  # b, b' and c
    assert first["c"].shared == 1.0  # the output of the first run only


def test_a_penalty_is_added_to_the_own_reward_and_leaks_nowhere() -> None:
    trace = run(call("a"), call("b", "a"), call("c", "b"), score=0.6)
    found = propagate(
        [trace], set("abc"), penalties={"b": lambda made: -0.5, "c": lambda made: -2.0}
    )
    rewards = {credit.call.address: credit.reward for credit in found[0]}
    assert rewards == pytest.approx({"a": 0.6, "b": 0.1, "c": -1.4})
    assert shared(found) == {"a": 0.6, "b": 0.6, "c": 0.6}


def test_runs_of_other_configurations_and_seeds_share_nothing() -> None:
    student = run(call("a", tokens=1), score=0.0)
    others = [
        replace(run(call("a", tokens=2), score=1.0), **{name: value}) for name, value in _OTHER
    ]
    assert [c.shared for c in propagate([student, *others], {"a"})[0]] == [0.0, 1.0, 1.0]


_OTHER: list[tuple[str, Any]] = [("configuration", "teacher"), ("seed", 1)]


def test_different_calls_that_cannot_be_told_apart_are_refused() -> None:
    with pytest.raises(
        DeclarationError,
        match="different calls at 'a' with sample index 0; give each fork a distinct sample",
    ):
        propagate([run(call("a", tokens=1), score=0.0), run(call("a", tokens=2), score=1.0)], {"a"})


def test_a_failed_run_gives_its_calls_the_fallback() -> None:
    trace = run(
        call("a"), call("b", "a", failed=True), call("c", "a"), score=0.9, failed=True, ends=("b",)
    )
    assert shared(propagate([trace], set("abc"), fallback=-1.0)) == {
        "a": -1.0,
        "b": -1.0,
        "c": -1.0,
    }


def test_a_call_that_leads_nowhere_has_no_reward_and_is_reported() -> None:
    trace = run(
        call("a"), call("note", "a"), call("tool", "note"), call("b", "a"), score=0.5, ends=("b",)
    )
    found = propagate([trace], {"a", "b", "note"}, penalties={"note": lambda made: -1.0})
    assert shared(found) == {"a": 0.5, "b": 0.5}
    assert [made.address for made in found[1]] == ["note"]


def test_wrong_arguments_are_refused() -> None:
    trace = run(call("a"), score=0.5)
    with pytest.raises(DeclarationError, match="within one example"):
        propagate([trace, replace(trace, example="f")], {"a"})
    with pytest.raises(DeclarationError, match="a run of example 'e' has no score"):
        propagate([run(call("a"))], {"a"})
    with pytest.raises(DeclarationError, match="unknown agent 'answer'; did you mean 'answerer'"):
        propagate([trace], {"answerer"}, penalties={"answer": lambda made: 0.0})
    assert propagate([], {"a"}) == ([], [])


@st.composite
def graphs(draw: st.DrawFn) -> tuple[list[Call], set[str]]:
    """A random run, calls after their parents, and which components are agents."""
    n = draw(st.integers(1, 7))
    calls = [
        call(f"c{i}", *(f"c{j}" for j in sorted(draw(st.sets(st.integers(0, i - 1), max_size=3)))))
        if i
        else call("c0")
        for i in range(n)
    ]
    return calls, draw(st.sets(st.sampled_from([made.component for made in calls])))


@given(graphs(), st.sampled_from([0.0, 0.25, 1.0]))
def test_without_forks_every_ancestor_of_the_output_earns_the_reward(
    graph: tuple[list[Call], set[str]], score: float
) -> None:
    calls, agents = graph
    last = calls[-1].address
    found = propagate([run(*calls, score=score, ends=(last,))], agents)
    ancestors = {last}
    for made in reversed(calls):
        if made.address in ancestors:
            ancestors |= set(made.parents)
    assert shared(found) == {a: score for a in ancestors if a in agents}
    assert {made.address for made in found[1]} == agents - ancestors


@given(st.lists(st.floats(-1, 1), min_size=1, max_size=5), st.integers(0, 3), st.integers(1, 4))
def test_a_chain_forked_once_earns_the_mean_before_and_the_own_reward_after(
    scores: list[float], fork_at: int, length: int
) -> None:
    fork_at = min(fork_at, length - 1)
    forks = [
        run(
            *(
                call(f"c{i}", *([f"c{i - 1}"] if i else []), sample=k if i == fork_at else 0)
                for i in range(length)
            ),
            score=score,
        )
        for k, score in enumerate(scores)
    ]
    found = propagate(forks, [f"c{i}" for i in range(length)])
    assert len(found[0]) == fork_at + len(scores) * (length - fork_at)
    for credit in found[0]:
        if int(credit.call.address[1:]) < fork_at:
            assert credit.traces == tuple(range(len(scores)))
            assert credit.shared == pytest.approx(sum(scores) / len(scores))
        else:
            assert [credit.shared] == [scores[t] for t in credit.traces]


def words(message: str, rng: np.random.Generator) -> str:
    return f"w{rng.integers(10**9)}-{zlib.crc32(message.encode())}"


def upper(text: str) -> str:
    return text.upper()


def twice(text: str) -> list[str]:
    return [text, text + "!"]


def agent(name: str) -> LLM:
    return LLM(name, prompt=Text(name), lm="m", temperature=1.0)


def test_forks_of_the_executor_are_united() -> None:
    tool = Function("tool", upper)
    a = agent("a")(x=Input("x", str))
    system = System(
        "s", outputs={"y": agent("c")(x=agent("b")(x=tool(text=a)), beside=agent("d")(x=a))}
    )
    executor = Executor({"m": ScriptedLM(words)})

    async def traces() -> list[Trace]:
        first = await executor.run(system, {"x": "go"}, example="e")
        return [first, *[await executor.fork(system, first, "b", resample=k) for k in (1, 2)]]

    forks = [
        trace.with_score(score)
        for trace, score in zip(asyncio.run(traces()), [0.0, 0.5, 1.0], strict=True)
    ]
    assert len({str(trace.outputs) for trace in forks}) == 3
    found = propagate(forks, set("abcd"))
    assert sorted((c.call.address, c.traces, c.shared) for c in found[0]) == [
        ("a", (0, 1, 2), 0.5),
        ("b", (0,), 0.0),
        ("b", (1,), 0.5),
        ("b", (2,), 1.0),
        ("c", (0,), 0.0),
        ("c", (1,), 0.5),
        ("c", (2,), 1.0),
        ("d", (0, 1, 2), 0.5),
    ]


def test_loops_and_maps_need_no_special_case() -> None:
    x = Input("x", str)
    written = agent("write")(x=x, note=Input("note", str))
    body = System("turn", outputs={"x": written, "note": agent("note")(x=written)})
    loop = Loop("draft", body, carry={"x": "x", "note": "note"}, max_turns=2)
    checked = System("one", outputs={"y": agent("check")(text=Input("text", str))})
    split = Function("split", twice)
    each = Map("each", checked, over="text")(text=split(text=loop(x=x, note=Input("start", str)).x))
    system = System("s", outputs={"y": each})
    trace = asyncio.run(
        Executor({"m": ScriptedLM(words)}).run(system, {"x": "go", "start": ""}, example="e")
    )
    found = propagate([trace.with_score(0.5)], {"write", "note", "check"})
    assert set(shared(found)) == {
        "draft[0]/write",
        "draft[0]/note",
        "draft[1]/write",
        "each[0]/check",
        "each[1]/check",
    }
    assert set(shared(found).values()) == {0.5}
    assert [made.address for made in found[1]] == ["draft[1]/note"]
