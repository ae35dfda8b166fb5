"""Write plain values as YAML, and convert types, spaces and code to plain values."""

from __future__ import annotations

import math
import re
import types
from collections.abc import Mapping
from enum import Enum
from typing import Literal, Union, get_args, get_origin

import yaml

from compound.core.errors import DeclarationError
from compound.graph.json_types import json_schema_of, json_type, schema_of_annotation
from compound.graph.registry.code import place_of
from compound.graph.space import Choice, Demos, Float, Int, LoRA, Space, Text, Weights
from compound.graph.types import NAMES, format_type, member_types, parse
from compound.yaml.source import BOOL, FLOAT, INT, NOT_FINITE, NULL

_BLOCK = re.compile(r"\S(.*\S)?(\n+\S(.*\S)?)*\n?\Z")  # no line begins or ends with a space
_ODD = re.compile(
    "[^\n -~\xa1-\ud7ff\ue000-\ufefe\uff00-\ufffd\U00010000-\U0010fffe]|[\u2028\u2029]"
)  # written as escapes


class Flow(dict[str, object]):
    """Mapping to write on one line."""


def write(value: Mapping[str, object]) -> str:
    """Return a mapping as YAML text, in its order.

    Raises:
        DeclarationError: a value cannot be written in YAML.

    >>> print(write({"a": "1e-6", "b": 1e-6, "c": ["on", True], "d": (1, 2)}), end="")
    a: '1e-6'
    b: 1.0e-06
    c: ['on', true]
    d: [1, 2]
    """
    text: str = yaml.dump(
        plain(value, ""),
        Dumper=_Dumper,
        sort_keys=False,
        allow_unicode=True,
        width=math.inf,
        default_flow_style=None,
    )
    return text


def plain(value: object, where: str) -> object:
    """Convert a value to YAML's types, or raise if it has none; ``where`` starts the message."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str) and not any("\ud800" <= character <= "\udfff" for character in value):
        return str(value)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float) and math.isfinite(value):
        return float(value)
    if isinstance(value, list | tuple):
        return [plain(item, f"{where}[{i}]") for i, item in enumerate(value)]
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        kind = Flow if isinstance(value, Flow) else dict
        return kind(
            {str(plain(key, where)): plain(item, f"{where}.{key}") for key, item in value.items()}
        )
    raise DeclarationError(f"{where.lstrip('.')}: {value!r} cannot be written in YAML")


class _Dumper(yaml.SafeDumper):
    """Dumper that quotes ambiguous strings and writes multi-line strings as blocks."""

    yaml_implicit_resolvers: dict[str, object] = {}  # noqa: RUF012 - PyYAML's name for its table

    def ignore_aliases(self, data: object) -> bool:
        """Return True: a file must not have aliases, so equal values are written in full."""
        return True


def _text(dumper: _Dumper, value: str) -> yaml.Node:
    style = None
    if _ODD.search(value) or ("\n" in value and not _BLOCK.match(value)):
        style = '"'
    elif "\n" in value:
        style = "|"
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)


def _flow(dumper: _Dumper, value: Flow) -> yaml.Node:
    return dumper.represent_mapping("tag:yaml.org,2002:map", value, flow_style=True)


_Dumper.add_representer(str, _text)
_Dumper.add_representer(Flow, _flow)
for _tag, _pattern in (
    ("null", NULL),
    ("bool", BOOL),
    ("int", INT),
    ("float", FLOAT),
    ("float", NOT_FINITE),
):
    _Dumper.add_implicit_resolver(
        f"tag:yaml.org,2002:{_tag}", re.compile(rf"(?:{_pattern.pattern})\Z"), None
    )
# Many YAML readers implement YAML 1.1, where these are booleans: quote them for compatibility.
_Dumper.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile(r"(?i:yes|no|on|off)\Z"), None)


Tree = dict[str, object]


def spell_type(kind: object, where: str, *, class_schemas: bool = False) -> str | Tree:
    """Return the YAML form of a port type.

    Args:
        kind: the type.
        where: the name of its port, for messages.
        class_schemas: write a class as the JSON schema of its values; a file cannot name the class
            itself.

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
        raise DeclarationError(
            f"{where}: the type {text} cannot be written in YAML", hint="use a plain type"
        )
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
        return Flow(
            {key: [space.low, space.high], "value": value, **({"log": True} if space.log else {})}
        )
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
