"""Typed access to the entries of untyped mappings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from compound.formatting import short_repr

__all__ = ["entry"]

Kind = TypeVar("Kind")


def entry(values: Mapping[str, object], name: str, kind: type[Kind] | tuple[type[Kind], ...]) -> Kind:
    """Return an entry, checked to be an instance of ``kind``.

    Raises:
        KeyError: The entry does not exist.
        TypeError: The entry has another type.

    Example:
        >>> entry({"k": 5}, "k", int)
        5
        >>> entry({"k": "five"}, "k", (int, float))
        Traceback (most recent call last):
        TypeError: k must be int or float, but is 'five'
    """
    value = values[name]
    if isinstance(value, kind):
        return value
    kinds = kind if isinstance(kind, tuple) else (kind,)
    raise TypeError(f"{name} must be {' or '.join(k.__name__ for k in kinds)}, but is {short_repr(value)}")
