"""Schema of settings that may be tuned.

A setting is a plain value, or a mapping that defines the space in which it may be tuned:
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
from compound.spec.schema.types import Constant, Model, Number, Scalar, as_pydantic_error

SPACES = ("tune", "choice", "int", "float", "lora")


class SpaceModel(Model, ABC):
    """A setting that may be tuned."""

    @abstractmethod
    def make(self) -> Space:
        """Return the space."""

    @model_validator(mode="after")
    def _check_space(self) -> Self:
        try:
            self.make()
        except DeclarationError as error:
            raise as_pydantic_error(error) from None
        return self


class TextSpace(SpaceModel):
    """A text to tune, usually a prompt."""

    tune: str
    """The initial text."""
    max_length: int = Field(default=Text.max_length, ge=1)
    """Maximum number of characters."""
    keep: list[str] = Field(default=[])
    """Passages that every value must contain, word for word."""

    def make(self) -> Space:
        """Return the space."""
        return Text(self.tune, self.max_length, self.keep)


class Demonstration(Model):
    """A worked example."""

    inputs: dict[str, object]
    """The inputs of the component, by port."""
    outputs: dict[str, object]
    """The expected outputs, by field."""


class DemosSpace(SpaceModel):
    """Demonstrations to select."""

    tune: int = Field(ge=0)
    """Maximum number of demonstrations."""
    value: list[Demonstration] = Field(default=[])
    """The initial demonstrations."""

    def make(self) -> Space:
        """Return the space."""
        return Demos(tuple(demo.model_dump() for demo in self.value), self.tune)


class ChoiceSpace(SpaceModel):
    """One of a few values."""

    choice: list[Scalar] = Field(min_length=1)
    """The possible values."""
    value: Scalar = None  # type: ignore[assignment]  # the first one
    """The initial value; the first one by default."""

    def make(self) -> Space:
        """Return the space."""
        return Choice(*self.choice, value=self.value)


class IntSpace(SpaceModel):
    """An integer between two bounds."""

    int: Annotated[list[int], Field(min_length=2, max_length=2)]
    """[low, high], both inclusive."""
    value: Annotated[object, Field(json_schema_extra={"type": "integer"})] = None
    """The initial value; the low bound by default."""
    log: bool = False
    """Whether to search on a logarithmic scale."""

    def make(self) -> Space:
        """Return the space."""
        return Int(self.int[0], self.int[1], cast("int", self.value), self.log)  # `Int` checks the type


class FloatSpace(SpaceModel):
    """A number between two bounds."""

    float: Annotated[list[Number], Field(min_length=2, max_length=2)]
    """[low, high], both inclusive."""
    value: Number = None  # type: ignore[assignment]  # the low bound
    """The initial value; the low bound by default."""
    log: bool = False
    """Whether to search on a logarithmic scale."""

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
    """The scaling factor; twice the rank by default."""
    targets: TargetsSetting = "all-linear"
    """The linear layers to adapt: all but the output layer, those of attention, or a list of names."""


class StoredFolder(Model):
    """A folder written by optimization, such as a trained adapter."""

    path: str
    """The path of the folder."""
    sha256: str
    """The SHA-256 digest of its files."""


class WeightsSpace(SpaceModel):
    """The weights of a component's model, as a LoRA adapter."""

    lora: Adapter
    """The adapter's shape."""
    value: StoredFolder | None = None
    """The initial adapter, trained before."""

    def make(self) -> Space:
        """Return the space."""
        base = LoRA(self.lora.rank, self.lora.alpha, self.lora.targets)
        value = self.value.model_dump() if self.value else None
        return Weights(value, base.rank, base.alpha, base.targets)


def make_setting(value: object) -> object:
    """Return the space of a tunable setting, or a plain value as it is."""
    return value.make() if isinstance(value, SpaceModel) else value


