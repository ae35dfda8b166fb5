"""`cp.llm`: the signature and the docstring of a function declare an LLM component."""

from __future__ import annotations

from typing import Any, Literal

import pydantic
import pytest

import compound as cp
from compound.core.errors import DeclarationError
from compound.testing import ScriptedLM


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
        (
            _with_code,
            "'_with_code' has statements, which would never run; leave only its docstring",
        ),
        (_without_prompt, "'_without_prompt' has no prompt; write it as the docstring"),
        (_without_type, "'_without_type' has no return type"),
    ],
)
def test_mistakes_are_refused(function: Any, message: str) -> None:
    with pytest.raises(DeclarationError, match=message):
        cp.llm(function)
