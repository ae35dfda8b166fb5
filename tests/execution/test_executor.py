"""Execution: what runs, in which order it is told, and what becomes of failures, retries and cancellation."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from pydantic import BaseModel

import compound
from compound.components.flow import Loop, Map
from compound.components.function import FirstOf, Function
from compound.components.hyperparameter import Hyperparameter
from compound.components.llm import LLM
from compound.components.selector import Selector
from compound.core.engine import Message, Request
from compound.core.errors import CallError, DeclarationError, TransientError
from compound.core.narrowing import entry
from compound.execution.budget import Budget, Meter
from compound.execution.cache import MemoryCache
from compound.execution.executor import Executor
from compound.execution.sender import LONGEST_WAIT
from compound.execution.trace import Failure, Trace, from_json, to_json
from compound.graph.component import CallContext, Input, Operation
from compound.graph.space import Float, Int
from compound.graph.system import System
from compound.graph.types import Port
from compound.optimization.runs.directory import RunDirectory
from compound.testing import ScriptedLM


def run(
    system: System, inputs: Mapping[str, Any], executor: Executor | None = None, **options: Any
) -> Trace:
    return asyncio.run((executor or Executor()).run(system, inputs, **options))


def addresses(trace: Trace) -> list[str]:
    return [call.address for call in trace.calls]


def told(trace: Trace) -> str:
    """All of a trace but how long it took."""
    plain: Any = to_json(trace)
    for call in plain["calls"]:
        del call["seconds"]
    return json.dumps(plain, sort_keys=True)


def system_of(lm: str | None = None, **outputs: Any) -> System:
    return System("s", outputs=outputs, lm=lm)


def f(name: str, function: Callable[..., Any], **options: Any) -> Function:
    return Function(name, function, **options)


def plus(x: int) -> int:
    return x + 1


def times(x: int) -> int:
    return x * 10


def add(a: int, b: int = 0) -> int:
    return a + b


def boom(x: int) -> int:
    raise ValueError(f"cannot take {x}")


def cannot_take(x: int) -> Failure:
    """The failure of `boom`, with its line."""
    line = boom.__code__.co_firstlineno + 1
    return Failure("error", f"ValueError: cannot take {x} (test_executor.py:{line}, in boom)")


def upper(text: str) -> str:
    return text.upper()


X = Input("x", int)
XS = Input("xs", list[int])


def test_a_chain_passes_values_on_and_records_who_read_whom() -> None:
    last = f("c", plus)(x=f("b", times)(x=f("a", plus)(x=X)))
    trace = run(System("chain", outputs={"y": last}), {"x": 1})
    assert trace.outputs == {"y": 21}
    assert [(c.address, dict(c.inputs), dict(c.outputs), c.parents) for c in trace.calls] == [
        ("a", {"x": 1}, {"output": 2}, ()),
        ("b", {"x": 2}, {"output": 20}, ("a",)),
        ("c", {"x": 20}, {"output": 21}, ("b",)),
    ]
    assert (trace.failure, trace.inputs, trace.example, trace.seed) == (None, {"x": 1}, "", 0)


def test_a_system_may_hand_an_input_straight_through() -> None:
    trace = run(system_of(y=X), {"x": 1})
    assert (trace.outputs, trace.calls, trace.equivalents) == ({"y": 1}, (), 1.0)


def test_inputs_that_cannot_be_encoded_are_replaced_before_any_component_reads_them() -> None:
    def size(text: str, parts: list[str]) -> int:
        return len(text.encode()) + len("".join(parts).encode())

    measured = Function("size", size)(text=Input("text", str), parts=Input("parts", list[str]))
    system = system_of(size=measured)
    trace = asyncio.run(Executor().run(system, {"text": "Hi \ud83d", "parts": ["\udc80"]}))
    assert trace.failure is None
    assert trace.outputs == {"size": 9}
    assert trace.inputs == {"text": "Hi \ufffd", "parts": ["\ufffd"]}


@pytest.mark.parametrize("kind", [list[object], dict[str, object]])
def test_an_output_that_no_record_could_hold_is_a_failed_call(kind: Any, tmp_path: Path) -> None:
    text = "[" * 250 + "]" * 250
    deep = text if kind == list[object] else json.dumps({"a": json.loads(text)})
    answerer = LLM("llm", prompt="Answer.", output=kind)
    system = system_of(y=answerer(q=Input("q")), lm="m")
    trace = asyncio.run(Executor({"m": ScriptedLM([deep])}).run(system, {"q": "?"}))
    assert trace.failure is not None
    assert trace.failure.kind == "type"
    assert "nested more than 100 levels deep" in trace.failure.message
    run = RunDirectory.create(tmp_path / "run", "", {})
    run.append("traces.jsonl", to_json(trace))
    assert len(list(run.read("traces.jsonl"))) == 1
    run.close()


def pick_route(question: str) -> Literal["calculate", "search"]:
    return "calculate" if question[0].isdigit() else "search"


def routed(join: bool = True) -> System:
    question = Input("question", str)
    route = f("route", pick_route)(question=question)
    calculated = f("calculator", upper)(text=question, when=route.equals("calculate"))
    searched = f("searcher", upper)(text=question, when=route.equals("search"))
    answer = FirstOf("pick", str)(a=calculated, b=searched) if join else calculated
    return System("routed", outputs={"answer": answer})


@pytest.mark.parametrize(("question", "ran"), [("1+1", "calculator"), ("who", "searcher")])
def test_only_the_branch_of_the_condition_runs_and_first_of_joins(question: str, ran: str) -> None:
    trace = run(routed(), {"question": question})
    assert trace.outputs == {"answer": question.upper()}
    assert addresses(trace) == ["route", ran, "pick"]
    assert trace.call(ran).parents == ("route",)
    assert set(trace.call("pick").parents) == {"route", ran}


def test_an_output_skipped_by_its_condition_fails_the_run_and_says_so() -> None:
    trace = run(routed(join=False), {"question": "who"})
    assert trace.outputs == {}
    assert trace.failure == Failure(
        "skipped", "output 'answer' ($calculator) was skipped by a condition"
    )


def test_a_skipped_node_leaves_optional_inputs_at_their_default_and_skips_what_needs_it() -> None:
    flag = Input("flag", bool)
    extra = f("extra", times)(x=X, when=flag)
    needs = f("needs", plus)(x=extra)
    system = system_of(y=f("sum", add)(a=X, b=needs))
    assert run(system, {"x": 1, "flag": True}).outputs == {"y": 12}
    trace = run(system, {"x": 1, "flag": False})
    assert trace.outputs == {"y": 1}
    assert addresses(trace) == ["sum"]


def test_when_both_branches_ran_first_of_takes_the_first_of_its_ports() -> None:
    pick = FirstOf("pick", int, ("b", "a"))(a=f("left", plus)(x=X), b=f("right", times)(x=X))
    assert run(system_of(y=pick), {"x": 7}).outputs == {"y": 70}


def test_when_every_branch_is_skipped_first_of_fails() -> None:
    flag = Input("flag", bool)
    left, right = f("l", plus)(x=X, when=flag), f("r", times)(x=X, when=flag)
    trace = run(system_of(y=FirstOf("pick", int)(a=left, b=right)), {"x": 1, "flag": False})
    assert trace.failure == Failure(
        "error", "LookupError: no input has a value: every branch was skipped"
    )


def test_a_condition_on_a_failed_node_fails_and_does_not_skip() -> None:
    guarded = f("guarded", plus)(x=X, when=f("guard", boom)(x=X).equals(1))
    trace = run(system_of(y=f("sum", add)(a=X, b=guarded)), {"x": 1})
    assert addresses(trace) == ["guard"]
    assert trace.failure == cannot_take(1)


def halve(x: int) -> int:
    return x // 2


def small(x: int) -> bool:
    return x < 3


def shrinking(max_turns: Any = 9, until: str | None = "done") -> System:
    half = f("halve", halve)(x=X)
    body = System("turn", outputs={"x": half, "done": f("small", small)(x=half)})
    loop = Loop("shrink", body, carry={"x": "x"}, until=until, max_turns=max_turns)
    return System("loop", outputs={"y": f("after", plus)(x=loop(x=Input("start", int)).x)})


def test_a_loop_repeats_until_its_condition_and_numbers_its_turns() -> None:
    trace = run(shrinking(), {"start": 20})
    assert trace.outputs == {"y": 3}
    assert addresses(trace) == [
        *(f"shrink[{t}]/{n}" for t in range(3) for n in ("halve", "small")),
        "after",
    ]
    assert [c.invocation for c in trace.calls_of("halve")] == [0, 1, 2]
    assert [c.outputs["output"] for c in trace.calls_of("halve")] == [10, 5, 2]
    assert set(trace.call("shrink[1]/halve").parents) == {"shrink[0]/halve", "shrink[0]/small"}


def test_the_turn_limit_of_a_loop_can_be_tuned() -> None:
    system = shrinking(max_turns=Int(1, 4, value=1), until=None)
    assert run(system, {"start": 64}).outputs == {"y": 33}
    assert run(system.bind({"shrink.max_turns": 4}), {"start": 64}).outputs == {"y": 5}


def test_a_wired_setting_of_another_type_is_a_failed_call() -> None:
    body = System("turn", outputs={"x": f("halve", halve)(x=X)})
    loop = Loop("shrink", body, carry={"x": "x"}, max_turns=3)
    scaled = f("scale", scale, by=3)
    for node, where in [
        (scaled(x=X, by=Input("n", Any)), "scale.by"),
        (loop(x=X, max_turns=Input("n", Any)), "shrink.max_turns"),
    ]:
        system = system_of(y=node)
        trace = run(system, {"x": 8, "n": "two"})
        assert trace.failure is not None
        assert trace.failure.kind == "type"
        assert f"{where} must be int, but got 'two'" in trace.failure.message
        assert run(system, {"x": 8, "n": 2}).failure is None


@pytest.mark.parametrize("turns", [0, -1])
def test_a_wired_turn_limit_below_one_is_a_failed_call(turns: int) -> None:
    body = System("turn", outputs={"x": f("halve", halve)(x=X)})
    loop = Loop("shrink", body, carry={"x": "x"}, max_turns=3)(x=X, max_turns=Input("turns", int))
    trace = run(system_of(y=loop), {"x": 8, "turns": turns})
    assert trace.failure is not None
    assert f"shrink: max_turns must be >= 1, but got {turns}" in trace.failure.message
    assert addresses(trace) == ["shrink"]
    assert run(system_of(y=loop), {"x": 8, "turns": 2}).outputs == {"y": 2}


def mapped(function: Callable[..., Any] = plus) -> System:
    body = System("one", outputs={"y": f("work", function)(x=X)})
    return System("mapped", outputs={"ys": Map("each", body, over="x")(x=XS)})


def test_a_map_over_nothing_gives_nothing() -> None:
    trace = run(mapped(), {"xs": []})
    assert (trace.outputs, trace.calls, trace.failure) == ({"ys": []}, (), None)


def test_calls_of_more_than_nine_items_are_ordered_by_number() -> None:
    trace = run(mapped(), {"xs": list(range(12))})
    assert addresses(trace) == [f"each[{i}]/work" for i in range(12)]


@pytest.mark.parametrize("value", ["text", 3, {"a": 1}])
def test_a_map_over_something_that_is_no_list_is_a_failed_call(value: Any) -> None:
    body = System("one", outputs={"y": f("work", plus)(x=X)})
    trace = run(system_of(ys=Map("each", body, over="x")(x=Input("xs", Any))), {"xs": value})
    assert trace.failure is not None
    assert trace.failure.message.startswith(f"each: x must be a list, but got {value!r}")
    assert addresses(trace) == ["each"]


def test_a_map_inside_a_loop_has_nested_addresses() -> None:
    item = System("item", outputs={"y": f("work", plus)(x=X)})
    turn = System("turn", outputs={"xs": Map("each", item, over="x")(x=XS)})
    loop = Loop("rounds", turn, carry={"xs": "xs"}, max_turns=2)
    trace = run(System("nested", outputs={"xs": loop(xs=XS)}), {"xs": [1, 5]})
    assert trace.outputs == {"xs": [3, 7]}
    assert addresses(trace) == [f"rounds[{t}]/each[{i}]/work" for t in range(2) for i in range(2)]
    assert [c.invocation for c in trace.calls] == [0, 1, 2, 3]
    assert trace.call("rounds[1]/each[0]/work").parents == (
        "rounds[0]/each[0]/work",
        "rounds[0]/each[1]/work",
    )


def test_the_calls_inside_a_conditional_loop_or_map_obey_its_condition() -> None:
    guard = f("guard", small)(x=X)
    body = System("one", outputs={"y": f("work", plus)(x=X)})
    ys = Map("each", body, over="x")(x=XS, when=guard)
    system = system_of(y=f("size", optional_length)(xs=ys))
    trace = run(system, {"x": 1, "xs": [1, 2]})
    assert trace.outputs == {"y": 2}
    assert [trace.call(f"each[{i}]/work").parents for i in range(2)] == [("guard",), ("guard",)]
    assert run(system, {"x": 5, "xs": [1, 2]}).outputs == {"y": 0}


def optional_length(xs: list[int] = []) -> int:  # noqa: B006 - a default to be passed on, not changed
    return len(xs)


def test_a_skipped_output_of_a_body_fails_the_run_and_names_the_body() -> None:
    inner = f("work", plus)(x=X, when=f("guard", small)(x=X))
    body = System("one", outputs={"y": inner})
    trace = run(system_of(ys=Map("each", body, over="x")(x=XS)), {"xs": [1, 7]})
    assert trace.outputs == {}
    assert trace.failure == Failure(
        "skipped", "output 'y' ($work) of each[1] was skipped by a condition"
    )


def scale(x: int, by: int) -> int:
    return x * by


def test_a_setting_may_be_fixed_tuned_or_fed_by_an_edge() -> None:
    assert run(system_of(y=f("scale", scale, by=3)(x=X)), {"x": 2}).outputs == {"y": 6}
    tuned = system_of(y=f("scale", scale, by=Int(1, 9, value=2))(x=X))
    assert run(tuned, {"x": 2}).outputs == {"y": 4}
    assert run(tuned.bind({"scale.by": 9}), {"x": 2}).outputs == {"y": 18}
    depth = Hyperparameter("depth", Int(1, 9, value=5))()
    wired = system_of(y=f("scale", scale, by=3)(x=X, by=depth))
    assert run(wired, {"x": 2}).outputs == {"y": 10}
    assert run(wired.bind({"depth.value": 7}), {"x": 2}).outputs == {"y": 14}


def test_a_selector_chooses_the_model_of_an_llm() -> None:
    chosen = Selector("model", "small", "large")(question=Input("question"))
    answer = LLM("answerer")(question=Input("question"), lm=chosen)
    system = system_of(y=answer)
    engines = {"small": ScriptedLM(["from small"]), "large": ScriptedLM(["from large"])}
    assert run(system, {"question": "?"}, Executor(engines)).outputs == {"y": "from small"}
    other = system.bind({"model.choice": "large"})
    assert run(other, {"question": "?"}, Executor(engines)).outputs == {"y": "from large"}
    assert "Model" not in engines["small"].requests[0].messages[-1].text


def test_the_systems_model_serves_every_llm_that_names_none() -> None:
    body = System("one", outputs={"y": LLM("inner")(x=Input("x", str))})
    ys = Map("each", body, over="x")(x=Input("xs", list[str]))
    named = LLM("named", lm="b")(x=Input("z", str))
    system = system_of(ys=ys, z=named, lm="a")
    engines = {
        "a": ScriptedLM(lambda _: "from a"),
        "b": ScriptedLM(lambda _: "from b"),
        "c": ScriptedLM(lambda _: "from c"),
    }
    assert run(system, {"xs": ["1"], "z": ""}, Executor(engines)).outputs == {
        "ys": ["from a"],
        "z": "from b",
    }
    assert run(system.with_lm("c"), {"xs": ["1"], "z": ""}, Executor(engines)).outputs == {
        "ys": ["from c"],
        "z": "from b",
    }


def asking(**settings: Any) -> System:
    return System("ask", outputs={"y": LLM("llm", **settings)(question=Input("question"))}, lm="m")


def words(trace: Trace) -> list[str]:
    return entry(trace.outputs, "y", str).split()


def test_d7_the_longest_answer_reaches_the_engine() -> None:
    # the reference sends max_new_tokens, which the server ignores: answers end after 16 tokens
    lm = ScriptedLM(lambda _: " ".join(["word"] * 100))
    system = asking(max_tokens=Int(1, 99, value=40))
    assert len(words(run(system, {"question": "?"}, Executor({"m": lm})))) == 40
    longer = system.bind({"llm.max_tokens": 99})
    assert len(words(run(longer, {"question": "?"}, Executor({"m": lm})))) == 99
    assert [request.max_tokens for request in lm.requests] == [40, 99]


def test_d9_the_temperature_is_applied_and_makes_samples_differ() -> None:
    # the reference looks for the temperature in the wrong place, so that all its samples are equal
    lm = ScriptedLM(lambda _, rng: str(rng.integers(10**9)))
    system = asking(temperature=Float(0.0, 2.0, value=0.7))

    def answers(bound: System) -> list[object]:
        executor = Executor({"m": lm})
        return [
            run(bound, {"question": "?"}, executor, sample=i).outputs["y"] for i in (0, 1, 2, 0)
        ]

    one, two, three, again = answers(system)
    assert len({one, two, three}) == 3
    assert again == one
    assert {request.temperature for request in lm.requests} == {0.7}
    lm.requests.clear()
    answers(system.bind({"llm.temperature": 1.5}))
    assert {request.temperature for request in lm.requests} == {1.5}


def test_d10_a_failed_call_is_recorded_and_independent_branches_still_run() -> None:
    # the reference drops crashed examples from the mean
    broken, fine = f("broken", boom)(x=X), f("fine", plus)(x=X)
    after = f("after", plus)(x=broken)
    trace = run(system_of(a=after, b=f("next", times)(x=fine)), {"x": 1})
    assert addresses(trace) == ["broken", "fine", "next"]
    assert trace.call("broken").failure == cannot_take(1)
    assert trace.call("broken").outputs == {}
    assert trace.call("next").outputs == {"output": 20}
    assert (trace.outputs, trace.failure) == ({}, cannot_take(1))


def test_d10_a_failed_request_counts_in_the_trace_as_in_the_budget() -> None:
    lm = ScriptedLM([TransientError("busy"), "fine", CallError("refused")])
    executor = Executor({"m": lm}, sleep=_no_sleep)
    first, second = (run(asking(), {"question": q}, executor) for q in "ab")
    assert (first.usage.calls, first.call("llm").attempts) == (2, 2)
    assert (second.usage.calls, second.failure) == (1, Failure("error", "refused"))
    assert executor.meter.usage == first.usage + second.usage


def test_a_failed_item_of_a_map_fails_the_run_but_the_others_are_in_the_trace() -> None:
    def some(x: int) -> int:
        return boom(x) if x == 2 else x

    trace = run(mapped(some), {"xs": [1, 2, 3]})
    assert [call.failure is None for call in trace.calls] == [True, False, True]
    assert trace.failure == cannot_take(2)


def test_a_failed_turn_ends_a_loop() -> None:
    def shaky(x: int) -> int:
        return boom(x) if x > 1 else x + 1

    body = System("turn", outputs={"x": f("shaky", shaky)(x=X)})
    trace = run(system_of(y=Loop("l", body, carry={"x": "x"}, max_turns=9)(x=X)), {"x": 0})
    assert addresses(trace) == ["l[0]/shaky", "l[1]/shaky", "l[2]/shaky"]
    assert trace.failure == cannot_take(2)


def test_a_parse_failure_of_a_text_that_was_cut_says_so() -> None:
    trace = run(
        asking(output=int, max_tokens=2, reasks=0),
        {"question": "?"},
        Executor({"m": ScriptedLM(["well let me think"])}),
    )
    assert trace.failure is not None
    assert "the text was truncated at max_tokens=2" in trace.failure.message


class Returns(Operation):
    """Returns what it is told to, right or wrong."""

    kind = "returns"
    inputs = None

    def __init__(self, value: Any, **outputs: Any) -> None:
        self.name, self.value, self._outputs = "wrong", value, outputs

    @property
    def outputs(self) -> Mapping[str, Port]:
        return {name: Port(kind) for name, kind in self._outputs.items()}

    @property
    def version(self) -> str:
        return "1"

    async def run(
        self, inputs: Mapping[str, Any], values: Mapping[str, Any], call: CallContext
    ) -> Any:
        return self.value


@pytest.mark.parametrize(
    ("value", "message", "kept"),
    [
        ({"a": 1}, "wrong must return the fields ['a', 'b'], but returned ['a']", {}),
        (
            {"a": 1, "b": "x", "c": 0},
            "wrong must return the fields ['a', 'b'], but returned ['a', 'b', 'c']",
            {},
        ),
        ([1, "x"], "wrong must return the fields ['a', 'b'], but returned list", {}),
        (None, "wrong must return the fields ['a', 'b'], but returned NoneType", {}),
        ({"a": "1", "b": "x"}, "wrong.a must be int, but is '1'", {"b": "x"}),
        ({"a": True, "b": "x"}, "wrong.a must be int, but is True", {"b": "x"}),
        ({"a": 1, "b": None}, "wrong.b must be str, but is None", {"a": 1}),
    ],
)
def test_outputs_of_another_type_are_a_failed_call(value: Any, message: str, kept: Any) -> None:
    node = Returns(value, a=int, b=str)(x=X)
    trace = run(system_of(a=node.a, b=node.b), {"x": 1})
    line = Returns.run.__code__.co_firstlineno
    assert trace.failure == Failure("type", f"{message} (test_executor.py:{line})")
    assert trace.call("wrong").outputs == kept


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({}, "system 's' needs input 'x': int; got no inputs"),
        ({"y": 1}, "system 's' has no input 'y'; possible: x"),
        ({"x": "1"}, "input 'x' must be int, but got '1'"),
        ({"x": True}, "input 'x' must be int, but got True"),
        ({"x": 1, "xx": 2}, "system 's' has no input 'xx'; did you mean 'x'?"),
    ],
)
def test_inputs_are_checked_before_anything_runs(inputs: dict[str, Any], message: str) -> None:
    ran: list[int] = []
    system = system_of(y=f("record", recording(ran))(x=X))
    with pytest.raises(DeclarationError) as error:
        run(system, inputs)
    assert str(error.value) == message
    assert ran == []


def recording(ran: list[int]) -> Callable[[int], int]:
    def record(x: int) -> int:
        ran.append(x)
        return x

    return record


def test_a_mistake_of_the_user_is_raised_and_not_recorded() -> None:
    system = asking(lm="modle")
    with pytest.raises(DeclarationError, match=r"no engine .* 'modle'; did you mean 'model'"):
        run(system, {"question": "?"}, Executor({"model": ScriptedLM(["x"])}))
    bare = system_of(y=LLM("llm")(question=Input("question")))
    with pytest.raises(DeclarationError, match="LLM 'llm' has no model"):
        run(bare, {"question": "?"}, Executor({}))


def test_a_component_that_changes_its_inputs_changes_nobody_elses() -> None:
    def smallest(xs: list[int]) -> int:
        xs.sort()
        return xs[0]

    def first(xs: list[int]) -> int:
        return xs[0]

    def doubled(xs: list[int]) -> list[int]:
        return [2 * x for x in xs]

    made = f("doubled", doubled)(xs=XS)
    outputs = {
        "a": f("a", smallest)(xs=made),
        "b": f("b", first)(xs=made),
        "c": f("c", smallest)(xs=XS),
    }
    given_inputs = {"xs": [3, 1, 2]}
    trace = run(System("s", outputs=outputs), given_inputs)
    assert trace.outputs == {"a": 2, "b": 6, "c": 1}
    assert given_inputs == {"xs": [3, 1, 2]}
    assert trace.call("doubled").outputs == {"output": [6, 2, 4]}
    assert trace.call("a").inputs == {"xs": [6, 2, 4]}


def test_a_second_try_sees_the_inputs_as_they_were() -> None:
    def picky(xs: list[int]) -> int:
        xs.append(0)
        if len(seen) < 2:
            seen.append(list(xs))
            raise TransientError("once more")
        return len(xs)

    seen: list[list[int]] = []
    trace = run(
        system_of(y=f("picky", picky, retries=2)(xs=XS)),
        {"xs": [1]},
        Executor(sleep=_no_sleep),
    )
    assert trace.outputs == {"y": 2}
    assert seen == [[1, 0], [1, 0]]


def test_final_outputs_come_from_the_run_and_not_from_shared_state_under_a_1_us_switch_interval() -> (
    None
):
    # the reference rebuilds outputs from an attribute of the component: 2-16 wrong of 4,000 at 1 us
    def slowly(x: int, by: int) -> int:
        return sum(x for _ in range(by))

    system = system_of(y=f("scale", slowly, by=Int(1, 9, value=1))(x=X))

    def work(by: int) -> list[Any]:
        bound = system.bind({"scale.by": by})
        return [compound.run(bound, {"x": x}).outputs["y"] for x in range(150)]

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as pool:
            found = list(pool.map(work, range(1, 5)))
    finally:
        sys.setswitchinterval(before)
    assert found == [[by * x for x in range(150)] for by in range(1, 5)]


async def _no_sleep(seconds: float) -> None:
    await asyncio.sleep(0)


def retried(errors: list[Exception], retries: int = 3) -> tuple[Trace, list[float]]:
    waits: list[float] = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)

    def work(x: int) -> int:
        if errors:
            raise errors.pop(0)
        return x

    system = system_of(y=f("work", work, retries=retries)(x=X))
    return run(system, {"x": 7}, Executor(sleep=sleep)), waits


def test_a_transient_error_is_tried_again_after_a_growing_wait() -> None:
    trace, waits = retried([TransientError("busy") for _ in range(3)])
    assert trace.outputs == {"y": 7}
    assert trace.call("work").attempts == 4
    assert len(waits) == 3
    for tries, wait in enumerate(waits):
        assert 0.25 * 2**tries <= wait <= 0.75 * 2**tries
    assert retried([TransientError("busy") for _ in range(3)])[1] == waits


def test_the_servers_own_wish_is_obeyed_up_to_a_limit() -> None:
    errors = [TransientError("busy", retry_after=7.0), TransientError("busy", retry_after=9999.0)]
    assert retried(list(errors))[1] == [7.0, LONGEST_WAIT]


@pytest.mark.parametrize(
    "error",
    [
        CallError("no"),
        ValueError("no"),
        KeyError("no"),
        PermissionError("no"),
        RecursionError("no"),
    ],
)
def test_retry_100_times_is_for_no_error_but_a_transient_one(error: Exception) -> None:
    # the reference tries 100 times, 3 s apart, on any error, a bad key included
    trace, waits = retried([error])
    assert trace.failure is not None
    assert trace.failure.kind == "error"
    assert "no" in trace.failure.message
    assert (trace.call("work").attempts, waits) == (1, [])


def test_an_attempt_that_takes_too_long_is_tried_again() -> None:
    tries: list[int] = []

    async def stuck_once(x: int) -> int:
        tries.append(x)
        if len(tries) == 1:
            await asyncio.Event().wait()
        return x

    component = f("stuck", stuck_once, timeout=0.01, retries=1)
    trace = run(system_of(y=component(x=X)), {"x": 1}, Executor(sleep=_no_sleep))
    assert (trace.outputs, trace.call("stuck").attempts) == ({"y": 1}, 2)
    tries.clear()
    component = f("stuck", stuck_once, timeout=0.01)
    trace = run(system_of(y=component(x=X)), {"x": 1})
    assert trace.failure == Failure("transient", "stuck took longer than 0.01 s")


def test_waiting_for_a_turn_at_the_engine_is_not_part_of_the_time_limit() -> None:
    async def answer(message: str) -> str:
        if "slow" in message:
            await asyncio.sleep(0.1)
        return "done"

    lm = ScriptedLM(answer, concurrency=1)
    slow = LLM("a_slow", prompt="slow", timeout=None)(x=Input("q"))
    quick = LLM("quick", prompt="quick", timeout=0.02, retries=0)(x=Input("q"))
    trace = run(system_of(a=slow, b=quick, lm="m"), {"q": ""}, Executor({"m": lm}))
    assert trace.outputs == {"a": "done", "b": "done"}


@pytest.mark.parametrize("remote", [True, False])
def test_only_a_remote_model_can_take_too_long(remote: bool) -> None:
    """A model in this process gives its answer in the end: leaving it would waste what it has done."""
    lm = ScriptedLM(lambda _: "done", latency=0.05, remote=remote)
    asked = LLM("asked", prompt="Say done.", timeout=0.01, retries=0)(x=Input("q"))
    trace = run(system_of(a=asked, lm="m"), {"q": ""}, Executor({"m": lm}))
    assert (trace.failure is not None) == remote


def test_an_engine_that_takes_too_long_is_left_and_its_place_is_free_again() -> None:
    async def answer(message: str) -> str:
        if "stuck" in message:
            await asyncio.Event().wait()
        return "done"

    lm = ScriptedLM(answer, concurrency=1)
    stuck = LLM("a_stuck", prompt="stuck", timeout=0.01, retries=1)(x=Input("q"))
    fine = LLM("fine", prompt="fine")(x=Input("q"))
    executor = Executor({"m": lm}, sleep=_no_sleep)
    trace = run(system_of(a=stuck, b=fine, lm="m"), {"q": ""}, executor)
    assert trace.call("a_stuck").failure == Failure("transient", "a_stuck took longer than 0.01 s")
    assert trace.call("fine").outputs == {"output": "done"}
    assert (lm.in_flight, executor.meter.usage.calls, trace.usage.calls) == (0, 3, 3)


async def _for_ever(x: int) -> int:
    await asyncio.Event().wait()
    return x


def cancellable() -> dict[str, System]:
    top = f("top", plus)(x=X)
    diamond = f("sum", add)(a=f("wait", _for_ever)(x=top), b=f("other", _for_ever)(x=top))
    body = System("one", outputs={"y": f("stuck", _for_ever)(x=X)})
    turn = System("turn", outputs={"xs": Map("each", body, over="x")(x=XS)})
    return {
        "diamond": System("diamond", outputs={"y": diamond}),
        "loop": System(
            "loop",
            outputs={
                "ys": Loop("l", turn, carry={"xs": "xs"}, max_turns=2)(xs=f("spread", spread)(x=X))
            },
        ),
    }


def spread(x: int) -> list[int]:
    return list(range(x))


@pytest.mark.parametrize("shape", list(cancellable()))
async def test_cancelling_a_run_leaves_no_task_behind(shape: str) -> None:
    task = asyncio.create_task(Executor().run(cancellable()[shape], {"x": 5}))
    for _ in range(20):
        await asyncio.sleep(0)
    assert not task.done()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert asyncio.all_tasks() == {asyncio.current_task()}


@pytest.mark.parametrize("shape", ["diamond", "map"])
async def test_a_mistake_in_one_branch_stops_the_others_and_leaves_no_task(shape: str) -> None:
    def wrong(x: int) -> int:
        raise DeclarationError("a mistake")

    if shape == "diamond":
        system = system_of(y=f("sum", add)(a=f("wait", _for_ever)(x=X), b=f("wrong", wrong)(x=X)))
    else:

        async def either(x: int) -> int:
            return wrong(x) if x == 3 else await _for_ever(x)

        body = System("one", outputs={"y": f("either", either)(x=X)})
        system = system_of(ys=Map("each", body, over="x")(x=f("spread", spread)(x=X)))

    with pytest.raises(DeclarationError, match="a mistake"):
        await Executor().run(system, {"x": 5})
    assert asyncio.all_tasks() == {asyncio.current_task()}


@pytest.mark.parametrize(("concurrency", "most"), [(1, 1), (3, 3), (64, 20)])
def test_an_engine_has_no_more_requests_than_it_allows(concurrency: int, most: int) -> None:
    lm = ScriptedLM(lambda message: message, concurrency=concurrency, latency=0.001)
    body = System("one", outputs={"y": LLM("llm")(x=X)})
    system = system_of(ys=Map("each", body, over="x")(x=XS), lm="m")
    trace = run(system, {"xs": list(range(20))}, Executor({"m": lm}))
    assert trace.failure is None
    assert (lm.most_in_flight, lm.in_flight, len(lm.requests)) == (most, 0, 20)


def test_one_engine_under_two_names_still_has_one_limit() -> None:
    lm = ScriptedLM(lambda message: message, concurrency=2, latency=0.001)
    nodes = {f"n{i}": LLM(f"n{i}", lm="ab"[i % 2])(x=X) for i in range(8)}
    run(System("s", outputs=nodes), {"x": 1}, Executor({"a": lm, "b": lm}))
    assert lm.most_in_flight == 2


def test_an_executor_serves_one_event_loop_after_another() -> None:
    lm = ScriptedLM(lambda message: message, concurrency=1, latency=0.001)
    executor = Executor({"m": lm})
    system = system_of(a=LLM("a")(x=X), b=LLM("b")(x=X), lm="m")
    assert [run(system, {"x": i}, executor).failure for i in range(3)] == [None] * 3


def varied() -> System:
    """Every shape at once, with a stochastic model."""
    xs = f("spread", spread)(x=X)
    sampler = LLM("sampler", temperature=1.0, output=int)
    item = System("item", outputs={"n": sampler(x=X)})
    numbers = Map("each", item, over="x")(x=xs)
    best = f("best", max_of)(xs=numbers)
    drawn = f("draw", drawing)(x=best)
    turn = System("turn", outputs={"x": f("halve", halve)(x=sampler(x=X, name="within"))})
    looped = Loop("rounds", turn, carry={"x": "x"}, max_turns=3)(x=best)
    judge = LLM("judge", output=Literal["even", "odd"])(x=looped)
    even = f("even", times)(x=drawn, when=judge.equals("even"))
    odd = f("odd", plus)(x=drawn, when=judge.equals("odd"))
    picked = FirstOf("pick", int)(a=even, b=odd)
    beside = {name: f(name, plus)(x=X) for name in ("zeta", "alpha", "mid", "beta")}
    return System(
        "varied", outputs={"y": f("sum", add)(a=picked, b=looped), "best": best, **beside}, lm="m"
    )


def max_of(xs: list[int]) -> int:
    return max(xs)


def drawing(x: int, rng: np.random.Generator) -> int:
    return x + int(rng.integers(100))


def judged(message: str, rng: np.random.Generator) -> str:
    return f"{rng.integers(1000)} {'even' if rng.random() < 0.5 else 'odd'}"


@pytest.mark.parametrize("example", range(3))
def test_traces_do_not_depend_on_latency_or_concurrency(example: int) -> None:
    latencies: list[Any] = [
        0.0,
        lambda _: float(np.random.default_rng().random()) * 0.005,
        lambda _: float(np.random.default_rng().random()) * 0.005,
    ]
    traces = set()
    for concurrency in (1, 64):
        for latency in latencies:
            lm = ScriptedLM(judged, concurrency=concurrency, latency=latency)
            trace = run(varied(), {"x": 6}, Executor({"m": lm}, seed=3), example=f"e{example}")
            assert trace.failure is None
            traces.add(told(trace))
    assert len(traces) == 1


def test_seed_example_sample_and_address_each_name_another_stream() -> None:
    def draw(rng: np.random.Generator) -> int:
        return int(rng.integers(10**12))

    one = f("one", draw)
    system = system_of(a=one(), b=one(name="two"))
    base = run(system, {}, Executor(seed=0), example="e", sample=0)
    drawn = [
        base.outputs["a"],
        base.outputs["b"],
        run(system, {}, Executor(seed=1), example="e", sample=0).outputs["a"],
        run(system, {}, Executor(seed=0), example="f", sample=0).outputs["a"],
        run(system, {}, Executor(seed=0), example="e", sample=1).outputs["a"],
    ]
    assert len(set(drawn)) == 5
    assert run(system, {}, Executor(seed=0), example="e", sample=0).outputs == base.outputs


class Person(BaseModel):
    name: str


def test_a_trace_survives_json_whatever_its_values_are() -> None:
    def person(x: int) -> Person:
        return Person(name=str(x))

    def odd(x: int) -> dict[str, Any]:
        return {
            "set": {2, 1},
            "nan": float("nan"),
            "model": [Person(name="Ada")],
            "object": threading.Lock,
        }

    outputs = {"p": f("person", person)(x=X), "o": f("odd", odd)(x=X), "bad": f("bad", boom)(x=X)}
    trace = run(System("s", outputs=outputs), {"x": 1})
    plain = to_json(trace)
    assert json.loads(json.dumps(plain, allow_nan=False)) == plain
    again = from_json(json.loads(json.dumps(plain)))
    assert to_json(again) == plain
    assert again.failure == trace.failure == cannot_take(1)


def test_a_trace_knows_which_calls_its_outputs_came_from() -> None:
    written = f("write", add)(a=X, b=Input("note", int))
    noted = f("note", plus)(x=X)  # only for the next turn: the last one leads to nothing
    body = System("turn", outputs={"x": written, "note": noted})
    loop = Loop("draft", body, carry={"x": "x", "note": "note"}, max_turns=2)
    trace = run(system_of(y=loop(x=X, note=Input("start", int)).x), {"x": 1, "start": 0})
    assert addresses(trace) == [
        "draft[0]/note",
        "draft[0]/write",
        "draft[1]/note",
        "draft[1]/write",
    ]
    assert trace.ends == ("draft[1]/write",)
    assert from_json(to_json(trace)).ends == trace.ends
    older = to_json(trace)
    del older["ends"]
    assert from_json(older).ends is None


def test_each_finished_call_is_told_and_calls_are_found_by_address() -> None:
    seen: list[str] = []
    executor = Executor(on_call=lambda call: seen.append(call.address))
    trace = run(shrinking(), {"start": 20}, executor)
    assert seen == addresses(trace)
    with pytest.raises(KeyError, match=r"no call at 'shrink\[9\]/halve'; calls: shrink\[0\]/halve"):
        trace.call("shrink[9]/halve")


def test_under_a_cost_limit_a_model_without_a_price_is_refused_before_it_is_called() -> None:
    lm = ScriptedLM(lambda _: "yes", priced=False)
    system = system_of(y=LLM("a", prompt="Say yes.")(x=X), lm="lm")
    assert asyncio.run(Executor({"lm": lm}).run(system, {"x": 1})).outputs == {"y": "yes"}
    limited = Executor({"lm": lm}, meter=Meter(Budget(cost=9.0)))
    with pytest.raises(
        DeclarationError,
        match="budget.cost is set, but the price of 'lm' is unknown; set the model",
    ):
        asyncio.run(limited.run(system, {"x": 2}))
    assert len(lm.requests) == 1


def test_a_node_that_would_not_run_anyway_does_not_pass_on_a_failure() -> None:
    def broken(x: int) -> int:
        raise ValueError("no")

    go = Input("go", bool)
    fast = f("fast", plus)(x=f("broken", broken)(x=X), when=go)
    slow = f("slow", plus)(x=X, when=go.equals(False))
    system = system_of(y=FirstOf("any", int)(a=fast, b=slow))
    assert run(system, {"x": 1, "go": False}).outputs == {"y": 2}
    assert run(system, {"x": 1, "go": True}).failure is not None


def test_a_blocking_function_has_a_time_limit_too() -> None:
    def sleepy(x: int) -> int:
        time.sleep(0.1)
        return x

    trace = run(system_of(y=f("sleepy", sleepy, timeout=0.02)(x=X)), {"x": 1})
    assert trace.failure == Failure("transient", "sleepy took longer than 0.02 s")


@pytest.mark.parametrize("timeout", [None, 50.0])
def test_a_timeout_of_the_components_own_is_its_error(timeout: float | None) -> None:
    async def own(x: int) -> int:
        raise TimeoutError("the database")

    trace = run(system_of(y=f("own", own, timeout=timeout)(x=X)), {"x": 1})
    assert trace.failure == Failure("transient", "TimeoutError: the database")


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ConnectionResetError("gone"), "ConnectionResetError: gone"),
        (TimeoutError("slow"), "TimeoutError: slow"),
        (TransientError("busy"), "busy"),
    ],
)
def test_what_a_component_talks_to_may_come_back(error: Exception, message: str) -> None:
    assert retried([error, error])[0].failure is None
    trace, waits = retried([error] * 9, retries=2)
    assert trace.failure == Failure("transient", message)
    assert (trace.call("work").attempts, len(waits)) == (3, 2)
    assert retried([error], retries=0)[1] == []


def test_a_component_may_draw_another_sample_than_the_rest() -> None:
    def drawn(x: int, rng: Any) -> int:
        return int(rng.integers(1_000_000))

    first = f("first", drawn)(x=X)
    system = system_of(a=first, b=f("second", drawn)(x=first))
    plain = [asyncio.run(Executor().run(system, {"x": 1}, sample=sample)) for sample in (0, 1)]
    mixed = asyncio.run(Executor().run(system, {"x": 1}, sample=1, samples={"first": 0}))
    assert plain[0].outputs["a"] == mixed.outputs["a"] != plain[1].outputs["a"]
    assert plain[1].outputs["b"] == mixed.outputs["b"] != plain[0].outputs["b"]
    assert [call.sample for call in mixed.calls] == [0, 1]


def test_a_request_that_was_left_counts_with_its_worst_case() -> None:
    """It may well have been answered and billed."""
    lm = ScriptedLM(lambda _: "late", latency=5.0, price=0.01)
    asked = LLM("asked", prompt="one two", timeout=0.01, retries=0, max_tokens=40)(x=Input("q"))
    executor = Executor({"m": lm})
    trace = run(system_of(a=asked, lm="m"), {"q": "three"}, executor)
    worst = lm.worst_case(lm.requests[0])
    assert executor.meter.usage == trace.usage == worst


def test_a_request_outside_the_graph_is_tried_again_and_then_a_clear_error() -> None:
    replies: list[Any] = [TransientError("busy"), "written"]
    executor = Executor({"m": ScriptedLM(replies)}, sleep=_no_sleep)
    request = Request((Message("user", "write"),))
    assert asyncio.run(executor.request("m", request)).text == "written"
    stuck = Executor({"m": ScriptedLM([TransientError("busy")] * 9)}, sleep=_no_sleep)
    with pytest.raises(CallError, match="m returned no answer in 4 attempts: busy"):
        asyncio.run(stuck.request("m", request))


async def test_equal_calls_that_fail_are_all_counted() -> None:
    """A failure that may pass is not kept, so each of the equal calls is made, and was paid for."""
    lm = ScriptedLM([TransientError("busy"), TransientError("busy"), "fine"])
    asked = LLM("asked", prompt="x", retries=0)(x=Input("q"))
    system = system_of(a=asked, lm="m")
    executor = Executor({"m": lm}, cache=MemoryCache())

    traces = [executor.settle(t) for t in [await executor.run(system, {"q": ""}) for _ in range(3)]]
    assert [call.reused for trace in traces for call in trace.calls] == [False] * 3
    assert sum(trace.usage.calls for trace in traces) == len(lm.requests) == 3
