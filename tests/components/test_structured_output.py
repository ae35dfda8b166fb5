"""Structured outputs of the LLM component: what the model is told, parsing, re-asks, caches and graph edges."""

from __future__ import annotations

import asyncio
import dataclasses
import datetime
import decimal
import enum
import json
import sys
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal, TypedDict

import pytest
from pydantic import AfterValidator, BaseModel, Field, StringConstraints, model_validator

import compound as cp
from compound.components.answers.answer_types import answer_format, describe, enforceable
from compound.components.answers.type_notes import Layout
from compound.components.fields import parse, render
from compound.components.function import Function
from compound.core.engine import AnswerFormat, Request
from compound.core.errors import DeclarationError, ParseError, WiringError
from compound.execution.cache import MemoryCache
from compound.execution.trace import from_json, to_json
from compound.graph.component import Output
from compound.graph.configuration import digest
from compound.graph.json_types import json_type
from compound.graph.types import Port, identify_type
from compound.testing import ScriptedLM
from compound.yaml import loads

QUESTION = cp.Input("question")


class Address(BaseModel):
    street: str
    zip: str | None = None


class Person(BaseModel):
    """A person."""

    name: str = Field(description="full name")
    age: int = Field(ge=0, le=150)
    address: Address
    tags: list[str] = []


@dataclasses.dataclass
class Point:
    x: float
    y: float


class AnswerRow(TypedDict):
    title: str
    points: list[int]


class Mood(enum.Enum):
    GOOD = "good"
    BAD = "bad"


class Tree(BaseModel):
    value: int
    children: list[Tree] = []


ADA = {"name": "Ada", "age": 36, "address": {"street": "Main"}, "tags": ["x"]}
NAMED = json_type(
    {
        "type": "object",
        "properties": {"name": {"type": "string", "minLength": 2}},
        "required": ["name"],
    }
)


def ports(**kinds: Any) -> dict[str, Port]:
    return {name: Port(kind) for name, kind in kinds.items()}


def system(kind: Any, **settings: Any) -> cp.System:
    node = cp.LLM("writer", prompt="Write.", output=kind, retries=0, **settings)(question=QUESTION)
    return cp.System("s", outputs={"y": node}, lm="lm")


def run(
    built: cp.System, replies: Sequence[str] | Callable[..., object], cache: Any = None
) -> tuple[cp.Trace, list[Request]]:
    lm = ScriptedLM(replies)
    trace = asyncio.run(cp.Executor({"lm": lm}, cache=cache).run(built, {"question": "?"}))
    return trace, lm.requests


def test_a_model_is_told_nested_fields_limits_and_descriptions() -> None:
    request = run(system(Person), [json.dumps(ADA)])[1][0]
    assert request.messages[-1].text == (
        "Write.\n\n"
        "The answer must be JSON: {\n"
        '  "name": str (full name),\n'
        '  "age": int (at least 0; at most 150),\n'
        '  "address": {"street": str, "zip" (optional): str | null},\n'
        '  "tags" (optional): [str, ...]\n'
        "}\n\nQuestion: ?"
    )
    assert request.cue == ""
    assert request.format is not None
    assert json.loads(request.format.schema)["required"] == ["name", "age", "address"]


@pytest.mark.parametrize(
    ("kind", "notation", "text", "value"),
    [
        (dict[int, str], "dict[int, str]", '{"1": "a"}', {1: "a"}),
        (dict[float, int], "dict[float, int]", '{"1.5": 2}', {1.5: 2}),
        (dict[bool, int], 'dict["true" | "false", int]', '{"true": 2}', {True: 2}),
        (dict[Literal["a", "b"], int], 'dict["a" | "b", int]', '{"a": 2}', {"a": 2}),
        (dict[Literal[1, 2], int], 'dict["1" | "2", int]', "", None),
        (dict[Mood, int], 'dict["good" | "bad", int]', '{"bad": 2}', {Mood.BAD: 2}),
        (
            dict[datetime.date, int],
            "dict[str (date), int]",
            '{"2024-01-02": 3}',
            {datetime.date(2024, 1, 2): 3},
        ),
    ],
)
def test_keys_of_dictionaries_are_described_and_read(
    kind: Any, notation: str, text: str, value: Any
) -> None:
    assert describe(kind) == notation
    if text:
        assert parse(text, ports(output=kind), "text") == {"output": value}


