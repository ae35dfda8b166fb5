"""Create models of settings from the typed parameters of a function or class."""

from __future__ import annotations

import inspect
import json
import re
import types
import typing
from collections.abc import Callable, Collection, Mapping
from typing import Annotated, Any, Union, cast

from pydantic import ConfigDict, Field, Tag, TypeAdapter, ValidationError, create_model
from pydantic.errors import PydanticUserError

from compound.graph.space import Choice, Demos, Float, Int, Space, Text, Weights
from compound.registry.user_code import UserCodeError, definition
from compound.spec.schema.settings import (
    AnySetting,
    ChoiceSpace,
    DemosSpace,
    FloatSpace,
    IntSpace,
    SpaceModel,
    TextSpace,
    WeightsSpace,
    form_discriminator,
)
from compound.spec.schema.types import Model, Number

FieldOf = tuple[object, object]  # a field's type, and its default or description
SPACES: Mapping[object, tuple[str, type[SpaceModel], str]] = {
    Text: ("~text", TextSpace, "{tune: TEXT}"),
    Demos: ("~demos", DemosSpace, "{tune: COUNT}"),
    Choice: ("~choice", ChoiceSpace, "{choice: [A, B]}"),
    Int: ("~int", IntSpace, "{int: [LOW, HIGH]}"),
    Float: ("~float", FloatSpace, "{float: [LOW, HIGH]}"),
    Weights: ("~lora", WeightsSpace, "{lora: {rank: 16}}"),
}
RESERVED = ("in", "when", "out", "settings")
"""Keys of an entry that cannot be names of settings."""
PLAIN: Mapping[object, str] = {str: "a string", int: "an integer", float: "a number", bool: "true or false"}


class _Made(Model):
    """Base of models created from fields with explicit descriptions, since they have no source to parse."""

    model_config = ConfigDict(use_attribute_docstrings=False)


def make_model(name: str, doc: str, fields: Mapping[str, FieldOf], base: type[Model] = _Made) -> type[Model]:
    """Return a model with the given fields."""
    given = cast("dict[str, Any]", fields)  # the type that `create_model` expects
    model: type[Model] = create_model(name, __base__=base, __doc__=doc, __module__=__name__, **given)
    return model


def entry_model(name: str, factory: Callable[..., object], prefix: str = "") -> type[Model]:
    """Return the model of ``{name: {parameter: value}}``; ``prefix`` starts the names of the models."""
    settings = settings_model(f"{prefix}{name}", factory)
    return make_model(f"{prefix}{name}_entry", summary(factory), {name: (settings, ...)})


def settings_model(name: str, factory: Callable[..., object], skip: Collection[str] = ()) -> type[Model]:
    """Return the model of the parameters of a function or class.

    Args:
        name: the prefix of the model's name.
        factory: the function or class; its docstring describes the parameters.
        skip: parameters to leave out.
    """
    return make_model(f"{name}_settings", summary(factory), _parameters(factory, skip))


def hints_of(factory: Callable[..., object]) -> dict[str, object]:
    """Return the types of the parameters of a function or class.

    A type that is only imported for type checkers cannot be resolved; no file can hold values of it.
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
        adapter = _adapter(annotation)
    except PydanticUserError:  # JSON holds no value of this type: the class says what it takes
        return ""
    try:
        adapter.validate_json(json.dumps(value), strict=True)
    except ValidationError:
        is_union = typing.get_origin(annotation) in (Union, types.UnionType)
        parts = typing.get_args(annotation) if is_union else (annotation,)
        named = [SPACES[part][2] if part in SPACES else PLAIN.get(part, _spelled(part)) for part in parts]
        return f"must be {' or '.join(dict.fromkeys(named))}"
    return ""


def _adapter(annotation: object) -> TypeAdapter[object]:
    return TypeAdapter(cast("type[object]", setting_type(annotation)))


def _spelled(part: object) -> str:
    if part is type(None):
        return "null"
    return part.__name__ if isinstance(part, type) and not typing.get_args(part) else str(part)


def _in_json(annotation: object) -> bool:
    """Return whether a file can hold values of a type."""
    try:
        _adapter(annotation).json_schema()
    except PydanticUserError:
        return False
    return True


def _parameters(factory: Callable[..., object], skip: Collection[str]) -> dict[str, FieldOf]:
    hints = hints_of(factory)
    doc = inspect.getdoc(factory) or ""
    fields: dict[str, FieldOf] = {}
    for name, parameter in inspect.signature(factory).parameters.items():
        if name in skip or parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        if name in RESERVED or name.startswith("_") or hasattr(Model, name):
            raise UserCodeError(
                f"parameter {name!r} of {definition(factory)} has a name that a file reserves",
                hint="rename it",
            )
        if name in hints and not _in_json(hints[name]):
            if parameter.default is not parameter.empty:
                continue  # it keeps its default
            raise UserCodeError(
                f"parameter {name!r} of {definition(factory)} has a type that a file cannot hold",
                hint="give it a default, or a type such as str, int, list[str] or str | cp.Choice",
            )
        described = re.search(rf"^( +){name}: (.+(?:\n\1 +.+)*)$", doc, re.MULTILINE)
        default = ... if parameter.default is parameter.empty else parameter.default
        fields[name] = (
            setting_type(hints[name]) if name in hints else AnySetting,
            Field(default, description=" ".join(described[2].split()) if described else None),
        )
    return fields


def setting_type(annotation: object) -> object:
    """Return the type of a setting in the file; spaces of the annotation become their YAML forms.

    >>> setting_type(int)
    <class 'int'>
    """
    is_union = typing.get_origin(annotation) in (Union, types.UnionType)
    parts = typing.get_args(annotation) if is_union else (annotation,)
    spaces = [part for part in parts if isinstance(part, type) and issubclass(part, Space)]
    if not spaces:
        return annotation
    plain = [part for part in parts if part not in spaces]
    options: list[object] = []
    if plain:
        numbers = tuple(Number if part is float else part for part in plain)
        options.append(Annotated[Union[numbers], Tag("~plain")])  # noqa: UP007 - made of a tuple
    options += dict.fromkeys(Annotated[SPACES[space][1], Tag(SPACES[space][0])] for space in spaces)
    named = [PLAIN.get(part, "a plain value") for part in plain if part is not type(None)]
    described = [*named, *(SPACES[space][2] for space in spaces)]
    return Annotated[Union[tuple(options)], form_discriminator(*dict.fromkeys(described))]  # noqa: UP007


def summary(factory: Callable[..., object]) -> str:
    """Return the first line of a docstring."""
    return (inspect.getdoc(factory) or "").split("\n", 1)[0]
