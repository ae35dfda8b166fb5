"""Templates of prompts: constant text with placeholders ``{{name}}`` for the parts that vary.

A template matches a text that consists of its constant parts, in order, with any text at the
placeholders. The values at the placeholders can be put into another text. Matching takes linear
time: each constant part is found at its first occurrence after the previous one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from compound.core.errors import DeclarationError

PLACEHOLDER = re.compile(r"\{\{\s*([A-Za-z_][A-Za-z0-9_]*)\s*\}\}")


@dataclass(frozen=True)
class PromptTemplate:
    """A text with placeholders.

    Attributes:
        text: the text; a placeholder is ``{{name}}``.

    Raises:
        DeclarationError: two placeholders have one name, or follow each other without text between
            them.

    Example:
        >>> template = PromptTemplate("You answer questions about {{topic}}. Be brief.")
        >>> template.match("You answer questions about rivers. Be brief.")
        {'topic': 'rivers'}
        >>> template.match("You write poems.") is None
        True
    """

    text: str

    def __post_init__(self) -> None:
        names = self.names
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise DeclarationError(f"the placeholder {twice!r} occurs twice in {self.text!r:.80}")
        if any(not part for part in self.constants[1:-1]):
            raise DeclarationError(
                f"two placeholders follow each other without text between them in {self.text!r:.80}"
            )

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The names of the placeholders, in order."""
        return tuple(PLACEHOLDER.findall(self.text))

    @cached_property
    def constants(self) -> tuple[str, ...]:
        """The constant parts: one more than there are placeholders; the first and the last may be empty."""
        return tuple(PLACEHOLDER.split(self.text)[::2])

    def match(self, text: str) -> dict[str, str] | None:
        """Return the values at the placeholders, or ``None`` if the text does not match."""
        first, *inner = self.constants
        if not inner:
            return {} if text == first else None
        last = inner.pop()
        if (
            not text.startswith(first)
            or len(text) < len(first) + len(last)
            or not text.endswith(last)
        ):
            return None
        start, end = len(first), len(text) - len(last)
        values: dict[str, str] = {}
        for name, part in zip(self.names, inner, strict=False):
            at = text.find(part, start, end)
            if at < 0:
                return None
            values[name] = text[start:at]
            start = at + len(part)
        values[self.names[-1]] = text[start:end]
        return values


def fill(text: str, values: Mapping[str, str]) -> str:
    r"""Put values at the placeholders of a text.

    Values without a placeholder are appended, so that a rewritten prompt loses no information.
    Unknown placeholders are left as they are.

    >>> fill("Answer about {{topic}}.", {"topic": "rivers"})
    'Answer about rivers.'
    >>> fill("Answer in one word.", {"topic": "rivers"})
    'Answer in one word.\n\ntopic: rivers'
    """
    missing = [name for name in values if name not in PLACEHOLDER.findall(text)]
    filled = PLACEHOLDER.sub(lambda found: values.get(found[1], found[0]), text)
    appended = "\n".join(f"{name}: {values[name]}" for name in missing if values[name].strip())
    return f"{filled}\n\n{appended}" if appended else filled
