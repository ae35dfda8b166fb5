"""Typed access to the entries of untyped mappings, and messages on arguments of wrong types."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from functools import cache, wraps
from types import UnionType
from typing import Any, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from compound.errors import CompoundError, DeclarationError, suggest_name
from compound.formatting import short_repr

__all__ = ["check_fields", "entry", "report_wrong_arguments"]

Kind = TypeVar("Kind")
Target = TypeVar("Target", bound=Callable[..., Any])


def entry(values: Mapping[str, object], name: str, kind: type[Kind] | tuple[type[Kind], ...]) -> Kind:
    """Return an entry, checked to be an instance of ``kind``.

    Raises:
        KeyError: The entry does not exist.
        TypeError: The entry has another type.

    Example:
        >>> entry({"k": 5}, "k", int)
        5
        >>> entry({"k": "five"}, "k", (int, float))
        Traceback (most recent call last):
        TypeError: k must be int or float, but is 'five'
    """
    value = values[name]
    if isinstance(value, kind):
        return value
    kinds = kind if isinstance(kind, tuple) else (kind,)
    raise TypeError(f"{name} must be {' or '.join(k.__name__ for k in kinds)}, but is {short_repr(value)}")


def report_wrong_arguments(target: Target) -> Target:
    """Name the wrong argument if a call of a function or class fails because of its type.

    Errors of this package pass unchanged, and so do others if every argument has the annotated type.

    Raises:
        DeclarationError: an argument has another type, is missing or does not exist.

    Example:
        >>> @report_wrong_arguments
        ... def first(items: list[str], most: int) -> list[str]:
        ...     return items[:most]
        >>> first(["a", "b"], "1")
        Traceback (most recent call last):
        compound.errors.DeclarationError: most of first must be int, but is '1'
        >>> first(["a", "b"], mots=1)
        Traceback (most recent call last):
        compound.errors.DeclarationError: first has no argument 'mots'; did you mean 'most'?
    """
    function = cast("Any", target).__init__ if isinstance(target, type) else target

    @wraps(function)
    def reporting(*given: object, **named: object) -> object:
        try:
            return function(*given, **named)
        except CompoundError:
            raise
        except Exception as error:
            problem = _wrong_argument(function, target.__qualname__, given, named)
            if problem is None:
                raise
            raise problem from error

    if not isinstance(target, type):
        return cast("Target", reporting)
    setattr(target, "__init__", reporting)  # noqa: B010 - mypy rejects an assignment
    return target


def _wrong_argument(
    function: Callable[..., object], name: str, given: Sequence[object], named: Mapping[str, object]
) -> DeclarationError | None:
    """Return an error on the first wrong argument of a call; ``None`` if all have the annotated types."""
    signature = inspect.signature(function)
    parameters = signature.parameters
    try:
        bound = signature.bind(*given, **named)
    except TypeError as error:
        known = [key for key in parameters if key != "self"]
        unknown = [key for key in named if key not in known]
        if not unknown or parameters[known[-1]].kind is inspect.Parameter.VAR_KEYWORD:
            return DeclarationError(f"{name}: {error}", hint=f"its arguments are {', '.join(known)}")
        return DeclarationError(
            f"{name} has no argument {unknown[0]!r}", hint=suggest_name(unknown[0], known)
        )
    for key, value in bound.arguments.items():
        values = [value]
        if parameters[key].kind is inspect.Parameter.VAR_POSITIONAL:
            values = [*value]
        elif parameters[key].kind is inspect.Parameter.VAR_KEYWORD:
            values = [*value.values()]
        for each in values:
            if problem := _problem(function, key, each):
                return DeclarationError(f"{key} of {name} {problem}")
    return None


def check_fields(instance: object) -> None:
    """Check that the fields of a dataclass have the annotated types.

    Raises:
        DeclarationError: one has another; the message names it.
    """
    kind = type(instance)
    for field in fields(cast("Any", instance)):
        if problem := _problem(kind.__init__, field.name, getattr(instance, field.name)):
            raise DeclarationError(f"{field.name} of {kind.__name__} {problem}")


def _problem(function: Callable[..., object], key: str, value: object) -> str:
    """Return why a value does not have the annotated type of an argument; ``""`` if it has."""
    kind = _annotated(inspect.unwrap(function), key)
    if _has_type(value, kind):
        return ""
    spelled = re.sub(r"\b(?:\w+\.)+", "", inspect.formatannotation(kind))
    return f"must be {spelled}, but is {short_repr(value)}"


@cache
def _annotated(function: Callable[..., object], key: str) -> Any:  # noqa: ANN401 - types of any form
    """Return the annotated type of an argument; ``Any`` if it cannot be resolved."""
    only = type("", (), {"__annotations__": {key: function.__annotations__.get(key, Any)}})
    try:
        return get_type_hints(only, getattr(function, "__globals__", {}), include_extras=True)[key]
    except NameError:  # imported for type checkers only
        return Any


def _has_type(value: object, kind: Any) -> bool:  # noqa: ANN401 - types of any form
    """Return whether a value has a type, also if that cannot be determined."""
    from pydantic import ConfigDict, PydanticUserError, TypeAdapter, ValidationError
    from pydantic_core import SchemaError

    parts = get_args(kind)
    if get_origin(kind) is tuple and parts[-1] is Ellipsis:
        kind = Sequence[parts[0]]  # type: ignore[valid-type]
    if isinstance(kind, UnionType) or get_origin(kind) is Union:
        return any(_has_type(value, part) for part in get_args(kind))
    try:
        if isinstance(kind, type) and not get_args(kind):
            return isinstance(value, kind) or (kind is float and isinstance(value, int))
        TypeAdapter(kind, config=ConfigDict(arbitrary_types_allowed=True, strict=True)).validate_python(value)
    except ValidationError:
        return False
    except (PydanticUserError, SchemaError, NameError, TypeError):  # of protocols and the like
        whole = get_origin(kind)
        return not isinstance(whole, type) or isinstance(value, whole)
    return True
