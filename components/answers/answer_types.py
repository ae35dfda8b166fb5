"""Answers of structured types: how a prompt describes them, and the format that engines enforce.

Plain types (text, labels, numbers, and lists of them) are answered in words. All others, such as
pydantic models, are answered as JSON, which the prompt describes in a short notation with the names
of this package's types: ``{"name": str, "tags": [str, ...]}``.
"""

from __future__ import annotations

import enum
import functools
import json
import re
import types
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import typing_extensions

from compound.core.engine import AnswerFormat
from compound.graph.json_types import (
    DESCRIPTIVE,
    INTEGER_KEY,
    NUMBER_KEY,
    json_schema_of,
    schema_of_annotation,
)
from compound.graph.types import Port, accepts

SCALARS: Mapping[object, str] = {
    "string": "str",
    "integer": "int",
    "number": "float",
    "boolean": "bool",
}
# Bound of integers without bounds, so that an answer cannot consist of digits without end.
LARGEST = 10**18 - 1
STRUCTURED = ("object", "array")  # JSON types
DEEPEST_UNION = 16  # references and unions that follow each other
WIDTH = 88  # characters of an object on one line
LIMITS = {  # keywords, and how the prompt states them
    "minimum": "at least {}",
    "maximum": "at most {}",
    "exclusiveMinimum": "more than {}",
    "exclusiveMaximum": "less than {}",
    "minLength": "at least {} characters",
    "maxLength": "at most {} characters",
    "minItems": "at least {} items",
    "maxItems": "at most {} items",
    "pattern": "matching {}",
    "format": "{}",
}


def without_annotation(kind: object) -> object:
    """Return the type in an ``Annotated`` that adds constraints to a plain type.

    >>> without_annotation(Annotated[int, "positive"])
    <class 'int'>
    """
    if get_origin(kind) is Annotated and schema_of_annotation(kind) is None:
        return without_annotation(get_args(kind)[0])
    return kind


def is_text(kind: object) -> bool:
    """Return whether values of a type are texts, also with constraints.

    >>> is_text(Annotated[str, "a name"]), is_text(str | None)
    (True, False)
    """
    while get_origin(kind) is Annotated:
        kind = get_args(kind)[0]
    return kind is str


def takes_any_text(kind: object) -> bool:
    """Return whether any text is a value of a type, and no value is structured.

    >>> from pydantic import Field
    >>> takes_any_text(str | None), takes_any_text(Annotated[str, Field(max_length=100)])
    (True, False)
    """
    if labels_of(kind) or not (is_text(kind) or accepts(kind, "any text")):
        return False
    schema = json_schema_of(kind)
    if schema is None:
        return True
    options = _options(schema, _definitions(schema))
    return any(map(_takes_any_text, options)) and json_forms(kind).isdisjoint(STRUCTURED)


def mixes_text(kind: object) -> bool:
    """Return whether a type is a union of text and structured types.

    >>> mixes_text(dict[str, int] | str), mixes_text(str | None)
    (True, False)
    """
    forms = json_forms(kind)
    return "string" in forms and not forms.isdisjoint(STRUCTURED)


def json_forms(kind: object) -> frozenset[str]:
    """Return the JSON types of a type's values; ``string`` stands for texts that are no labels.

    >>> sorted(json_forms(dict[str, int] | str)), json_forms(Literal["a"] | None)
    (['object', 'string'], frozenset({'null'}))
    """
    schema = json_schema_of(kind) or {}
    options = _options(schema, _definitions(schema))
    forms = {"object" if "properties" in option else option.get("type") for option in options}
    texts = [o for o in options if o.get("type") == "string" and not o.keys() & {"enum", "const"}]
    return frozenset(str(form) for form in forms if form and (form != "string" or texts))


def _options(
    schema: object, definitions: Mapping[str, object], depth: int = 0
) -> list[Mapping[str, object]]:
    """Return the alternatives of a schema, with those of unions in it, and without references."""
    if not isinstance(schema, Mapping) or depth > DEEPEST_UNION:
        return []
    if "$ref" in schema:
        found = definitions.get(str(schema["$ref"]).rpartition("/")[2])
        return _options(found, definitions, depth + 1)
    parts = schema.get("anyOf", schema.get("oneOf"))
    if not parts:
        return [schema]
    return [option for part in parts for option in _options(part, definitions, depth + 1)]


def _definitions(schema: Mapping[str, Any]) -> dict[str, object]:
    return {**schema.get("definitions", {}), **schema.get("$defs", {})}


def _takes_any_text(schema: Mapping[str, object]) -> bool:
    kind = schema.get("type", "string")
    is_string = kind == "string" or (isinstance(kind, list) and "string" in kind)
    return is_string and schema.keys() <= {*DESCRIPTIVE, "$defs", "definitions"}


