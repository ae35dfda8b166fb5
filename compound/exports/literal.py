"""Write JSON data as Python source. Texts become string literals, which no text can leave."""

from __future__ import annotations

import pprint
from typing import Any

WIDTH = 100


def python_literal(value: Any) -> str:  # noqa: ANN401 - JSON types
    r"""Return ASCII source of a literal that evaluates to ``value``.

    >>> print(python_literal({"prompt": 'say "hi"\n\'\'\''}))
    {'prompt': 'say "hi"\n\'\'\''}
    """
    text = pprint.pformat(value, width=WIDTH, sort_dicts=False)
    return text if text.isascii() else _escaped(text)


def _escaped(text: str) -> str:
    """Escape characters beyond ASCII; they occur inside string literals only, which `repr` wrote."""
    return "".join(c if c.isascii() else _escape(ord(c)) for c in text)


def _escape(code: int) -> str:
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
