"""Tools from what users pass to an agent: typed functions, and tools of LangChain and DSPy."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Protocol, TypeAlias

from compound.components.function import Function
from compound.components.tools.tool import Tool
from compound.core.errors import DeclarationError


class ForeignTool(Protocol):
    """A tool of LangChain or DSPy, made from a function."""

    @property
    def name(self) -> str:
        """The tool's name."""
        ...

    @property
    def args(self) -> Mapping[str, object]:
        """The arguments that the model gives."""
        ...


AnyTool: TypeAlias = Tool | Callable[..., object] | ForeignTool
PACKAGES = {"langchain_core": "LangChain", "dspy": "DSPy"}
DESCRIPTIONS = {"LangChain": "description", "DSPy": "desc"}  # attributes
HINT = "pass a cp.Tool, or a function with annotations, such as `def search(query: str) -> str`"


def as_tool(owner: str, given: AnyTool) -> Tool:
    """Return what an agent was given as a tool.

    Args:
        owner: the agent's name, for messages.
        given: a tool, a typed function, or a tool of LangChain or DSPy that calls a function.

    Raises:
        DeclarationError: it is none of them, or its function lacks annotations.

    >>> def double(x: int) -> int:
    ...     return 2 * x
    >>> as_tool("agent", double)
    Tool('double', arguments=x)
    """
    if isinstance(given, Tool):
        return given
    if isinstance(given, Function):  # made by `compound.component`
        return Tool.from_function(given.function, name=given.name)
    if inspect.isroutine(given):
        return Tool.from_function(given)
    package = _package(given)
    if package:
        return _from_package(owner, given, package)
    kind = given.__name__ if isinstance(given, type) else type(given).__name__
    raise DeclarationError(
        f"agent {owner!r}: a tool must be a tool or a function, but got {kind}", hint=HINT
    )


def _package(given: object) -> str:
    """Return the library that a tool belongs to, without importing it; ``""`` if it is none of them."""
    for cls in type(given).__mro__:
        found = PACKAGES.get(cls.__module__.partition(".")[0], "")
        if found and cls.__name__ in ("BaseTool", "Tool"):
            return found
    return ""


def _from_package(owner: str, given: object, package: str) -> Tool:
    name = str(getattr(given, "name", ""))
    function = getattr(given, "func", None) or getattr(given, "coroutine", None)
    if not callable(function):
        raise DeclarationError(
            f"agent {owner!r}: the {package} tool {name!r} calls no function",
            hint="define a function with annotations that calls it, and pass the function",
        )
    expected, parameters = (
        set(getattr(given, "args", ())),
        set(inspect.signature(function).parameters),
    )
    if expected != parameters:
        raise DeclarationError(
            f"agent {owner!r}: the function of the {package} tool {name!r} has the parameters "
            f"{sorted(parameters)}, but the model gives {sorted(expected)}",
            hint="define a function with the arguments of the model that calls it, and pass the function",
        )
    if getattr(given, "response_format", "content") == "content_and_artifact":
        raise DeclarationError(
            f"agent {owner!r}: the {package} tool {name!r} returns an artifact besides its content",
            hint="define a function that calls it and returns the content, and pass the function",
        )
    described = getattr(given, DESCRIPTIONS[package])
    tool = Tool.from_function(function, name=name, description=described)
    return _with_descriptions(tool, getattr(given, "args", {}))


def _with_descriptions(tool: Tool, arguments: Mapping[str, object]) -> Tool:
    """Return a tool with the descriptions of arguments that its library has, in place of the function's."""
    properties: dict[str, Any] = dict(tool.parameters.get("properties", {}))
    for name, schema in arguments.items():
        described = schema.get("description") if isinstance(schema, Mapping) else None
        if isinstance(described, str) and described:
            properties[name] = {**properties[name], "description": described}
    return replace(tool, parameters={**tool.parameters, "properties": properties})
