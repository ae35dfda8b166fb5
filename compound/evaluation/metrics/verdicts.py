"""Values that metrics compare, and the scores of right and wrong ones."""

from __future__ import annotations

import numbers

from compound.errors import CallError
from compound.evaluation.metrics.messages import format_value, format_values
from compound.example import Score


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
