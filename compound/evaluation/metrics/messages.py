"""Values and fields in messages of metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def format_fields(fields: Mapping[str, object]) -> str:
    """Return the names of the fields, or ``none``."""
    return ", ".join(fields) or "none"


def format_values(values: Sequence[object]) -> str:
    """Return the first three values, joined by *or*."""
    shown = " or ".join(format_value(value) for value in values[:3])
    return shown if len(values) <= 3 else f"{shown} or {len(values) - 3} more"


def format_value(value: object) -> str:
    """Return a value on one line, with at most 80 characters."""
    text = " ".join(value.split()) if isinstance(value, str) else repr(value)
    text = text if len(text) <= 80 else text[:79] + "…"
    return repr(text) if isinstance(value, str) else text
