"""JSON forms of values: dates, decimals, sets, enums, pydantic models, dataclasses.

The form of a value is that of pydantic's JSON mode, from which `compound.graph.types.convert` makes
an equal value of the declared type.
"""

from __future__ import annotations

import dataclasses
import json
import math
import numbers
from collections.abc import Iterable, Mapping
from datetime import date, time, timedelta
from decimal import Decimal
from enum import Enum
from pathlib import PurePath
from typing import cast
from uuid import UUID

from pydantic import BaseModel
from pydantic_core import to_jsonable_python

SCALARS = (date, time, timedelta, Decimal, UUID, bytes)  # a datetime is a date
KEYS = (str, int, float, bool, type(None))
LARGEST = 8192  # bits of an integer; Python writes at most 4,300 digits


def json_form(value: object) -> object:
    """Return the JSON form of a value that is no JSON type itself; its items may need conversion too.

    Raises:
        TypeError: it has no JSON form.
        ValueError: it is bytes that are not UTF-8.

    >>> json_form(date(2024, 1, 2)), json_form(Decimal("1.50")), json_form({2, 1})
    ('2024-01-02', '1.50', [1, 2])
    """
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, set | frozenset):
        return _ordered(value)
    if isinstance(value, tuple):
        return list(value)
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, SCALARS):
        return to_jsonable_python(value)
    if isinstance(value, PurePath):
        return str(value)
    if hasattr(value, "model_dump"):
        return value.model_dump(mode="json")
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return to_jsonable_python(value)
    raise TypeError(f"{type(value).__name__} {value!r} cannot be written as JSON")


def dumps(
    value: object, *, sort_keys: bool = False, compact: bool = False, allow_nan: bool = False
) -> str:
    """Return a value as JSON text, in which values of other classes have their JSON form.

    >>> dumps({date(2024, 1, 2): (Decimal("1.5"),)})
    '{"2024-01-02": ["1.5"]}'

    Raises:
        TypeError: a part has no JSON form.
        ValueError: bytes are not UTF-8, or a number is not finite and ``allow_nan`` is false.
    """

    def write(part: object) -> str:
        return json.dumps(
            part,
            sort_keys=sort_keys,
            separators=(",", ":") if compact else None,
            ensure_ascii=False,
            allow_nan=allow_nan,
            default=json_form,
        )

    try:
        return write(value)
    except TypeError:
        return write(_with_json_keys(value))  # `default` is not asked about keys
    except ValueError as error:
        if "Out of range float" not in str(error):
            raise
        raise ValueError("nan and inf are numbers without a JSON form") from None


def find_nonfinite(value: object) -> float | Decimal | None:
    """Return a number within a value that is not finite, and so has no JSON form; None if there is none.

    >>> find_nonfinite({"a": [1.0, float("inf")]}), find_nonfinite([1, "nan"])
    (inf, None)
    """
    # also of numpy
    if isinstance(value, Decimal | numbers.Real) and not isinstance(value, numbers.Rational):
        return None if math.isfinite(value) else value  # type: ignore[return-value]
    if isinstance(value, Mapping):
        parts: Iterable[object] = [*value.keys(), *value.values()]
    elif isinstance(value, list | tuple | set | frozenset):
        parts = value
    elif isinstance(value, BaseModel):
        parts = [item for _, item in value]
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        parts = [getattr(value, item.name) for item in dataclasses.fields(value)]
    else:
        return None
    return next((found for part in parts if (found := find_nonfinite(part)) is not None), None)


def is_json(value: object) -> bool:
    """Return whether a value consists of JSON types only, exactly.

    >>> is_json({"a": [1, None]}), is_json((1,)), is_json({1: "a"})
    (True, False, False)
    """
    kind = type(value)
    if kind is int:
        return cast("int", value).bit_length() <= LARGEST
    if kind in (str, float, bool, type(None)):
        return True
    if kind is list:
        return all(map(is_json, cast("list[object]", value)))
    if kind is dict:
        items = cast("dict[object, object]", value)
        return all(type(key) is str for key in items) and all(map(is_json, items.values()))
    return False


def _ordered(items: set[object] | frozenset[object]) -> list[object]:
    """Return the items of a set in an order that does not depend on the process."""
    try:
        return sorted(items)  # type: ignore[type-var]
    except TypeError:  # such as enums, and None among texts
        return sorted(items, key=lambda item: dumps(item, sort_keys=True))


def _with_json_keys(value: object) -> object:
    """Return a copy in which the keys of mappings are texts or numbers."""
    if isinstance(value, Mapping):
        return {_key(key): _with_json_keys(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_with_json_keys(item) for item in value]
    return value


def _key(key: object) -> object:
    form = key if isinstance(key, KEYS) and not isinstance(key, Enum) else json_form(key)
    if not isinstance(form, KEYS):
        raise TypeError(f"the key {key!r} cannot be written as JSON")
    return form
