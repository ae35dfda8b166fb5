"""The decorator `component`: a typed function as a component that remains callable as a function."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from typing import Any, Generic, ParamSpec, TypeVar, overload

from compound.components.function import Function
from compound.core.narrowing import report_wrong_arguments
from compound.core.threads import ThreadUse
from compound.graph.building import active_build
from compound.graph.component import Condition, Input, Output, Outputs

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
