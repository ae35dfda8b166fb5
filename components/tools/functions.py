"""Tools from typed Python functions."""

from __future__ import annotations

import importlib
import inspect
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import docstring_parser
from pydantic import TypeAdapter
from pydantic.errors import PydanticUserError
from pydantic_core import ArgsKwargs

from compound.components.function import parameter_types
from compound.core.errors import DeclarationError
from compound.core.image import replace_images
from compound.core.loops import Sessions
from compound.core.threads import exit_as_error, run_in_thread
from compound.graph.configuration import canonical_json, to_readable_json
from compound.graph.fingerprint import code_digest


@dataclass(frozen=True, eq=False)
class FunctionSource:
    """A Python function."""

    function: Callable[..., object]
    reproducible: bool = False

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle a decorated function by the name of its tool, which has replaced it in its module."""
        if self.is_decorated:
            return _source_at, (self.place,)
        return FunctionSource, (self.function, self.reproducible)

    @property
    def place(self) -> str | None:
        """``module:name`` of the function, or of the tool made of it; ``None`` if there is none."""
        module = getattr(self.function, "__module__", None)
        place = f"{module}:{getattr(self.function, '__qualname__', '')}"
        if not isinstance(module, str) or module == "__main__" or "<" in place:
            return None
        found = _at(place)
        return place if found is self.function or getattr(found, "source", None) is self else None

    @property
    def is_decorated(self) -> bool:
        """Whether `place` names a tool instead of the function."""
        return self.place is not None and _at(self.place) is not self.function

    @property
    def version(self) -> str:
        """Digest of the function's code."""
        return f"function:{code_digest(self.function)}:{self.reproducible}"

    async def call(self, arguments: Mapping[str, Any], sessions: Sessions) -> str:
        """Call the function with arguments converted to the annotated types."""

        def run() -> object:
            return _adapter(self.function).validate_python(ArgsKwargs((), dict(arguments)))

        name = getattr(self.function, "__name__", "the tool")
        with exit_as_error(name):
            result = (
                run()
                if inspect.iscoroutinefunction(self.function)
                else await run_in_thread(run, name)
            )
            return to_text(await result if inspect.isawaitable(result) else result)


def _at(place: str) -> object:
    module, _, path = place.partition(":")
    try:
        return operator.attrgetter(path)(importlib.import_module(module))
    except (ImportError, AttributeError):
        return None


def _source_at(place: str) -> object:
    return getattr(_at(place), "source", None)


def to_text(value: object) -> str:
    """Return a result as text: texts as they are, other values as JSON, in which images are only described.

    >>> to_text("Lima"), to_text({"n": 3}), to_text(None)
    ('Lima', '{"n":3}', 'null')
    """
    shown = replace_images(value, lambda image: image.label)
    return shown if isinstance(shown, str) else canonical_json(to_readable_json(shown))


def declare(
    function: Callable[..., object], name: str | None
) -> tuple[str, str, Mapping[str, Any]]:
    """Return the name, the description and the parameters of the tool of a function."""
    shown = name or str(getattr(function, "__name__", ""))
    parameter_types(f"tool {shown!r}", function)
    try:
        schema = _adapter(function).json_schema()
    except (PydanticUserError, NameError, TypeError) as error:
        raise DeclarationError(
            f"tool {shown!r}: the arguments have no JSON schema: {str(error).splitlines()[0]}",
            hint="annotate every parameter with a type that has a JSON form",
        ) from error
    summary, arguments = read_docstring(function)
    properties = {
        argument: {
            **({"description": arguments[argument]} if arguments.get(argument) else {}),
            **{key: value for key, value in part.items() if key != "title"},
        }
        for argument, part in schema.get("properties", {}).items()
    }
    return shown, summary, {"type": "object", **schema, "properties": properties}


def _adapter(function: Callable[..., object]) -> TypeAdapter[object]:
    return TypeAdapter(cast("Any", function))


def read_docstring(function: Callable[..., object]) -> tuple[str, dict[str, str]]:
    """Return the description in a docstring, and those of the parameters.

    >>> def find(query: str) -> str:
    ...     '''Search the catalogue.
    ...
    ...     Args:
    ...         query: words to find,
    ...             in any order
    ...     '''
    ...     return query
    >>> read_docstring(find)
    ('Search the catalogue.', {'query': 'words to find, in any order'})
    """
    text = inspect.getdoc(function) or ""
    try:
        found = docstring_parser.parse(text)
    except (docstring_parser.ParseError, IndexError, ValueError):
        return text, {}
    paragraphs = (found.description or "").split("\n\n")
    described = {item.arg_name: item.description or "" for item in found.params}
    return (
        "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs),
        {name: " ".join(described[name].split()) for name in described},
    )