def test_several_outputs_with_a_structured_one_are_one_json_object() -> None:
    node = cp.LLM("writer", output={"who": Person, "sure": bool}, retries=0)(question=QUESTION)
    built = cp.System("s", outputs={"who": node.who, "sure": node.sure}, lm="lm")
    trace, requests = run(built, [json.dumps({"who": ADA, "sure": True})])
    assert trace.outputs == {"who": Person.model_validate(ADA), "sure": True}
    assert 'Reply with one JSON object: {"who": {' in requests[0].messages[-1].text


def test_plain_fields_keep_their_lines_and_a_structured_field_of_lines_is_json() -> None:
    assert cp.LLM("a", output={"x": str, "n": int}).layout == "fields"
    text = render("", [], {"q": "x"}, ports(who=Point, n=int), "fields")
    assert 'who: <JSON: {"x": float, "y": float}>\nn: <int>' in text
    assert parse('who: {"x": 1, "y": 2}\nn: 3', ports(who=Point, n=int), "fields")["who"] == Point(
        1, 2
    )


def test_demonstrations_show_the_fields_in_the_declared_order_without_a_label() -> None:
    demo: Any = {"inputs": {"q": "a"}, "outputs": {"output": {"tags": [], "age": 1, "name": "B"}}}
    text = render("", [demo], {"q": "x"}, ports(output=Person), "text")
    assert 'Q: a\n{"name": "B", "age": 1, "tags": []}\n\nQ: x' in text


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (str, None),
        (Any, None),
        (Literal["a", "b"], AnswerFormat(choices=("a", "b"))),
        (Literal["a"] | None, AnswerFormat(choices=("a", "none"))),
        (Mood, AnswerFormat(choices=("good", "bad"))),
        (bool, AnswerFormat(choices=("yes", "no"))),
    ],
)
def test_the_format_of_an_answer_in_words(kind: Any, expected: AnswerFormat | None) -> None:
    assert answer_format(ports(output=kind), "text") == expected


def test_integers_without_limits_have_a_finite_length() -> None:
    found = answer_format(ports(output=int), "text")
    assert found is not None
    assert json.loads(found.schema)["maximum"] == 10**18 - 1


def test_the_version_changes_with_the_fields_of_a_class_of_the_same_name() -> None:
    def made(kind: Any) -> type[BaseModel]:
        class Same(BaseModel):
            x: kind

        return Same

    versions = {
        cp.LLM("a", output=made(kind), format=f).version
        for kind in (int, str)
        for f in ("text", "fields", "json")
    }
    assert len(versions) == 6


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


CODE = Annotated[str, Field(pattern=r"^[A-Z]{3}-\d{4}$")]
SHORT = Annotated[str, Field(max_length=3)]
LONG = Annotated[str, Field(max_length=100)]
NAME = json_type({"type": "string", "minLength": 2})
MAYBE = Annotated[int, Field(ge=0)] | None
MIXED = Person | str


