"""Port types: their spelling, their compatibility, and validation of values.

Types are ordinary Python annotations (``str``, ``list[str]``, ``Literal["a", "b"]``, ``dict[str,
int]``). YAML uses the same spelling; `parse` reads it with a small grammar and never evaluates it.
"""

from __future__ import annotations

import ast
import functools
import operator
import types
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union, cast, get_args, get_origin

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.errors import PydanticSchemaGenerationError, PydanticUserError

from compound.core.errors import DeclarationError, suggest_name
from compound.core.image import Image
from compound.core.security.json_schemas import MOST_ERRORS
from compound.graph.json_types import portable, schema_of_annotation
from compound.graph.json_values import find_nonfinite

if TYPE_CHECKING:
    from typing_extensions import TypeForm
import dataclasses
import typing

from compound.core.errors import WiringError
from compound.graph.json_types import json_type

NAMES: Mapping[str, object] = {
    "str": str,
    "int": int,
    "float": float,
    "bool": bool,
    "list": list,
    "dict": dict,
    "any": Any,
    "Any": Any,
    "Image": Image,
    "None": type(None),
}

_MODULES = (
    "types",
    "typing",
    "typing_extensions",
)  # of the classes of types such as list[str] and str | None


@dataclass(frozen=True, slots=True)
class Port:
    """Typed input or output of a component.

    ``optional`` inputs take ``default`` if they are not connected or if their source node was
    skipped.
    """

    type: object
    optional: bool = False
    default: object = None

    def __post_init__(self) -> None:
        if isinstance(self.type, str):  # as in a file
            object.__setattr__(self, "type", parse(self.type))
        is_type = isinstance(self.type, type) or type(self.type).__module__ in _MODULES
        if not is_type and self.type is not None:
            raise DeclarationError(
                f"the type of a port must be a type, but is {self.type!r:.60}",
                hint="such as str, int or list[str]",
            )


