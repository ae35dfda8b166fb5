"""Values that metrics compare, and the scores of right and wrong ones."""

from __future__ import annotations

import dataclasses
import numbers
import unicodedata
from collections.abc import Mapping
from decimal import Decimal
from enum import Enum

from compound.errors import CallError
from compound.evaluation.metrics.messages import format_value, format_values
from compound.example import Score
from compound.graph.json_values import SCALARS, json_form


def comparable(value: object) -> object:
    """Return a value in the form in which a data file holds it, so that equal values compare equal.

    Members of an Enum become their values, decimals numbers, dates ISO texts, models and dataclasses objects,
    and letters with accents single characters (NFC).

    >>> from datetime import date
    >>> comparable({1: [Decimal("1.5"), date(2024, 1, 2)]})
    {'1': [1.5, '2024-01-02']}
    """
    try:
        return _comparable(value)
    except RecursionError:  # metrics report documents that are nested too deeply
        return value


def _comparable(value: object) -> object:
    if isinstance(value, Enum):
        return _comparable(value.value)
    if isinstance(value, str):
        return value if unicodedata.is_normalized("NFC", value) else unicodedata.normalize("NFC", value)
    if isinstance(value, Decimal):
        return int(value) if value.is_finite() and value == value.to_integral_value() else float(value)
    if isinstance(value, Mapping):
        return {str(_comparable(key)): _comparable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_comparable(item) for item in value]
    if isinstance(value, (set, frozenset, *SCALARS)) or hasattr(value, "model_dump") or _is_record(value):
        try:
            found = json_form(value)
        except (TypeError, ValueError):  # such as bytes that are no text
            return value
        return _comparable(found)
    return value


def _is_record(value: object) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def text_of(value: object, where: str) -> str:
    """Return a text or a number as text; ``where`` starts the error message for other values.

    Raises:
        CallError: the value is neither.
    """
    if isinstance(value, str | numbers.Real):
        return str(value)
    raise CallError(f"{where}: the output must be text or a number, got {type(value).__name__}")


def verdict(right: bool, accepted: list[object], found: object) -> Score:
    """Return 1 or 0, with the acceptable answers as feedback on a wrong one."""
    return Score(
        float(right), "correct" if right else f"expected {format_values(accepted)}, got {format_value(found)}"
    )