@pytest.mark.parametrize(
    ("kind", "note"),
    [
        (SHORT, "text (at most 3 characters)."),
        (CODE, r"text (matching ^[A-Z]{3}-\d{4}$)."),
        (NAME, "text (at least 2 characters)."),
        (Annotated[int, Field(ge=0)], "a whole number (at least 0)."),
        (
            Annotated[int, Field(ge=0)] | SHORT,
            "a whole number (at least 0) or text (at most 3 characters).",
        ),
        (Annotated[Literal["a", "b"], "note"], "one of: a, b"),
        (
            Annotated[list[str], Field(min_length=2)],
            "a list (at least 2 items): one item in each line, or a JSON array.",
        ),
        (
            list[Annotated[int, Field(ge=0)]],
            "a list of whole numbers (at least 0): one in each line, or a JSON array.",
        ),
        (list[SHORT], "a list of texts (at most 3 characters): one in each line, or a JSON array."),
        (list[Literal["x", "y"]], "a list of labels (x, y): one in each line, or a JSON array."),
        (Mood | None, "one of: good, bad, none"),
        (Level, "one of: 1 (LOW), 2 (HIGH)"),
        (list[Level], "a list of labels (1 (LOW), 2 (HIGH)): one in each line, or a JSON array."),
        (Literal["yes", "no", "maybe"], "one of: yes, no, maybe"),
        (Literal["a, b", "c"], 'one of: "a, b", "c"'),
        (int, "a whole number."),
        (float, "a number."),
        (bool, "yes or no."),
        (int | None, "a whole number or none."),
        (Literal["a"] | None, "one of: a, none"),
        (list[str], "a list: one item in each line, or a JSON array."),
        (list[int], "a list of whole numbers: one in each line, or a JSON array."),
        (dict[str, int], "JSON: dict[str, int]"),
        (Point, 'JSON: {"x": float, "y": float}'),
    ],
)
def test_a_model_is_told_limits_and_labels_of_plain_types(kind: Any, note: str) -> None:
    answer = '["x", "y"]' if note.startswith("a list") else "x"
    request = run(system(kind), [answer])[1][0]
    assert request.messages[-1].text == f"Write.\n\nThe answer must be {note}\n\nQuestion: ?"
    assert request.format is not None


@pytest.mark.parametrize("layout", ["fields", "json"])
def test_fields_are_described_with_limits_and_labels(layout: Layout) -> None:
    kinds = ports(code=SHORT, age=MAYBE, mood=Mood, moods=list[Mood], level=Level)
    text = render("", [], {"q": "x"}, kinds, layout)
    for part in (
        "str (at most 3 characters)",
        "int (at least 0) | None",
        "one of good, bad",
        "list[Literal['good', 'bad']]",
        "one of 1 (LOW), 2 (HIGH)",
    ):
        assert part in text
    versions = {
        cp.LLM("a", output={"x": kind, "y": str}, format=layout).version for kind in (SHORT, LONG)
    }
    assert len(versions) == 2


@pytest.mark.parametrize(
    "kind", [str, Annotated[str, "a name"], Annotated[str, AfterValidator(str.strip)]]
)
def test_a_text_without_limits_is_neither_described_nor_enforced(kind: Any) -> None:
    request = run(system(kind), ["x"])[1][0]
    assert request.messages[-1].text == "Write.\n\nQuestion: ?"
    assert request.format is None


def test_an_error_names_the_constraint_and_not_its_object() -> None:
    with pytest.raises(ParseError) as caught:
        parse("abcd", ports(output=SHORT), "text")
    assert (
        "'abcd' is not Annotated[str, ...] (String should have at most 3 characters)"
        in caught.value.message
    )


