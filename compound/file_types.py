"""The small types of the YAML file: names, references, port types, and settings that may be tuned.

A setting is a plain value, or a mapping that says between which values it may be tuned:
``{tune: TEXT}``, ``{tune: 4}`` (demonstrations), ``{choice: […]}``, ``{int: [1, 9]}``, ``{float: [0, 1]}``
or ``{lora: {rank: 16}}``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Discriminator, Field, PlainValidator, Tag, WithJsonSchema
from pydantic_core import PydanticCustomError

from compound.errors import DeclarationError
from compound.ports import parse
from compound.space import Choice, Demos, Float, Int, LoRA, Space, Text, Weights

SPACES = ("tune", "choice", "int", "float", "lora")
_REFERENCE = re.compile(r"\$[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)?\Z")
_CODE = re.compile(r"[A-Za-z_][A-Za-z0-9_.]*:[A-Za-z_][A-Za-z0-9_.]*\Z")


class Model(BaseModel):
    """What all parts of the file share: no unknown keys, no conversions."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, use_attribute_docstrings=True)

    @property
    def given(self) -> dict[str, Any]:
        """What the file says; defaults stay with the classes that are made of it."""
        return {name: getattr(self, name) for name in type(self).model_fields if name in self.model_fields_set}


def wrong(what: str, hint: str = "") -> PydanticCustomError:
    """Return the error of a value that is not what it must be."""
    return PydanticCustomError("wrong", "{what}", {"what": what, "hint": hint})


def _type(value: Any) -> Any:
    if not isinstance(value, str):
        raise wrong("must be a type such as str, int or list[str]")
    try:
        return parse(value)
    except DeclarationError as error:
        raise PydanticCustomError("refused", "{what}", {"what": error.message, "hint": error.hint}) from None


def _reference(value: Any) -> str:
    if isinstance(value, str) and _REFERENCE.match(value):
        return value
    raise wrong("must be a reference such as $question or $node.field", "constants are settings of the component")


def _code(value: Any) -> str:
    if isinstance(value, str) and _CODE.match(value):
        return value
    raise wrong("must name Python code as module:name")


def _scalar(value: Any) -> Any:
    if isinstance(value, str | int | float | bool):
        return value
    raise wrong("must be a text, a number, true or false")


def _number(value: Any) -> Any:
    if type(value) in (int, float):
        return value
    raise wrong("must be a number")


def _described(kind: str, pattern: str, description: str) -> WithJsonSchema:
    return WithJsonSchema({"type": kind, "pattern": pattern, "description": description})


Name = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
"""The name of a component, node, port, input or output."""
Type = Annotated[
    Any,
    PlainValidator(_type),
    WithJsonSchema({"type": "string", "description": "A type: str, int, float, bool, list[str], `one of a, b`, …"}),
]
Reference = Annotated[
    str, PlainValidator(_reference), _described("string", _REFERENCE.pattern[:-2] + "$", "$input, $node or $node.field")
]
Code = Annotated[str, PlainValidator(_code), _described("string", _CODE.pattern[:-2] + "$", "Python code: module:name")]
Scalar = Annotated[Any, PlainValidator(_scalar), WithJsonSchema({"type": ["string", "number", "boolean"]})]
Number = Annotated[Any, PlainValidator(_number), WithJsonSchema({"type": "number"})]


class SpaceModel(Model):
    """A setting that may be tuned."""

    def make(self) -> Space:
        """Return the space."""
        raise NotImplementedError


class TextSpace(SpaceModel):
    """A text to tune, usually a prompt."""

    tune: str
    """The text tuning starts from."""
    max_length: int = Field(default=Text.max_length, ge=1)
    """The most characters."""

    def make(self) -> Space:
        """Return the space."""
        return Text(self.tune, self.max_length)


class Demonstration(Model):
    """A worked example."""

    inputs: dict[str, Any]
    """What the component is given, by port."""
    outputs: dict[str, Any]
    """What it should answer, by field."""


class DemosSpace(SpaceModel):
    """Demonstrations to choose."""

    tune: int = Field(ge=0)
    """The most demonstrations."""
    value: list[Demonstration] = []
    """The ones to start from."""

    def make(self) -> Space:
        """Return the space."""
        return Demos(tuple(demo.model_dump() for demo in self.value), self.tune)


class ChoiceSpace(SpaceModel):
    """One of a few values."""

    choice: list[Scalar] = Field(min_length=1)
    """The possible values."""
    value: Scalar = None
    """Where tuning starts; the first value by default."""

    def make(self) -> Space:
        """Return the space."""
        return Choice(*self.choice, value=self.value)


class IntSpace(SpaceModel):
    """A whole number between two bounds."""

    int: Annotated[list[int], Field(min_length=2, max_length=2)]
    """[low, high]; both belong to it."""
    value: Annotated[Any, Field(json_schema_extra={"type": "integer"})] = None
    """Where tuning starts; the low bound by default."""
    log: bool = False
    """Search ratios rather than differences."""

    def make(self) -> Space:
        """Return the space."""
        return Int(*self.int, value=self.value, log=self.log)


