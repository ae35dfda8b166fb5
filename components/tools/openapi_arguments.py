"""Arguments of an HTTP operation: their JSON schema for models, and their places in a request."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from compound.components.tools.openapi_document import OpenAPIDocument
from compound.core.errors import CallError, DeclarationError
from compound.core.security.json_schemas import NAMED_PARTS, VALUES

DELIMITERS = {
    "spaceDelimited": " ",
    "pipeDelimited": "|",
}  # of lists in the query; others have commas


@dataclass(frozen=True)
class Place:
    """Where an argument is sent.

    Attributes:
        name: its name there.
        where: ``path``, ``query``, ``header``, ``body`` for a member of the body, or ``whole`` for
            the body.
        style: how a list or an object is written, in the words of OpenAPI; ``json`` as JSON text.
        explode: whether the items of a list, or the members of an object, are parameters of their
            own.
    """

    name: str
    where: str
    style: str = "form"
    explode: bool = True

    @property
    def identity(self) -> list[object]:
        """What determines how the argument is sent."""
        usual = (self.style, self.explode) == ("form", True)
        return [self.name, self.where, *([] if usual else [self.style, self.explode])]

    def query(self, value: object) -> list[tuple[str, str]]:
        """Return the names and values in the query of an argument."""
        if self.style == "json" or not isinstance(value, list | dict):
            return [(self.name, _plain(value))]
        if isinstance(value, list):
            items = [_plain(item) for item in value if item is not None]
            if self.explode and self.style == "form":
                return [(self.name, item) for item in items]
            return [(self.name, DELIMITERS.get(self.style, ",").join(items))] if items else []
        if self.style == "deepObject":
            return list(_deep(self.name, value))
        members = [(str(name), _plain(item)) for name, item in value.items() if item is not None]
        return (
            members
            if self.explode
            else [(self.name, ",".join(part for pair in members for part in pair))]
        )


def _plain(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _deep(name: str, value: object) -> Iterator[tuple[str, str]]:
    """Yield the members of an object as ``name[member]``.

    >>> list(_deep("filter", {"age": {"min": 3}, "tags": ["a", "b"]}))
    [('filter[age][min]', '3'), ('filter[tags]', 'a'), ('filter[tags]', 'b')]
    """
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _deep(f"{name}[{key}]", item)
    elif value is not None:
        yield from (
            (name, _plain(item)) for item in (value if isinstance(value, list) else [value])
        )


def _simple(value: object) -> str:
    """Return the text of an argument in a path or a header, where the items of a list have commas."""
    return ",".join(map(_plain, value)) if isinstance(value, list) else _plain(value)


def as_path_part(name: str, value: object) -> str:
    """Return an argument as a part of a path.

    Raises:
        CallError: it would lead to another path.

    >>> as_path_part("id", "a/b"), as_path_part("ids", [1, 2])
    ('a%2Fb', '1%2C2')
    """
    text = _simple(value)
    if value is None or text in ("", ".", ".."):
        raise CallError(f"{name} must not be {'null' if value is None else repr(text)}")
    return quote(text, safe="")


def as_header(name: str, value: object) -> str:
    """Return an argument as the value of a header.

    Raises:
        CallError: it could be read as more than a value.
    """
    text = _simple(value)
    if not text.isprintable() or not text.isascii():
        raise CallError(f"{name} must consist of printable ASCII characters")
    return text


MAX_PARTS = (
    20_000  # objects and lists of the schema of the arguments; aliases of YAML can multiply them
)
DROPPED = frozenset({"nullable", "example", "xml", "externalDocs", "discriminator"})
NAMED = NAMED_PARTS | {"patternProperties"}
LIMITS = {"exclusiveMinimum": "minimum", "exclusiveMaximum": "maximum"}  # booleans in OpenAPI 3.0


class SchemaConverter:
    """Converts one schema; the schemas that it refers to become its definitions."""

    def __init__(self, document: OpenAPIDocument) -> None:
        self._document = document
        self._names: dict[str, str] = {}  # of definitions, by reference
        self._definitions: dict[str, Any] = {}
        self._parts = 0

    def converted(self, schema: Mapping[str, Any]) -> dict[str, Any]:
        """Return the schema with its definitions.

        Raises:
            DeclarationError: it is too large, or refers to something outside the document.
        """
        result: dict[str, Any] = self._schema(schema)
        return {**result, "$defs": self._definitions} if self._definitions else result

    def _schema(self, part: Any) -> Any:  # noqa: ANN401 - JSON
        """Return a schema, a list of them, or another value, as a JSON schema has it."""
        self._parts += isinstance(part, list | Mapping)
        if self._parts > MAX_PARTS:
            raise DeclarationError(f"the schema of its arguments has more than {MAX_PARTS:,} parts")
        if isinstance(part, list):
            return [self._schema(item) for item in part]
        if not isinstance(part, Mapping):
            return part
        found: dict[str, Any] = {}
        for keyword, value in part.items():
            if keyword in DROPPED or str(keyword).startswith("x-"):
                continue
            if keyword == "$ref":
                found[keyword] = self._definition(str(value))
            elif keyword in NAMED and isinstance(value, Mapping):
                self._parts += len(value)
                found[keyword] = {str(name): self._schema(inner) for name, inner in value.items()}
            elif keyword in VALUES:
                found[keyword] = value
            elif keyword not in LIMITS or not isinstance(value, bool):
                found[keyword] = self._schema(value)
        for keyword, usual in LIMITS.items():
            if part.get(keyword) is True and usual in found:
                found[keyword] = found.pop(usual)
        return _with_null(found) if part.get("nullable") is True else found

    def _definition(self, reference: str) -> str:
        """Return the reference to the definition of a part of the document."""
        if reference not in self._names:
            own = short = "".join(c if c.isalnum() else "_" for c in reference.rpartition("/")[2])
            while own in self._definitions:
                own = f"{short}_{len(self._definitions)}"
            self._names[reference] = own
            self._definitions[own] = {}  # a recursive definition refers to itself
            self._definitions[own] = self._schema(self._document.target(reference))
        return f"#/$defs/{self._names[reference]}"


def _with_null(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema that accepts null as well.

    >>> _with_null({"type": "string", "enum": ["a"]})
    {'type': ['string', 'null'], 'enum': ['a', None]}
    >>> _with_null({"$ref": "#/$defs/A", "description": "an item"})
    {'anyOf': [{'$ref': '#/$defs/A'}, {'type': 'null'}], 'description': 'an item'}
    """
    texts = {
        key: value for key, value in schema.items() if key in ("title", "description", "default")
    }
    rest = {key: value for key, value in schema.items() if key not in texts}
    kind, options = rest.get("type"), rest.get("enum")
    if isinstance(kind, str) and {
        "$ref",
        "allOf",
        "anyOf",
        "oneOf",
        "not",
        "if",
        "const",
    }.isdisjoint(rest):
        more = (
            {"enum": [*options, *([] if None in options else [None])]}
            if isinstance(options, list)
            else {}
        )
        return {**schema, "type": [kind, "null"], **more} if kind != "null" else schema
    return {"anyOf": [rest, {"type": "null"}], **texts} if rest else schema
