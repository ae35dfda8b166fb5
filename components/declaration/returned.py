"""Check the outputs of a graph against the return type of the function that built it."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable, Mapping
from typing import Any, get_args, get_origin

from compound.core.errors import DeclarationError
from compound.graph.component import Input, Output, Outputs
from compound.graph.registry.user_code import definition
from compound.graph.types import format_type, is_assignable, member_types


def check_returned(name: str, function: Callable[..., object], returned: object) -> None:
    """Reject outputs whose types do not match the annotation of a function.

    Args:
        name: the name of the system.
        function: the function.
        returned: what it returned: an output, or a mapping, a tuple, a list or an instance with
            outputs.

    Raises:
        DeclarationError: a type does not match; the message names the output and both types.
    """
    annotation = typing.get_type_hints(function).get("return", Any)
    if annotation in (Any, object) or isinstance(returned, Outputs):
        return
    for label, found, expected in _pairs(returned, annotation):
        if found is None or not is_assignable(found, expected):
            kind = f"a {type(returned).__name__}" if found is None else format_type(found)
            raise DeclarationError(
                f"system {name!r} returns {label} as {kind}, but declares {format_type(expected)} "
                f"({definition(function)})",
                hint=_hint(returned, found),
            )


def _pairs(returned: object, annotation: object) -> list[tuple[str, object, object]]:
    """Return label, type and declared type of each output; ``None`` is the type of several outputs."""
    if isinstance(returned, Input | Output):
        return [(returned.label, returned.type, annotation)]
    whole: list[tuple[str, object, object]] = [("several outputs", None, annotation)]
    origin, arguments = get_origin(annotation) or annotation, get_args(annotation)
    if isinstance(returned, Mapping):
        if isinstance(origin, type) and (fields := member_types(annotation)):
            return _of_fields(returned, fields)
        if not (isinstance(origin, type) and issubclass(origin, Mapping)):
            return whole
        return _of_fields(
            returned, dict.fromkeys(returned, arguments[1] if len(arguments) == 2 else Any)
        )
    if dataclasses.is_dataclass(returned) or hasattr(returned, "_asdict"):
        fields = typing.get_type_hints(type(returned))
        return _of_fields({field: getattr(returned, field) for field in fields}, fields)
    if isinstance(returned, tuple) and isinstance(origin, type) and issubclass(origin, tuple):
        if not arguments or arguments[-1] is Ellipsis:
            arguments = (arguments or (Any,))[:1] * len(returned)
        if len(arguments) == len(returned):
            return _of_fields(dict(enumerate(returned)), dict(enumerate(arguments)))
    return whole


def _of_fields(
    found: Mapping[Any, object], expected: Mapping[Any, object]
) -> list[tuple[str, object, object]]:
    return [
        (value.label, value.type, expected.get(key, Any))
        for key, value in found.items()
        if isinstance(value, Input | Output)
    ]


def _hint(returned: object, found: object) -> str:
    if found is not None:
        return "correct the annotation, or convert the value in a function with @cp.component"
    if isinstance(returned, list):
        return "make the list in a function with @cp.component, or return a dict of outputs"
    return "correct the annotation, such as `-> dict[str, str]`"