def test_the_version_of_a_component_with_a_constrained_number_has_not_changed() -> None:
    """It is part of the keys of cached results."""
    assert identify_type(Annotated[int, Field(ge=0)]) == (
        "Annotated[int, annotation=NoneType required=True metadata=[Ge(ge=0)]]"
    )


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        (Person, json.dumps(ADA), Person.model_validate(ADA)),
        (
            Person,
            f"Here it is:\n```json\n{json.dumps(ADA)}\n```\nDone.",
            Person.model_validate(ADA),
        ),
        (Point, '{"x": 1, "y": 2.5}', Point(1.0, 2.5)),
        (list[Point], '[{"x": 1, "y": 2}]', [Point(1.0, 2.0)]),
        (AnswerRow, '{"title": "t", "points": [1]}', {"title": "t", "points": [1]}),
        (AnswerRow, 'So:\n{"title": "t\nu", "points": [1]}', {"title": "t\nu", "points": [1]}),
        (dict[str, str], '{"a": "b\tc"}', {"a": "b\tc"}),
        (NAMED, '{"name": "Ada"}', {"name": "Ada"}),
        (int | Literal["unknown"], "unknown", "unknown"),
        # a constrained text may be a JSON string, and a number may be named
        (CODE, '"TAM-1234"', "TAM-1234"),
        (CODE, "TAM-1234", "TAM-1234"),
        (SHORT, '""', ""),
        (SHORT, 'a"b', 'a"b'),
        (LONG, '"quoted"', "quoted"),
        (NAME, '"Ada"', "Ada"),
        (SHORT | None, '"abc"', "abc"),
        (SHORT | None, "none", None),
        (str, '"quoted"', '"quoted"'),
        (Annotated[str, Field(pattern='^".*"$')], '"quoted"', '"quoted"'),
        (Annotated[str, StringConstraints(to_lower=True)], "ABC", "abc"),
        (Level, "2", Level.HIGH),
        (Level, "HIGH", Level.HIGH),
        (Level, "1 (LOW)", Level.LOW),
        (list[Level], "- LOW\n- 2", [Level.LOW, Level.HIGH]),
        # a structured value, or else text
        (MIXED, json.dumps(ADA), Person.model_validate(ADA)),
        (str | Person, f"```json\n{json.dumps(ADA)}\n```", Person.model_validate(ADA)),
        (MIXED, f"Here it is: {json.dumps(ADA)}", Person.model_validate(ADA)),
        (MIXED, "There is nobody {here}.", "There is nobody {here}."),
        (MIXED, '"nobody"', "nobody"),
        (MIXED | None, "none", None),
        (list[int] | str, "[1, 2]", [1, 2]),
        (list[int] | str, "As said in [1].", "As said in [1]."),
        (str | dict[str, int], "17", "17"),
    ],
)
def test_a_text_becomes_a_value_of_the_declared_type(kind: Any, text: str, value: Any) -> None:
    found = parse(text, ports(output=kind), "text")["output"]
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("kind", "text", "problem"),
    [
        (
            Person,
            '{"name": "Ada", "age": 200, "address": {"street": "x"}}',
            "age: Input should be less than",
        ),
        (Person, '{"name": "Ada", "age": 3, "address": {}}', "address.street: Field required"),
        (Person, '{"name": "Ada", "age": 3', "no complete JSON for Person"),
        (NAMED, '{"name": "A"}', "name: 'A' is too short"),
        (Annotated[int, Field(ge=1)], "0", "greater than or equal to 1"),
    ],
)
def test_a_parse_error_names_the_field(kind: Any, text: str, problem: str) -> None:
    with pytest.raises(ParseError, match="'output'") as caught:
        parse(text, ports(output=kind), "text")
    assert problem in caught.value.message or "is not" in caught.value.message


@pytest.mark.parametrize("kind", [Person | str, str | Person, Person | str | None])
def test_a_union_of_text_and_a_structured_type_is_described_and_enforced(kind: Any) -> None:
    request = run(system(kind), ["Unknown."])[1][0]
    assert '"name": str (full name)' in request.messages[-1].text
    assert request.format is not None
    types = [option.get("type", "ref") for option in json.loads(request.format.schema)["anyOf"]]
    assert {"ref", "string"} <= set(types)


@pytest.mark.parametrize("text", ['{"name": "Ada"}', '{"name": "Ada", "age"', "[3]"])
def test_json_that_fits_no_type_of_a_union_is_no_text(text: str) -> None:
    with pytest.raises(ParseError, match="Person"):
        parse(text, ports(y=MIXED), "text")


class Cat(BaseModel):
    kind: Literal["cat"] = "cat"
    lives: int


