"""Systems: every wrong wire is refused where it is made, and nothing depends on declaration order."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

import compound
from compound.components.agents.agent import Agent
from compound.components.flow import Loop, Map
from compound.components.function import FirstOf, Function
from compound.components.hyperparameter import Hyperparameter
from compound.components.llm import LLM
from compound.components.selector import Selector
from compound.core.errors import ConfigurationError, DeclarationError, WiringError
from compound.graph.component import CallContext, Component, Input, Node, Operation, Output
from compound.graph.space import Float, Int, Text
from compound.graph.system import System
from compound.graph.types import Port


def echo(text: str) -> str:
    return text


def count(text: str) -> int:
    return len(text)


def join(a: str, b: str = "") -> str:
    return a + b


def scale(x: float, by: float) -> float:
    return x * by


def both(text: str) -> dict[str, Any]:
    return {"size": len(text), "upper": text.upper()}


class Sum(Operation):
    """One more than the sum of whatever is connected, so that random graphs can be built."""

    kind = "sum"
    inputs = None
    outputs: ClassVar[dict[str, Port]] = {"output": Port(int)}
    version = "1"

    def __init__(self, name: str) -> None:
        self.name = name

    async def run(
        self, inputs: Mapping[str, Any], values: Mapping[str, Any], call: CallContext
    ) -> dict[str, Any]:
        return {"output": 1 + sum(inputs.values())}


def question() -> Input:
    return Input("question", str)


def message_of(make: Callable[[], object], kind: type[Exception] = WiringError) -> str:
    with pytest.raises(kind) as error:
        make()
    return str(error.value)


def test_a_type_mismatch_names_both_ends_and_what_the_node_takes() -> None:
    size = Function("size", count)(text=question())
    message = message_of(lambda: Function("join", join)(a=size))
    assert "join.a expects str, but $size is int" in message
    assert "join takes a: str, b: str (optional)" in message


def test_a_type_mismatch_names_the_fields_that_would_fit() -> None:
    parts = Function("parts", both, outputs={"size": int, "upper": str})(text=question())
    message = message_of(lambda: Function("echo", echo)(text=parts.size))
    assert "echo.text expects str, but $parts.size is int; connect $parts.upper" in message


def test_a_missing_input_is_named_with_its_node_and_the_ports() -> None:
    assert message_of(lambda: Function("join", join)()) == (
        "join.a is not connected; join takes a: str, b: str (optional)"
    )


def test_an_unknown_input_is_refused_and_the_nearest_named() -> None:
    message = message_of(lambda: Function("echo", echo)(txt=question()))
    assert message == "echo has no input 'txt'; did you mean 'text'? (echo takes text: str)"


@pytest.mark.parametrize("constant", ["words", 3, None])
def test_a_constant_is_not_an_edge(constant: Any) -> None:
    message = message_of(lambda: Function("echo", echo)(text=constant))
    assert "echo.text must be connected to an input or an output" in message
    assert "use the component's settings for constants" in message


def test_all_fields_of_a_node_at_once_are_not_an_edge() -> None:
    parts = Function("parts", both, outputs={"size": int, "upper": str})(text=question())
    assert "echo.text must be connected" in message_of(lambda: Function("echo", echo)(text=parts))
    assert "output 'y' of system 'demo' is not produced by any node" in message_of(
        lambda: System("demo", outputs={"y": parts})
    )


def test_an_output_that_does_not_exist_is_refused_and_the_nearest_named() -> None:
    parts = Function("parts", both, outputs={"size": int, "upper": str})(text=question())
    assert message_of(lambda: parts.uper) == "parts has no output 'uper'; did you mean 'upper'?"
    assert [output.label for output in parts] == ["$parts.size", "$parts.upper"]


def test_a_setting_may_be_wired_and_its_type_counts() -> None:
    fixed = Function("scale", scale, by=2.0)
    assert fixed(x=Input("x", float), by=Input("factor", float)).label == "$scale"
    assert "scale.by expects float, but $factor is str" in message_of(
        lambda: fixed(x=Input("x", float), by=Input("factor", str))
    )


def test_a_component_that_can_neither_run_nor_be_driven_is_refused() -> None:
    class Neither(Component):
        name = "neither"
        inputs: Mapping[str, Port] = {}
        outputs = {"y": Port(int)}  # noqa: RUF012
        version = "1"

    with pytest.raises(DeclarationError, match="neither .* nor a Composite; subclass Operation"):
        Neither()()


def test_a_setting_that_a_wire_feeds_at_every_node_is_not_tunable() -> None:
    scaled = Function("scale", scale, by=Float(0.0, 9.0, value=2.0))
    factor = Input("factor", float)
    first = scaled(x=Input("x", float), by=factor)
    assert list(System("s", outputs={"y": first}).parameters) == []
    both_uses = System("s", outputs={"y": scaled(x=first, name="again")})
    assert list(both_uses.parameters) == ["scale.by"]  # one use still reads it


def test_a_condition_must_compare_with_a_value_its_source_can_have() -> None:
    route = Function("route", echo)(text=question())
    size = Function("size", count)(text=question())
    label = Selector("label", "fast", "slow")(question=question())
    assert "when compares $size with 'x', but its type is int" in message_of(
        lambda: Function("echo", echo)(text=question(), when=size.equals("x"))
    )
    assert "when compares $route with True, but its type is str" in message_of(
        lambda: Function("echo", echo)(text=question(), when=route)
    )
    assert "when compares $label with 'medium'" in message_of(
        lambda: Function("echo", echo)(text=question(), when=label.equals("medium"))
    )
    assert Function("echo", echo)(text=question(), when=label.equals("fast")).label == "$echo"


@pytest.mark.parametrize("name", ["1st", "a b", "a/b", "a.b", "", "é!", "a[0]", "$a"])
def test_a_name_that_cannot_stand_in_an_address_is_refused(name: str) -> None:
    for make in (
        lambda: Input(name),
        lambda: System(name, outputs={"y": question()}),
        lambda: System("demo", outputs={name: question()}),
        lambda: Function("echo", echo)(text=question(), name=name or " "),
        lambda: Function(name, echo)(text=question(), name="fine"),
        lambda: LLM("llm", output={name: str, "other": str})(question=question()),
    ):
        assert "name must consist of letters, digits and underscores" in message_of(
            make, DeclarationError
        )


def test_a_function_must_say_its_types() -> None:
    def untyped(x, y: int) -> int:  # type: ignore[no-untyped-def]
        return y

    def silent(x: int):  # type: ignore[no-untyped-def]
        return x

    def greedy(*xs: int) -> int:
        return sum(xs)

    assert "parameter 'x' has no type; write `x: str`" in message_of(
        lambda: Function("untyped", untyped), DeclarationError
    )
    assert "has no return type; annotate it, for example `-> str`" in message_of(
        lambda: Function("silent", silent), DeclarationError
    )
    assert "parameter 'xs' must not be positional-only" in message_of(
        lambda: Function("greedy", greedy), DeclarationError
    )
    assert "function 'scale' has no parameter 'bye'" in message_of(
        lambda: Function("scale", scale, bye=1), DeclarationError
    )


def test_a_function_that_compares_with_mixed_constants_can_be_declared() -> None:
    def empty(text: str) -> bool:
        return text in {None, "", 0}

    assert Function("empty", empty).version == Function("again", empty).version


def test_a_system_without_outputs_is_refused() -> None:
    assert "system 'demo' has no outputs" in message_of(lambda: System("demo", outputs={}))


def test_an_output_that_no_node_produces_is_refused() -> None:
    message = message_of(lambda: System("demo", outputs={"y": "answer"}))  # type: ignore[dict-item]
    assert "output 'y' of system 'demo' is not produced by any node: got 'answer'" in message


def test_declared_inputs_must_be_used_and_used_ones_declared() -> None:
    q, unused = question(), Input("context", str)
    y = Function("echo", echo)(text=q)
    assert "declares unused inputs: 'context'" in message_of(
        lambda: System("demo", outputs={"y": y}, inputs=[q, unused])
    )
    assert "reads undeclared inputs: 'question'; declared: 'query'" in message_of(
        lambda: System(
            "demo",
            outputs={"y": y, "z": Function("other", echo)(text=Input("query"))},
            inputs=[Input("query")],
        )
    )
    assert list(System("demo", outputs={"y": y}, inputs=[q]).inputs) == ["question"]


def test_one_input_declared_with_two_types_is_refused() -> None:
    outputs = {
        "a": Function("echo", echo)(text=Input("x", str)),
        "b": Function("scale", scale, by=2.0)(x=Input("x", float)),
    }
    message = message_of(lambda: System("demo", outputs=outputs))
    assert "input 'x' is declared as" in message
    assert "str" in message
    assert "float" in message
    assert "input 'x' is declared as str and as int" in message_of(
        lambda: System("demo", outputs={"a": outputs["a"]}, inputs=[Input("x", int)])
    )


def test_two_nodes_with_one_name_are_refused() -> None:
    component = Function("echo", echo)
    message = message_of(
        lambda: System(
            "demo", outputs={"a": component(text=question()), "b": component(text=question())}
        )
    )
    assert message == (
        "two nodes are named 'echo' in system 'demo'; give the second use its own name: component(..., name='other')"
    )


def test_two_components_with_one_name_are_refused_wherever_they_are() -> None:
    first, second = (
        Function("echo", echo)(text=question()),
        Function("echo", echo)(text=question(), name="other"),
    )
    assert "two components are named 'echo' in system 'demo'; rename one" in message_of(
        lambda: System("demo", outputs={"a": first, "b": second})
    )
    body = System("body", outputs={"y": Function("echo", echo)(text=Input("x", str))})
    inner = Map("each", body, over="x")(x=Input("xs", list[str]))
    assert "two components are named 'echo'" in message_of(
        lambda: System("demo", outputs={"a": first, "b": inner})
    )


def test_declared_nodes_that_no_output_depends_on_are_refused() -> None:
    used, lost = Function("used", echo)(text=question()), Function("lost", echo)(text=question())
    lost_too = Function("parts", both, outputs={"size": int, "upper": str})(text=question())
    message = message_of(lambda: System("demo", outputs={"y": used}, nodes=[used, lost, lost_too]))
    assert message == (
        "system 'demo' has nodes that no output depends on: 'lost', 'parts'; use their outputs or remove them"
    )
    assert list(System("demo", outputs={"y": used}, nodes=[used]).nodes) == ["used"]


@pytest.mark.parametrize("length", [1, 2, 5])
def test_a_cycle_is_refused_and_named(length: int) -> None:
    nodes = [Node(f"n{i}", Function(f"n{i}", echo), wires={}) for i in range(length)]
    for i, node in enumerate(nodes):
        node.wires["text"] = Output(nodes[(i + 1) % length], "output")  # type: ignore[index]
    message = message_of(lambda: System("demo", outputs={"y": Output(nodes[0], "output")}))
    named = message.split("has a cycle: ")[1].split(";")[0].split(" -> ")
    assert named[0] == named[-1]
    assert sorted(named[:-1]) == sorted(node.name for node in nodes)
    assert "use a loop component for repetition" in message


def test_a_condition_can_close_a_cycle_too() -> None:
    first = Node("first", Function("first", echo), wires={"text": question()})
    second = Function("second", echo)(text=Output(first, "output"))
    looped = Node("first", first.component, {"text": question()}, second.equals("x"))
    second.node.wires["text"] = Output(looped, "output")
    assert "has a cycle" in message_of(
        lambda: System("demo", outputs={"y": Output(looped, "output")})
    )


def test_one_component_at_two_nodes_has_one_configuration() -> None:
    rewriter = LLM("rewriter", prompt=Text("Rewrite."))
    first = rewriter(question=question())
    system = System("demo", outputs={"y": rewriter(question=first, name="hop2")}, lm="x")
    assert list(system.parameters) == ["rewriter.prompt"]
    assert list(system.nodes) == ["rewriter", "hop2"]
    assert system.nodes_of("rewriter") == ("rewriter", "hop2")


def tuned() -> System:
    depth = Hyperparameter("depth", Int(1, 9, value=5))()
    scaled = Function("scale", scale, by=Float(0.0, 1.0, value=0.5))(x=Input("x", float))
    return System("tuned", outputs={"y": scaled, "depth": depth})


def test_bind_refuses_a_name_the_system_lacks_and_says_the_nearest() -> None:
    message = message_of(lambda: tuned().bind({"scale.bye": 0.1}), ConfigurationError)
    assert message == "system 'tuned' has no parameter 'scale.bye'; did you mean 'scale.by'?"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"scale.by": 2.0}, "scale.by must lie in [0.0, 1.0], but got 2.0"),
        ({"scale.by": "0.1"}, "scale.by must be a finite number, but got '0.1'"),
        ({"depth.value": 3.0}, "depth.value must be an integer, but got 3.0"),
        ({"depth.value": 3, "scale.by": -1.0}, "scale.by must lie in [0.0, 1.0], but got -1.0"),
    ],
)
def test_bind_refuses_a_value_outside_its_space(values: dict[str, Any], message: str) -> None:
    assert message_of(lambda: tuned().bind(values), ConfigurationError) == message


def test_binding_leaves_the_original_untouched() -> None:
    system = tuned()
    before = system.configuration
    bound = system.bind({"scale.by": 1.0})
    again = bound.bind({"depth.value": 2})
    assert system.configuration == before
    assert (system.configuration["scale.by"], bound.configuration["scale.by"]) == (0.5, 1.0)
    assert dict(again.configuration) == {"depth.value": 2, "scale.by": 1.0}
    assert system.bind({"scale.by": 0.5}).configuration == before
    assert compound.run(system, {"x": 4.0}).outputs == {"y": 2.0, "depth": 5}
    assert compound.run(bound, {"x": 4.0}).outputs == {"y": 4.0, "depth": 5}


def test_a_system_and_its_nodes_cannot_be_changed() -> None:
    system = tuned()
    with pytest.raises(AttributeError):
        system.name = "other"  # type: ignore[misc]
    with pytest.raises(AttributeError):
        system.nodes["scale"].name = "other"  # type: ignore[misc]


DAGS = st.integers(1, 7).flatmap(
    lambda n: st.tuples(
        *[st.sets(st.integers(0, i - 1), max_size=3) if i else st.just(set()) for i in range(n)],
    )
)


def graph_of(parents: tuple[set[int], ...], names: list[str], declared: list[int]) -> System:
    """Build the nodes in index order, and hand all of them to the system in the order ``declared``."""
    nodes: list[Any] = []
    for i, above in enumerate(parents):
        wires = {f"p{j}": nodes[j] for j in sorted(above)} or {"x": Input("x", int)}
        nodes.append(Sum(names[i])(**wires))
    return System("random", outputs={names[i]: nodes[i] for i in declared})


@given(DAGS, st.data())
def test_the_order_is_topological_and_independent_of_declaration_order(
    parents: tuple[set[int], ...], data: st.DataObject
) -> None:
    n = len(parents)
    names = data.draw(st.permutations([f"n{i}" for i in range(n)]))
    one = graph_of(parents, names, data.draw(st.permutations(range(n))))
    two = graph_of(parents, names, data.draw(st.permutations(range(n))))
    assert list(one.nodes) == list(two.nodes)
    place = {name: i for i, name in enumerate(one.nodes)}
    for i, above in enumerate(parents):
        assert all(place[names[j]] < place[names[i]] for j in above)
    assert one.signature == two.signature
    assert {k: set(v) for k, v in one.successors.items()} == {
        names[i]: {names[j] for j in range(n) if i in parents[j]} for i in range(n)
    }


@given(DAGS)
def test_the_descendants_are_exactly_the_nodes_reached(parents: tuple[set[int], ...]) -> None:
    names = [f"n{i}" for i in range(len(parents))]
    system = graph_of(parents, names, list(range(len(parents))))
    for i in range(len(parents)):
        reached: set[int] = set()
        for j in range(i + 1, len(parents)):
            if parents[j] & (reached | {i}):
                reached.add(j)
        assert system.descendants(names[i]) == {names[j] for j in reached}


HASH_SEEDS = """
import json
from compound import Input, LLM, System, Selector, FirstOf, Function, Map, Text, Choice
def echo(text: str) -> str:
    return text if text in {"yes", "no", "maybe"} else text.upper()
