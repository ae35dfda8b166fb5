"""Serve the calls of a tested function: the process that runs the candidate's code.

The source of this module runs inside the sandbox as ``candidate_server.py``, started by `tester`.
"""

from __future__ import annotations

import importlib.machinery
import json
import os
import sys
import types

try:
    from codec import decode, dump_line, encode  # type: ignore[import-not-found]  # inside the sandbox
except ImportError:
    from compound.evaluation.code_tests.codec import decode, dump_line, encode


def main() -> None:
    """Load the candidate and answer one call per line."""
    requests = os.fdopen(os.dup(0), "rb")
    answers = os.fdopen(os.dup(1), "wb", 0)
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(nothing, 1)  # what the candidate prints is no answer
    module = types.ModuleType("candidate_module")
    sys.modules[module.__name__] = module
    problem = ""
    try:
        importlib.machinery.SourceFileLoader(module.__name__, "candidate.txt").exec_module(module)
    except BaseException as error:  # noqa: BLE001 - generated code may raise anything
        problem = f"{type(error).__name__}: {error}"
    for line in requests:
        asked = json.loads(line)
        answer: dict[str, object]
        try:
            function = getattr(module, asked["name"])
            positional, named = decode(asked["args"]), decode(asked["named"])
            answer = {"value": encode(function(*positional, **named))}
        except BaseException as error:  # noqa: BLE001 - as above
            answer = {"error": f"{type(error).__name__}: {error}"[:500]}
        answer = {"error": problem} if problem else answer
        answers.write(dump_line(answer))


if __name__ == "__main__":
    main()