class Dog(BaseModel):
    kind: Literal["dog"] = "dog"


def test_the_tag_of_a_discriminated_union_is_required() -> None:
    pet = Annotated[Cat | Dog, Field(discriminator="kind")]
    assert describe(pet) == '{"kind": "cat", "lives": int} | {"kind": "dog"}'
    assert describe(list[pet]) == '[{"kind": "cat", "lives": int} | {"kind": "dog"}, ...]'
    assert describe(Cat) == '{"kind" (optional): "cat", "lives": int}'


class Titled(TypedDict):
    title: str


class Described(Titled, total=False):
    text: str


class Section(TypedDict):
    sections: list[Section]


def test_inherited_fields_of_a_typed_dict_stay_required() -> None:
    assert describe(Described) == '{"title": str, "text" (optional): str}'
    assert parse('[{"title": "a"}]', ports(y=tuple[Described, ...]), "text") == {
        "y": ({"title": "a"},)
    }


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="pydantic accepts it")
def test_a_recursive_typed_dict_is_rejected_with_the_remedy() -> None:
    with pytest.raises(DeclarationError, match="'Section' .* `typing_extensions.TypedDict`"):
        run(system(Section), ["{}"])


def test_a_re_ask_shows_the_answer_and_the_error_and_is_charged() -> None:
    bad = '{"name": "Ada", "age": 200, "address": {"street": "x"}}'
    trace, requests = run(system(Person), [bad, json.dumps(ADA)])
    assert trace.outputs == {"y": Person.model_validate(ADA)}
    assert [m.role for m in requests[1].messages] == ["user", "assistant", "user"]
    assert requests[1].messages[1].text == bad
    assert "age: Input should be less than or equal to 150" in requests[1].messages[2].text
    assert trace.usage.calls == 2
    assert len(trace.calls[0].exchanges) == 2


class Span(BaseModel):
    start: int
    end: int

    @model_validator(mode="after")
    def check(self) -> Span:
        if self.start > self.end:
            raise ValueError("start must not exceed end")
        return self


def test_a_re_ask_shows_the_message_of_a_validator_of_the_whole_value() -> None:
    trace, requests = run(system(Span), ['{"start": 3, "end": 1}', '{"start": 1, "end": 3}'])
    assert "is not Span (Value error, start must not exceed end)" in requests[1].messages[2].text
    assert trace.outputs == {"y": Span(start=1, end=3)}
    nested, _ = run(system(dict[str, Span], reasks=0), ['{"a": {"start": 3, "end": 1}}'])
    assert nested.failure is not None
    assert "(a: Value error, start must not exceed end)" in nested.failure.message


def test_every_answer_but_a_text_is_asked_for_again_by_default() -> None:
    assert cp.LLM("a").most_reasks == cp.LLM("a", output=str | None).most_reasks == 0
    assert len(run(system(int, reasks=0), lambda _: "no")[1]) == 1
    assert run(system(int), ["no", "3"])[0].outputs == {"y": 3}


def oldest(person: Person) -> int:
    assert type(person) is Person
    return person.age


class Aliased(BaseModel):
    name: str = Field(alias="fullName")


class Label(str, enum.Enum):  # noqa: UP042 - formatted by its name, unlike a StrEnum
    GOOD = "good"
    BAD = "bad"