q = Input("q", str)
nodes = {n: Function(n, echo)(text=q) for n in {"zeta", "alpha", "mid", "beta", "gamma"}}
pick = FirstOf("pick", str, tuple(sorted(nodes)))(**nodes)
llm = LLM("llm", prompt=Text("a"), lm=Choice("x", "y"), output={"p": str, "q": int})(**nodes, picked=pick)
body = System("body", outputs={"y": Function("inner", echo)(text=Input("t", str))})
each = Map("each", body, over="t")(t=Input("ts", list[str]))
system = System("s", outputs={"a": llm.p, "b": llm.q, "c": each})
print(json.dumps([list(system.nodes), list(system.parameters), system.signature, system.configuration.digest,
                  {k: v for k, v in system.successors.items()}, sorted(system.graph.edges)]))
"""


def test_d5_order_and_signature_are_the_same_under_every_hash_seed(
    under_every_hash_seed: Callable[[str], set[str]],
) -> None:
    # the reference takes its topological order from a set: 6 of 8 hash seeds perturbed the wrong
    # component
    printed = under_every_hash_seed(HASH_SEEDS)
    assert len(printed) == 1
    assert json.loads(printed.pop())[0] == [
        "alpha",
        "beta",
        "each",
        "gamma",
        "mid",
        "zeta",
        "pick",
        "llm",
    ]


def shaped(
    *,
    prompt: str = "Answer.",
    high: int = 9,
    other: bool = False,
    when: bool = False,
    output: Any = str,
    lm: str = "x",
) -> System:
    q = question()
    answerer = LLM("answerer", prompt=Text(prompt), output=output)
    depth = Hyperparameter("depth", Int(1, high, value=5))()
    text = Function("echo", join)(a=q) if other else Function("echo", echo)(text=q)
    guard = q.equals("go") if when else None
    return System("shaped", outputs={"y": answerer(question=text, depth=depth, when=guard)}, lm=lm)


def test_the_signature_changes_with_the_structure_and_not_with_the_values() -> None:
    base = shaped()
    assert base.signature == shaped().signature
    assert base.signature == shaped(prompt="Reply.").signature
    assert base.signature == shaped(lm="y").signature
    assert base.signature == base.bind({"depth.value": 7}).signature
    changed = [
        shaped(high=10),
        shaped(other=True),
        shaped(when=True),
        shaped(output=Literal["yes", "no"]),
        System("shaped", outputs={**base.outputs, "z": question()}),
    ]
    assert len({base.signature, *(system.signature for system in changed)}) == 1 + len(changed)


def test_the_signature_changes_with_the_code_of_a_function_and_with_the_body_of_a_loop() -> None:
    def plus(x: int) -> int:
        return x + 1

    def minus(x: int) -> int:
        return x - 1

    def looped(function: Callable[..., int]) -> System:
        body = System("turn", outputs={"x": Function("step", function)(x=Input("x", int))})
        return System(
            "demo",
            outputs={"y": Loop("loop", body, carry={"x": "x"}, max_turns=2)(x=Input("x", int))},
        )

    assert looped(plus).signature == looped(plus).signature
    assert looped(plus).signature != looped(minus).signature


def test_a_body_that_was_bound_keeps_its_values_and_names_no_model() -> None:
    def turn(lm: str | None = None) -> System:
        step = Function("step", scale, by=Float(0.0, 9.0, value=2.0))
        return System("turn", outputs={"x": step(x=Input("x", float))}, lm=lm)

    def looped(body: System) -> System:
        loop = Loop("loop", body, carry={"x": "x"}, max_turns=Int(1, 3))
        return System("demo", outputs={"x": loop(x=Input("x", float))})

    assert looped(turn()).configuration["step.by"] == 2.0
    assert looped(turn().bind({"step.by": 5.0})).configuration["step.by"] == 5.0
    with pytest.raises(DeclarationError, match="set lm on the outermost system"):
        looped(turn(lm="a"))


def test_the_graph_names_inputs_nodes_and_the_ports_their_edges_feed() -> None:
    q = question()
    text = Function("echo", echo)(text=q)
    system = System(
        "demo", outputs={"y": Function("join", join)(a=text, b=text, when=q.equals("go"))}
    )
    edges = {(a, b): data["ports"] for a, b, data in system.graph.edges(data=True)}
    assert edges == {
        ("$question", "echo"): ("text",),
        ("echo", "join"): ("a", "b"),
        ("$question", "join"): ("when",),
    }


def turn() -> System:
    x = Input("x", int)
    half = Function("half", halve)(x=x)
    return System(
        "turn",
        outputs={"x": half, "done": Function("small", small)(x=half), "note": Input("note", str)},
    )


def halve(x: int) -> int:
    return x // 2


def small(x: int) -> bool:
    return x < 3


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: Loop("l", turn(), carry={"y": "x"}),
            "'l': carry names 'y', which its body does not have",
        ),
        (
            lambda: Loop("l", turn(), carry={"x": "z"}),
            "'l': carry names 'z', which its body does not have",
        ),
        (
            lambda: Loop("l", turn(), carry={"note": "x"}),
            "loop 'l': carry gives 'note' (str) to 'x' (int)",
        ),
        (
            lambda: Loop("l", turn(), carry={}, until="don"),
            "until names 'don', which its body does not have; did you mean 'done'",
        ),
        (
            lambda: Loop("l", turn(), carry={}, until="x"),
            "loop 'l': until needs a bool, but 'x' is int",
        ),
        (lambda: Loop("l", turn(), carry={}, max_turns=0), "max_turns must be >= 1, but got 0"),
        (
            lambda: Loop("l", turn(), carry={}, max_turns=Int(0, 3)),
            "max_turns must be >= 1, but got",
        ),
        (lambda: Map("m", turn(), over="xs"), "'m': over names 'xs', which its body does not have"),
    ],
)
def test_a_wrong_loop_or_map_is_refused(make: Callable[[], object], message: str) -> None:
    assert message in message_of(make, DeclarationError)


def test_parameters_inside_loops_and_maps_belong_to_the_system() -> None:
    inner = LLM("inner", prompt=Text("a"))
    body = System("body", outputs={"y": inner(x=Input("x", str))})
    loop = Loop("loop", body, carry={"y": "x"}, max_turns=Int(1, 4, value=2))
    outer = System(
        "outer",
        outputs={
            "ys": Map("each", System("m", outputs={"y": loop(x=Input("x", str))}), over="x")(
                x=Input("xs", list[str])
            )
        },
    )
    assert list(outer.parameters) == ["inner.prompt", "loop.max_turns"]
    assert (
        outer.bind({"inner.prompt": "b", "loop.max_turns": 4}).configuration["loop.max_turns"] == 4
    )


def test_the_parts_of_a_first_of_must_have_its_type() -> None:
    pick = FirstOf("pick", str)
    assert "pick.b expects str, but $size is int" in message_of(
        lambda: pick(a=question(), b=Function("size", count)(text=question()))
    )


def repeat(text: str, max_turns: int) -> str:
    return text * max_turns


@pytest.mark.parametrize(
    "column", ["prompt", "temperature", "lm", "max_tokens", "demos", "weights"]
)
def test_data_does_not_replace_a_setting_of_the_same_name(column: str) -> None:
    llm: Any = LLM("a", prompt="P.")
    with pytest.raises(WiringError, match=f"'{column}' is a setting of llm 'a'.*the_{column}"):
        llm(**{column: Input(column)})
    with pytest.raises(WiringError, match=f"'{column}' is a setting of llm 'a'.*the_{column}"):
        llm(Input(column))
    llm(**{f"the_{column}": Input(column)})
    llm(q=Input("q"), lm=Selector("model", "x", "y")())


def test_data_does_not_replace_settings_of_other_components() -> None:
    text, turns = Input("text"), Input("max_turns", int)
    body = System("body", outputs={"text": Function("repeat", repeat)(text=text, max_turns=turns)})
    loop = Loop("loop", body, carry={"text": "text"}, max_turns=2)
    cases: list[tuple[Any, dict[str, Input]]] = [
        (Selector("model", "x", "y"), {"choice": Input("choice")}),
        (Agent("agent", tools=[]), {"max_turns": Input("max_turns", int)}),
        (loop, {"text": text, "max_turns": turns}),
        (LLM("b", takes={"prompt": str}), {"prompt": Input("prompt")}),
    ]
    for component, wires in cases:
        with pytest.raises(WiringError, match="is a setting of"):
            component(**wires)


def test_an_answer_does_not_replace_a_setting_that_has_a_value() -> None:
    weather = LLM("weather", output={"temperature": float, "prompt": str})(city=Input("city"))
    for name in ("temperature", "prompt"):
        made: Any = LLM("a", prompt="P.")
        with pytest.raises(WiringError, match=rf"which \$weather\.{name} would replace"):
            made(**{name: weather[name]})
    assert (
        "prompt" in LLM("a")(prompt=weather.prompt, q=Input("q")).node.wires
    )  # it has no other prompt


def test_a_column_may_be_called_name_or_when() -> None:
    with pytest.raises(WiringError, match=r"name= is the node's own name.*the_name"):
        LLM("a")(name=Input("name"))  # type: ignore[arg-type]
    with pytest.raises(WiringError, match=r"when= is the node's own condition"):
        LLM("a")(when="x")
    assert list(LLM("a")(Input("name"), Input("when")).node.wires) == ["name", "when"]