def parse(text: str) -> object:
    """Parse the spelling of a type.

    >>> parse("list[str]")
    list[str]
    >>> parse("one of yes, no") == Literal["yes", "no"]
    True
    >>> parse("lsit")
    Traceback (most recent call last):
    compound.core.errors.DeclarationError: 'lsit' is not a type; did you mean 'list'?
    """
    stripped = text.strip()
    if stripped.startswith("one of "):
        labels = [label.strip() for label in stripped[len("one of ") :].split(",")]
        if not all(labels):
            raise DeclarationError(f"{text!r} has an empty label", hint="write `one of yes, no`")
        return Literal[tuple(labels)]
    try:
        tree = ast.parse(stripped, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise DeclarationError(
            f"{text!r} is not a type", hint=suggest_name(stripped, NAMES)
        ) from None
    return _from_tree(tree, text)


def _from_tree(tree: ast.expr, text: str) -> object:
    if isinstance(tree, ast.Name) and tree.id in NAMES:
        return NAMES[tree.id]
    if isinstance(tree, ast.Constant) and tree.value is None:
        return type(None)
    if isinstance(tree, ast.BinOp) and isinstance(tree.op, ast.BitOr):
        return union(_from_tree(tree.left, text), _from_tree(tree.right, text))
    if isinstance(tree, ast.Subscript) and isinstance(tree.value, ast.Name):
        arguments = tree.slice.elts if isinstance(tree.slice, ast.Tuple) else [tree.slice]
        if tree.value.id == "Literal" and all(isinstance(a, ast.Constant) for a in arguments):
            return Literal[tuple(a.value for a in arguments if isinstance(a, ast.Constant))]
        inner = tuple(_from_tree(a, text) for a in arguments)
        if tree.value.id == "list" and len(inner) == 1:
            return list[inner[0]]  # type: ignore[valid-type]
        if tree.value.id == "dict" and len(inner) == 2:
            return dict[inner[0], inner[1]]  # type: ignore[valid-type]
    name = tree.id if isinstance(tree, ast.Name) else text
    raise DeclarationError(f"{name!r} is not a type", hint=suggest_name(name, NAMES))


def union(first: object, second: object) -> object:
    """Return the union of two types.

    >>> union(str, None)
    str | None
    """
    return operator.or_(type(None) if first is None else first, second)


def format_type(kind: object) -> str:
    """Return the spelling of a type in YAML and messages.

    >>> format_type(list[str]), format_type(Literal["yes", "no"]), format_type(str | None)
    ('list[str]', 'one of yes, no', 'str | None')
    >>> format_type(Annotated[int, "positive"])
    'Annotated[int, ...]'
    """
    if get_origin(kind) is Annotated and schema_of_annotation(kind) is None:
        return f"Annotated[{_inner(get_args(kind)[0])}, ...]"
    return _format(kind, _inner)


def identify_type(kind: object) -> str:
    """Return the spelling of a type with all its constraints, for digests of what produced a value.

    >>> identify_type(list[Annotated[int, "positive"]])
    'list[Annotated[int, positive]]'
    """

    def inner(part: object) -> str:
        return _inner(part) if get_origin(part) is Literal else identify_type(part)

    return _format(kind, inner)


def _format(kind: object, inner: Callable[[object], str]) -> str:
    if kind is Any:
        return "any"
    if kind is type(None):
        return "None"
    origin, arguments = get_origin(kind), get_args(kind)
    if (schema := schema_of_annotation(kind)) is not None:
        return _describe_schema(schema.document)
    if origin is Literal:
        if all(isinstance(a, str) and a and a == a.strip() and "," not in a for a in arguments):
            return "one of " + ", ".join(arguments)
        return _inner(kind)
    if origin in (Union, types.UnionType):
        return " | ".join(map(inner, arguments))
    if origin is not None:
        return f"{getattr(origin, '__name__', origin)}[{', '.join(map(inner, arguments))}]"
    return getattr(kind, "__name__", str(kind))


def _describe_schema(schema: Mapping[str, object]) -> str:
    properties = schema.get("properties")
    names = (
        f" with {', '.join(properties)}" if isinstance(properties, Mapping) and properties else ""
    )
    return f"JSON {schema.get('type', 'value')}{names}"


def _inner(kind: object) -> str:
    """Spell a type inside another, where ``one of`` would absorb the text after it."""
    if get_origin(kind) is Literal:
        return f"Literal[{', '.join(map(repr, get_args(kind)))}]"
    return format_type(kind)


def is_assignable(source: object, target: object) -> bool:
    """Return whether ``target`` accepts every value of ``source``.

    >>> is_assignable(int, float), is_assignable(Literal["a"], str), is_assignable(str, Any)
    (True, True, True)
    >>> is_assignable(list[int], list[str])
    False
    """
    if target is Any or source is Any or source == target:
        return True
    source = (
        get_args(source)[0] if get_origin(source) is Annotated else source
    )  # a value of the plain type
    source_origin, target_origin = get_origin(source), get_origin(target)
    if source_origin in (Union, types.UnionType):
        return all(is_assignable(a, target) for a in get_args(source))
    if target_origin in (Union, types.UnionType):
        return any(is_assignable(source, a) for a in get_args(target))
    if source_origin is Literal:
        if target_origin is Literal:
            return set(get_args(source)) <= set(get_args(target))
        return all(is_assignable(type(a), target) for a in get_args(source))
    if target_origin is Literal:
        return False
    if (source_origin or source) is (target_origin or target):
        pairs = zip(get_args(source), get_args(target), strict=False)
        return all(is_assignable(a, b) for a, b in pairs)
    # bool is a subclass of int, but not a number here
    if source is bool or target is bool:
        return False
    if isinstance(source, type) and isinstance(target, type):
        return issubclass(source, target) or (source is int and target is float)
    return False


@functools.lru_cache(maxsize=512)
def _adapter(kind: object) -> TypeAdapter[object]:
    try:
        return TypeAdapter(
            _form(kind), config=ConfigDict(strict=True, arbitrary_types_allowed=True)
        )
    except PydanticSchemaGenerationError as error:
        raise DeclarationError(f"{format_type(kind)!r} cannot be used as a port type") from error
    except Exception:  # noqa: BLE001 - pydantic rejects a config for models, which have their own
        return _lenient_adapter(kind)


@functools.lru_cache(maxsize=512)
def _lenient_adapter(kind: object) -> TypeAdapter[object]:
    try:
        return TypeAdapter(_form(kind))
    except PydanticUserError as error:
        raise DeclarationError(
            f"{format_type(kind)!r} cannot be used as a port type: {str(error).splitlines()[0]}"
        ) from error


def _form(kind: object) -> TypeForm[object]:
    """Return a port's type, typed for pydantic, which rejects objects that are not types."""
    return cast("TypeForm[object]", portable(kind))


EXACT = (str, int, float, bool)


def accepts(kind: object, value: object) -> bool:
    """Return whether ``value`` belongs to ``kind`` without conversion (an int is a float, a bool is no int).

    >>> accepts(list[str], ["a"]), accepts(list[str], "a"), accepts(float, 1), accepts(int, True)
    (True, False, True, False)
    """
    if kind is Any or (kind in EXACT and type(value) is kind):
        return True
    try:
        found = _adapter(kind).validate_python(value, strict=True)
    except ValidationError:
        return False
    # pydantic makes a model from a dict, too
    return found is value or not _has_classes(kind) or bool(found == value)


def convert(kind: object, value: object) -> object:
    """Convert text or JSON leniently to ``kind`` (``"3"`` to 3), or raise `ValueError`."""
    try:
        # models write the aliases of fields, and stored values have their names
        made = _lenient_adapter(kind).validate_python(
            value, strict=False, by_alias=True, by_name=True
        )
    except ValidationError as error:
        found = error.errors(include_url=False, include_context=False, include_input=False)[
            :MOST_ERRORS
        ]
        # an error of a whole value, such as one of a model's validator, has no place
        details = [": ".join(filter(None, (".".join(map(str, e["loc"])), e["msg"]))) for e in found]
        raise ValueError(
            f"{value!r:.200} is not {format_type(kind)} ({'; '.join(details)})"
        ) from error
    if (number := find_nonfinite(made)) is not None:
        raise ValueError(f"{value!r:.200} holds {number}, which is not a finite number")
    return made


@functools.lru_cache(maxsize=512)
def reads_decimals(kind: object) -> bool:
    """Return whether values of a type are or contain decimals, which a float of JSON would round."""
    return kind is not Any and "'type': 'decimal'" in repr(_lenient_adapter(kind).core_schema)


JSON_FORMS = (
    dict,
    list,
    str,
    int,
    float,
    datetime,
)  # a time of a data frame may be the form of a date


def as_declared(kind: object, value: object) -> object:
    """Return a value as an instance of its declared type, if it is the JSON form of one.

    Data sets and stored traces hold the JSON form of pydantic models, dataclasses, dates and sets;
    data frames hold times for dates. Plain types are not converted, and neither is a value that
    does not fit.

    >>> as_declared(datetime, "2024-01-02T10:00"), as_declared(set[int], [1]), as_declared(int, "1")
    (datetime.datetime(2024, 1, 2, 10, 0), {1}, '1')
    """
    if not isinstance(value, JSON_FORMS) or not _has_classes(kind) or accepts(kind, value):
        return value
    try:
        return convert(kind, value)
    except ValueError:
        return value


def all_as_declared(ports: Mapping[str, Port], values: Mapping[str, object]) -> dict[str, object]:
    """Apply `as_declared` to values by port name."""
    return {
        name: as_declared(ports[name].type, value) if name in ports else value
        for name, value in values.items()
    }


@functools.lru_cache(maxsize=512)
def _has_classes(kind: object) -> bool:
    """Return whether values of a type contain instances of classes that JSON does not have."""
    origin, arguments = get_origin(kind), get_args(kind)
    found = kind if origin is None else origin
    if isinstance(found, type) and found not in (*EXACT, list, dict, type(None), types.UnionType):
        return True
    if origin is dict and arguments[0] not in (str, Any):
        return True  # JSON has only texts as keys
    return any(_has_classes(part) for part in arguments if isinstance(part, Hashable))


def holds_images(kind: object) -> bool:
    """Return whether values of a type are or contain images.

    >>> holds_images(list[Image] | None), holds_images(str)
    (True, False)
    """
    return kind is Image or any(map(holds_images, get_args(kind)))


def format_ports(ports: Mapping[str, Port]) -> str:
    """Format ports for messages: ``question: str, k: int (optional)``."""
    spelled = [
        f"{name}: {format_type(port.type)}" + (" (optional)" if port.optional else "")
        for name, port in ports.items()
    ]
    return ", ".join(spelled) or "none"


def quote_names(values: Iterable[str]) -> str:
    """Quote and join names for messages."""
    return ", ".join(repr(value) for value in values)


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
