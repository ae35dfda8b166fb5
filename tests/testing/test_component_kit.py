"""The kit of components catches each kind of wrong component by the check that is meant for it."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from compound import Choice, Int, Port
from compound.ext import CallContext, Message, Operation, Request
from compound.testing import ComponentKit, ScriptedLM, run_kit

INPUTS = [{"words": ["a", "b"], "more": {"x": [1]}}, {"words": [], "more": {}}]
ASK = Request((Message("user", "What next?"),), max_tokens=5)


class Right(Operation):
    kind = "draw"
    version: Any = "draw:1"
    cacheable = True
    inputs: Any = {"words": Port(list[str]), "more": Port(dict)}  # noqa: RUF012
    outputs: Any = {"found": Port(list[str]), "count": Port(int)}  # noqa: RUF012

    def __init__(self, name: str) -> None:
        self.name = name

    @property
    def settings(self) -> Mapping[str, object]:
        return {"most": Int(1, 3, value=2)}

    def deterministic(self, values: Mapping[str, object]) -> bool:
        return False

    async def run(self, inputs: Any, values: Any, call: CallContext) -> Any:
        found = [word for word in inputs["words"] if self.chance(call) < 0.5][: values["most"]]
        return {"found": found, "count": len(found)}

    def chance(self, call: CallContext) -> float:
        return float(call.rng.random())


def failures(make: Callable[[str], Any], inputs: Any = INPUTS, **attributes: Any) -> dict[str, str]:
    hooks = {"make": lambda self, name: make(name), "inputs": lambda self: inputs, **attributes}
    return run_kit(type("TestDraw", (ComponentKit,), hooks))


def test_a_right_component_passes() -> None:
    assert failures(Right) == {}
    assert failures(Right, INPUTS[0]) == {}


def wrong(**attributes: Any) -> type[Any]:
    return type("Wrong", (Right,), attributes)


def settings(**given: Any) -> type[Any]:
    return wrong(settings={"most": 2, **given})


async def failing(*_: object) -> Any:
    raise ValueError("no words")


async def untyped(self: Any, inputs: Any, values: Any, call: CallContext) -> Any:
    found = await Right.run(self, inputs, values, call)
    return {**found, "count": str(found["count"])}


NUMBERS = itertools.count()
Renamed = wrong(__init__=lambda self, name: setattr(self, "name", name.removesuffix("_2")))
Fails = wrong(run=failing)
Untyped = wrong(run=untyped)
Counts = wrong(chance=lambda self, _: next(NUMBERS) % 4 / 4)
Numbered = wrong(version=functools.cached_property(lambda self: f"draw:{next(NUMBERS)}"))
Global = wrong(chance=lambda self, _: random.random())
Certain = wrong(deterministic=lambda self, _: True)


class Copied(Right):
    """Loses a part of itself when it is copied."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.version = "draw:2"

    def __copy__(self) -> Copied:
        other = object.__new__(Copied)
        other.name = self.name
        return other


class Deep(Right):
    """Forgets what it holds when it is copied deeply."""

    limit = 0

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.limit = 5

    def __deepcopy__(self, memo: object) -> Deep:
        other = object.__new__(Deep)
        other.name = self.name
        return other

    def chance(self, call: CallContext) -> float:
        return 0.0 if self.limit else 1.0


class Asks(Right):
    async def run(self, inputs: Any, values: Any, call: CallContext) -> Any:
        await call.generate("lm", ASK)
        return {"found": inputs["words"], "count": len(inputs["words"])}


NAME = "test_it_keeps_its_name"
DECLARED = "test_kind_version_and_ports_are_declared"
PARAMETERS = "test_parameters_hold_their_start_values"
REPR = "test_the_repr_is_short"
TYPES = "test_outputs_have_the_declared_types"
ALIKE = "test_equal_components_behave_alike"
CERTAIN = "test_a_deterministic_component_ignores_its_stream"
GLOBAL = "test_global_generators_are_not_used"


def outside() -> Choice:
    space = Choice(1, 2)
    object.__setattr__(space, "value", 9)
    return space


class Declared(Choice):
    def to_json(self) -> dict[str, object]:
        return {"options": {*self.options}}


@pytest.mark.parametrize(
    ("component", "check", "message"),
    [
        (Renamed, NAME, "a component created as 'second_2' has the name 'second'"),
        (lambda name: object(), DECLARED, "object is neither an Operation nor a Composite"),
        (wrong(kind=""), DECLARED, "kind must be a text that is not empty, but is ''"),
        (
            wrong(version=property(lambda self: repr(self.run.__func__))),
            DECLARED,
            "contains the address of an object",
        ),
        (wrong(inputs={"words": list[str]}), DECLARED, "'words' of inputs must be a Port"),
        (wrong(outputs={"a b": Port(int)}), DECLARED, "outputs must have names of letters"),
        (wrong(outputs={}), DECLARED, "outputs declares no port"),
        (wrong(outputs=["found"]), DECLARED, "outputs must map names to ports"),
        (wrong(inputs={"most": Port(int)}), DECLARED, "most is an input and a setting"),
        (settings(size=outside()), PARAMETERS, "the value of the parameter 'size' must be one of"),
        (settings(size=Declared(1, 3)), PARAMETERS, "to_json of the parameter 'size' must be JSON"),
        (settings(**{"a.b": Int(1, 2)}), PARAMETERS, "the parameter 'a.b' must be a name"),
        (Numbered, ALIKE, "another instance has version 'draw:"),
        (wrong(__repr__=lambda self: "word " * 100), REPR, "repr has 500 characters"),
        (Fails, TYPES, "the call failed: ValueError: no words"),
        (Untyped, TYPES, "tested.count must be int"),
        (Counts, ALIKE, "another instance has the outputs"),
        (Certain, CERTAIN, "deterministic(values) is True, but on inputs 1 two random streams"),
        (Global, GLOBAL, "the global generator of random;"),
        (Copied, ALIKE, "copy.copy has version 'draw:1' instead of 'draw:2'"),
        (Deep, ALIKE, "copy.deepcopy has the outputs"),
    ],
)
def test_a_wrong_component_is_caught(
    component: Callable[[str], Any], check: str, message: str
) -> None:
    found = failures(component)
    assert message in found.get(check, f"{check} passed; failed: {found}")


def test_an_input_that_the_component_lacks_fails() -> None:
    assert "cannot be connected to the component" in failures(Right, {"word": "a"})[TYPES]
    assert (
        "must name the same ports in every call"
        in failures(Right, [INPUTS[0], {"words": []}])[TYPES]
    )


def test_a_model_may_answer() -> None:
    assert failures(Asks, engine=lambda self: ScriptedLM({"next": "go"})) == {}
