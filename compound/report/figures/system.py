"""Draw the graph of a system, in one of several formats."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from compound.errors import DeclarationError, suggest_name
from compound.graph.draw import as_document, as_mermaid, as_text
from compound.graph.system import System
from compound.report.figures.graph import graph_svg


def draw(system: System, form: str = "text") -> str:
    """Return a drawing of a system.

    Args:
        system: the system.
        form: ``text`` (one line per node, top to bottom), ``mermaid``, or ``svg``.

    Raises:
        DeclarationError: the format is unknown.
        MissingExtra: the format is ``svg``, and matplotlib is not installed.
    """
    forms: Mapping[str, Callable[[System], str]] = {
        "text": as_text,
        "mermaid": as_mermaid,
        "svg": lambda shown: graph_svg(as_document(shown)),
    }
    if form not in forms:
        raise DeclarationError(f"no drawing format {form!r}", hint=suggest_name(form, forms))
    return forms[form](system)
