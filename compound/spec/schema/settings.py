"""Settings that may be tuned, as the YAML file spells them.

A setting is a plain value, or a mapping that says between which values it may be tuned:
``{tune: TEXT}``, ``{tune: 4}`` (demonstrations), ``{choice: […]}``, ``{int: [1, 9]}``, ``{float: [0, 1]}``
or ``{lora: {rank: 16}}``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Annotated, Literal, Self, cast

from pydantic import Discriminator, Field, Tag, WithJsonSchema, model_validator

from compound.errors import DeclarationError
from compound.graph.space import Choice, Demos, Float, Int, LoRA, Space, Text, Weights
from compound.spec.schema.types import Model, Number, Scalar, refused

SPACES = ("tune", "choice", "int", "float", "lora")


class SpaceModel(Model, ABC):
    """A setting that may be tuned."""

    @abstractmethod
    def make(self) -> Space:
        """Return the space."""

    @model_validator(mode="after")
    def _possible(self) -> Self:
        try:
            self.make()
        except DeclarationError as error:
            raise refused(error) from None
        return self


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

    inputs: dict[str, object]
    """What the component is given, by port."""
    outputs: dict[str, object]
    """What it should answer, by field."""


class DemosSpace(SpaceModel):
    """Demonstrations to choose."""

    tune: int = Field(ge=0)
    """The most demonstrations."""
    value: list[Demonstration] = Field(default=[])
    """The ones to start from."""

    def make(self) -> Space:
        """Return the space."""
        return Demos(tuple(demo.model_dump() for demo in self.value), self.tune)


class ChoiceSpace(SpaceModel):
    """One of a few values."""

    choice: list[Scalar] = Field(min_length=1)
    """The possible values."""
    value: Scalar = None  # type: ignore[assignment]  # the first one
    """Where tuning starts; the first value by default."""

    def make(self) -> Space:
        """Return the space."""
        return Choice(*self.choice, value=self.value)


class IntSpace(SpaceModel):
    """A whole number between two bounds."""

    int: Annotated[list[int], Field(min_length=2, max_length=2)]
    """[low, high]; both belong to it."""
    value: Annotated[object, Field(json_schema_extra={"type": "integer"})] = None
    """Where tuning starts; the low bound by default."""
    log: bool = False
    """Search ratios rather than differences."""

    def make(self) -> Space:
        """Return the space."""
        return Int(self.int[0], self.int[1], cast("int", self.value), self.log)  # `Int` refuses all others


class FloatSpace(SpaceModel):
    """A number between two bounds."""

    float: Annotated[list[Number], Field(min_length=2, max_length=2)]
    """[low, high]; both belong to it."""
    value: Number = None  # type: ignore[assignment]  # the low bound
    """Where tuning starts; the low bound by default."""
    log: bool = False
    """Search ratios rather than differences."""

    def make(self) -> Space:
        """Return the space."""
        return Float(self.float[0], self.float[1], self.value, self.log)


TargetsSetting = Annotated[
    Annotated[Literal["all-linear", "attention"], Tag("~plain")]
    | Annotated[list[str], Field(min_length=1), Tag("~names")],
    Discriminator(lambda value: "~names" if isinstance(value, list | tuple) else "~plain"),
]


class Adapter(Model):
    """A LoRA adapter's shape."""

    rank: int = Field(default=16, ge=1)
    """The rank of the update."""
    alpha: int | None = Field(default=None, ge=1)
    """The scale; twice the rank by default."""
    targets: TargetsSetting = "all-linear"
    """The linear layers that are adapted: all but the output layer, those of attention, or some by name."""


class StoredFolder(Model):
    """A folder that optimization made, such as a trained adapter."""

    path: str
    """Where it is."""
    sha256: str
    """The digest of its files."""


class WeightsSpace(SpaceModel):
    """The weights of a component's model, as a LoRA adapter."""

    lora: Adapter
    """The adapter's shape."""
    value: StoredFolder | None = None
    """A trained adapter to start from."""

    def make(self) -> Space:
        """Return the space."""
        base = LoRA(self.lora.rank, self.lora.alpha, self.lora.targets)
        value = self.value.model_dump() if self.value else None
        return Weights(value, base.rank, base.alpha, base.targets)


def made(value: object) -> object:
    """Return a setting's space, or its plain value."""
    return value.make() if isinstance(value, SpaceModel) else value


