"""Spaces: which values they hold, and how wrong ones are refused."""

from __future__ import annotations

import json
import math
from dataclasses import FrozenInstanceError
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from compound.core.errors import DeclarationError
from compound.graph.space import Choice, Demos, Float, Int, LoRA, Space, Text, Weights
from compound.graph.types import accepts

DEMO = {"inputs": {"q": "1+1"}, "outputs": {"a": "2"}}
SPACES: list[Space] = [
    Text("Answer."),
    Demos(),
    Choice(1, 5, 10),
    Choice("a", "b"),
    Choice(1, "a", True),
    Int(1, 9),
    Float(0.1, 1.0, log=True),
    LoRA(8),
]


@pytest.mark.parametrize("space", SPACES, ids=lambda space: space.kind)
def test_the_starting_value_belongs_to_the_space_and_to_its_port_type(space: Space) -> None:
    assert space.problem(space.value) == ""
    assert accepts(space.type, list(space.value) if isinstance(space, Demos) else space.value)


@pytest.mark.parametrize("space", SPACES, ids=lambda space: space.kind)
def test_a_space_cannot_be_changed_and_declares_itself_as_json(space: Space) -> None:
    with pytest.raises(FrozenInstanceError):
        space.value = None
    declared = space.to_json()
    assert declared["kind"] == space.kind
    assert "value" not in declared
    assert json.loads(json.dumps(declared)) == declared


@pytest.mark.parametrize(
    ("space", "value", "problem"),
    [
        (Text("a"), 3, "must be a string, but got 3"),
        (Text("a", max_length=3), "abcd", "must have at most 3 characters, but has 4"),
        (Demos(), "demo", "must be a list of demonstrations, but got 'demo'"),
        (Demos(max=1), [DEMO, DEMO], "must hold at most 1 demonstrations, but holds 2"),
        (Demos(), [{"inputs": {}}], "must hold {'inputs': {…}, 'outputs': {…}} only, but holds"),
        (Demos(), [{"inputs": {}, "outputs": "2"}], "must hold {'inputs': {…}, 'outputs': {…}}"),
        (Demos(), [3], "must hold {'inputs': {…}, 'outputs': {…}} only, but holds 3"),
        (Choice(1, 5), 7, "must be one of 1, 5, but got 7"),
        (Choice(1, 5), 1.0, "must be one of 1, 5, but got 1.0"),
        (Choice(0, 1), True, "must be one of 0, 1, but got True"),
        (Int(1, 9), 10, "must lie in [1, 9], but got 10"),
        (Int(1, 9), 2.0, "must be an integer, but got 2.0"),
        (Int(0, 9), True, "must be an integer, but got True"),
        (Float(0, 1), 1.5, "must lie in [0, 1], but got 1.5"),
        (Float(0, 1), math.nan, "must be a finite number, but got nan"),
        (Float(0, 1), "0.5", "must be a finite number, but got '0.5'"),
        (Float(0, 1), True, "must be a finite number, but got True"),
        (Weights(), {"path": "x"}, "must be None or {'path': …, 'sha256': …}, but got"),
    ],
)
def test_a_value_outside_is_told_the_broken_law(space: Space, value: Any, problem: str) -> None:
    assert space.problem(value).startswith(problem)
    with pytest.raises(DeclarationError) as error:
        space.check(value, "node.setting")
    assert str(error.value).startswith(f"node.setting {problem}")


@pytest.mark.parametrize(
    ("declare", "message"),
    [
        (lambda: Choice(), "Choice needs at least one option"),
        (lambda: Choice(1, 1), "Choice options must differ"),
        (lambda: Choice([1], [2]), "Choice options must be texts, numbers or booleans"),  # type: ignore[arg-type]
        (lambda: Choice(1, 2, value=3), "Choice must be one of 1, 2, but got 3"),
        (lambda: Int(9, 1), "low <= high must hold, but got low=9, high=1"),
        (lambda: Int(1, 9, value=0), "Int must lie in [1, 9], but got 0"),
        (lambda: Int(0.5, 9), "Int bounds must be numbers"),  # type: ignore[arg-type]
        (lambda: Float(math.nan, 1.0), "low <= high must hold"),
        (lambda: Float(0.0, 1.0, log=True), "a log scale needs low > 0"),
        (lambda: Float(0.0, True), "Float bounds must be numbers"),
        (lambda: Text(3), "Text must be a string"),  # type: ignore[arg-type]
        (lambda: Demos(value=(DEMO, DEMO), max=1), "Demos must hold at most 1"),
        (lambda: LoRA(0), "rank and alpha must be >= 1"),
    ],
)
def test_a_wrong_declaration_is_refused_where_it_is_made(declare: Any, message: str) -> None:
    with pytest.raises(DeclarationError) as error:
        declare()
    assert message in str(error.value)


def test_equal_numbers_of_different_types_are_different_options() -> None:
    choice = Choice(1, 1.0, True)
    assert [choice.problem(value) for value in (1, 1.0, True)] == ["", "", ""]
    assert choice.type is Any


def test_the_port_type_of_text_options_names_them() -> None:
    assert Choice("a", "b").type == Literal["a", "b"]
    assert Choice(1, 5).type is int
    assert Choice(0.5, 1.5).type is float


def test_bounds_without_a_value_start_low_and_alpha_is_twice_the_rank() -> None:
    assert Int(3, 9).value == 3
    assert Float(2, 9).value == 2.0
    assert isinstance(Float(2, 9).value, float)
    assert (LoRA(8).alpha, LoRA(8, alpha=4).alpha) == (16, 4)


def test_lora_targets_are_a_set_of_layers_or_names() -> None:
    assert LoRA(8).targets == "all-linear"
    assert LoRA(8, targets="attention").targets == "attention"
    assert LoRA(8, targets=["q_proj", "v_proj"]) == Weights(
        rank=8, alpha=16, targets=("q_proj", "v_proj")
    )
    with pytest.raises(DeclarationError, match="got 'atention'; did you mean 'attention'"):
        LoRA(8, targets="atention")
    with pytest.raises(DeclarationError, match=r"write a single layer as a list: \[q_proj\]"):
        LoRA(8, targets="q_proj")
    for empty in ([], [""]):
        with pytest.raises(DeclarationError, match="at least one linear layer"):
            LoRA(8, targets=empty)


@given(st.integers(-50, 50), st.integers(0, 50), st.integers(-200, 200))
def test_an_int_space_holds_what_lies_between_bounds(low: int, width: int, value: int) -> None:
    assert (Int(low, low + width).problem(value) == "") == (low <= value <= low + width)


@pytest.mark.parametrize(
    "space",
    [
        Choice("a", 2, True),
        Int(3, 7),
        Int(1, 1000, log=True),
        Float(-1, 2),
        Float(1e-6, 1.0, log=True),
    ],
)
def test_what_is_drawn_lies_in_the_space_and_covers_it(space: Choice | Int | Float) -> None:
    rng = np.random.default_rng(0)
    drawn: list[Any] = [space.draw(rng) for _ in range(400)]
    assert not any(space.problem(value) for value in drawn)
    if isinstance(space, Choice):
        assert {repr(value) for value in drawn} == {repr(option) for option in space.options}
    elif space.log:
        middle = math.sqrt(space.low * space.high)
        assert 0.4 < sum(value < middle for value in drawn) / 400 < 0.6
    else:
        assert min(drawn) < space.low + 0.2 * (space.high - space.low)
        assert max(drawn) > space.high - 0.2 * (space.high - space.low)