def limits_of(kind: object) -> str:
    """Return the limits of a type in parentheses, or ``""`` if it has none.

    >>> from pydantic import Field
    >>> limits_of(Annotated[list[str], Field(min_length=2)]), limits_of(int)
    ('(at least 2 items)', '')
    """
    notes = _limits(json_schema_of(kind) or {})
    return f"({'; '.join(notes)})" if notes else ""


def _limits(schema: Mapping[str, object]) -> list[str]:
    return [words.format(schema[keyword]) for keyword, words in LIMITS.items() if keyword in schema]


def labels_of(kind: object) -> tuple[object, ...]:
    """Return the values of a type with finitely many: a Literal, an Enum, or one of them or None."""
    kind = without_annotation(kind)
    if get_origin(kind) is Literal:
        return get_args(kind)
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return tuple(member.value for member in kind)
    return ()


def is_plain(kind: object) -> bool:
    """Return whether a single answer of this type is written in words instead of JSON.

    >>> is_plain(Literal["a", "b"] | None), is_plain(list[int]), is_plain(dict[str, int])
    (True, True, False)
    """
    kind = without_annotation(kind)
    if (
        kind in (str, int, float, bool, list, Any, None, type(None))
        or labels_of(kind)
        or is_text(kind)
    ):
        return True
    if get_origin(kind) is list or get_origin(kind) in (Union, types.UnionType):
        nested = any(get_origin(a) is list for a in get_args(kind))
        return not nested and all(map(is_plain, get_args(kind)))
    return takes_any_text(kind)


def answer_format(outputs: Mapping[str, Port], layout: str) -> AnswerFormat | None:
    """Return the format that an engine can enforce; ``None`` for free text and for the layout ``fields``.

    >>> answer_format({"verdict": Port(Literal["yes", "no"])}, "text")
    AnswerFormat(schema='', choices=('yes', 'no'))
    """
    if layout == "fields":
        return None
    if layout == "json":
        fields = {name: port.type for name, port in outputs.items()}
        return _schema_format(typing_extensions.TypedDict("Answer", fields))  # type: ignore[operator]
    kind = next(iter(outputs.values())).type
    return _single_format(kind)


def _single_format(kind: object) -> AnswerFormat | None:
    if takes_any_text(kind):
        return None
    options: list[object] = []
    for part in get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,):
        plain = without_annotation(part)
        options += (
            ["yes", "no"] if plain is bool else ["none"] if part is type(None) else labels_of(part)
        )
        if not (plain is bool or part is type(None) or labels_of(part)):
            return _schema_format(kind)
    texts = tuple(dict.fromkeys(map(str, options)))
    return AnswerFormat(choices=texts) if all(texts) else None


def _schema_format(kind: object) -> AnswerFormat | None:
    schema = json_schema_of(kind)
    return (
        AnswerFormat(schema=json.dumps(enforceable(schema), ensure_ascii=False)) if schema else None
    )


def enforceable(schema: object) -> object:
    """Return a schema whose objects have only the declared properties, and whose integers are bounded.

    >>> enforceable({"type": "object", "properties": {"title": {"type": "string", "title": "Title"}}})
    {'type': 'object', 'properties': {'title': {'type': 'string'}}, 'additionalProperties': False}
    """
    if isinstance(schema, list):
        return [enforceable(part) for part in schema]
    if not isinstance(schema, Mapping):
        return schema
    found: dict[str, object] = {}
    for keyword, value in schema.items():
        if keyword in ("properties", "$defs", "definitions", "patternProperties"):
            found[keyword] = {name: enforceable(part) for name, part in value.items()}
        elif keyword in ("enum", "const", "required"):
            found[keyword] = value
        elif keyword not in ("title", "default", "examples"):  # which no answer depends on
            found[keyword] = enforceable(value)
    if pattern := _key_pattern(found):  # grammars ignore propertyNames
        del found["propertyNames"]
        found |= {
            "patternProperties": {pattern: found["additionalProperties"]},
            "additionalProperties": False,
        }
    if "properties" in found and "patternProperties" not in found:
        found.setdefault("additionalProperties", False)
    if found.get("type") == "integer" and not found.keys() & {"enum", "const", *LIMITS}:
        found |= {"minimum": -LARGEST, "maximum": LARGEST}
    return found


def _key_pattern(schema: Mapping[str, Any]) -> str:
    """Return the pattern of the keys of a dictionary whose names are restricted, or ``""``."""
    names = schema.get("propertyNames")
    if (
        not isinstance(names, Mapping)
        or "additionalProperties" not in schema
        or "patternProperties" in schema
    ):
        return ""
    if "enum" in names:
        return f"^({'|'.join(re.escape(str(name)) for name in names['enum'])})$"
    return str(names.get("pattern", ""))


