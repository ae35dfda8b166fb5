"""An extension of Griffe: doctests in docstrings become sections with highlighted code."""

from __future__ import annotations

import re

import griffe

HEADING = re.compile(r"^Example:$", re.MULTILINE)
BARE = re.compile(r"^>>> .*(?:\n(?!\s*$).*)*", re.MULTILINE)


class Doctests(griffe.Extension):
    """Name sections of examples as the parser expects, and give bare doctests a section."""

    def on_object(self, *, obj: griffe.Object, **_: object) -> None:
        """Rewrite the docstring of an object."""
        if obj.docstring is not None:
            obj.docstring.value = with_sections(obj.docstring.value)


def with_sections(text: str) -> str:
    """Return a docstring whose doctests are in sections.

    >>> print(with_sections("Add.\\n\\n>>> 1 + 1\\n2"))
    Add.
    <BLANKLINE>
    Examples:
        >>> 1 + 1
        2
    """
    text = HEADING.sub("Examples:", text)
    return BARE.sub(
        lambda found: "Examples:\n" + re.sub(r"^", "    ", found[0], flags=re.MULTILINE), text
    )
