"""The decorator `system`: build a graph by calling a Python function once with placeholders."""

from __future__ import annotations

import dataclasses
import inspect
import typing
from collections.abc import Callable, Mapping
from typing import Any, get_args, get_origin, overload

from compound.components.function import parameter_types
from compound.components.hyperparameter import Hyperparameter, is_constant
from compound.core.errors import CompoundError, DeclarationError, GraphBuildError, WiringError
from compound.core.narrowing import report_wrong_arguments
from compound.graph.building import active_build, building
from compound.graph.component import Input, Node, Output, Outputs, Source
from compound.graph.registry.user_code import definition, place_in
from compound.graph.system import System
from compound.graph.types import format_type, is_assignable, member_types

SINGLE = "output"


@overload
def system(function: Callable[..., object], /) -> System: ...


@overload
def system(
    *, name: str = "", lm: str | None = None
) -> Callable[[Callable[..., object]], System]: ...


@report_wrong_arguments
def system(
    function: Callable[..., object] | None = None, /, *, name: str = "", lm: str | None = None
) -> System | Callable[[Callable[..., object]], System]:
    """Build a system from a Python function that calls components; a decorator with or without options.

    The function is called once, with a placeholder for each parameter. Its parameters become the
    inputs, and what it returns the outputs: one value (named ``output``), a dict, a dataclass, a
    named tuple, a tuple of outputs (named after their nodes), or a component with several outputs.
    Their types must match the function's return type, if it has one. A component that is used
    several times gets numbered nodes (``reader``, ``reader_2``).

    A constant that is given to a component (a string, a number, a boolean or a list of them)
    becomes a node with this value: ``reader_style`` for the input ``style`` of ``reader``.

    Python code runs while the graph is built, not for each example: a ``for`` loop over constants
    or an ``if`` on an argument of yours is fine, one that needs the value of a placeholder raises
    an error.

    Args:
        function: a function with typed parameters.
        name: the system's name; default: the function's name.
        lm: default model of LLM components that name none.

    Raises:
        GraphBuildError: the function uses the value of an input or an output.
        DeclarationError: a parameter lacks a type, has a default or is unused, or the function
            returns something else, or outputs of other types than it declares.

    Example:
        >>> from compound import LLM, Text, component
        >>> rewrite = LLM("rewrite", prompt=Text("Write a search query."))
        >>> @component
        ... def search(query: str, k: int = 3) -> list[str]:
        ...     return [query] * k
        >>> @system(lm="smollm2")
        ... def find(question: str) -> list[str]:
        ...     return search(rewrite(question=question))
        >>> list(find.inputs), list(find.nodes), list(find.outputs)
        (['question'], ['rewrite', 'search'], ['output'])
    """
    if function is None:
        return lambda decorated: _build(decorated, name, lm)
    return _build(function, name, lm)


def _build(function: Callable[..., object], name: str, lm: str | None) -> System:
    own = name or function.__name__
    if inspect.iscoroutinefunction(function):
        raise DeclarationError(
            f"system {own!r} is an async function, which cannot build a graph",
            hint="write def; components may be async, and independent ones run concurrently",
        )
    inputs = [
        Input(parameter, kind)
        for parameter, kind in parameter_types(f"function {own!r}", function).items()
    ]
    _check_defaults(own, function)
    with building(_constant_source) as build:
        try:
            returned = function(**{item.name: item for item in inputs})
        except WiringError as error:
            raise WiringError(
                f"{error.message}{place_in(error, function)}", hint=error.hint
            ) from error
        except CompoundError:
            raise
        except Exception as error:
            problem = f"{type(error).__name__}: {error}{place_in(error, function)}"
            raise GraphBuildError(
                f"system {own!r} could not be built: {problem}",
                hint="its parameters are placeholders without values; compute with them in a @cp.component",
            ) from error
        outputs = _outputs(own, function, returned)
        _check_types(own, function, returned, outputs)
    nodes = [node for node in build.nodes.values() if isinstance(node, Node)]
    return System(own, outputs, inputs=inputs, nodes=nodes, lm=lm)


def _check_defaults(name: str, function: Callable[..., object]) -> None:
    for parameter in inspect.signature(function).parameters.values():
        if parameter.default is not parameter.empty:
            raise DeclarationError(
                f"parameter {parameter.name!r} of system {name!r} has the default {parameter.default!r:.60}, "
                f"but each run needs a value for every input ({definition(function)})",
                hint=f"remove the default; to fix the value, remove the parameter and write "
                f"`{parameter.name} = {parameter.default!r:.60}` in the function",
            )


