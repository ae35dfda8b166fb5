"""The decorator `llm`: a typed function without a body as an LLM component; its docstring is the prompt."""

from __future__ import annotations

import dis
import inspect
from collections.abc import Callable
from typing import Any, Generic, ParamSpec, TypeVar, overload

from compound.components.function import typed_signature
from compound.components.llm import LLM
from compound.core.errors import DeclarationError
from compound.core.narrowing import report_wrong_arguments
from compound.graph.space import Text

P = ParamSpec("P")
R = TypeVar("R")
EMPTY = {
    "RESUME",
    "NOP",
    "LOAD_CONST",
    "RETURN_CONST",
    "RETURN_VALUE",
    "LOAD_GLOBAL",
    "RAISE_VARARGS",
}


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
    return all(step.opname in EMPTY for step in steps) and loaded in (
        [None],
        ["NotImplementedError"],
    )
