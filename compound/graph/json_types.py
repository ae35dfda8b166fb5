"""Types declared by a JSON schema, and the JSON schemas of types.

A type of a JSON schema is ``Annotated[base, JSONSchema(text)]``. Its values are plain JSON values,
checked with jsonschema. Two types are equal if their schemas are.
"""

from __future__ import annotations

import functools
import json
import sys
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union, cast, get_args, get_origin

import typing_extensions
from pydantic import TypeAdapter
from pydantic.errors import PydanticUserError
from pydantic.json_schema import GenerateJsonSchema
from pydantic_core import CoreSchema, core_schema

from compound.core.errors import DeclarationError
from compound.core.narrowing import report_wrong_arguments
from compound.core.security.json_schemas import Document, check_keywords, problems_of

if TYPE_CHECKING:
    from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler

BASES: Mapping[object, object] = {
    "object": dict[str, Any],
    "array": list[Any],
    "string": str,
    "integer": int,
    "number": float,
    "boolean": bool,
    "null": type(None),
}
# Keywords that only describe: a schema with no others is the plain type of its `type`.
DESCRIPTIVE = frozenset({"type", "title", "description", "default", "examples", "$schema", "$id"})
INTEGER_KEY = r"^-?(0|[1-9][0-9]{0,17})$"
NUMBER_KEY = r"^-?(0|[1-9][0-9]{0,17})(\.[0-9]{1,17})?(e-?[0-9]{1,3})?$"
KEYS: Mapping[
    str, dict[str, Any]
] = {  # schemas of the names of properties, by the kind of the keys
    "int": {"pattern": INTEGER_KEY},
    "float": {"pattern": NUMBER_KEY},
    "decimal": {"pattern": NUMBER_KEY},
    "bool": {"enum": ["true", "false"]},
}
MARKERS = (typing.Required, typing.NotRequired)
LONGEST_SCHEMA = 100_000  # characters


@dataclass(frozen=True, eq=False)
class JSONSchema:
    """Annotation of a type whose values a JSON schema describes.

    The text keeps the declared order of properties, in which models write them.
    """

    text: str

    def __eq__(self, other: object) -> bool:
        return isinstance(other, JSONSchema) and self.document == other.document

    def __hash__(self) -> int:
        return hash(json.dumps(self.document, sort_keys=True))

    @property
    def document(self) -> dict[str, Any]:
        """The schema."""
        found: dict[str, Any] = json.loads(self.text)
        return found

    def problems(self, value: object) -> list[str]:
        """Return descriptions of the parts of a value that the schema does not accept."""
        return problems_of(self.text, value)

    def __get_pydantic_core_schema__(
        self, source: object, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._checked, handler(source))

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        return self.document

    def _checked(self, value: object) -> object:
        problems = self.problems(value)
        if problems:
            raise ValueError("; ".join(problems))
        return value


