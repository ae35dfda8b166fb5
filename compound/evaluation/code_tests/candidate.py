"""Serve the calls of a tested program: the process that runs the candidate's code.

The source of this module runs inside the sandbox as ``candidate_server.py``, started by `tester`,
and imports only the standard library. It receives names and arguments of calls, and never a test or
an expected value. Plain values travel as JSON, exactly: tuples, sets, dictionaries with any keys,
big integers, NaN, arrays.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.machinery
import io
import json
import os
import re
import sys
import types
from typing import Any

SMALL = 2**53
_NUMBERS = re.compile("[<>=|][biufc](1|2|4|8|16)")  # types of NumPy without Python objects


def encode(value: object) -> object:
    """Return a value as JSON types.

    >>> decode(encode({(1, 2.5): {"a"}, "x": [None, True, 2**70, b"b"]}))
    {(1, 2.5): {'a'}, 'x': [None, True, 1180591620717411303424, b'b']}
    """
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        return int(value) if abs(value) < SMALL else {"int": hex(value)}
    if isinstance(value, float):
        return {"float": float(value).hex()}
    if isinstance(value, complex):
        return {"complex": [value.real.hex(), value.imag.hex()]}
    if isinstance(value, bytes | bytearray):
        return {"bytes": bytes(value).hex()}
    if isinstance(value, list):
        return [encode(item) for item in value]
    if isinstance(value, dict):
        return {"dict": [[encode(key), encode(item)] for key, item in value.items()]}
    for name, kind in (("tuple", tuple), ("set", set), ("frozenset", frozenset)):
        if isinstance(value, kind):
            return {name: [encode(item) for item in value]}
    if type(value).__module__ == "numpy" and _NUMBERS.fullmatch(
        str(getattr(getattr(value, "dtype", ""), "str", ""))
    ):
        array: Any = value
        if array.shape:
            return {"array": [array.dtype.str, encode(array.tolist())]}
        return encode(array.item())
    raise TypeError(f"a {type(value).__name__}, which is not a plain value")


def decode(data: object) -> object:
    """Return the value that `encode` was given, made of built-in types only."""
    if data is None or isinstance(data, bool | str | int):
        return data
    if isinstance(data, list):
        return [decode(item) for item in data]
    if isinstance(data, dict) and len(data) == 1:
        ((name, inner),) = data.items()
        if name in ("int", "float", "bytes") and isinstance(inner, str):
            readers = {
                "int": lambda text: int(text, 16),
                "float": float.fromhex,
                "bytes": bytes.fromhex,
            }
            return readers[name](inner)
        if name == "complex" and isinstance(inner, list):
            return complex(*map(float.fromhex, inner))
        if name == "dict" and isinstance(inner, list):
            return {decode(key): decode(item) for key, item in inner}
        if name in ("tuple", "set", "frozenset") and isinstance(inner, list):
            kinds = {"tuple": tuple, "set": set, "frozenset": frozenset}
            return kinds[name](decode(item) for item in inner)
        if name == "array" and isinstance(inner, list) and _NUMBERS.fullmatch(inner[0]):
            return importlib.import_module("numpy").array(decode(inner[1]), inner[0])
    raise ValueError("not an encoded value")


def dump_line(document: dict[str, object]) -> bytes:
    """Return a message of the tester or the candidate."""
    return json.dumps(document).encode() + b"\n"


def reply(
    module: types.ModuleType, name: str, arguments: object, named: object
) -> dict[str, object]:
    """Call a function of the candidate, and return its value or exception, and what it printed."""
    if not hasattr(module, name):
        return {"fault": f"the program has no attribute {name!r}"}
    printed = io.StringIO()
    try:
        given: Any = decode(arguments)
        by_name: Any = decode(named)
        with contextlib.redirect_stdout(printed):
            value = getattr(module, name)(*given, **by_name)
    except BaseException as error:  # noqa: BLE001 - generated code may raise anything
        kind = next(base.__name__ for base in type(error).__mro__ if base.__module__ == "builtins")
        try:
            values = encode(list(error.args))
        except TypeError:
            values = [str(error)]
        return {"error": kind, "args": values, "printed": printed.getvalue()}
    try:
        return {"value": encode(value), "printed": printed.getvalue()}
    except (TypeError, RecursionError) as error:
        return {"fault": f"{name} returned {error}"}


def main() -> None:
    """Load the candidate and answer one call per line."""
    requests = os.fdopen(os.dup(0), "rb")
    answers = os.fdopen(os.dup(1), "wb", 0)
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(nothing, 1)  # what the candidate prints is no answer
    module = types.ModuleType("candidate_module")
    sys.modules[module.__name__] = module
    problem: dict[str, object] = {}
    try:
        importlib.machinery.SourceFileLoader(module.__name__, "candidate.txt").exec_module(module)
    except BaseException as error:  # noqa: BLE001 - as above
        problem = {"fault": f"{type(error).__name__}: {error}"}
    for line in requests:
        asked = json.loads(line)
        answers.write(
            dump_line(problem or reply(module, asked["name"], asked["args"], asked["named"]))
        )


if __name__ == "__main__":
    main()
