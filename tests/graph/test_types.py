"""Port types: how they are spelled, which may feed which, and what belongs to them."""

from __future__ import annotations

from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from compound.core.errors import DeclarationError
from compound.graph.json_types import json_type
from compound.graph.types import (
    Port,
    accepts,
    as_declared,
    convert,
    format_ports,
    format_type,
    is_assignable,
    parse,
)

LABELS = st.text("abcdefgh xyz-", min_size=1, max_size=6).map(str.strip).filter(bool)
LITERALS = st.lists(LABELS, min_size=1, max_size=3, unique=True).map(
    lambda labels: Literal[tuple(labels)]
)
PLAIN = st.sampled_from([str, int, float, bool, list, dict, Any])
TYPES = st.recursive(
    PLAIN | LITERALS,
    lambda inner: st.one_of(
        inner.map(lambda t: list[t]),  # type: ignore[valid-type]
        inner.map(lambda t: dict[str, t]),  # type: ignore[valid-type]
    ),
    max_leaves=4,
)


class Person(BaseModel):
    name: str


@given(TYPES)
def test_parsing_the_spelling_of_a_type_gives_the_type_back(kind: Any) -> None:
    assert parse(format_type(kind)) == kind


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("str", str),
        (" list[str] ", list[str]),
        ("dict[str, list[int]]", dict[str, list[int]]),
        ("one of yes, no", Literal["yes", "no"]),
        ("one of not sure, sure", Literal["not sure", "sure"]),
        ("Literal['a, b', 'c']", Literal["a, b", "c"]),
        ("Literal[1, 2]", Literal[1, 2]),
        ("str | None", str | None),
        ("int | float | str", int | float | str),
        ("any", Any),
    ],
)
def test_a_type_is_read_from_yaml(text: str, kind: Any) -> None:
    assert parse(text) == kind


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lsit", "'lsit' is not a type; did you mean 'list'?"),
        ("list[strr]", "'strr' is not a type; did you mean 'str'?"),
        ("list[str, int]", "'list[str, int]' is not a type"),
        ("one of yes,, no", "has an empty label"),
        ("", "'' is not a type"),
        ("str(", "'str(' is not a type"),
        ("Literal[str]", "is not a type"),
    ],
)
def test_what_is_not_a_type_is_refused_and_the_nearest_named(text: str, message: str) -> None:
    with pytest.raises(DeclarationError) as error:
        parse(text)
    assert message in str(error.value)


@pytest.mark.parametrize(
    "text", ["__import__('os').getcwd()", "str if 1 else int", "(lambda: str)()", "str.__class__"]
)
def test_a_spelling_is_never_evaluated(text: str) -> None:
    with pytest.raises(DeclarationError, match="is not a type"):
        parse(text)


@pytest.mark.parametrize(
    ("source", "target", "expected"),
    [
        (str, str, True),
        (str, int, False),
        (int, float, True),
        (float, int, False),
        (bool, int, False),
        (int, bool, False),
        (bool, float, False),
        (Any, str, True),
        (str, Any, True),
        (Literal["a"], str, True),
        (str, Literal["a"], False),
        (Literal["a"], Literal["a", "b"], True),
        (Literal["a", "c"], Literal["a", "b"], False),
        (Literal["a"], int, False),
        (list[int], list[float], True),
        (list[int], list[str], False),
        (list, list[str], True),
        (list[str], list, True),
        (list[str], str, False),
        (str, list[str], False),
        (dict[str, int], dict[str, float], True),
        (dict[str, int], dict[str, str], False),
        (str, str | None, True),
        (str | None, str, False),
        (str | None, str | int | None, True),
        (int, str | None, False),
        (Person, BaseModel, True),
        (BaseModel, Person, False),
    ],
)
def test_one_type_may_feed_another_only_when_all_its_values_belong_there(
    source: Any, target: Any, expected: bool
) -> None:
    assert is_assignable(source, target) is expected


@given(TYPES)
def test_a_type_feeds_itself_and_any(kind: Any) -> None:
    assert is_assignable(kind, kind)
    assert is_assignable(kind, Any)
    assert is_assignable(Any, kind)


@given(
    st.sampled_from(
        [str, int, float, bool, list[int], list[str], Literal["a"], Literal["a", "b"], str | None]
    ),
    st.data(),
)
def test_what_one_type_holds_is_accepted_where_it_may_go(source: Any, data: st.DataObject) -> None:
    target = data.draw(
        st.sampled_from([str, int, float, bool, list[int], list[float], list[str], str | None])
    )
    value = data.draw(st.from_type(source))
    if is_assignable(source, target):
        assert accepts(target, value)


@pytest.mark.parametrize(
    ("kind", "value", "expected"),
    [
        (str, "a", True),
        (str, 1, False),
        (int, 1, True),
        (int, True, False),
        (int, "1", False),
        (int, 1.0, False),
        (float, 1, True),
        (float, True, False),
        (bool, True, True),
        (bool, 1, False),
        (list[str], ["a"], True),
        (list[str], "a", False),
        (list[str], ["a", 1], False),
        (dict[str, int], {"a": 1}, True),
        (dict[str, int], {"a": "1"}, False),
        (Literal["yes", "no"], "yes", True),
        (Literal["yes", "no"], "Yes", False),
        (str | None, None, True),
        (str, None, False),
        (Any, object(), True),
        (Person, Person(name="Ada"), True),
        (Person, "Ada", False),
    ],
)
def test_a_value_is_of_a_type_without_conversion(kind: Any, value: Any, expected: bool) -> None:
    assert accepts(kind, value) is expected