def form_tag(value: object) -> str:
    """Return the tag of a setting's form: ``~plain``, or a space identified by its key.

    >>> [form_tag(value) for value in (3, {"tune": "Answer."}, {"tune": 4}, {"int": [1, 2]}, {"tun": 4})]
    ['~plain', '~text', '~demos', '~int', '~unknown']
    """
    if not isinstance(value, Mapping):
        return "~plain"
    key = next((key for key in SPACES if key in value), "unknown")
    if key == "tune":
        return "~demos" if type(value["tune"]) is int else "~text"
    return f"~{key}"


def _free_form_tag(value: object) -> str:
    """Return the tag of a setting whose plain value may be a mapping."""
    return form_tag(value).replace("~unknown", "~plain")


def form_discriminator(*possible: str) -> Discriminator:
    """Return the discriminator of a setting that is plain or a space; ``possible`` lists its forms."""
    what = f"must be {' or '.join([', '.join(possible[:-1]), possible[-1]] if possible[1:] else possible)}"
    return Discriminator(form_tag, custom_error_type="form", custom_error_message=what)


TEXT, DEMOS, CHOICE = "{tune: TEXT}", "{tune: COUNT}", "{choice: [A, B]}"
INT, FLOAT, LORA = "{int: [LOW, HIGH]}", "{float: [LOW, HIGH]}", "{lora: {rank: 16}}"
_PLAIN_SCHEMA = {"not": {"type": "object", "anyOf": [{"required": [key]} for key in SPACES]}}

TextSetting = Annotated[
    Annotated[str, Tag("~plain")] | Annotated[TextSpace, Tag("~text")], form_discriminator("a string", TEXT)
]
DemosSetting = Annotated[
    Annotated[list[Demonstration], Tag("~plain")] | Annotated[DemosSpace, Tag("~demos")],
    form_discriminator("a list of demonstrations", DEMOS),
]
LabelSetting = Annotated[
    Annotated[str, Tag("~plain")] | Annotated[ChoiceSpace, Tag("~choice")],
    form_discriminator("a string", CHOICE),
]
OptionSetting = Annotated[
    Annotated[Scalar, Tag("~plain")] | Annotated[StoredFolder, Tag("~stored")],
    Discriminator(lambda value: "~stored" if isinstance(value, Mapping | StoredFolder) else "~plain"),
]
IntSetting = Annotated[
    Annotated[int, Field(ge=1), Tag("~plain")] | Annotated[IntSpace, Tag("~int")],
    form_discriminator("an integer", INT),
]
CountSetting = Annotated[
    Annotated[int, Field(ge=1), Tag("~plain")]
    | Annotated[IntSpace, Tag("~int")]
    | Annotated[ChoiceSpace, Tag("~choice")],
    form_discriminator("an integer", INT, CHOICE),
]
FloatSetting = Annotated[
    Annotated[Number, Field(ge=0), Tag("~plain")] | Annotated[FloatSpace, Tag("~float")],
    form_discriminator("a number", FLOAT),
]
WeightsSetting = Annotated[Annotated[WeightsSpace, Tag("~lora")], form_discriminator("left out", LORA)]
ValueSetting = Annotated[
    Annotated[Constant, Tag("~plain")]
    | Annotated[TextSpace, Tag("~text")]
    | Annotated[DemosSpace, Tag("~demos")]
    | Annotated[ChoiceSpace, Tag("~choice")]
    | Annotated[IntSpace, Tag("~int")]
    | Annotated[FloatSpace, Tag("~float")]
    | Annotated[WeightsSpace, Tag("~lora")],
    form_discriminator("a constant", INT, FLOAT, CHOICE, TEXT),
]
AnySetting = Annotated[
    Annotated[object, Tag("~plain"), WithJsonSchema(_PLAIN_SCHEMA)]
    | Annotated[TextSpace, Tag("~text")]
    | Annotated[DemosSpace, Tag("~demos")]
    | Annotated[ChoiceSpace, Tag("~choice")]
    | Annotated[IntSpace, Tag("~int")]
    | Annotated[FloatSpace, Tag("~float")]
    | Annotated[WeightsSpace, Tag("~lora")],
    Discriminator(_free_form_tag),
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
"""Model that each tag in the location of an error stands for."""