@pytest.mark.parametrize(
    ("kind", "reply", "shown"),
    [
        (datetime.date, "2024-01-02", "2024-01-02"),
        (decimal.Decimal, "1.5", "1.5"),
        (set[int], "[2, 1]", "[1,2]"),
        (dict[datetime.date, int], '{"2024-01-02": 1}', '{"2024-01-02":1}'),
        (Label, "good", "good"),
        (Point, '{"x": 1, "y": 2}', '{"x":1.0,"y":2.0}'),
        (Aliased, '{"fullName": "Ada"}', '{"name":"Ada"}'),
    ],
)
def test_a_value_of_another_class_is_passed_on_cached_and_stored(
    kind: Any, reply: str, shown: str
) -> None:
    written = cp.LLM("writer", output=kind, retries=0)(question=QUESTION)
    built = cp.System("s", outputs={"y": cp.LLM("reader")(value=written), "w": written}, lm="lm")
    cache = MemoryCache()
    first, requests = run(built, [reply, "fine"], cache)
    assert first.failure is None
    assert f"Value: {shown}" in requests[1].messages[-1].text
    second, requests = run(built, [], cache)
    assert not requests
    stored = from_json(json.loads(json.dumps(to_json(first))))
    forked = asyncio.run(
        cp.Executor({"lm": ScriptedLM(["again"])}).fork(built, stored, "reader", resample=1)
    )
    for trace in (second, forked):
        assert trace.outputs["w"] == first.outputs["w"]
        assert type(trace.outputs["w"]) is type(first.outputs["w"])


def test_fields_of_an_output_can_be_wired() -> None:
    person = cp.LLM("writer", output=Person, retries=0)(question=QUESTION)
    assert person.age.label == "$writer.age"
    assert person["address"]["street"].type is str
    reader = cp.LLM("reader")(street=person["address"]["street"], age=person.age)
    built = cp.System("s", outputs={"y": reader, "age": person["age"]}, lm="lm")
    trace, requests = run(built, [json.dumps(ADA), "fine"])
    assert "Street: Main\nAge: 36" in requests[1].messages[-1].text
    assert trace.outputs == {"y": "fine", "age": 36}
    assert trace.call("reader").parents == ("writer",)


@pytest.mark.parametrize(
    ("read", "message"),
    [
        (lambda p: p["agee"], r"\$writer has no field 'agee'; did you mean 'age'\?"),
        (lambda p: p["age"]["x"], r"\$writer.age is int and has no fields"),
    ],
)
def test_a_field_that_does_not_exist_is_named(
    read: Callable[[Output], object], message: str
) -> None:
    person = cp.LLM("writer", output=Person)(question=QUESTION)
    with pytest.raises(WiringError, match=message):
        read(person)
    with pytest.raises(AttributeError, match="no field or attribute 'agee'"):
        person.agee  # noqa: B018
    with pytest.raises(TypeError):
        iter(person)


FILE = """
system: s
lm: lm
inputs: {question: str}
components:
  writer:
    llm: {prompt: Write., reasks: 2}
    in: {question: $question}
    out: {json_schema: {type: object, properties: {name: {type: string}, age: {type: integer}}, required: [name, age]}}
  reader:
    llm: {prompt: Read.}
    in: {age: $writer.age, who: $record.who.name}
  record:
    llm: {prompt: Note.}
    in: {question: $question}
    out: {who: {name: str, tags: "list[str]"}, sure: bool}
outputs: {y: $reader, sure: $record.sure}
"""


def test_a_file_declares_json_schemas_and_records_and_reads_their_fields() -> None:
    built = loads(FILE, models=["lm"]).system
    replies = {
        "Write.": '{"name": "Ada", "age": 36}',
        "Note.": '{"who": {"name": "B", "tags": []}, "sure": true}',
    }
    trace, requests = run(
        built, lambda text: next((r for k, r in replies.items() if k in text), "done")
    )
    assert trace.outputs == {"y": "done", "sure": True}, trace.failure
    assert any("Age: 36\nWho: B" in request.messages[-1].text for request in requests)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (("type: object", "type: objekt"), "JSON schema is invalid"),
        (("$writer.age", "$writer.agee"), "has no field 'agee'"),
        (("{name: str, tags", "{1x: str, tags"), "must be the types of fields"),
        (("{name: str, tags", "{name: strr, tags"), "'strr' is not a type"),
    ],
)
def test_mistakes_in_a_file_are_located(change: tuple[str, str], problem: str) -> None:
    assert change[0] in FILE
    with pytest.raises(cp.CompoundError, match=problem) as caught:
        loads(FILE.replace(*change, 1), models=["lm"])
    assert ":" in str(caught.value).split(" ")[0]


