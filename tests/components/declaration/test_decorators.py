"""`cp.component`: a typed function that declares nodes when called with sources, and runs otherwise."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pydantic
import pytest

import compound as cp
from compound.core.errors import DeclarationError, WiringError
from compound.testing import ScriptedLM


@cp.component
def shout(text: str) -> str:
    """Return the text in capitals."""
    return text.upper()


@cp.component(weight=cp.Float(0.0, 1.0, value=0.5), retries=2)
def fuse(a: float, b: float, weight: float) -> float:
    return weight * a + (1 - weight) * b


@cp.component(name="parts", outputs={"first": str, "rest": str})
async def split(text: str) -> dict[str, str]:
    first, _, rest = text.partition(" ")
    return {"first": first, "rest": rest}


def test_a_call_with_values_is_the_function() -> None:
    assert shout("lima") == "LIMA"
    assert shout(text="lima") == "LIMA"
    assert fuse(1.0, 3.0, weight=0.5) == 2.0
    assert shout.__doc__ == "Return the text in capitals."


def test_sources_by_position_feed_the_parameters_in_order() -> None:
    a, b = cp.Input("a", float), cp.Input("b", float)
    node = fuse(a, b).node
    assert node.wires == {"a": a, "b": b}
    assert fuse(a, b=b).node.wires == {"a": a, "b": b}
    with pytest.raises(WiringError, match=r"fuse\.a is connected twice"):
        fuse(a, b, a=b)


def test_an_async_function_with_several_outputs() -> None:
    parts = split(text=cp.Input("text"))
    system = cp.System("s", {"first": parts.first, "rest": parts.rest})
    assert cp.run(system, {"text": "a b c"}).outputs == {"first": "a", "rest": "b c"}
    assert list(system.nodes) == ["parts"]


def test_a_component_can_be_pickled_by_its_name() -> None:
    assert pickle.loads(pickle.dumps(shout)) is shout
    system = cp.System("s", {"y": shout(cp.Input("x"))})
    copied = pickle.loads(pickle.dumps(system))
    assert copied.signature == system.signature


def test_yaml_names_the_decorated_function(tmp_path: Path) -> None:
    (tmp_path / "decorated_parts.py").write_text(
        "import compound as cp\n\n\n"
        "@cp.component(retries=2, weight=cp.Float(0.0, 1.0, value=0.25))\n"
        "def fuse(a: float, weight: float) -> float:\n    return weight * a\n"
    )
    file = tmp_path / "system.yaml"
    file.write_text(
        "system: s\ninputs: {a: float}\ncomponents:\n"
        "  fuse: {function: {call: 'decorated_parts:fuse'}, in: {a: $a}}\noutputs: {y: $fuse}\n"
    )
    system = cp.load_system(file)
    assert cp.run(system, {"a": 4.0}).outputs == {"y": 1.0}
    assert system.components["fuse"].retries == 2


@pytest.mark.parametrize(
    ("declare", "message"),
    [
        (lambda: cp.component(_untyped), "'_untyped': parameter 'x' has no type; write `x: str`"),
        (lambda: cp.component(missing=1)(_typed), "function '_typed' has no parameter 'missing'"),
        (lambda: cp.component(_count), "is a generator; return a list of its values"),
        (lambda: cp.component(_no_return), "'_no_return' has no return type"),
    ],
)
def test_mistakes_are_refused_with_their_place(declare: Any, message: str) -> None:
    with pytest.raises((DeclarationError, TypeError), match=message):
        declare()


def _untyped(x):  # type: ignore[no-untyped-def]
    return x


def _typed(x: int) -> int:
    return x


def _count(x: int) -> Iterator[int]:
    yield from range(x)


def _no_return(x: int):  # type: ignore[no-untyped-def]
    return x


def test_a_constant_is_refused_with_the_fix() -> None:
    with pytest.raises(WiringError, match=r"fuse\.b .* got 1\.0; use the component's settings"):
        fuse(cp.Input("a", float), 1.0)


class Person(pydantic.BaseModel):
    name: str
    age: int


@cp.llm(temperature=0.5, demos=cp.Demos(max=2))
def classify(text: str, topic: str) -> Literal["yes", "no"]:
    """Does the text discuss the topic?

    Answer strictly.
    """
    raise NotImplementedError


@cp.llm
def extract(text: str) -> Person:
    """Extract the person."""
    raise NotImplementedError


def test_the_signature_and_the_docstring_declare_the_component() -> None:
    assert isinstance(classify, cp.LLM)
    assert classify.name == "classify"
    assert classify.prompt == cp.Text("Does the text discuss the topic?\n\nAnswer strictly.")
    assert classify.takes == {"text": str, "topic": str}
    assert classify.outputs["output"].type == Literal["yes", "no"]
    assert list(classify.parameters) == ["prompt", "demos"]
    assert classify.temperature == 0.5


def test_it_runs_with_typed_inputs_and_outputs() -> None:
    system = cp.System("s", {"person": extract(cp.Input("text"))}, lm="lm")
    engines = {"lm": ScriptedLM(['{"name": "Ada", "age": 36}'])}
    assert cp.run(system, {"text": "Ada, 36"}, engines=engines).outputs == {
        "person": Person(name="Ada", age=36)
    }


def test_sources_by_position_feed_the_parameters() -> None:
    text, topic = cp.Input("a"), cp.Input("b")
    assert classify(text, topic).node.wires == {"text": text, "topic": topic}


def test_the_prompt_may_be_fixed() -> None:
    def answer(question: str) -> None: ...

    assert cp.llm(answer, prompt="Answer.", name="other").settings["prompt"] == "Answer."


def test_the_body_may_be_only_the_docstring() -> None:
    def answer(question: str) -> None:
        """Answer."""

    assert cp.llm(answer).prompt == cp.Text("Answer.")


def _with_code(question: str) -> str:
    """Answer."""
    return question.upper()


def _without_prompt(question: str) -> None: ...


def _without_type(question: str):  # type: ignore[no-untyped-def]
    """Answer."""


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (_with_code, "'_with_code' has statements, which would never run"),
        (_without_prompt, "'_without_prompt' has no prompt; write it as the docstring"),
        (_without_type, "'_without_type' has no return type"),
    ],
)
def test_mistakes_are_refused(function: Any, message: str) -> None:
    with pytest.raises(DeclarationError, match=message):
        cp.llm(function)
