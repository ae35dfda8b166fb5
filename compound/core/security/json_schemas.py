"""Check JSON schemas, and values against them, in a bounded number of steps and without other documents.

Schemas and values come from files, servers of tools and models. References that multiply, or lead
back to themselves, and patterns that backtrack must therefore not stop a run.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from pydantic_core import SchemaError, SchemaValidator, core_schema

from compound.core.errors import DeclarationError

if TYPE_CHECKING:
    from jsonschema import Draft202012Validator
    from jsonschema.exceptions import ValidationError as ValidationProblem

Document = Mapping[str, object]
Keyword = Callable[[Any, Any, Any, Any], "Iterable[ValidationProblem] | None"]
# mappings by name
NAMED_PARTS = frozenset({"properties", "$defs", "definitions", "dependentSchemas"})
VALUES = frozenset({"enum", "const", "default", "examples", "dependentRequired"})  # hold no schemas
IN_PLACE = ("$ref", "allOf", "anyOf", "oneOf", "not", "if", "then", "else", "dependentSchemas")
"""Keywords whose schemas apply to the same value, and not to a part of it."""
IDENTIFIERS = ("$schema", "$id")
MOST_ERRORS = 3
STEPS = 100_000  # of a check, besides those for each part of the value
STEPS_PER_PART = 100
_LEFT: ContextVar[int] = ContextVar("schema_steps_left")


class _TooManySteps(Exception):
    """A value cannot be checked within the limit of steps."""


def problems_of(text: str, value: object) -> list[str]:
    """Return descriptions of the parts of a value that a schema does not accept."""
    token = _LEFT.set(STEPS + STEPS_PER_PART * _count_parts(value))
    try:
        errors = sorted(
            _validator(text).iter_errors(value), key=lambda error: list(map(str, error.path))
        )
    except _TooManySteps:
        return ["value: checking it against its JSON schema takes too many steps"]
    except RecursionError:
        return ["value: it is nested too deeply to be checked against its JSON schema"]
    finally:
        _LEFT.reset(token)
    return [
        f"{'.'.join(map(str, e.path)) or 'value'}: {e.message[:200]}" for e in errors[:MOST_ERRORS]
    ]


def _count_parts(value: object) -> int:
    """Return the number of values in a value, itself included."""
    count, left = 0, [value]
    while left:
        part = left.pop()
        count += 1
        if isinstance(part, Mapping):
            left += part.values()
        elif isinstance(part, list | tuple):
            left += part
    return count


@functools.lru_cache(maxsize=256)
def _validator(text: str) -> Draft202012Validator:
    """Return the validator of a schema, which reads no other documents and counts its steps."""
    from jsonschema import Draft202012Validator
    from jsonschema.validators import extend
    from jsonschema_specifications import REGISTRY

    keywords: Mapping[str, Keyword] = {**Draft202012Validator.VALIDATORS, "pattern": _check_pattern}
    checked = extend(
        Draft202012Validator, {name: _counted(check) for name, check in keywords.items()}
    )
    validator: Draft202012Validator = checked(
        _without_identifiers(json.loads(text)), registry=REGISTRY
    )
    return validator


def _counted(check: Keyword) -> Keyword:
    """Return the implementation of a keyword, which counts its steps."""

    def counted(
        validator: Any,  # noqa: ANN401
        given: Any,  # noqa: ANN401
        value: Any,  # noqa: ANN401
        schema: Any,  # noqa: ANN401
    ) -> Iterable[ValidationProblem] | None:
        left = _LEFT.get() - 1 - (len(given) if isinstance(given, list | dict) else 0)
        if left < 0:
            raise _TooManySteps
        _LEFT.set(left)
        return check(validator, given, value, schema)

    return counted


def _without_identifiers(part: Any) -> Any:  # noqa: ANN401 - JSON
    """Return a schema without ``$schema`` and ``$id``.

    jsonschema would check a part with ``$schema`` by its own rules instead of those here, and
    resolve the references in a part with ``$id`` within that part. All references start at the top
    of the schema.
    """
    if isinstance(part, list):
        return [_without_identifiers(item) for item in part]
    if not isinstance(part, dict):
        return part
    found = {}
    for keyword, inner in part.items():
        if keyword in NAMED_PARTS and isinstance(inner, dict):
            found[keyword] = {name: _without_identifiers(item) for name, item in inner.items()}
        elif keyword not in IDENTIFIERS:
            found[keyword] = inner if keyword in VALUES else _without_identifiers(inner)
    return found


def check_keywords(schema: Document) -> None:
    """Reject references to other documents, or of a schema to itself, and patterns that could backtrack."""
    try:
        _check_part(schema, schema, {})
    except RecursionError:
        raise DeclarationError("the JSON schema is nested too deeply") from None


def _check_part(part: object, schema: Document, finite: dict[int, bool]) -> None:
    """Check a part of a schema; ``finite`` are the parts whose references are known to end, by identity."""
    if isinstance(part, list):
        for item in part:
            _check_part(item, schema, finite)
    if not isinstance(part, Mapping):
        return
    reference, pattern = part.get("$ref"), part.get("pattern")
    if isinstance(reference, str) and not _targets(reference, schema):
        raise DeclarationError(
            f"the JSON schema refers to {reference!r}, which is not a part of it",
            hint="define it under $defs, and refer to #/$defs/NAME",
        )
    for keyword in ("patternProperties", "$dynamicRef", "$anchor"):
        if keyword in part:
            raise DeclarationError(
                f"the JSON schema has the keyword {keyword!r}, which is not supported"
            )
    if isinstance(pattern, str):
        try:
            _pattern(pattern)
        except SchemaError as error:
            raise DeclarationError(
                f"the JSON schema has the pattern {pattern!r}, which is not supported: {error}",
                hint="use a regular expression without look-around and back-references",
            ) from None
    _check_end(part, schema, finite)
    for keyword, inner in part.items():
        if keyword in NAMED_PARTS and isinstance(inner, Mapping):
            _check_part(list(inner.values()), schema, finite)
        elif keyword not in VALUES:
            _check_part(inner, schema, finite)


def _check_end(part: object, schema: Document, finite: dict[int, bool]) -> None:
    """Reject a part whose references lead back to it for the same value."""
    if not isinstance(part, Mapping):
        return
    known = finite.setdefault(id(part), False)
    if known:
        return
    for inner in _applied_in_place(part, schema):
        if finite.get(id(inner)) is False:
            raise DeclarationError(
                "the JSON schema refers to itself for the same value, so that no value could be checked",
                hint="refer to it from properties or items, which are parts of the value",
            )
        _check_end(inner, schema, finite)
    finite[id(part)] = True


def _applied_in_place(part: Document, schema: Document) -> Iterator[object]:
    """Yield the schemas that a part of a schema applies to the same value."""
    for keyword in IN_PLACE:
        inner = part.get(keyword)
        if keyword == "$ref":
            yield from _targets(inner, schema) if isinstance(inner, str) else ()
        elif keyword == "dependentSchemas" and isinstance(inner, Mapping):
            yield from inner.values()
        else:
            yield from inner if isinstance(inner, list) else [inner]


def _targets(reference: str, schema: Document) -> list[object]:
    """Return the part of a schema that a reference leads to, in a list that is empty if there is none."""
    found: object = schema
    start, *names = reference.split("/")
    for name in names:
        key = unquote(name).replace("~1", "/").replace("~0", "~")
        if not isinstance(found, Mapping) or key not in found:
            return []
        found = found[key]
    return [found] if start == "#" else []


@functools.lru_cache(maxsize=256)
def _pattern(pattern: str) -> SchemaValidator:
    """Return a matcher in linear time, by the regular expressions of pydantic."""
    return SchemaValidator(core_schema.str_schema(pattern=pattern))


def _check_pattern(
    validator: object, pattern: str, value: object, schema: object
) -> Iterator[ValidationProblem]:
    """Implement the keyword ``pattern``."""
    from jsonschema.exceptions import ValidationError as ValidationProblem

    if isinstance(value, str) and not _pattern(pattern).isinstance_python(value):
        yield ValidationProblem(f"{value!r:.100} does not match {pattern!r}")