def form(value: object) -> str:
    """Return which form a setting has: ``~plain``, or a space told by its key.

    >>> form(3), form({"tune": "Answer."}), form({"tune": 4}), form({"int": [1, 2]}), form({"tun": 4})
    ('~plain', '~text', '~demos', '~int', '~unknown')
    """
    if not isinstance(value, Mapping):
        return "~plain"
    key = next((key for key in SPACES if key in value), "unknown")
    if key == "tune":
        return "~demos" if type(value["tune"]) is int else "~text"
    return f"~{key}"


def _free_form(value: object) -> str:
    """Return the form of a setting whose plain value may be a mapping."""
    return form(value).replace("~unknown", "~plain")


def one_form(*possible: str) -> Discriminator:
    """Return the discriminator of a setting that is plain or a space; ``possible`` describes its forms."""
    what = f"must be {' or '.join([', '.join(possible[:-1]), possible[-1]] if possible[1:] else possible)}"
    return Discriminator(form, custom_error_type="form", custom_error_message=what)


TEXT, DEMOS, CHOICE = "{tune: TEXT}", "{tune: COUNT}", "{choice: [A, B]}"
INT, FLOAT, LORA = "{int: [LOW, HIGH]}", "{float: [LOW, HIGH]}", "{lora: {rank: 16}}"
_PLAIN_SCHEMA = {"not": {"type": "object", "anyOf": [{"required": [key]} for key in SPACES]}}

TextSetting = Annotated[
    Annotated[str, Tag("~plain")] | Annotated[TextSpace, Tag("~text")], one_form("a text", TEXT)
]
DemosSetting = Annotated[
    Annotated[list[Demonstration], Tag("~plain")] | Annotated[DemosSpace, Tag("~demos")],
    one_form("a list of demonstrations", DEMOS),
]
LabelSetting = Annotated[
    Annotated[str, Tag("~plain")] | Annotated[ChoiceSpace, Tag("~choice")], one_form("a text", CHOICE)
]
OptionSetting = Annotated[
    Annotated[Scalar, Tag("~plain")] | Annotated[StoredFolder, Tag("~stored")],
    Discriminator(lambda value: "~stored" if isinstance(value, Mapping | StoredFolder) else "~plain"),
]
IntSetting = Annotated[
    Annotated[int, Field(ge=1), Tag("~plain")] | Annotated[IntSpace, Tag("~int")],
    one_form("a whole number", INT),
]
CountSetting = Annotated[
    Annotated[int, Field(ge=1), Tag("~plain")]
    | Annotated[IntSpace, Tag("~int")]
    | Annotated[ChoiceSpace, Tag("~choice")],
    one_form("a whole number", INT, CHOICE),
]
FloatSetting = Annotated[
    Annotated[Number, Field(ge=0), Tag("~plain")] | Annotated[FloatSpace, Tag("~float")],
    one_form("a number", FLOAT),
]
WeightsSetting = Annotated[Annotated[WeightsSpace, Tag("~lora")], one_form("left out", LORA)]
AnySpace = Annotated[
    Annotated[TextSpace, Tag("~text")]
    | Annotated[DemosSpace, Tag("~demos")]
    | Annotated[ChoiceSpace, Tag("~choice")]
    | Annotated[IntSpace, Tag("~int")]
    | Annotated[FloatSpace, Tag("~float")]
    | Annotated[WeightsSpace, Tag("~lora")],
    one_form("a space to tune", INT, FLOAT, CHOICE, TEXT),
]
AnySetting = Annotated[
    Annotated[object, Tag("~plain"), WithJsonSchema(_PLAIN_SCHEMA)]
    | Annotated[TextSpace, Tag("~text")]
    | Annotated[DemosSpace, Tag("~demos")]
    | Annotated[ChoiceSpace, Tag("~choice")]
    | Annotated[IntSpace, Tag("~int")]
    | Annotated[FloatSpace, Tag("~float")]
    | Annotated[WeightsSpace, Tag("~lora")],
    Discriminator(_free_form),
]

TAGGED: dict[str, type[Model]] = {
    "~text": TextSpace,
    "~demos": DemosSpace,
    "~choice": ChoiceSpace,
    "~int": IntSpace,
    "~float": FloatSpace,
    "~lora": WeightsSpace,
    "~stored": StoredFolder,
}
"""Which model a part of an error's location stands for."""
