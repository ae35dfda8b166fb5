"""Short text representations of values, lists of names and counts.

Notebooks and error messages show reprs, so a repr must not grow with
prompts, demonstrations or the number of paths through a graph.
"""

from __future__ import annotations

import os
import reprlib
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import TextIO

from rich.cells import cell_len

MOST_NAMES = 12
NO_LIMIT = 10_000  # columns
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 80
_SHORT.maxdict = _SHORT.maxlist = _SHORT.maxtuple = _SHORT.maxset = _SHORT.maxfrozenset = 4
_SHORT.maxlevel = 3


def short_repr(value: object) -> str:
    """Return a repr of bounded length.

    >>> short_repr({"question": "word " * 100})
    "{'question': 'word word word word word word word w... word word word word word word word '}"
    """
    return _SHORT.repr(dict(value) if isinstance(value, Mapping) else value)


def format_names(names: Iterable[str], most: int = MOST_NAMES) -> str:
    """Return names in brackets, truncated to the first ``most``.

    >>> format_names("abc"), format_names("abcdef", most=2)
    ('[a, b, c]', '[a, b, … 4 more]')
    """
    found = list(names)
    shown = [*found[:most], f"… {len(found) - most} more"] if len(found) > most else found
    return f"[{', '.join(shown)}]"


def format_repr(kind: str, *positional: str, **parts: str) -> str:
    """Return ``Kind(positional, name=part)``, omitting empty parts.

    >>> format_repr("Row", "'e1'", score="0.5", failure="")
    "Row('e1', score=0.5)"
    """
    named = [f"{name}={part}" for name, part in parts.items() if part]
    return f"{kind}({', '.join([*positional, *named])})"


def plural(n: int, noun: str) -> str:
    """Return a count with its noun.

    >>> plural(1, "example"), plural(2000, "example")
    ('1 example', '2,000 examples')
    """
    return f"{n:,} {noun}" if n == 1 else f"{n:,} {noun}s"


def format_bytes(count: float) -> str:
    """Return a number of bytes in GiB, or in MiB below one.

    >>> format_bytes(538060032), format_bytes(17.2 * 2**30)
    ('513 MiB', '17.2 GiB')
    """
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"


def width_of(stream: TextIO) -> int:
    """Return the number of columns of a terminal, and `NO_LIMIT` for another stream."""
    with suppress(OSError, ValueError, AttributeError):
        return os.get_terminal_size(stream.fileno()).columns or 80
    return NO_LIMIT


def cut(text: str, width: int) -> str:
    """Return a text of at most a number of columns of a terminal, in which some signs take two.

    >>> cut("retrieval", 6), cut("名前", 3), cut("名前", 4)
    ('retri…', '名…', '名前')
    """
    shown = text[: max(0, width)]
    while cell_len(shown) + (len(shown) < len(text)) > width and shown:
        shown = shown[:-1]
    return shown + "…" * (shown != text)
