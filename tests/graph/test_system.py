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


def parts() -> Any:
    return Function("parts", both, outputs={"size": int, "upper": str})(text=question())


def echoed(name: str = "echo", **wires: Any) -> Any:
    return Function("echo", echo)(text=question(), name=name, **wires)


def untyped(x, y: int) -> int:  # type: ignore[no-untyped-def]
    return y


def silent(x: int):  # type: ignore[no-untyped-def]
    return x


def greedy(*xs: int) -> int:
    return sum(xs)


SIZE = Function("size", count)(text=question())
LABEL = Selector("label", "fast", "slow")(question=question())
INNER = Map("each", System("body", {"y": Function("echo", echo)(text=Input("x"))}), over="x")
ECHOED, OTHER = echoed(), echoed("other")
SAME = Function("echo", echo)
MISTAKES: list[tuple[Callable[[], object], str]] = [
    (lambda: Function("join", join)(a=SIZE), "join.a expects str, but $size is int; change one"),
    (lambda: Function("echo", echo)(text=parts().size), "$parts.size is int; connect $parts.upper"),
    (lambda: Function("join", join)(), "join.a is not connected; join takes a: str, b: str"),
    (lambda: Function("echo", echo)(txt=question()), "echo has no input 'txt'; did you mean 'tex"),
    (lambda: SAME(text=None), "echo.text must be connected to an input or an output, but got None"),
    (lambda: SAME(text="words"), "use the component's settings for constants"),
    (lambda: SAME(text=parts()), "echo.text must be connected"),
    (lambda: System("s", {"y": parts()}), "output 'y' of system 's' is not produced by any node"),
    (lambda: System("s", {"y": "a"}), "is not produced by any node: got 'a'"),  # type: ignore[dict-item]
    (lambda: System("s", {}), "system 's' has no outputs"),
    (lambda: parts().uper, "parts has no output 'uper'; did you mean 'upper'?"),
    (
        lambda: Function("scale", scale, by=2.0)(x=Input("x", float), by=Input("factor", str)),
        "scale.by expects float, but $factor is str",
    ),
    (lambda: FirstOf("pick", str)(a=question(), b=SIZE), "pick.b expects str, but $size is int"),
    # a condition compares with a value that its source can have
    (lambda: echoed(when=SIZE.equals("x")), "when compares $size with 'x', but its type is int"),
    (lambda: echoed(when=OTHER), "when compares $other with True, but its type is str"),
    (lambda: echoed(when=LABEL.equals("medium")), "when compares $label with 'medium'"),
    # functions
    (lambda: Function("f", untyped), "parameter 'x' has no type; write `x: str`"),
    (lambda: Function("f", silent), "has no return type; annotate it, for example `-> str`"),
    (lambda: Function("f", greedy), "parameter 'xs' must not be positional-only"),
    (lambda: Function("scale", scale, bye=1), "function 'scale' has no parameter 'bye'"),
    # inputs, nodes and names of a system
    (lambda: System("s", {"y": ECHOED}, inputs=[question(), Input("context")]), "unused inputs"),
    (
        lambda: System("s", {"y": ECHOED, "z": Input("query")}, inputs=[Input("query")]),
        "reads undeclared inputs: 'question'; declared: 'query'",
    ),
    (lambda: System("s", {"a": ECHOED, "b": Input("question", int)}), "declared as int and as str"),
    (lambda: System("s", {"a": ECHOED}, inputs=[Input("question", int)]), "as str and as int"),
    (lambda: System("s", {"a": SAME(text=question()), "b": SAME(text=question())}), "name='other'"),
    (lambda: System("s", {"a": ECHOED, "b": OTHER}), "two components are named 'echo'"),
    (lambda: System("s", {"a": ECHOED, "b": INNER(x=Input("xs", list[str]))}), "are named 'echo'"),
    (lambda: System("s", {"y": ECHOED}, nodes=[ECHOED, OTHER, parts()]), "no output depends on"),
]


@pytest.mark.parametrize(("make", "message"), MISTAKES, ids=[each for _, each in MISTAKES])
def test_a_wrong_declaration_is_refused_where_it_is_made(
    make: Callable[[], object], message: str
) -> None:
    assert message in message_of(make, DeclarationError)


def test_what_is_declared_right_is_kept() -> None:
    assert [output.label for output in parts()] == ["$parts.size", "$parts.upper"]
    scaled = Function("scale", scale, by=2.0)(x=Input("x", float), by=Input("factor", float))
    assert scaled.label == "$scale"
    assert echoed(when=LABEL.equals("fast")).label == "$echo"
    assert list(System("s", {"y": ECHOED}, inputs=[question()]).inputs) == ["question"]
    assert list(System("s", {"y": ECHOED}, nodes=[ECHOED]).nodes) == ["echo"]


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


def test_a_function_that_compares_with_mixed_constants_can_be_declared() -> None:
    def empty(text: str) -> bool:
        return text in {None, "", 0}

    assert Function("empty", empty).version == Function("again", empty).version


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
    order = ["alpha", "beta", "each", "gamma", "mid", "zeta", "pick", "llm"]
    assert json.loads(printed.pop())[0] == order


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
        (lambda: Loop("l", turn(), carry={"y": "x"}), "carry names 'y', which its body"),
        (lambda: Loop("l", turn(), carry={"x": "z"}), "carry names 'z', which its body"),
        (lambda: Loop("l", turn(), carry={"note": "x"}), "carry gives 'note' (str) to 'x' (int)"),
        (lambda: Loop("l", turn(), carry={}, until="don"), "not have; did you mean 'done'"),
        (lambda: Loop("l", turn(), carry={}, until="x"), "until needs a bool, but 'x' is int"),
        (lambda: Loop("l", turn(), carry={}, max_turns=0), "max_turns must be >= 1, but got 0"),
        (lambda: Loop("l", turn(), carry={}, max_turns=Int(0, 3)), "max_turns must be >= 1"),
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
