"""Members of structured values: the fields of pydantic models, dataclasses, TypedDicts and JSON objects."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping
from typing import Annotated, Any, Union, get_args, get_origin

from compound.errors import WiringError, suggest_name
from compound.graph.json_types import json_type, schema_of_annotation
from compound.graph.types import format_type, union


def member_types(kind: object) -> Mapping[str, object]:
    """Return the types of a structured type's members by name; empty for any other type.

    A member that may be missing has a type that includes None.

    >>> from dataclasses import dataclass
    >>> @dataclass
    ... class Person:
    ...     name: str
    >>> member_types(Person)
    {'name': <class 'str'>}
    """
    if (schema := schema_of_annotation(kind)) is not None:
        return _of_schema(schema.document)
    if get_origin(kind) is Annotated:
        return member_types(get_args(kind)[0])
    fields = getattr(kind, "model_fields", None)
    if isinstance(fields, Mapping):
        return {name: field.annotation for name, field in fields.items()}
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        return {field.name: hints[field.name] for field in dataclasses.fields(kind)}
    required = getattr(kind, "__required_keys__", None)
    if isinstance(kind, type) and isinstance(required, frozenset):
        found = typing.get_type_hints(kind)
        return {name: hint if name in required else _or_none(hint) for name, hint in found.items()}
    return {}


def member_type(kind: object, name: str, label: str) -> object:
    """Return the type of a member; ``label`` names the value in messages.

    Raises:
        WiringError: the type has no such member, or its value may be None.
    """
    if get_origin(kind) in (Union, types.UnionType):
        raise WiringError(
            f"{label} is {format_type(kind)}, so {label}.{name} may not exist",
            hint="make the type one class, or read the field in a function",
        )
    members = member_types(kind)
    if not members:
        raise WiringError(
            f"{label} is {format_type(kind)} and has no fields, but {name!r} was read",
            hint="declare a pydantic model, a dataclass, a TypedDict or a JSON schema as the output",
        )
    if name not in members:
        raise WiringError(f"{label} has no field {name!r}", hint=suggest_name(name, members))
    return members[name]


def read_members(value: object, path: tuple[str, ...]) -> object:
    """Return the member of a value at a path; a missing key of a mapping is None."""
    for name in path:
        value = value.get(name) if isinstance(value, Mapping) else getattr(value, name)
    return value


def _of_schema(schema: Mapping[str, Any]) -> dict[str, object]:
    required = schema.get("required", ())
    found: dict[str, object] = {}
    for name, part in schema.get("properties", {}).items():
        definitions = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
        kind = json_type({**part, **definitions} if definitions and "type" not in part else part)
        found[name] = kind if name in required else _or_none(kind)
    return found


def _or_none(kind: object) -> object:
    return kind if kind is Any else union(kind, None)