@pytest.mark.parametrize(
    ("kind", "answer"),
    [
        (Point, '{"x": NaN, "y": 1}'),
        (dict[str, Any], '{"a": [-Infinity]}'),
        (list[Point], '[{"x": "nan", "y": 1}]'),
        (decimal.Decimal, "NaN"),
    ],
)
def test_a_number_that_is_not_finite_is_a_wrong_answer_that_is_asked_again(
    kind: Any, answer: str
) -> None:
    trace, requests = run(system(kind, reasks=1), [answer, answer])
    assert trace.failure is not None
    assert trace.failure.kind == "parse"
    assert len(requests) == 2


def test_a_trained_component_is_not_asked_again() -> None:
    assert cp.LLM("a", output=Person, weights=cp.LoRA(rank=4)).most_reasks == 0
    with pytest.raises(DeclarationError, match="cannot ask again"):
        cp.LLM("a", output=Person, weights=cp.LoRA(rank=4), reasks=1)
    with pytest.raises(DeclarationError, match="reasks of LLM must be >= 0"):
        cp.LLM("a", reasks=-1)


def test_without_enforcement_nothing_is_sent_and_the_version_differs() -> None:
    _, requests = run(system(Person, enforce=False), [json.dumps(ADA)])
    assert requests[0].format is None
    assert cp.LLM("a", output=Person).version != cp.LLM("a", output=Person, enforce=False).version


def test_recursive_types_are_named() -> None:
    shape = '{"value": int, "children" (optional): [Tree, ...]}'
    assert describe(Tree) == f"{shape}\nwhere Tree is {shape}"


def test_keys_are_enforced_by_their_pattern() -> None:
    found = answer_format(ports(output=dict[int, str]), "text")
    assert found is not None
    assert json.loads(found.schema) == {
        "type": "object",
        "patternProperties": {"^-?(0|[1-9][0-9]{0,17})$": {"type": "string"}},
        "additionalProperties": False,
    }


def test_properties_named_like_keywords_are_kept() -> None:
    properties = {name: {"type": "string"} for name in ("title", "default", "type", "enum")}
    document = {"type": "object", "properties": properties, "title": "T"}
    assert enforceable(document) == {
        "type": "object",
        "properties": properties,
        "additionalProperties": False,
    }


def test_a_system_input_of_a_class_takes_its_json_form() -> None:
    built = cp.System("s", outputs={"y": Function("f", oldest)(person=cp.Input("person", Person))})
    for given in (ADA, Person.model_validate(ADA)):
        assert asyncio.run(cp.Executor().run(built, {"person": given})).outputs == {"y": 36}


def asked(reply: str, **settings: Any) -> tuple[Request, cp.Trace]:
    lm = ScriptedLM([reply])
    node = cp.LLM("judge", prompt="Is it so?", retries=0, **settings)(claim=cp.Input("claim"))
    system = cp.System("s", outputs={"y": node}, lm="lm")
    trace = asyncio.run(cp.Executor({"lm": lm}).run(system, {"claim": "It rains."}))
    return lm.requests[0], trace


def test_the_version_and_the_prompt_of_a_text_output_are_those_of_earlier_versions() -> None:
    """Caches and run directories from before the type notes of single outputs stay valid."""
    llm = cp.LLM("a", prompt="Is it so?")
    assert llm.version == "llm:" + digest([2, {"output": "str"}, "text", (), "", False])
    request, _ = asked("It is.")
    assert request.messages[-1].content == "Is it so?\n\nClaim: It rains."
    several = cp.LLM("a", output={"x": str, "n": int}, reasks=0)
    assert several.version == "llm:" + digest(
        [2, {"x": "str", "n": "int"}, "fields", (), "", False]
    )
