"""The decorators `component`, `llm` and `system`: components and graphs declared as functions."""

from __future__ import annotations

import dataclasses
import dis
import functools
import inspect
import sys
import typing
from collections.abc import Callable, Mapping
from typing import Any, Generic, ParamSpec, TypeVar, get_args, get_origin, overload

from compound.components.function import Function, parameter_types, typed_signature
from compound.components.hyperparameter import Hyperparameter, is_constant
from compound.components.llm import LLM
from compound.core.errors import CompoundError, DeclarationError, GraphBuildError, WiringError
from compound.core.narrowing import report_wrong_arguments
from compound.core.threads import ThreadUse
from compound.graph.building import active_build, building
from compound.graph.component import Condition, Input, Node, Output, Outputs, Source
from compound.graph.registry.user_code import definition, place_in
from compound.graph.space import Text
from compound.graph.system import System
from compound.graph.types import format_type, is_assignable, member_types

P = ParamSpec("P")
R = TypeVar("R")


class FunctionComponent(Function, Generic[P, R]):
    """A `Function` that can be called with sources, which declares a node, or with values, which calls it.

    Made by `component`.
    """

    positional = True

    def __init__(self, name: str, function: Callable[P, R], **options: Any) -> None:  # noqa: ANN401
        super().__init__(name, function, **options)
        functools.update_wrapper(self, function, updated=())

    @overload
    def __call__(self, *arguments: P.args, **named: P.kwargs) -> R: ...

    @overload
    def __call__(self, *arguments: Any, **named: Any) -> Any: ...  # noqa: ANN401

    def __call__(
        self,
        *arguments: Any,
        name: Any = None,
        when: Any = None,
        **named: Any,
    ) -> Any:
        """Declare a node if an argument is a source, or within `compound.system`; else call the function."""
        given = [*arguments, *named.values(), when]
        if active_build() is not None or any(
            isinstance(v, Input | Output | Outputs | Condition) for v in given
        ):
            return super().__call__(*arguments, name=name, when=when, **named)
        further = {
            key: value for key, value in (("name", name), ("when", when)) if value is not None
        }
        return self.function(*arguments, **named, **further)

    def __reduce__(self) -> str | tuple[Any, ...]:
        """Pickle by name: the module's attribute is this component, not the function inside it."""
        found: object = sys.modules.get(self.function.__module__)
        for part in self.function.__qualname__.split("."):
            found = getattr(found, part, None)
        return self.function.__qualname__ if found is self else super().__reduce__()


@overload
def component(function: Callable[P, R], /) -> FunctionComponent[P, R]: ...


@overload
def component(
    *,
    name: str = "",
    outputs: Mapping[str, object] | None = None,
    timeout: float | None = None,
    retries: int = 0,
    thread: ThreadUse = "auto",
    **settings: object,
) -> Callable[[Callable[P, R]], FunctionComponent[P, R]]: ...


@report_wrong_arguments
def component(
    function: Callable[P, R] | None = None,
    /,
    *,
    name: str = "",
    **options: Any,
) -> FunctionComponent[P, R] | Callable[[Callable[P, R]], FunctionComponent[P, R]]:
    """Make a component of a typed function, sync or async; a decorator with or without options.

    Called with an input or an output of another component, it declares a node. Called with values,
    it is the function itself.

    Args:
        function: an annotated function; its parameters are the inputs.
        name: the component's name; default: the function's name.
        **options: ``outputs``, ``timeout``, ``retries`` and ``thread`` of `cp.Function`, and values
            or spaces for parameters of the function; its other parameters are inputs.

    Raises:
        DeclarationError: the function lacks annotations, or a setting is no parameter of it.

    Example:
        >>> from compound import Float, Input
        >>> @component(weight=Float(0.0, 1.0, value=0.5))
        ... def fuse(a: float, b: float, weight: float) -> float:
        ...     return weight * a + (1 - weight) * b
        >>> fuse(1.0, 3.0, 0.5), fuse(Input("x", float), Input("y", float))
        (2.0, Output($fuse: float))
    """

    def decorate(decorated: Callable[P, R]) -> FunctionComponent[P, R]:
        own = name or getattr(decorated, "__name__", type(decorated).__name__)
        return FunctionComponent(own, decorated, **options)

    return decorate if function is None else decorate(function)


EMPTY = "RESUME NOP LOAD_CONST RETURN_CONST RETURN_VALUE LOAD_GLOBAL RAISE_VARARGS"


class LLMFunction(LLM, Generic[P, R]):
    """An `LLM` declared as a function; sources given by position feed its parameters. Made by `llm`."""

    positional = True

    @overload
    def __call__(self, *arguments: P.args, **named: P.kwargs) -> R: ...

    @overload
    def __call__(self, *sources: Any, **named: Any) -> Any: ...  # noqa: ANN401

    def __call__(self, *sources: Any, **named: Any) -> Any:
        """Use the component in a graph."""
        return super().__call__(*sources, **named)


