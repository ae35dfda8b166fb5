"""Schemas of OpenAPI 3 as JSON schemas that lead to no other part of the document."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from compound.components.tools.openapi_document import OpenAPIDocument
from compound.errors import DeclarationError
from compound.security.json_schemas import NAMED_PARTS, VALUES

MAX_PARTS = 20_000  # objects and lists of the schema of the arguments; aliases of YAML can multiply them
DROPPED = frozenset({"nullable", "example", "xml", "externalDocs", "discriminator"})
NAMED = NAMED_PARTS | {"patternProperties"}
LIMITS = {"exclusiveMinimum": "minimum", "exclusiveMaximum": "maximum"}  # booleans in OpenAPI 3.0


class SchemaConverter:
    """Converts one schema; the schemas that it refers to become its definitions.

    Args:
        document: the document that references lead into.
    """

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
                found[keyword] = {name: self._schema(inner) for name, inner in value.items()}
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
    texts = {key: value for key, value in schema.items() if key in ("title", "description", "default")}
    rest = {key: value for key, value in schema.items() if key not in texts}
    kind, options = rest.get("type"), rest.get("enum")
    if isinstance(kind, str) and {"$ref", "allOf", "anyOf", "oneOf", "not", "if", "const"}.isdisjoint(rest):
        more = {"enum": [*options, *([] if None in options else [None])]} if isinstance(options, list) else {}
        return {**schema, "type": [kind, "null"], **more} if kind != "null" else schema
    return {"anyOf": [rest, {"type": "null"}], **texts} if rest else schema
