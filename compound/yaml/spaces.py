"""Schema of settings that may be tuned, and of the parameters of functions and classes.

A setting is a plain value, or a mapping that defines the space in which it may be tuned: ``{tune:
TEXT}``, ``{tune: 4}`` (demonstrations), ``{choice: […]}``, ``{int: [1, 9]}``, ``{float: [0, 1]}``
or ``{lora: {rank: 16}}``.
"""

from __future__ import annotations

import inspect
import json
import re
import types
import typing
from collections.abc import Callable, Collection, Iterable, Mapping
from types import MappingProxyType
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Literal,
    Optional,
    Required,
    Self,
    TypeVar,
    Union,
    cast,
)

from pydantic import (
    Discriminator,
    Field,
    PositiveInt,
    Tag,
    TypeAdapter,
    ValidationError,
    WithJsonSchema,
    create_model,
    model_validator,
)
from pydantic.errors import PydanticUserError

from compound.core.errors import DeclarationError
from compound.core.storage.artifacts import Reference as FolderReference
from compound.graph.registry.user_code import UserCodeError, definition
from compound.graph.space import Choice, Demos, Float, Int, LoRA, Space, Text, Weights
from compound.yaml.types import (
    TAGGED,
    Constant,
    MadeModel,
    Model,
    Name,
    Number,
    Scalar,
    Type,
    as_pydantic_error,
    tagged,
)

ModelT = TypeVar("ModelT", bound=Model)

SPACES = ("tune", "choice", "int", "float", "lora")


class SpaceModel(Model):
    """A setting that may be tuned."""

    def make(self) -> Space:
        """Return the space."""
        return MAKERS[type(self)](self)

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


class ChoiceSpace(SpaceModel):
    """One of a few values."""

    choice: list[Scalar] = Field(min_length=1)
    """The possible values."""
    value: Scalar = None  # type: ignore[assignment]  # the first one
    """The initial value; the first one by default."""


class IntSpace(SpaceModel):
    """An integer between two bounds."""

    int: Annotated[list[int], Field(min_length=2, max_length=2)]
    """[low, high], both inclusive."""
    value: Annotated[object, Field(json_schema_extra={"type": "integer"})] = None
    """The initial value; the low bound by default."""
    log: bool = False
    """Whether to search on a logarithmic scale."""


class FloatSpace(SpaceModel):
    """A number between two bounds."""

    float: Annotated[list[Number], Field(min_length=2, max_length=2)]
    """[low, high], both inclusive."""
    value: Number = None  # type: ignore[assignment]  # the low bound
    """The initial value; the low bound by default."""
    log: bool = False
    """Whether to search on a logarithmic scale."""


TargetsSetting = Annotated[
    Annotated[Literal["all-linear", "attention"], Tag("~plain")]
    | Annotated[list[str], Field(min_length=1), Tag("~names")],
    Discriminator(lambda value: "~names" if isinstance(value, list | tuple) else "~plain"),
]


class LoRAShape(Model):
    """A LoRA adapter's shape."""

    rank: int = Field(default=16, ge=1)
    """The rank of the update."""
    alpha: int | None = Field(default=None, ge=1)
    """The scaling factor; twice the rank by default."""
    targets: TargetsSetting = "all-linear"
    """The linear layers to adapt: all but the output layer, those of attention, or a list of names."""


class FolderSetting(Model):
    """A folder written by optimization, such as a trained adapter."""

    path: str
    """The path of the folder."""
    sha256: str
    """The SHA-256 digest of its files."""

    @property
    def reference(self) -> FolderReference:
        """The folder as a reference."""
        return {"path": self.path, "sha256": self.sha256}


class WeightsSpace(SpaceModel):
    """The weights of a component's model, as a LoRA adapter."""

    lora: LoRAShape
    """The adapter's shape."""
    value: FolderSetting | None = None
    """The initial adapter, trained before."""


def _weights(model: WeightsSpace) -> Weights:
    base = LoRA(model.lora.rank, model.lora.alpha, model.lora.targets)
    value = model.value.reference if model.value else None
    return Weights(value, base.rank, base.alpha, base.targets)


MAKERS: Mapping[type[SpaceModel], Callable[[Any], Space]] = {
    TextSpace: lambda m: Text(m.tune, m.max_length, m.keep),
    DemosSpace: lambda m: Demos(tuple(demo.model_dump() for demo in m.value), m.tune),
    ChoiceSpace: lambda m: Choice(*m.choice, value=m.value),
    IntSpace: lambda m: Int(m.int[0], m.int[1], m.value, m.log),
    FloatSpace: lambda m: Float(m.float[0], m.float[1], m.value, m.log),
    WeightsSpace: _weights,
}
"""The space of each model."""


def make_setting(value: object) -> object:
    """Return the space of a tunable setting, demonstrations as records, or a plain value as it is."""
    if isinstance(value, SpaceModel):
        return value.make()
    if isinstance(value, list) and any(isinstance(item, Demonstration) for item in value):
        return tuple(item.model_dump() for item in value)
    return value


