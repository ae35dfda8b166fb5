"""Interpret plain (unquoted) scalars by the rules of YAML 1.2, for reading and writing."""

from __future__ import annotations

import math
import re

NULL = re.compile(r"~|null|Null|NULL|\Z")
BOOL = re.compile(r"true|True|TRUE|false|False|FALSE")
INT = re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+")
FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
NOT_FINITE = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")


def scalar(text: str) -> object:
    """Return the value of a plain (unquoted) scalar; ``inf`` and ``nan`` are returned as floats.

    >>> [scalar(text) for text in ("1e-6", "on", "true", "012", "0x10", "~", "1_000", ".5")]
    [1e-06, 'on', True, 12, 16, None, '1_000', 0.5]
    """
    if NULL.fullmatch(text):
        return None
    if BOOL.fullmatch(text):
        return text.lower() == "true"
    if INT.fullmatch(text):
        return int(text, 0) if text[:2] in ("0o", "0x") else int(text)
    if FLOAT.fullmatch(text):
        return float(text)
    return math.nan if NOT_FINITE.fullmatch(text) else text