def test_text_is_converted_leniently_where_that_is_asked() -> None:
    assert convert(int, "3") == 3
    assert convert(bool, "true") is True
    assert convert(list[float], ["1", 2]) == [1.0, 2.0]
    with pytest.raises(ValueError, match="'three' is not int"):
        convert(int, "three")


def test_ports_are_listed_with_their_types() -> None:
    ports = {"question": Port(str), "k": Port(int, optional=True), "label": Port(Literal["a", "b"])}
    assert format_ports(ports) == "question: str, k: int (optional), label: one of a, b"
    assert format_ports({}) == "none"


@pytest.mark.parametrize(
    ("schema", "problem"),
    [
        ({"type": "objekt"}, "invalid"),
        ({"type": "object", "properties": {"a": {"$ref": "http://127.0.0.1:9/x"}}}, "part of it"),
        ({"$ref": "#/$defs/Missing"}, "not a part of it"),
        ({"type": "string", "pattern": "(?=a)b"}, "not supported"),
        ({"patternProperties": {"a+": {}}}, "patternProperties"),
        ({"enum": [{1, 2}]}, "must be JSON"),
        ({"type": "string", "description": "x" * 100_001}, "characters"),
        ({"$ref": "#"}, "refers to itself"),
        ({"properties": {"a": {"allOf": [{"$ref": "#/properties/a"}]}}}, "refers to itself"),
        (
            {"$defs": {"a": {"not": {"$ref": "#/$defs/b"}}, "b": {"$ref": "#/$defs/a"}}},
            "refers to itself",
        ),
    ],
)
def test_a_json_schema_that_cannot_be_used_is_refused(schema: Any, problem: str) -> None:
    with pytest.raises(DeclarationError, match=problem):
        json_type(schema)


def test_values_of_a_json_schema_are_checked_in_linear_time() -> None:
    kind = json_type({"type": "string", "pattern": "^(a+)+$"})
    assert accepts(kind, "aaa")
    assert not accepts(kind, "a" * 40 + "!")
    assert not accepts(json_type({"type": "array", "uniqueItems": True}), [1, 1])


@pytest.mark.parametrize("name", ["$schema", "$id"])
def test_a_part_of_a_json_schema_chooses_no_other_rules(name: str) -> None:
    """A part with `$schema` would be checked by Python's regular expressions, which backtrack."""
    text = {"type": "string", "pattern": "^(a+)+$"}
    own = {name: "https://json-schema.org/draft/2020-12/schema"}
    parts = {"x": {**own, "$ref": "#/$defs/text"}, "y": {**own, **text}, name: {"type": "null"}}
    kind = json_type({"$defs": {"text": text}, "type": "object", "properties": parts})
    for part in ("x", "y"):
        assert accepts(kind, {part: "aaa", name: None})
        assert not accepts(
            kind, {part: "aaa\n"}
        )  # the `$` of Python would match before the end of a line
        assert not accepts(kind, {part: "a" * 40 + "!"})
    assert not accepts(kind, {name: 1})


def multiplying(levels: int) -> Any:
    """Return the type of a schema whose references double at each level."""
    parts = {f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(levels)}
    return json_type({"$ref": "#/$defs/d0", "$defs": {**parts, f"d{levels}": {"type": "string"}}})


def test_references_that_multiply_end_the_check_of_a_value() -> None:
    assert accepts(multiplying(8), "a")
    assert not accepts(multiplying(40), "a")
    with pytest.raises(ValueError, match="too many steps"):
        convert(multiplying(40), "a")


def test_a_deep_value_of_a_recursive_json_schema_is_no_crash() -> None:
    kind = json_type(
        {"type": "object", "properties": {"a": {"$ref": "#"}}, "additionalProperties": False}
    )
    value: dict[str, Any] = {}
    for _ in range(20):
        value = {"a": value}
    assert accepts(kind, value)
    for _ in range(400):
        value = {"a": value}
    with pytest.raises(ValueError, match="nested too deeply"):
        convert(kind, value)


def test_a_long_value_is_checked_completely() -> None:
    numbers = json_type(
        {"type": "array", "items": {"anyOf": [{"type": "integer"}, {"type": "null"}]}}
    )
    assert accepts(numbers, [1, None] * 20_000)
    assert not accepts(numbers, [*[1, None] * 20_000, "a"])


def test_a_class_is_not_accepted_as_its_json_form_but_restored_from_it() -> None:
    assert not accepts(Person, {"name": "Ada"})
    assert not accepts(list[Person], [{"name": "Ada"}])
    restored = as_declared(list[Person], [{"name": "Ada"}])
    assert accepts(list[Person], restored)
    assert as_declared(dict[str, int], {"a": "1"}) == {"a": "1"}
    assert as_declared(Person, {"nothing": 1}) == {"nothing": 1}
