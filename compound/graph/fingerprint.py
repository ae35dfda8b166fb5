"""Digests of user code, for cache keys and for detecting changes when a run is resumed.

A digest covers byte code and constants, but not file or line, nor the functions that the code
calls.
"""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
from collections.abc import Callable, Mapping
from pathlib import PurePath
from types import CellType, CodeType

from compound.graph.configuration import to_readable_json
from compound.graph.json_values import SCALARS

PLAIN = (str, int, float, bool, bytes, type(None))


def code_digest(function: Callable[..., object]) -> str:
    """Return a digest of a function: its code, its defaults, and the strings and numbers it closes over.

    >>> code_digest(lambda x: x + 1) == code_digest(lambda x: x + 1) != code_digest(lambda x: x + 2)
    True
    """
    target = function if hasattr(function, "__code__") else type(function).__call__
    code = getattr(target, "__code__", None)
    if code is None:  # a builtin is identified by its name alone
        return hashlib.sha256(repr(to_readable_json(function)).encode()).hexdigest()[:16]
    held = [
        getattr(target, "__defaults__", None),
        getattr(target, "__kwdefaults__", None),
        [_cell_value(cell) for cell in getattr(target, "__closure__", None) or ()],
    ]
    return hashlib.sha256(f"{_walk(code)}{describe_code(held)}".encode()).hexdigest()[:16]


def describe_code(value: object) -> object:
    """Return a process-independent description of an object: JSON types, functions by their code.

    >>> describe_code({"f": len, "s": {2, 1}})
    {'f': '<built-in function len>', 's': [1, 2]}
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [
            f"{f.name}={describe_code(getattr(value, f.name))!r}" for f in dataclasses.fields(value)
        ]
        return f"{type(value).__qualname__}({', '.join(fields)})"
    if inspect.isroutine(value) and hasattr(value, "__code__"):
        return f"{value.__qualname__}:{code_digest(value)}"
    if isinstance(value, Mapping):
        return {str(key): describe_code(item) for key, item in value.items()}
    if isinstance(value, set | frozenset):
        return sorted((describe_code(item) for item in value), key=str)
    if isinstance(value, list | tuple):
        return [describe_code(item) for item in value]
    if isinstance(value, (*SCALARS, PurePath)):
        return repr(value)  # digests in existing caches depend on it
    return to_readable_json(value)


def _cell_value(cell: CellType) -> object:
    try:
        value = cell.cell_contents
    except ValueError:  # the cell is empty
        return None
    # mutable, so only its type counts
    return value if isinstance(value, PLAIN) else type(value).__name__


def _walk(code: CodeType) -> str:
    constants = [
        _walk(c)
        if isinstance(c, CodeType)
        else repr(sorted(map(repr, c)) if isinstance(c, frozenset) else c)
        for c in code.co_consts
    ]
    return f"{code.co_code.hex()}|{code.co_names}|{code.co_varnames}|{constants}"
