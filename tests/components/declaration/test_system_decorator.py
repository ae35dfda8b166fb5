"""`cp.system`: a Python function of components becomes a graph; code that needs values is refused with its line."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable
from typing import Any, Literal, TypedDict

import pytest
from hypothesis import given
from hypothesis import strategies as st

import compound as cp
from compound.core.errors import DeclarationError, GraphBuildError, WiringError
from compound.testing import ScriptedLM


@cp.component
def increase(x: int) -> int:
    return x + 1


@cp.component
def add(a: int, b: int) -> int:
    return a + b


@cp.component
def is_even(x: int) -> bool:
    return x % 2 == 0


@cp.component
def words(text: str) -> list[str]:
    return text.split()


@cp.llm
def answer(question: str, hint: str) -> str:
    """Answer."""
    raise NotImplementedError


def test_parameters_become_inputs_and_the_value_the_output() -> None:
    @cp.system
    def chain(x: int) -> int:
        return increase(increase(x))

    assert isinstance(chain, cp.System)
    assert (chain.name, chain.inputs, list(chain.outputs)) == ("chain", {"x": int}, ["output"])
    assert list(chain.nodes) == ["increase", "increase_2"]
    assert cp.run(chain, {"x": 1}).outputs == {"output": 3}


def test_options_and_a_dict_of_outputs() -> None:
    @cp.system(name="qa", lm="lm")
    def build(question: str, hint: str) -> dict[str, str]:
        return {"answer": answer(question, hint), "question": question}

    assert (build.name, build.lm) == ("qa", "lm")
    trace = cp.run(build, {"question": "?", "hint": "!"}, engines={"lm": ScriptedLM(["Lima"])})
    assert trace.outputs == {"answer": "Lima", "question": "?"}


@dataclasses.dataclass
class Report:
    total: int
    even: bool


def test_a_dataclass_names_the_outputs() -> None:
    def build(x: int) -> object:
        total: Any = increase(x)
        return Report(total, is_even(total))

    assert cp.run(cp.system(build), {"x": 1}).outputs == {"total": 2, "even": True}


def test_conditions_and_constants_of_python_are_fine() -> None:
    def build(x: int) -> object:
        for _ in range(3):  # known while the graph is built
            x = increase(x)
        even = is_even(x)
        return cp.FirstOf("chosen", int)(a=increase(x, when=even), b=x)

    system = cp.system(build)
    assert len(system.nodes) == 6
    assert cp.run(system, {"x": 1}).outputs == {"output": 5}
    assert cp.run(system, {"x": 2}).outputs == {"output": 5}


@given(st.lists(st.sampled_from(["increase", "add"]), min_size=1, max_size=8), st.integers(-50, 50))
def test_a_built_graph_computes_what_the_function_computes(steps: list[str], start: int) -> None:
    def compute(x: int) -> Any:
        total: Any = x
        for step in steps:
            total = increase(total) if step == "increase" else add(total, x)
        return total

    assert cp.run(cp.system(compute), {"x": start}).outputs == {"output": compute(start)}


def _unpacking(text: str) -> object:
    first, second = words(text)
    return first, second


NEED_A_VALUE: list[tuple[Any, str]] = [
    (lambda x: increase(x) if is_even(x) else x, "when="),
    (lambda text: [words(text) for _ in words(text)], "cp.Map"),
    (lambda question: answer(question=f"{question}?", hint=question), "input"),
    (lambda x: increase(x) + 1, "@cp.component"),
    (lambda x: 1 - increase(x), "@cp.component"),
    (lambda x: increase(x) > 1, "@cp.component"),
    (lambda x: increase(x) == 1, "equals"),
    (lambda text: len(words(text)), "@cp.component"),
    (lambda text: "a" in words(text), "@cp.component"),
    (lambda text: str(words(text)), "input"),
    (lambda x: not is_even(x), "when="),
    (lambda text: words(text)[0], "@cp.component"),
    (lambda text: text[1:], "@cp.component"),
    (lambda text: tuple(reversed(words(text))), "cp.Map"),
    (_unpacking, "cp.Map"),
]


@pytest.mark.parametrize(("function", "hint"), NEED_A_VALUE)
def test_code_that_needs_a_value_is_refused_with_its_line(function: Any, hint: str) -> None:
    line = function.__code__.co_firstlineno + (function is _unpacking)
    kinds = {name: int if name == "x" else str for name in inspect.signature(function).parameters}
    function.__annotations__, function.__name__ = {**kinds, "return": object}, "built"
    with pytest.raises(GraphBuildError, match=rf"decorator\.py:{line}: .*no value while") as caught:
        cp.system(function)
    assert hint in caught.value.hint


def _attribute(question: str) -> object:
    return answer(question=question.upper(), hint=question)


def _library(question: str) -> object:
    return re.sub("a", "b", question)


@pytest.mark.parametrize("function", [_attribute, _library])
def test_other_errors_are_explained_with_their_line(function: Callable[..., object]) -> None:
    line = inspect.getsourcelines(function)[1] + 1
    with pytest.raises(GraphBuildError, match=rf"could not be built: .*\.py:{line}") as caught:
        cp.system(function)
    assert "placeholders" in caught.value.hint


def test_a_wrong_edge_is_refused_with_its_line() -> None:
    def build(text: str) -> object:
        return increase(words(text))

    line = inspect.getsourcelines(build)[1] + 1
    with pytest.raises(WiringError, match=rf"test_system_decorator\.py:{line}, in build") as caught:
        cp.system(build)
    assert "increase.x expects int" in caught.value.message
    assert "change one" in caught.value.hint


@cp.component
def label(text: str, style: Literal["long", "short"], parts: list[str], scale: float) -> str:
    return f"{style} {text} {parts} {scale}"


def test_constants_become_nodes_that_a_file_can_hold() -> None:
    @cp.system(lm="lm")
    def build(question: str) -> dict[str, str]:
        given = label(question, "short", ["a", "b"], 0.5)
        return {"label": given, "answer": answer("fixed", hint=question)}

    names = "answer_question answer label_parts label_scale label_style label"
    assert list(build.nodes) == names.split()
    assert list(build.parameters) == ["answer.prompt"]
    lm = ScriptedLM(lambda message: message)
    assert cp.run(build, {"question": "q"}, engines={"lm": lm}).outputs == {
        "label": "short q ['a', 'b'] 0.5",
        "answer": "Answer.\n\nQuestion: fixed\nHint: q\nAnswer:",
    }


def test_a_constant_of_another_type_is_refused() -> None:
    def build(question: str) -> object:
        return label(question, "tall", ["a"], 1.0)

    with pytest.raises(WiringError, match=r"one of long, short, but \$label_style is one of tall"):
        cp.system(build)


def test_outside_of_a_function_a_constant_is_a_hyperparameter() -> None:
    with pytest.raises(WiringError, match=r"Hyperparameter\('name', 'constant'\)\(\)"):
        answer(question="fixed", hint=cp.Input("hint"))
    system = cp.System(
        "s",
        {
            "a": answer(
                question=cp.components.Hyperparameter("topic", "fixed")(), hint=cp.Input("hint")
            )
        },
        lm="lm",
    )
    trace = cp.run(system, {"hint": "h"}, engines={"lm": ScriptedLM(lambda message: message)})
    assert "Question: fixed" in str(trace.outputs["a"])
    with pytest.raises(DeclarationError, match="must be a space or a constant"):
        cp.components.Hyperparameter("topic", {"a": 1})  # type: ignore[arg-type]


class Sizes(TypedDict):
    total: int


def built(function: Any, returns: Any, **kinds: Any) -> Any:
    """Return a function with a name and annotations, which has a number `x` by default."""
    function.__annotations__ = {**(kinds or {"x": int}), "return": returns}
    function.__name__ = "built"
    return function


@pytest.mark.parametrize(
    ("function", "returns", "message"),
    [
        (lambda x: increase(x), str, r"\$increase as int, but declares str \(.*\.py:\d+\)"),
        (lambda x: {"x": increase(x)}, dict[str, str], r"\$increase as int, but declares str"),
        (lambda x: {"total": is_even(x)}, Sizes, r"\$is_even as bool, but declares int"),
        (
            lambda x: Report(increase(x), increase(x)),  # type: ignore[arg-type]
            Report,
            r"\$increase_2 as int, but declares bool",
        ),
        (lambda x: {"x": increase(x)}, str, r"several outputs as a dict, but declares str"),
    ],
)
def test_outputs_of_other_types_than_declared_are_refused(
    function: Any, returns: Any, message: str
) -> None:
    with pytest.raises(DeclarationError, match=message):
        cp.system(built(function, returns))


@pytest.mark.parametrize(
    ("function", "returns"),
    [
        (lambda x: increase(x), float | None),
        (lambda x: {"total": increase(x)}, Sizes),
        (lambda x: {"a": increase(x), "b": is_even(x)}, dict),
    ],
)
def test_outputs_of_the_declared_types_are_accepted(function: Any, returns: Any) -> None:
    assert cp.run(cp.system(built(function, returns)), {"x": 1}).failure is None


def test_a_default_of_a_parameter_is_refused() -> None:
    def build(x: int, y: int = 3) -> int:
        return add(x, y)

    with pytest.raises(DeclarationError, match=r"'y' of .*'build' has the default 3") as caught:
        cp.system(build)
    assert "`y = 3`" in caught.value.hint


def _untyped(x):  # type: ignore[no-untyped-def]
    return increase(x)


async def _async(x: int) -> object:
    return increase(x)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (built(lambda x, y: increase(x), object, x=int, y=int), "declares unused inputs: 'y'"),
        (built(lambda x: (increase(x), is_even(x))[1], object), "no output depends on: 'increase'"),
        (built(lambda x: (increase(x), 3)[1], object), r"int, which names no outputs .*\.py"),
        (_untyped, "parameter 'x' has no type"),
        (_async, "is an async function"),
        (built(lambda x: (x, increase(x)), object), "tuple, which names no outputs .*several"),
        (built(lambda x: {"y": increase(x), "z": 3}, object), "output 'z' of system 'built' is 3"),
    ],
)
def test_mistakes_are_refused(function: Any, message: str) -> None:
    with pytest.raises((DeclarationError, WiringError), match=message):
        cp.system(function)


def test_outside_of_a_build_outputs_stay_usable_as_objects() -> None:
    output = increase(cp.Input("x", int))
    assert output
    assert str(output) == repr(output) == f"{output}" == "Output($increase: int)"
    assert output != 1
    assert {output: 1}[output] == 1
    with pytest.raises(TypeError):
        iter(output)
    with pytest.raises(GraphBuildError, match=r"\.py:\d+: an operator computes with \$increase"):
        output + 1
