"""Typed access to the entries of untyped mappings, and messages on arguments of wrong types."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields
from functools import cache, reduce, wraps
from operator import or_
from types import UnionType
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

from compound.core.errors import CompoundError, DeclarationError, suggest_name
from compound.core.formatting import short_repr

if TYPE_CHECKING:
    from pydantic import TypeAdapter

__all__ = ["check_fields", "entry", "report_wrong_arguments"]

Kind = TypeVar("Kind")
Target = TypeVar("Target", bound=Callable[..., Any])

# Errors that wrong types cause; others, such as of files and servers, say themselves what is wrong.
OF_WRONG_TYPES = (AttributeError, LookupError, SyntaxError, TypeError, ValueError)


def entry(
    values: Mapping[str, object], name: str, kind: type[Kind] | tuple[type[Kind], ...]
) -> Kind:
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
    raise TypeError(
        f"{name} must be {' or '.join(k.__name__ for k in kinds)}, but is {short_repr(value)}"
    )


def report_wrong_arguments(target: Target) -> Target:
    """Name the wrong argument if a call of a function or class fails because of its type.

    Errors of this package pass unchanged, and so do others if every argument has the annotated
    type. A text in place of a list is refused before the call, since its characters would be the
    items.

    Raises:
        DeclarationError: an argument has another type, is missing or does not exist.

    Example:
        >>> @report_wrong_arguments
        ... def first(items: list[str], most: int) -> list[str]:
        ...     return items[:most]
        >>> first(["a", "b"], "1")
        Traceback (most recent call last):
        compound.core.errors.DeclarationError: most of first must be int, but is '1'
        >>> first(["a", "b"], mots=1)
        Traceback (most recent call last):
        compound.core.errors.DeclarationError: first has no argument 'mots'; did you mean 'most'?
        >>> first("ab", 1)
        Traceback (most recent call last):
        compound.core.errors.DeclarationError: items of first must be list[str], but is 'ab'
    """
    function = cast("Any", target).__init__ if isinstance(target, type) else target
    signature, name = inspect.signature(function), target.__qualname__

    @wraps(function)
    def reporting(*given: object, **named: object) -> object:
        with suppress(TypeError):  # reported below
            for key, value in _arguments(signature.bind(*given, **named)):
                if isinstance(value, str) and (problem := _problem(function, key, value, [*value])):
                    raise DeclarationError(f"{key} of {name} {problem}")
        try:
            return function(*given, **named)
        except CompoundError:
            raise
        except OF_WRONG_TYPES as error:
            try:
                bound = signature.bind(*given, **named)
            except TypeError as wrong:
                raise _unknown_argument(signature, name, named, wrong) from error
            for key, value in _arguments(bound):
                if problem := _problem(function, key, value):
                    raise DeclarationError(f"{key} of {name} {problem}") from error
            raise

    if not isinstance(target, type):
        return cast("Target", reporting)
    setattr(target, "__init__", reporting)  # noqa: B010 - mypy rejects an assignment
    return target


def _arguments(bound: inspect.BoundArguments) -> Iterator[tuple[str, object]]:
    """Yield the arguments of a call that have a type, by name."""
    for key, value in bound.arguments.items():
        parameter = bound.signature.parameters[key]
        if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
            yield from ((key, each) for each in value)
        elif (
            parameter.annotation is not parameter.empty
            and parameter.kind is not parameter.VAR_KEYWORD
        ):
            yield key, value


def _unknown_argument(
    signature: inspect.Signature, name: str, named: Mapping[str, object], error: TypeError
) -> DeclarationError:
    """Return an error for a call with missing, unknown or too many arguments."""
    known = [key for key in signature.parameters if key != "self"]
    unknown = [key for key in named if key not in known]
    if not unknown or signature.parameters[known[-1]].kind is inspect.Parameter.VAR_KEYWORD:
        return DeclarationError(f"{name}: {error}", hint=f"its arguments are {', '.join(known)}")
    return DeclarationError(
        f"{name} has no argument {unknown[0]!r}", hint=suggest_name(unknown[0], known)
    )


def check_fields(instance: object) -> None:
    """Check that the fields of a dataclass have the annotated types."""
    kind = type(instance)
    for field in fields(cast("Any", instance)):
        if problem := _problem(kind.__init__, field.name, getattr(instance, field.name)):
            raise DeclarationError(f"{field.name} of {kind.__name__} {problem}")


def _problem(
    function: Callable[..., object], key: str, value: object, items: Sequence[object] | None = None
) -> str:
    """Return why a value does not have the annotated type of an argument; ``""`` if it has.

    With ``items``, only values that stand for a list of these are checked.
    """
    kind = _annotated(inspect.unwrap(function), key)
    if _has_type(value, kind) or (items is not None and not _has_type(items, kind)):
        return ""
    wanted = _limit(value, kind) or inspect.formatannotation(_unlimited(kind))
    spelled = re.sub(r"\b(?:[A-Za-z_]+\.)+", "", wanted)
    return f"must be {spelled}, but is {short_repr(value)}"


def _limit(value: object, kind: Any) -> str:  # noqa: ANN401 - types of any form
    """Return the limit that a value of an annotated type exceeds, such as ``> 0``; ``""`` if none."""
    for part in get_args(kind) if _is_union(kind) else (kind,):
        if get_origin(part) is Annotated and _has_type(value, get_args(part)[0]):
            for limit in get_args(part)[1:]:
                for name, sign in (("gt", ">"), ("ge", ">="), ("lt", "<"), ("le", "<=")):
                    if (bound := getattr(limit, name, None)) is not None:
                        return f"{sign} {bound}"
    return ""


def _unlimited(kind: Any) -> Any:  # noqa: ANN401 - types of any form
    """Return a type without the limits of its values."""
    if get_origin(kind) is Annotated:
        return _unlimited(get_args(kind)[0])
    return reduce(or_, map(_unlimited, get_args(kind))) if _is_union(kind) else kind


def _is_union(kind: object) -> bool:
    return isinstance(kind, UnionType) or get_origin(kind) is Union


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
    from pydantic import PydanticUserError, ValidationError
    from pydantic_core import SchemaError

    parts = get_args(kind)
    if get_origin(kind) is tuple and parts[-1] is Ellipsis:
        kind = Sequence[parts[0]]  # type: ignore[valid-type]
    if _is_union(kind):
        return any(_has_type(value, part) for part in get_args(kind))
    try:
        if isinstance(kind, type) and not get_args(kind):
            return isinstance(value, kind) or (kind is float and isinstance(value, int))
        _adapter(kind).validate_python(value)
    except ValidationError:
        return False
    except (PydanticUserError, SchemaError, NameError, TypeError):  # of protocols and the like
        whole = get_origin(kind)
        return not isinstance(whole, type) or isinstance(value, whole)
    return True


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:  # noqa: ANN401 - types of any form
    from pydantic import ConfigDict, TypeAdapter

    return TypeAdapter(kind, config=ConfigDict(arbitrary_types_allowed=True, strict=True))
