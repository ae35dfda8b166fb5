"""Recognition of labels in model output."""

from __future__ import annotations

import re

_DENIAL = re.compile(
    r"(?:\b(?:not|never|nor|non|neither)|n['’]t)(?:\s+(?:a|an|the|very))?[\s\-\"'`*]*$", re.IGNORECASE
)
_LONGEST = 24  # maximum length of a negation before a label


def is_negated(text: str, start: int) -> bool:
    """Return whether a negation directly precedes a position in a text.

    >>> is_negated("It is not positive", 10), is_negated("It is positive, not bad", 6)
    (True, False)
    """
    return _DENIAL.search(text[max(0, start - _LONGEST) : start]) is not None
