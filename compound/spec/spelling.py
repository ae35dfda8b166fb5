"""Convert types, spaces and Python code to their form in the YAML file."""

from __future__ import annotations

import types
from enum import Enum
from typing import Literal, Union, get_args, get_origin

from compound.errors import DeclarationError
from compound.graph.json_types import json_schema_of, json_type, schema_of_annotation
from compound.graph.members import member_types
from compound.graph.space import Choice, Demos, Float, Int, LoRA, Space, Text, Weights
from compound.graph.types import NAMES, format_type, parse
from compound.registry.code import place_of
from compound.spec.yaml.text import Flow

Tree = dict[str, object]


def spell_type(kind: object, where: str, *, class_schemas: bool = False) -> str | Tree:
    """Return the YAML form of a port type.

    Args:
        kind: the type.
        where: the name of its port, for messages.
        class_schemas: write a class as the JSON schema of its values; a file cannot name the class itself.

    Raises:
        DeclarationError: the type has no form in YAML.
    """
    if class_schemas and _has_class(kind) and _is_json(kind):
        kind = json_type(json_schema_of(kind) or {})
    if (schema := schema_of_annotation(kind)) is not None:
        return Flow(json_schema=schema.document)
    text = format_type(kind)
    try:
        same = parse(text) == kind
    except DeclarationError:
        same = False
    if not same:
        raise DeclarationError(f"{where}: the type {text} cannot be written in YAML", hint="use a plain type")
    return text


def _has_class(kind: object) -> bool:
    """Return whether values of a type contain instances of a structured class or an enumeration."""
    return _is_class(kind) or any(map(_has_class, get_args(kind)))


def _is_json(kind: object) -> bool:
    """Return whether a JSON schema describes the values of a type to a model as the type itself does."""
    origin = get_origin(kind)
    if origin in (list, dict, Union, types.UnionType):
        return all(map(_is_json, get_args(kind)))
    return kind in NAMES.values() or kind is None or origin is Literal or _is_class(kind)


def _is_class(kind: object) -> bool:
    if not isinstance(kind, type) or get_origin(kind) is not None:
        return False
    return (issubclass(kind, Enum) or bool(member_types(kind))) and json_schema_of(kind) is not None


def spell_space(space: Space, value: object) -> Tree:
    """Return the YAML form of a space with a given initial value."""
    if isinstance(space, Text):
        limit = {} if space.max_length == Text.max_length else {"max_length": space.max_length}
        return {"tune": value, **limit, **({"keep": list(space.keep)} if space.keep else {})}
    if isinstance(space, Demos):
        return {"tune": space.max, **({"value": value} if value else {})}
    if isinstance(space, Choice):
        return Flow(choice=space.options, value=value)
    if isinstance(space, Int | Float):
        key = "int" if isinstance(space, Int) else "float"
        return Flow({key: [space.low, space.high], "value": value, **({"log": True} if space.log else {})})
    if isinstance(space, Weights):
        targets = {} if space.targets == LoRA().targets else {"targets": space.targets}
        shape = {"rank": space.rank, "alpha": space.alpha, **targets}
        return {"lora": Flow(shape), **({"value": value} if value else {})}
    raise DeclarationError(f"a {type(space).__name__} space cannot be written in YAML")


def spell_code(found: object, name: str) -> str:
    """Return the import string ``module:name`` of a function or class.

    Raises:
        DeclarationError: it cannot be imported by name.
    """
    place = place_of(found)
    if place is None:
        module, path = getattr(found, "__module__", None), getattr(found, "__qualname__", None)
        raise DeclarationError(
            f"{name}: {path or found!r} of {module} cannot be named in a file",
            hint="define it at the top of a module",
        )
    return place
