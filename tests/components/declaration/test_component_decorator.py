"""`cp.component`: a typed function that declares nodes when called with sources, and runs otherwise."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import compound as cp
from compound.core.errors import DeclarationError, WiringError
from compound.yaml.dump import dump


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
    assert "call: decorated_parts:fuse" in dump(system)


@pytest.mark.parametrize(
    ("declare", "message"),
    [
        (lambda: cp.component(_untyped), "'_untyped': parameter 'x' has no type; write `x: str`"),
        (lambda: cp.component(missing=1)(_typed), "function '_typed' has no parameter 'missing'"),
        (
            lambda: cp.component(_count),
            "function '_count' is a generator; return a list of its values",
        ),
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
    with pytest.raises(
        WiringError, match=r"fuse\.b must be connected .* got 1\.0; use the component's settings"
    ):
        fuse(cp.Input("a", float), 1.0)