FORMS: Mapping[object, tuple[str, type[SpaceModel], str]] = {
    Text: ("~text", TextSpace, "{tune: TEXT}"),
    Demos: ("~demos", DemosSpace, "{tune: COUNT}"),
    Choice: ("~choice", ChoiceSpace, "{choice: [A, B]}"),
    Int: ("~int", IntSpace, "{int: [LOW, HIGH]}"),
    Float: ("~float", FloatSpace, "{float: [LOW, HIGH]}"),
    Weights: ("~lora", WeightsSpace, "{lora: {rank: 16}}"),
}
"""Tag, model and spelling of each space."""
PLAIN: Mapping[object, str] = {
    str: "a string",
    int: "an integer",
    float: "a number",
    bool: "true or false",
}
RESERVED = ("in", "when", "out", "settings")
"""Keys of an entry that cannot be names of settings."""


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


def _form(plain: object, spaces: Iterable[object], named: Iterable[str] = ()) -> Any:  # noqa: ANN401
    """Return the type of a setting that is plain, or one of some spaces.

    Args:
        plain: the type of plain values; None if there are none.
        spaces: the spaces.
        named: the forms that the message of an error lists; default: any mapping that is no space
            is plain.
    """
    options: list[object] = [] if plain is None else [Annotated[plain, Tag("~plain")]]
    options += [tagged(*FORMS[space][:2]) for space in spaces]
    *names, last = dict.fromkeys(named) or [""]
    what = f"must be {', '.join(names)} or {last}" if names else f"must be {last}"
    select = (
        Discriminator(form_tag, custom_error_type="form", custom_error_message=what)
        if last
        else Discriminator(lambda value: form_tag(value).replace("~unknown", "~plain"))
    )
    return Annotated[Union[tuple(options)], select]  # noqa: UP007 - made of a tuple


def setting_type(annotation: object) -> Any:  # noqa: ANN401 - a type
    """Return the type of a setting in the file; spaces of the annotation become their YAML forms.

    >>> setting_type(int)
    <class 'int'>
    """
    parts = _parts(annotation)
    spaces = [part for part in parts if isinstance(part, type) and issubclass(part, Space)]
    if not spaces:
        return annotation
    plain = tuple(_number(part) for part in parts if part not in spaces and part is not NONE)
    named = [
        _named(part, "a plain value") for part in parts if part not in spaces and part is not NONE
    ]
    named = [*(named or ["left out"]), *(FORMS[space][2] for space in spaces)]
    form = _form(Union[plain] if plain else None, spaces, named)  # noqa: UP007
    return Optional[form] if NONE in parts else form  # noqa: UP045


NONE = type(None)


def _parts(annotation: object) -> tuple[object, ...]:
    is_union = typing.get_origin(annotation) in (Union, types.UnionType)
    return typing.get_args(annotation) if is_union else (annotation,)


def _number(part: object) -> object:
    """Return a type of numbers in which an integer remains one; other types as they are."""
    if part is float:
        return Number
    if typing.get_origin(part) is Annotated and typing.get_args(part)[0] is float:
        return Annotated[(Number, *typing.get_args(part)[1:])]
    return part


def _named(part: object, other: str = "") -> str:
    if part in FORMS:
        return FORMS[part][2]
    if typing.get_origin(part) is Annotated:
        return _named(typing.get_args(part)[0], other)
    if part is NONE:
        return "null"
    spelled = part.__name__ if isinstance(part, type) and not typing.get_args(part) else str(part)
    return PLAIN.get(part, other or spelled)


if TYPE_CHECKING:
    IntSetting = int | IntSpace
    ValueSetting = object
    AnySetting = object
else:
    IntSetting = setting_type(PositiveInt | Int)
    ValueSetting = _form(
        Constant,
        FORMS,
        ("a constant", *(FORMS[space][2] for space in (Int, Float, Choice, Text))),
    )
    _NO_SPACE = {"not": {"type": "object", "anyOf": [{"required": [key]} for key in SPACES]}}
    AnySetting = _form(Annotated[object, WithJsonSchema(_NO_SPACE)], FORMS)
TAGGED["~stored"] = FolderSetting
OptionSetting = Annotated[
    Annotated[Scalar, Tag("~plain")] | Annotated[FolderSetting, Tag("~stored")],
    Discriminator(
        lambda value: "~stored" if isinstance(value, Mapping | FolderSetting) else "~plain"
    ),
]
TAKES = dict[Name, Type] | None
MODEL_FORMS: Mapping[str, object] = {
    "demos": _form(list[Demonstration], (Demos,), ("a list of demonstrations", FORMS[Demos][2])),
    "takes": TAKES,
}
"""Forms of the settings of models that are not as the types of their parameters."""


# Models of the parameters of functions and classes


def make_model(
    name: str,
    doc: str,
    fields: Mapping[str, tuple[object, object]],
    base: type[ModelT] = MadeModel,  # type: ignore[assignment]
) -> type[ModelT]:
    """Return a model with the given fields: the type of each, and its default or description."""
    given = cast("dict[str, Any]", fields)  # the type that `create_model` expects
    model: type[ModelT] = create_model(
        name, __base__=base, __doc__=doc, __module__=__name__, **given
    )
    return model