@overload
def llm(function: Callable[P, R], /, **settings: object) -> LLMFunction[P, R]: ...


@overload
def llm(**settings: object) -> Callable[[Callable[P, R]], LLMFunction[P, R]]: ...


@report_wrong_arguments
def llm(
    function: Callable[P, R] | None = None, /, **settings: object
) -> LLMFunction[P, R] | Callable[[Callable[P, R]], LLMFunction[P, R]]:
    '''Make an LLM component of a typed function that has a docstring and no body; usable as a decorator.

    The parameters are the inputs, the return type is the output, and the docstring is the prompt,
    which is tuned unless ``prompt`` says otherwise. Type checkers accept ``raise
    NotImplementedError`` as the body.

    Args:
        function: an annotated function without statements.
        **settings: settings of `LLM`, such as ``lm``, ``temperature`` or ``demos``; ``name`` is the
            function's name by default.

    Raises:
        DeclarationError: the function has statements, which would never run, lacks a docstring or a
            type.

    Example:
        >>> @llm(max_tokens=32)
        ... def answer(question: str, passages: list[str]) -> bool:
        ...     """Answer the question from the passages."""
        >>> answer.prompt.value, list(answer.inputs), answer.outputs["output"].type
        ('Answer the question from the passages.', ['question', 'passages'], <class 'bool'>)
    '''
    if function is None:
        return lambda decorated: _declare(decorated, dict(settings))
    return _declare(function, dict(settings))


def _declare(function: Callable[P, R], settings: dict[str, Any]) -> LLMFunction[P, R]:
    name = settings.pop("name", None) or function.__name__
    kinds, returned = typed_signature(name, function)
    if inspect.iscoroutinefunction(function) or not _is_empty(function):
        raise DeclarationError(
            f"llm function {name!r} has statements, which would never run",
            hint="leave only its docstring, or use cp.component for a function that runs",
        )
    if "prompt" not in settings:
        prompt = inspect.getdoc(function)
        if not prompt:
            raise DeclarationError(
                f"llm function {name!r} has no prompt",
                hint="write it as the docstring, or give prompt=…",
            )
        settings["prompt"] = Text(prompt)
    return LLMFunction(name, **{"output": returned, "takes": kinds, **settings})


def _is_empty(function: Callable[..., object]) -> bool:
    """Return whether a function only returns None or raises NotImplementedError."""
    steps = list(dis.get_instructions(function))
    loaded = [
        step.argval
        for step in steps
        if step.opname in ("LOAD_CONST", "RETURN_CONST", "LOAD_GLOBAL")
    ]
    return all(step.opname in EMPTY.split() for step in steps) and loaded in (
        [None],
        ["NotImplementedError"],
    )


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
    inputs, and what it returns the outputs: one value (named ``output``), a dict, a dataclass, or a
    component with several outputs.
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
            hint="return the output of a component, or name several: {'answer': …, 'passages': …}",
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
    return {}


def _check_types(
    name: str, function: Callable[..., object], returned: object, outputs: Mapping[str, Source]
) -> None:
    """Reject outputs whose types do not match the annotation of a function."""
    annotation = typing.get_type_hints(function).get("return", Any)
    if annotation in (Any, object) or isinstance(returned, Outputs):
        return
    declared = _declared_types(returned, annotation, list(outputs))
    for key, source in outputs.items():
        expected = annotation if declared is None else declared.get(key, Any)
        if declared is not None and is_assignable(source.type, expected):
            continue
        what = (
            f"several outputs as a {type(returned).__name__}"
            if declared is None
            else f"{source.label} as {format_type(source.type)}"
        )
        raise DeclarationError(
            f"system {name!r} returns {what}, but declares {format_type(expected)} "
            f"({definition(function)})",
            hint="correct the annotation, or convert the value in a function with @cp.component",
        )


def _declared_types(
    returned: object, annotation: object, names: list[str]
) -> Mapping[str, object] | None:
    """Return the declared type of each output; None if the annotation is not of several outputs."""
    origin, arguments = get_origin(annotation) or annotation, get_args(annotation)
    if isinstance(returned, Input | Output):
        return {SINGLE: annotation}
    if dataclasses.is_dataclass(returned):
        return typing.get_type_hints(type(returned))
    if not isinstance(origin, type):
        return None
    values = arguments[1] if len(arguments) == 2 else Any
    fields = member_types(annotation)
    return fields or (dict.fromkeys(names, values) if issubclass(origin, Mapping) else None)
