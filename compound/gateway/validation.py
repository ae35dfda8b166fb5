"""Read the body of a request: JSON of bounded depth, with the numbers that budgets depend on in their ranges.

An agent passes on what it receives from others. A body may reach the record and the budget only if it cannot
damage them: a negative limit of tokens would add to the budget, and a deep body cannot be stored.
"""

from __future__ import annotations

import json
import math
from typing import cast

from compound.gateway.exchange import Document
from compound.security.sanitize import replace_surrogates
from compound.web.problems import Problem

MAX_DEPTH = 64  # of nested objects and lists
MAX_TOKENS = 10_000_000  # that a request may ask for
MAX_ANSWERS = 128
MAX_TEMPERATURE = 100
COUNTS = {
    "max_tokens": MAX_TOKENS,
    "max_completion_tokens": MAX_TOKENS,
    "max_output_tokens": MAX_TOKENS,
    "n": MAX_ANSWERS,
}
"""Fields that hold a positive whole number, and the largest one."""


def read_document(body: bytes) -> Document:
    """Return the body of a request.

    Raises:
        Problem: it is not a JSON object, nested too deeply, or a number is out of range.
    """
    try:
        found = json.loads(body, parse_constant=_refuse, parse_float=_finite)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise Problem(400, "not_json", "the body must be a JSON object")
    if _is_deeper(found, MAX_DEPTH):
        raise _invalid(f"the body is nested more than {MAX_DEPTH} levels deep")
    for name, most in COUNTS.items():
        value = found.get(name)
        if value is not None and not (type(value) is int and 1 <= value <= most):
            raise _invalid(f"{name} must be a whole number from 1 to {most:,}, but is {value!r:.40}")
    heat = found.get("temperature")
    if heat is not None and not (type(heat) in (int, float) and 0 <= heat <= MAX_TEMPERATURE):
        raise _invalid(f"temperature must be a number from 0 to {MAX_TEMPERATURE}, but is {heat!r:.40}")
    return cast("Document", replace_surrogates(found))


def _refuse(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text:.40} is too large")
    return value


def _is_deeper(value: object, levels: int) -> bool:
    """Return whether objects and lists are nested more than ``levels`` deep."""
    if not isinstance(value, dict | list):
        return False
    items = value.values() if isinstance(value, dict) else value
    return levels == 0 or any(_is_deeper(item, levels - 1) for item in items)


def _invalid(message: str) -> Problem:
    return Problem(400, "invalid_request", message)