@report_wrong_arguments
def json_type(schema: Document) -> object:
    """Return the type of the values that a JSON schema accepts.

    Args:
        schema: a JSON schema (draft 2020-12).

    Raises:
        DeclarationError: the schema is invalid.

    Example:
        >>> json_type({"type": "integer"}), json_type({"enum": ["yes", "no"]})
        (<class 'int'>, typing.Literal['yes', 'no'])
        >>> kind = json_type({"type": "object", "properties": {"age": {"type": "integer"}}})
        >>> kind == json_type({"properties": {"age": {"type": "integer"}}, "type": "object"})
        True
    """
    from jsonschema import Draft202012Validator
    from jsonschema.exceptions import SchemaError as InvalidSchema

    try:
        text = json.dumps(schema, sort_keys=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise DeclarationError(f"a JSON schema must be JSON, but {error}") from None
    if len(text) > LONGEST_SCHEMA:
        raise DeclarationError(
            f"a JSON schema may have {LONGEST_SCHEMA:,} characters, but has {len(text):,}"
        )
    try:
        Draft202012Validator.check_schema(dict(schema))
    except RecursionError:
        raise DeclarationError("the JSON schema is nested too deeply") from None
    except InvalidSchema as error:
        where = ".".join(map(str, error.path)) or "its top level"
        raise DeclarationError(
            f"the JSON schema is invalid at {where}: {error.message[:200]}"
        ) from None
    check_keywords(schema)
    kind = schema.get("type")
    options = schema.get("enum")
    if isinstance(options, list) and options and all(type(o) in (str, int, bool) for o in options):
        return Literal[tuple(options)]
    base = BASES.get(kind) if isinstance(kind, str) else Any
    if kind in ("string", "integer", "number", "boolean") and schema.keys() <= DESCRIPTIVE:
        return base
    return Annotated[base, JSONSchema(text)]


def record_type(fields: Mapping[str, object]) -> object:
    """Return the type of JSON objects with the given fields, each of which is required.

    >>> record_type({"age": int}) == json_type({
    ...     "type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"],
    ...     "additionalProperties": False})
    True
    """
    properties: dict[str, object] = {}
    for name, kind in fields.items():
        schema = json_schema_of(kind)
        if schema is None:
            raise DeclarationError(f"field {name!r} has a type without a JSON form")
        properties[name] = schema
    return json_type(
        {
            "type": "object",
            "properties": properties,
            "required": list(fields),
            "additionalProperties": False,
        }
    )


def schema_of_annotation(kind: object) -> JSONSchema | None:
    """Return the schema of a type made by `json_type`, or ``None`` for any other type."""
    if get_origin(kind) is not Annotated:
        return None
    return next((item for item in get_args(kind)[1:] if isinstance(item, JSONSchema)), None)


class _SchemaGenerator(GenerateJsonSchema):
    """Generator that also describes keys that are no texts, which JSON writes as texts."""

    def dict_schema(self, schema: core_schema.DictSchema) -> dict[str, Any]:
        found = super().dict_schema(schema)
        keys = schema.get("keys_schema", {})
        if keys.get("type") == "literal" and "propertyNames" not in found:
            found["propertyNames"] = {"enum": [str(label) for label in keys["expected"]]}
        elif names := KEYS.get(keys.get("type", "")):
            found.setdefault("propertyNames", names)
        return found


@functools.lru_cache(maxsize=512)
def json_schema_of(kind: object) -> dict[str, Any] | None:
    """Return the JSON schema of a type's values, or ``None`` if they have no JSON form.

    The result is shared and must not be modified.

    >>> json_schema_of(list[int])
    {'items': {'type': 'integer'}, 'type': 'array'}
    """
    given = schema_of_annotation(kind)
    if given is not None:
        return given.document
    try:
        schema = TypeAdapter(cast("Any", portable(kind))).json_schema(
            mode="validation", schema_generator=_SchemaGenerator
        )
    except (PydanticUserError, TypeError, ValueError):
        return None
    _require_tags(schema, schema.get("$defs", {}))
    return schema


def _require_tags(part: object, definitions: Mapping[str, Any]) -> None:
    """Require the tag of each class of a discriminated union, also if it has a default.

    Pydantic chooses the class by the tag, so that a value without it is invalid.
    """
    if isinstance(part, list):
        for item in part:
            _require_tags(item, definitions)
    if not isinstance(part, dict):
        return
    tag = part.get("discriminator")
    if isinstance(tag, dict) and isinstance(name := tag.get("propertyName"), str):
        for option in part.get("oneOf", ()):
            found = definitions.get(str(option.get("$ref", "")).rpartition("/")[2], option)
            if name in found.get("properties", {}) and name not in found.get("required", ()):
                found["required"] = [name, *found.get("required", ())]
    for item in part.values():
        _require_tags(item, definitions)


@functools.lru_cache(maxsize=512)
def portable(kind: object) -> object:
    """Return a type in which a `typing.TypedDict` is replaced by that of typing_extensions.

    On Python 3.11 pydantic accepts only the latter. One that refers to itself is not replaced.
    """
    if sys.version_info >= (3, 12):
        return kind
    if typing.is_typeddict(kind) and isinstance(kind, type):
        return kind if _is_recursive(kind) else _portable_record(kind)
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated:
        inner = portable(arguments[0])
        return kind if inner == arguments[0] else Annotated[(inner, *arguments[1:])]
    if origin in (list, dict, tuple, Union, types.UnionType):
        parts = tuple(map(portable, arguments))
        if parts == arguments:
            return kind
        return Union[parts] if origin in (Union, types.UnionType) else origin[parts]  # noqa: UP007
    return kind


def _portable_record(kind: type) -> object:
    """Return a TypedDict of typing_extensions with the fields of another one."""
    fields: dict[str, object] = {}
    required: frozenset[str] = getattr(kind, "__required_keys__", frozenset())
    for name, hint in typing.get_type_hints(kind, include_extras=True).items():
        # without a marker of its own, a field is as the class that declares it, which may be a base
        # class
        marker = get_origin(hint) if get_origin(hint) in MARKERS else MARKERS[name not in required]
        inner = get_args(hint)[0] if get_origin(hint) in MARKERS else hint
        fields[name] = marker[portable(inner)]
    return typing_extensions.TypedDict(kind.__name__, fields)  # type: ignore[operator]


def _is_recursive(kind: object, enclosing: tuple[object, ...] = ()) -> bool:
    """Return whether a TypedDict refers to itself, or has a field that does."""
    if kind in enclosing:
        return True
    is_record = typing.is_typeddict(kind)
    parts = typing.get_type_hints(kind).values() if is_record else get_args(kind)
    return any(
        _is_recursive(part, (*enclosing, kind) if is_record else enclosing) for part in parts
    )
