"""JSON schemas as the response format of OpenAI's chat API, which most providers and servers take.

The root of such a schema must be an object, so other answers are wrapped in one and unwrapped afterwards.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from compound.engine import AnswerFormat

WRAPPED = "answer"  # name of the property that holds an answer that is no object
NAME = "answer"  # name of the schema, which the API requires
# In strict mode OpenAI takes no others, and rejects a request that has them.
STRICT_KEYWORDS = frozenset(
    {
        *("type", "properties", "required", "additionalProperties", "items", "enum", "const", "anyOf"),
        *("$ref", "$defs", "description", "pattern", "format", "minimum", "maximum", "exclusiveMinimum"),
        *("exclusiveMaximum", "multipleOf", "minItems", "maxItems", "minLength", "maxLength"),
    }
)


def response_format(answer: AnswerFormat) -> dict[str, object]:
    """Return the request field ``response_format`` of a format.

    >>> response_format(AnswerFormat(choices=("yes", "no")))["json_schema"]["schema"]["properties"]
    {'answer': {'type': 'string', 'enum': ['yes', 'no']}}
    """
    schema = _schema(answer)
    if not _is_object(schema):
        definitions = {key: schema.pop(key) for key in ("$defs",) if key in schema}
        schema = {
            "type": "object",
            "properties": {WRAPPED: schema},
            "required": [WRAPPED],
            "additionalProperties": False,
            **definitions,
        }
    described = {"name": NAME, "schema": schema, "strict": is_strict(schema)}
    return {"type": "json_schema", "json_schema": described}


def is_wrapped(answer: AnswerFormat) -> bool:
    """Return whether `response_format` wraps answers of a format in an object.

    >>> is_wrapped(AnswerFormat(choices=("yes", "no"))), is_wrapped(AnswerFormat('{"type": "object"}'))
    (True, False)
    """
    return not _is_object(_schema(answer))


def unwrap(text: str, answer: AnswerFormat) -> str:
    """Return the answer from the object that `response_format` wrapped it in; other texts are unchanged.

    >>> unwrap('{"answer": "yes"}', AnswerFormat(choices=("yes", "no")))
    'yes'
    """
    if not is_wrapped(answer):
        return text
    try:
        value = json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return text
    if not isinstance(value, dict) or value.keys() != {WRAPPED}:
        return text
    inner = value[WRAPPED]
    return inner if isinstance(inner, str) else json.dumps(inner, ensure_ascii=False)


def is_strict(schema: object) -> bool:
    """Return whether a schema is in the subset that OpenAI's strict mode takes.

    >>> is_strict({"type": "object", "properties": {}, "required": [], "additionalProperties": False})
    True
    >>> is_strict({"type": "object", "additionalProperties": {"type": "integer"}})
    False
    """
    if not isinstance(schema, Mapping):
        return isinstance(schema, bool)
    if not schema.keys() <= STRICT_KEYWORDS:
        return False
    if _is_object(schema):
        properties = schema.get("properties", {})
        if schema.get("additionalProperties") is not False or set(properties) != set(
            schema.get("required", ())
        ):
            return False
    parts = [*schema.get("properties", {}).values(), *schema.get("$defs", {}).values()]
    parts += [*schema.get("anyOf", ()), *([schema["items"]] if "items" in schema else [])]
    return all(map(is_strict, parts))


def _schema(answer: AnswerFormat) -> dict[str, Any]:
    if answer.choices:
        return {"type": "string", "enum": list(answer.choices)}
    schema: dict[str, Any] = json.loads(answer.schema)
    return schema


def _is_object(schema: Mapping[str, object]) -> bool:
    return schema.get("type") == "object"
