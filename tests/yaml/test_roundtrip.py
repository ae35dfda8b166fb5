"""Writing a system and reading it back changes nothing: laws on generated systems, and every kind by hand."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from compound import LLM, FirstOf, Function, Loop, Map, Port, Retriever, Selector, System
from compound.components.hyperparameter import Hyperparameter
from compound.components.index import BM25, PassageIndex
from compound.core.errors import DeclarationError
from compound.evaluation.metrics.text import find_label, normalize
from compound.graph.component import Component, Input, Operation, Output
from compound.graph.space import Choice, Demos, Float, Int, LoRA, Text, Weights
from compound.yaml import Program, dump, load, loads
from compound.yaml.source import read
from compound.yaml.text import write

FILES = Path(__file__).parents[1] / "files" / "spec"
QUESTION = Input("question")


def again(system: System) -> System:
    """Write a system, read it back, and check that it is the same one."""
    text = dump(system)
    program: Program = loads(text, models=["scripted", "other"])
    assert program.system.signature == system.signature
    assert program.system.configuration == system.configuration
    assert program.system.defaults == system.defaults
    assert dump(program.system) == text
    return program.system


def one(component: Component, **wires: Any) -> System:
    return System("one", {"out": component(**wires)}, lm="scripted")


ODD_TEXTS = (  # between broken bars
    "yes¦1e-6¦0x10¦null¦~¦¦ a ¦a\nb¦a\n¦\n a¦- a¦a: b¦# a¦'¦\"¦{a}¦*a¦!a¦on¦.inf¦a\tb\n¦\x85¦|¦%a¦a\r\nb"
)
TEXTS = st.text(
    st.characters(codec="utf-8", exclude_characters="\0"), max_size=40
) | st.sampled_from(ODD_TEXTS.split("¦"))
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | TEXTS
)
VALUES = st.recursive(
    SCALARS, lambda v: st.lists(v, max_size=3) | st.dictionaries(TEXTS, v, max_size=3), max_leaves=8
)


@given(st.dictionaries(TEXTS, VALUES, max_size=4))
@settings(max_examples=500)
def test_what_is_written_is_read_back(tree: dict[str, Any]) -> None:
    if tree:
        assert read(write(tree), "x.yaml").tree == tree


def spaces(values: st.SearchStrategy[Any], space: Callable[[Any], Any]) -> st.SearchStrategy[Any]:
    return values | values.map(space)


INTS = st.tuples(st.integers(1, 99), st.integers(0, 99), st.booleans()).map(
    lambda t: Int(t[0], t[0] + t[1], t[0] + t[1] // 2, t[2])
)
FLOATS = st.tuples(st.floats(0.001, 9), st.floats(0, 9), st.booleans()).map(
    lambda t: Float(t[0], t[0] + t[1], t[0], t[2])
)
COUNTS = st.integers(1, 99) | INTS | st.just(Choice(1, 5, value=5))
DEMO = st.dictionaries(TEXTS, VALUES, max_size=2).map(
    lambda given: dict[str, dict[str, Any]](inputs=given, outputs={"output": "a"})
)
LLMS = st.fixed_dictionaries(
    {},
    optional={
        "prompt": spaces(TEXTS, Text),
        "demos": st.lists(DEMO, max_size=2).map(tuple)
        | st.lists(DEMO, max_size=2).map(lambda d: Demos(tuple(d), 3)),
        "lm": st.sampled_from(["scripted", Choice("other", "scripted"), "openai/x"]),
        "temperature": st.floats(0, 2) | FLOATS,
        "max_tokens": st.integers(1, 99) | INTS,
        "stop": st.lists(TEXTS, max_size=2).map(tuple),
        "weights": st.sampled_from(
            [
                LoRA(4),
                LoRA(2, 3),
                LoRA(2, targets="attention"),
                Weights(rank=2, targets=("q_proj",)),
            ]
        ),
        "system": TEXTS,
        "timeout": st.none() | st.floats(0.1, 9),
        "retries": st.integers(0, 9),
        "output": st.sampled_from([str, Literal["yes", "no"], str | None]),
    },
)


@st.composite
def systems(draw: st.DrawFn) -> System:
    """Draw a system of a few components over texts, some of them used twice or under a condition."""
    sources: list[Any] = [QUESTION]
    flags: list[Any] = []
    for i in range(draw(st.integers(1, 5))):
        source = draw(st.sampled_from(sources))
        text = draw(st.sampled_from([known for known in sources if known.type is str]))
        when = draw(st.sampled_from([None, *flags]))
        kind = draw(
            st.sampled_from(["llm", "shout", "select", "search", "first", "loop", "map", "fields"])
        )
        name = f"c{i}"
        if kind == "llm":
            llm = LLM(name, **draw(LLMS))
            sources += [llm(text=source, when=when), llm(text=QUESTION, name=f"again{i}")]
        elif kind == "shout":
            sources.append(
                Function(name, normalize, retries=draw(st.integers(0, 2)))(text=text, when=when)
            )
        elif kind == "select":
            chosen = Selector(name, *draw(st.lists(TEXTS, min_size=1, max_size=3, unique=True)))(
                text=source
            )
            sources.append(chosen)
            flags.append(chosen.equals(chosen.node.component.space.options[0]))
        elif kind == "search":
            size = Hyperparameter(f"k{i}", draw(INTS))()
            retriever = Retriever(name, PassageIndex(k1=draw(st.floats(0, 9))), k=draw(COUNTS))
            sources.append(
                LLM(f"read{i}")(
                    passages=retriever(query=text, passages=Input("rows", list), k=size)
                )
            )
        elif kind == "first":
            sources.append(
                FirstOf(name, str | None, ("a", "b", "c"))(
                    b=source, a=draw(st.sampled_from(sources))
                )
            )
        elif kind == "loop":
            state = LLM(f"turn{i}", **draw(LLMS))(state=Input("state", str | None))
            body = System(name, {"state": state})
            sources.append(
                Loop(name, body, carry={"state": "state"}, max_turns=draw(INTS))(state=source)
            )
        elif kind == "map":
            body = System(name, {"x": LLM(f"each{i}")(item=Input("item"))})
            sources.append(
                LLM(f"all{i}")(items=Map(name, body, over="item")(item=Input("items", list[str])))
            )
        else:
            pair = LLM(name, output={"route": Literal["a", "b"], "sure": bool})(text=source)
            sources.append(pair.route)
            flags.append(pair.sure)
    return System("drawn", {f"o{i}": source for i, source in enumerate(sources[1:])}, lm="scripted")


@given(systems())
@settings(max_examples=60)
def test_a_drawn_system_is_read_back_as_it_was(system: System) -> None:
    again(system)


def test_a_system_bound_to_other_values_is_written_with_them() -> None:
    llm = LLM(
        "c", prompt=Text("One.", 99), demos=Demos(max=2), max_tokens=Int(8, 64), weights=LoRA(4)
    )
    bound = one(llm, question=QUESTION).bind(
        {
            "c.prompt": "Two.\nLines.",
            "c.max_tokens": 32,
            "c.demos": [{"inputs": {"question": "1 + 1"}, "outputs": {"output": "2"}}],
            "c.weights": {"path": "/stored/adapter", "sha256": "ab"},
        }
    )
    assert again(bound).configuration["c.prompt"] == "Two.\nLines."


def test_every_kind_is_read_back(tmp_path: Path) -> None:
    shutil.copytree(FILES, tmp_path, dirs_exist_ok=True)
    program = load(tmp_path / "everything.yaml")
    text = dump(program.system)
    second = loads(text, path=tmp_path / "again.yaml", models=["big", "mock"])
    assert second.system.signature == program.system.signature
    assert second.system.configuration == program.system.configuration
    assert dump(second.system) == text


def test_a_component_used_in_two_bodies_is_declared_around_them() -> None:
    shared = LLM("shared", prompt=Text("Share."))

    def body(name: str) -> System:
        return System(name, {"x": shared(x=Input("x"), name=f"{name}_use")})

    first = Loop("first", body("a"), carry={"x": "x"})(x=QUESTION)
    second = Loop("second", body("b"), carry={"x": "x"})(x=first)
    system = again(System("two", {"x": second}, lm="scripted"))
    assert list(system.parameters) == ["shared.prompt"]
    assert "shared" not in system.nodes


def test_a_component_whose_nodes_all_have_other_names_is_only_declared() -> None:
    llm = LLM("rewriter")
    second = llm(question=llm(question=QUESTION, name="hop1"), name="hop2")
    assert list(again(System("hops", {"out": second}, lm="scripted")).nodes) == ["hop1", "hop2"]


def test_paths_of_indexes_are_written_as_they_are(tmp_path: Path) -> None:
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text('{"text": "a"}\n')
    again(one(Retriever("c", BM25(corpus, k1=0.9, title="t")), query=QUESTION))


class Kept(Operation):
    """A component whose settings can be told from its attributes."""

    kind = "kept"
    inputs = None
    outputs: ClassVar[dict[str, Port]] = {"output": Port(str)}
    version = "1"

    def __init__(self, name: str, size: Any = 3, **rest: Any) -> None:
        self.name, self.size = name, size

    async def run(self, inputs: Any, values: Any, call: Any) -> Any:
        return {"output": ""}


class Forgetful(Kept):
    """One that does not keep what it was made with."""

    def __init__(self, name: str, width: int) -> None:
        super().__init__(name)


class Answer(BaseModel):
    """A type that YAML has no name for."""

    text: str


def anonymous() -> Any:
    return lambda text: text


def local() -> Any:
    def shout(text: str) -> str:
        return text

    return shout


def typed(function: Any) -> Any:
    function.__annotations__ = {"text": str, "return": str}
    return function


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: Function("c", typed(anonymous()))(text=QUESTION),
            "c: 'anonymous.<locals>.<lambda>' of .* cannot be named",
        ),
        (
            lambda: Function("c", typed(local()))(text=QUESTION),
            "c: 'local.<locals>.shout' of .* cannot be named",
        ),
        (
            lambda: LLM("c", output=Answer)(text=QUESTION),
            "c.output: the type Answer cannot be written",
        ),
        (
            lambda: Forgetful("c", 4)(text=QUESTION),
            "c: the argument 'width' of Forgetful cannot be read back",
        ),
        (lambda: Kept("c")(text=QUESTION), "c: the argument 'rest' of Kept cannot be read back"),
        (
            lambda: LLM("question")(text=QUESTION),
            r"\$question is the name of both an input and a node",
        ),
        (
            lambda: LLM("a")(text=LLM("b")(text=QUESTION, name="x"), name="b"),
            "node 'b' uses 'a', but a component is named 'b'",
        ),
        (lambda: LLM("c", system="\ud800")(text=QUESTION), "cannot be written in YAML"),
    ],
)
def test_what_files_cannot_hold_is_told_by_name(make: Callable[[], Output], message: str) -> None:
    with pytest.raises(DeclarationError, match=message):
        dump(System("s", {"out": make()}, lm="scripted"))


@pytest.mark.parametrize("value", [math.nan, math.inf, object(), {1: 2}, {"a": {1, 2}}])
def test_values_without_a_spelling_are_refused(value: object) -> None:
    with pytest.raises(DeclarationError, match="cannot be written in YAML"):
        write({"a": value})


def test_a_body_takes_its_values_from_the_system_around_it() -> None:
    body = System("turn", {"x": LLM("inner", prompt=Text("One."))(x=Input("x"))})
    system = one(Loop("outer", body, carry={"x": "x"}), x=QUESTION).bind({"inner.prompt": "Two."})
    assert again(system).configuration["inner.prompt"] == "Two."


def test_one_body_in_two_composites_is_written_twice_with_one_declaration() -> None:
    body = System("both", {"x": LLM("inner")(x=Input("x"))})
    looped = Loop("looped", body, carry={"x": "x"})(x=QUESTION)
    mapped = Map("mapped", body, over="x")(x=Input("xs", list[str]))
    again(System("two", {"a": looped, "b": mapped}, lm="scripted"))


def test_functions_with_several_outputs_keep_their_fields(tmp_path: Path) -> None:
    system = one(Function("c", find_label, choices=["yes", "no"], timeout=2.5), text=QUESTION)
    assert again(system).components["c"].timeout == 2.5