def _constant_source(name: str, value: object) -> object:
    """Return a source of a constant; other values as they are."""
    if not is_constant(value):
        return value
    build = active_build()
    assert build is not None
    return Hyperparameter(build.node_name(name), value)()


def _outputs(name: str, function: Callable[..., object], returned: object) -> dict[str, Source]:
    """Return the outputs by name."""
    if isinstance(returned, Input | Output):
        return {SINGLE: returned}
    if isinstance(returned, Outputs):
        return {output.field: output for output in returned}
    found = _fields(returned)
    if not found:
        raise DeclarationError(
            f"system {name!r} returns {type(returned).__name__}, which names no outputs "
            f"({definition(function)})",
            hint="return the output of a component, or a dict of them: {'answer': …}",
        )
    for key, value in found.items():
        if not isinstance(value, Input | Output):
            raise DeclarationError(
                f"output {key!r} of system {name!r} is {value!r}, which no component produces "
                f"({definition(function)})",
                hint="return outputs of components, such as {'answer': answerer(question=question)}",
            )
    return {str(key): value for key, value in found.items() if isinstance(value, Input | Output)}


def _fields(returned: object) -> Mapping[object, object]:
    if isinstance(returned, Mapping):
        return dict(returned)
    if dataclasses.is_dataclass(returned) and not isinstance(returned, type):
        return {field.name: getattr(returned, field.name) for field in dataclasses.fields(returned)}
    if isinstance(returned, tuple) and hasattr(returned, "_asdict"):
        return dict(typing.cast("typing.Any", returned)._asdict())
    if isinstance(returned, tuple | list):
        return _named_after_nodes(returned)
    return {}


def _named_after_nodes(values: tuple[object, ...] | list[object]) -> Mapping[object, object]:
    found: dict[object, object] = {}
    for value in values:
        key: object = value
        if isinstance(value, Output):
            key = value.path[-1] if value.path else value.field
            key = value.node.name if key == SINGLE else key
        elif isinstance(value, Input):
            key = value.name
        if key in found:
            raise DeclarationError(
                f"two of the returned outputs would be named {key!r}",
                hint="return a dict to name them",
            )
        found[key] = value
    return found


def _check_types(
    name: str, function: Callable[..., object], returned: object, outputs: Mapping[str, Source]
) -> None:
    """Reject outputs whose types do not match the annotation of a function."""
    annotation = typing.get_type_hints(function).get("return", Any)
    if annotation in (Any, object) or isinstance(returned, Outputs):
        return
    declared = _declared_types(returned, annotation, list(outputs))
    for key, source in outputs.items():
        if declared is not None and is_assignable(source.type, declared.get(key, Any)):
            continue
        if declared is not None:
            what, expected = f"{source.label} as {format_type(source.type)}", declared.get(key, Any)
            hint = "correct the annotation, or convert the value in a function with @cp.component"
        else:
            what, expected = f"several outputs as a {type(returned).__name__}", annotation
            hint = "correct the annotation, such as `-> dict[str, str]`"
            if isinstance(returned, list):
                hint = "make the list in a function with @cp.component, or return a dict of outputs"
        raise DeclarationError(
            f"system {name!r} returns {what}, but declares {format_type(expected)} "
            f"({definition(function)})",
            hint=hint,
        )


def _declared_types(
    returned: object, annotation: object, names: list[str]
) -> Mapping[str, object] | None:
    """Return the declared type of each output; None if the annotation is not of several outputs."""
    origin, arguments = get_origin(annotation) or annotation, get_args(annotation)
    if isinstance(returned, Input | Output):
        return {SINGLE: annotation}
    if dataclasses.is_dataclass(returned) or hasattr(returned, "_asdict"):
        return typing.get_type_hints(type(returned))
    if not isinstance(origin, type):
        return None
    if isinstance(returned, Mapping):
        values = arguments[1] if len(arguments) == 2 else Any
        fields = member_types(annotation)
        return fields or (dict.fromkeys(names, values) if issubclass(origin, Mapping) else None)
    if isinstance(returned, tuple) and issubclass(origin, tuple):
        if not arguments or arguments[-1] is Ellipsis:
            arguments = (arguments or (Any,))[:1] * len(names)
        return dict(zip(names, arguments, strict=True)) if len(arguments) == len(names) else None
    return None