class FloatSpace(SpaceModel):
    """A number between two bounds."""

    float: Annotated[list[Number], Field(min_length=2, max_length=2)]
    """[low, high]; both belong to it."""
    value: Number = None
    """Where tuning starts; the low bound by default."""
    log: bool = False
    """Search ratios rather than differences."""

    def make(self) -> Space:
        """Return the space."""
        return Float(*self.float, value=self.value, log=self.log)


class Adapter(Model):
    """A LoRA adapter's shape."""

    rank: int = Field(default=16, ge=1)
    """The rank of the update."""
    alpha: int | None = Field(default=None, ge=1)
    """The scale; twice the rank by default."""
    targets: list[str] | None = None
    """The projections that are adapted; those of attention by default."""


class StoredWeights(Model):
    """A trained adapter."""

    path: str
    """Its folder."""
    sha256: str
    """The digest of its files."""


class WeightsSpace(SpaceModel):
    """The weights of a component's model, as a LoRA adapter."""

    lora: Adapter
    """The adapter's shape."""
    value: StoredWeights | None = None
    """A trained adapter to start from."""

    def make(self) -> Space:
        """Return the space."""
        base = LoRA(self.lora.rank, self.lora.alpha)
        value = self.value.model_dump() if self.value else None
        targets = base.targets if self.lora.targets is None else tuple(self.lora.targets)
        return Weights(value, base.rank, base.alpha, targets)


def form(value: Any) -> str:
    """Return which form a setting has: ``~plain``, or the space's key.

    >>> form(3), form({"tune": "Answer."}), form({"tune": 4}), form({"int": [1, 2]}), form({"a": 1})
    ('~plain', '~text', '~demos', '~int', '~plain')
    """
    if not isinstance(value, Mapping):
        return "~plain"
    key = next((key for key in SPACES if key in value), "")
    if key == "tune":
        return "~demos" if type(value["tune"]) is int else "~text"
    return f"~{key}" if key else "~plain"


def _either(*possible: str) -> Discriminator:
    what = f"must be {', '.join(possible[:-1])} or {possible[-1]}"
    return Discriminator(form, custom_error_type="form", custom_error_message=what)


TEXT, DEMOS, CHOICE = "{tune: TEXT}", "{tune: COUNT}", "{choice: [A, B]}"
INT, FLOAT, LORA = "{int: [LOW, HIGH]}", "{float: [LOW, HIGH]}", "{lora: {rank: 16}}"
_PLAIN_SCHEMA = {"not": {"type": "object", "anyOf": [{"required": [key]} for key in SPACES]}}

TextSetting = Annotated[
    Annotated[str, Tag("~plain")] | Annotated[TextSpace, Tag("~text")], _either("a text", TEXT)
]
DemosSetting = Annotated[
    Annotated[list[Demonstration], Tag("~plain")] | Annotated[DemosSpace, Tag("~demos")],
    _either("a list of demonstrations", DEMOS),
]
LabelSetting = Annotated[
    Annotated[str, Tag("~plain")] | Annotated[ChoiceSpace, Tag("~choice")], _either("a text", CHOICE)
]
IntSetting = Annotated[
    Annotated[int, Tag("~plain")] | Annotated[IntSpace, Tag("~int")], _either("a whole number", INT)
]
CountSetting = Annotated[
    Annotated[int, Tag("~plain")] | Annotated[IntSpace, Tag("~int")] | Annotated[ChoiceSpace, Tag("~choice")],
    _either("a whole number", INT, CHOICE),
]
FloatSetting = Annotated[
    Annotated[Number, Tag("~plain")] | Annotated[FloatSpace, Tag("~float")], _either("a number", FLOAT)
]
WeightsSetting = Annotated[Annotated[WeightsSpace, Tag("~lora")], _either("left out", LORA)]
AnySpace = Annotated[
    Annotated[TextSpace, Tag("~text")]
    | Annotated[DemosSpace, Tag("~demos")]
    | Annotated[ChoiceSpace, Tag("~choice")]
    | Annotated[IntSpace, Tag("~int")]
    | Annotated[FloatSpace, Tag("~float")]
    | Annotated[WeightsSpace, Tag("~lora")],
    _either("a space to tune", INT, FLOAT, CHOICE, TEXT),
]
AnySetting = Annotated[
    Annotated[Any, Tag("~plain"), WithJsonSchema(_PLAIN_SCHEMA)]
    | Annotated[TextSpace, Tag("~text")]
    | Annotated[DemosSpace, Tag("~demos")]
    | Annotated[ChoiceSpace, Tag("~choice")]
    | Annotated[IntSpace, Tag("~int")]
    | Annotated[FloatSpace, Tag("~float")]
    | Annotated[WeightsSpace, Tag("~lora")],
    _either("a plain value", "a space to tune"),
]

TAGGED: dict[str, type[Model]] = {
    "~text": TextSpace,
    "~demos": DemosSpace,
    "~choice": ChoiceSpace,
    "~int": IntSpace,
    "~float": FloatSpace,
    "~lora": WeightsSpace,
}
"""Which model a part of an error's location stands for."""
