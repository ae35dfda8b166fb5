"""Basic types of the YAML file: names, references, port types, Python code, plain values."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, WithJsonSchema
from pydantic_core import PydanticCustomError

from compound.errors import DeclarationError
from compound.graph.json_types import json_type, record_type
from compound.graph.types import parse

LONGEST_TYPE = 500  # characters; bounds the recursion of the parser on untrusted input
_REFERENCE = re.compile(r"\$[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*\Z")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
_CODE = re.compile(r"[A-Za-z_][A-Za-z0-9_.]*:[A-Za-z_][A-Za-z0-9_.]*\Z")


class Model(BaseModel):
    """Base model of all parts of the file: no unknown keys, no type conversions."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, use_attribute_docstrings=True)

    @property
    def given(self) -> dict[str, Any]:
        """Fields that the file sets; others are left to the defaults of the class they are passed to."""
        names = [name for name in type(self).model_fields if name in self.model_fields_set]
        return {name: getattr(self, name) for name in names}


def value_error(what: str, hint: str = "") -> PydanticCustomError:
    """Return the error of an invalid value."""
    return PydanticCustomError("wrong", "{what}", {"what": what, "hint": hint})


def as_pydantic_error(error: DeclarationError) -> PydanticCustomError:
    """Return a declaration error as one that pydantic collects."""
    return PydanticCustomError("refused", "{what}", {"what": error.message, "hint": error.hint})


def _type(value: object) -> object:
    if isinstance(value, Mapping):
        return _mapping_type(value)
    if not isinstance(value, str) or len(value) > LONGEST_TYPE:
        raise value_error("must be a type such as str, int or list[str]")
    try:
        return parse(value)
    except DeclarationError as error:
        raise as_pydantic_error(error) from None


def _mapping_type(value: Mapping[object, object]) -> object:
    """Return the type of ``{json_schema: SCHEMA}``, or of an object with the given fields."""
    schema = value.get("json_schema")
    try:
        if isinstance(schema, Mapping):
            if len(value) > 1:
                raise value_error("must have no key besides json_schema")
            return json_type({str(key): part for key, part in schema.items()})
        if not value or not all(isinstance(name, str) and _NAME.match(name) for name in value):
            hint = "write {name: str, age: int}, or {json_schema: {type: object, ...}}"
            raise value_error("must be the types of fields by their names", hint)
        fields = {str(name): _type(part) for name, part in value.items()}
        return record_type(fields)
    except DeclarationError as error:
        raise as_pydantic_error(error) from None


def _reference(value: object) -> str:
    if isinstance(value, str) and _REFERENCE.match(value):
        return value
    hint = "write constants as settings of the component"
    raise value_error("must be a reference such as $question or $node.field", hint)


def _code(value: object) -> str:
    if isinstance(value, str) and _CODE.match(value):
        return value
    raise value_error("must name Python code as module:name")


def _scalar(value: object) -> str | float:
    if isinstance(value, str | int | float | bool):
        return value
    raise value_error("must be a string, a number, true or false")


def _constant(value: object) -> object:
    found = value if isinstance(value, list) else [value]
    if all(isinstance(item, str | int | float | bool) for item in found):
        return value
    raise value_error("must be a string, a number, true, false, or a list of them")


def _number(value: object) -> float:
    if isinstance(value, int | float) and type(value) in (int, float):
        return value
    raise value_error("must be a number")


def _text_like(pattern: re.Pattern[str], description: str) -> WithJsonSchema:
    ecma = f"^{pattern.pattern.removesuffix(chr(92) + 'Z')}$"
    return WithJsonSchema({"type": "string", "pattern": ecma, "description": description})


Name = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
"""The name of a component, node, port, input or output."""
_NAMED = {"type": "string", "description": "str, int, float, bool, list[str], `one of a, b`, …"}
_SCHEMA = {
    "type": "object",
    "required": ["json_schema"],
    "properties": {"json_schema": {"type": "object", "description": "a JSON schema"}},
    "maxProperties": 1,
}
_RECORD = {
    "type": "object",
    "minProperties": 1,
    "description": "an object: the type of each field by name, or {json_schema: SCHEMA}",
}
Type = Annotated[object, PlainValidator(_type), WithJsonSchema({"anyOf": [_NAMED, _RECORD]})]
"""A type by name, or of an object."""
OneType = Annotated[object, PlainValidator(_type), WithJsonSchema({"anyOf": [_NAMED, _SCHEMA]})]
"""A type where a mapping without the key ``json_schema`` has another meaning."""
Reference = Annotated[str, PlainValidator(_reference), _text_like(_REFERENCE, "$input, $node or $node.field")]
Code = Annotated[str, PlainValidator(_code), _text_like(_CODE, "Python code: module:name")]
Scalar = Annotated[
    str | int | float | bool,
    PlainValidator(_scalar),
    WithJsonSchema({"type": ["string", "number", "boolean"]}),
]
Constant = Annotated[
    object,
    PlainValidator(_constant),
    WithJsonSchema({"type": ["string", "number", "boolean", "array"]}),
]
"""A value that is not tuned."""
Number = Annotated[float, PlainValidator(_number), WithJsonSchema({"type": "number"})]