@functools.lru_cache(maxsize=512)
def describe(kind: object) -> str:
    """Describe the JSON form of a type in the notation of prompts, or return ``""`` if it has none.

    >>> describe(dict[str, int]), describe(list[dict[int, bool]])
    ('dict[str, int]', '[dict[int, bool], ...]')
    """
    schema = json_schema_of(kind)
    return _Notation(schema).text() if schema else ""


class _Notation:
    """Writer of one schema; recursive definitions are named and follow after the text."""

    def __init__(self, schema: Mapping[str, Any]) -> None:
        self._schema = schema
        self._definitions = _definitions(schema)
        self._open: list[str] = []
        self._recursive: list[str] = []

    def text(self) -> str:
        """Return the notation."""
        parts = [self._of(self._schema, 0)]
        for name in self._recursive:  # grows while its definitions are written
            self._open = [name]
            parts.append(f"where {name} is {self._of(self._definitions[name], 0)}")
        return "\n".join(parts)

    def _of(self, schema: object, depth: int) -> str:
        if not isinstance(schema, Mapping):
            return "any value"
        text = self._kind(schema, depth)
        notes = _limits(schema)
        if isinstance(schema.get("description"), str) and depth:
            notes.append(" ".join(schema["description"].split()))
        return f"{text} ({'; '.join(notes)})" if notes else text

    def _kind(self, schema: Mapping[str, Any], depth: int) -> str:
        if "$ref" in schema:
            return self._reference(str(schema["$ref"]), depth)
        if "const" in schema or "enum" in schema:
            values = schema.get("enum", [schema.get("const")])
            return " | ".join(json.dumps(value, ensure_ascii=False) for value in values)
        for keyword in ("anyOf", "oneOf"):
            if keyword in schema:
                return " | ".join(dict.fromkeys(self._of(part, depth) for part in schema[keyword]))
        if len(parts := schema.get("allOf", ())) == 1:
            return self._of(parts[0], depth)
        kind = schema.get("type")
        if isinstance(kind, list):
            return " | ".join(self._kind({**schema, "type": one}, depth) for one in kind)
        if kind == "object" or "properties" in schema:
            return self._object(schema, depth)
        if kind == "array":
            fixed = schema.get("prefixItems")
            if fixed:
                return f"[{', '.join(self._of(part, depth) for part in fixed)}]"
            return f"[{self._of(schema.get('items'), depth)}, ...]"
        return "null" if kind == "null" else SCALARS.get(kind, "any value")

    def _object(self, schema: Mapping[str, Any], depth: int) -> str:
        properties, required = schema.get("properties", {}), schema.get("required", ())
        if not properties:
            values = schema.get("additionalProperties")
            if not isinstance(values, Mapping):
                return "dict"
            return f"dict[{self._key(schema.get('propertyNames', {}), depth)}, {self._of(values, depth)}]"
        fields = [
            f'"{name}"{"" if name in required else " (optional)"}: {self._of(part, depth + 1)}'
            for name, part in properties.items()
        ]
        line = f"{{{', '.join(fields)}}}"
        if len(line) <= WIDTH and "\n" not in line:
            return line
        indent = "  " * (depth + 1)
        return "{\n" + ",\n".join(indent + field for field in fields) + "\n" + "  " * depth + "}"

    def _key(self, names: Mapping[str, Any], depth: int) -> str:
        named = {INTEGER_KEY: "int", NUMBER_KEY: "float"}.get(names.get("pattern", ""))
        return named or self._of({"type": "string", **names}, depth)

    def _reference(self, reference: str, depth: int) -> str:
        name = reference.rpartition("/")[2]
        if name not in self._definitions:
            return "any value"
        if name in self._open:
            if name not in self._recursive:
                self._recursive.append(name)
            return name
        self._open.append(name)
        try:
            return self._of(self._definitions[name], depth)
        finally:
            self._open.pop()


def ordered_json(kind: object, value: object) -> str:
    """Return a value as JSON with the properties in the order of the schema, in which models write them."""
    schema = json_schema_of(kind) or {}
    definitions = _definitions(schema)
    return json.dumps(_ordered(schema, value, definitions), ensure_ascii=False)


def _ordered(schema: Any, value: object, definitions: Mapping[str, object]) -> object:  # noqa: ANN401 - JSON
    while isinstance(schema, Mapping) and "$ref" in schema:
        schema = definitions.get(str(schema["$ref"]).rpartition("/")[2])
    if not isinstance(schema, Mapping):
        return value
    options = schema.get("anyOf", schema.get("oneOf", schema.get("allOf", ())))
    for option in options:
        value = _ordered(option, value, definitions)
    if isinstance(value, Mapping):
        properties = schema.get("properties", {})
        names = [*(n for n in properties if n in value), *(n for n in value if n not in properties)]
        return {name: _ordered(properties.get(name), value[name], definitions) for name in names}
    if isinstance(value, list):
        return [_ordered(schema.get("items"), item, definitions) for item in value]
    return value