def entry_model(name: str, factory: Callable[..., object], prefix: str = "") -> type[Model]:
    """Return the model of ``{name: {parameter: value}}``; ``prefix`` starts the names of the models."""
    settings = settings_model(f"{prefix}{name}", factory)
    doc = summary(factory)
    return make_model(f"{prefix}{name}_entry", doc, {name: (settings, ...)}, MadeModel)


def settings_model(
    name: str,
    *factories: Callable[..., object],
    skip: Collection[str] = (),
    forms: Mapping[str, object] = MappingProxyType({}),
    base: type[Model] = MadeModel,
) -> type[Model]:
    """Return the model of the parameters of functions and classes.

    Args:
        name: the prefix of the model's name.
        factories: the functions and classes; their docstrings describe the parameters.
        skip: parameters to leave out.
        forms: types that replace those of parameters, and further settings. What is not `Required`
            has the default of its parameter, or None.
        base: the base of the model.
    """
    fields: dict[str, tuple[object, object]] = {}
    for factory in factories:
        fields = {**fields, **_parameters(factory, skip, forms)}
    further = {name: (form, None) for name, form in forms.items() if name not in fields}
    found = {
        name: (typing.get_args(form)[0], ...)
        if typing.get_origin(form) is Required
        else (form, default)
        for name, (form, default) in {**further, **fields}.items()
    }
    return make_model(f"{name}_settings", summary(factories[0]), found, base)


def _parameters(
    factory: Callable[..., object], skip: Collection[str], forms: Mapping[str, object]
) -> dict[str, tuple[object, object]]:
    hints = hints_of(factory)
    doc = inspect.getdoc(factory) or ""
    fields: dict[str, tuple[object, object]] = {}
    for name, parameter in inspect.signature(factory).parameters.items():
        if name in skip or parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        if name in RESERVED or name.startswith("_") or hasattr(Model, name):
            raise UserCodeError(
                f"parameter {name!r} of {definition(factory)} has a name that a file reserves",
                hint="rename it",
            )
        if name not in forms and name in hints and not _in_json(hints[name]):
            if parameter.default is not parameter.empty:
                continue  # it keeps its default
            raise UserCodeError(
                f"parameter {name!r} of {definition(factory)} has a type that a file cannot hold",
                hint="give it a default, or a type such as str, int, list[str] or str | cp.Choice",
            )
        form = setting_type(hints[name]) if name in hints else AnySetting
        described = re.search(rf"^( +){name}: (.+(?:\n\1 +.+)*)$", doc, re.MULTILINE)
        default = ... if parameter.default is parameter.empty else parameter.default
        about = " ".join(described[2].split()) if described else ""
        about = about[:1].upper() + about[1:]
        fields[name] = forms.get(name, form), Field(default, description=about or None)
    return fields


def hints_of(factory: Callable[..., object]) -> dict[str, object]:
    """Return the types of the parameters of a function or class.

    A type that is only imported for type checkers cannot be resolved; no file can hold values of
    it.
    """
    described_by = inspect.unwrap(factory)
    if isinstance(described_by, type):
        described_by = inspect.unwrap(described_by.__init__)  # type: ignore[misc]
    names = getattr(described_by, "__globals__", {})
    hints: dict[str, object] = {}
    for name, annotation in getattr(described_by, "__annotations__", {}).items():
        alone = types.SimpleNamespace(__annotations__={name: annotation})
        try:
            hints[name] = typing.get_type_hints(alone, names, include_extras=True)[name]
        except Exception:  # noqa: BLE001 - an annotation is code of a user, and may raise anything
            hints[name] = _Unresolved
    return hints


class _Unresolved:
    """Stands for a type that cannot be resolved."""


def problem_of(annotation: object, value: object) -> str:
    """Return what a setting must be, if a value of the file is not of a parameter's type; else ``""``.

    >>> problem_of(int, 3), problem_of(int | Int, "x"), problem_of(list[str], "x")
    ('', 'must be an integer or {int: [LOW, HIGH]}', 'must be list[str]')
    """
    try:
        _adapter(annotation).validate_json(json.dumps(value), strict=True)
    except PydanticUserError:  # JSON holds no value of this type: the class says what it takes
        return ""
    except ValidationError:
        return f"must be {' or '.join(dict.fromkeys(map(_named, _parts(annotation))))}"
    return ""


def _adapter(annotation: object) -> TypeAdapter[object]:
    return TypeAdapter(cast("type[object]", setting_type(annotation)))


def _in_json(annotation: object) -> bool:
    try:
        _adapter(annotation).json_schema()
    except PydanticUserError:
        return False
    return True


def summary(factory: Callable[..., object]) -> str:
    """Return the first line of a docstring."""
    return (inspect.getdoc(factory) or "").split("\n", 1)[0]
