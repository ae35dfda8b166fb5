"""Serve the calls of a tested program: the process that runs the candidate's code.

The source of this module runs inside the sandbox as ``candidate_server.py``, started by `tester`. It
receives names and arguments of calls, and never a test or an expected value.
"""

from __future__ import annotations

import contextlib
import importlib.machinery
import io
import json
import os
import sys
import types

try:
    from codec import decode, dump_line, encode  # type: ignore[import-not-found]  # inside the sandbox
except ImportError:
    from compound.evaluation.code_tests.codec import decode, dump_line, encode


def reply(module: types.ModuleType, name: str, arguments: object, named: object) -> dict[str, object]:
    """Call a function of the candidate, and return its value or exception, and what it printed."""
    if not hasattr(module, name):
        return {"fault": f"the program has no attribute {name!r}"}
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            value = getattr(module, name)(*decode(arguments), **decode(named))
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
        answers.write(dump_line(problem or reply(module, asked["name"], asked["args"], asked["named"])))


if __name__ == "__main__":
    main()
