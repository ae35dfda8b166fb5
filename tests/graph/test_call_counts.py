"""Calls of components in one run, counted from the graph."""

from __future__ import annotations

from compound import LLM, Choice, Example, Function, Input, Int, Loop, Map, Retriever, System
from compound.components.hyperparameter import Hyperparameter
from compound.components.index import PassageIndex
from compound.graph.call_counts import count_calls


def counts(system: System, *examples: Example) -> dict[str, str]:
    return {name: str(count) for name, count in count_calls(system, examples).items()}


def looped(name: str, turns: int | Int = 4) -> Loop:
    step = LLM(f"{name}_step")(text=Input("text"))
    return Loop(name, System("body", {"text": step}), carry={"text": "text"}, max_turns=turns)


def mapped(name: str, kind: type = str) -> Map:
    each = LLM(f"{name}_each")(item=Input("item", kind))
    return Map(name, System("item", {"said": each}), over="item")


def halves(text: str) -> list[str]:
    return [text[:1], text[1:]]


def test_nodes_of_a_component_add_up() -> None:
    twice = LLM("twice")
    first = twice(name="first", text=Input("text"))
    assert counts(System("s", {"a": twice(name="second", text=first)})) == {"twice": "2"}


def test_a_branch_may_not_be_taken() -> None:
    text = Input("text")
    maybe = LLM("maybe")(text=text, when=text.equals("x"))
    assert counts(System("s", {"a": maybe, "b": LLM("always")(text=text)})) == {
        "maybe": "at most 1",
        "always": "1",
    }


def test_a_loop_makes_at_most_its_turns() -> None:
    system = System("s", {"a": looped("loop", Int(1, 6, value=2))(text=Input("text"))})
    assert counts(system) == {"loop_step": "at most 6"}


def test_a_wired_number_of_turns_limits_a_loop() -> None:
    turns = Hyperparameter("turns", Int(1, 3, value=1))()
    system = System("s", {"a": looped("loop")(text=Input("text"), max_turns=turns)})
    assert counts(system)["loop_step"] == "at most 3"


def test_a_map_over_an_input_makes_as_many_calls_as_the_longest_list() -> None:
    system = System("s", {"a": mapped("map")(item=Input("items", list[str]))})
    examples = [Example(str(n), {"items": ["x"] * n}) for n in (1, 3)]
    assert counts(system, *examples) == {"map_each": "at most 3"}
    assert counts(system) == {"map_each": "at most 1 per item of items"}


def test_a_map_over_passages_makes_as_many_calls_as_are_returned() -> None:
    found = Retriever("search", PassageIndex(), k=Choice(1, 3))(
        query=Input("query"), passages=Input("passages", list)
    )
    system = System("s", {"a": mapped("map", dict)(item=found)})
    assert counts(system) == {"search": "1", "map_each": "at most 3"}


def test_the_items_of_other_lists_are_known_at_run_time_only() -> None:
    parts = Function("halves", halves)(text=Input("text"))
    body = System("turn", {"text": mapped("map")(item=parts), "next": LLM("next")(text=parts)})
    loop = Loop("loop", body, carry={"next": "text"}, max_turns=2)
    system = System("s", {"a": loop(text=Input("text")).next})
    assert counts(system) == {
        "halves": "at most 2",
        "map_each": "at most 2 per item of halves",
        "next": "at most 2",
    }
    assert count_calls(system)["map_each"].most == float("inf")
