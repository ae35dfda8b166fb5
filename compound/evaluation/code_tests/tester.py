"""Run tests against a function of another process, which exchanges only plain values with this one.

The source of this module runs inside the sandbox as ``main.py ENTRY_POINT``. It never runs the candidate's
code. The exit status is the verdict: 0 if ``check`` returns, 1 if it raises. Standard output is the reason.
"""

from __future__ import annotations

import builtins
import dis
import importlib
import importlib.machinery
import json
import os
import subprocess
import sys
import types
from collections.abc import Callable, Iterator

try:
    from codec import decode, dump_line, encode  # type: ignore[import-not-found]  # inside the sandbox
except ImportError:
    from compound.evaluation.code_tests.codec import decode, dump_line, encode

LONGEST = 1 << 22  # bytes of an answer


class CandidateError(Exception):
    """The candidate raised an exception, returned no plain value, or ended."""


def remote(process: subprocess.Popen[bytes], name: str) -> Callable[..., object]:
    """Return a function that calls a function of the candidate."""

    def call(*args: object, **named: object) -> object:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(dump_line({"name": name, "args": encode(list(args)), "named": encode(named)}))
            process.stdin.flush()
            answer = json.loads(process.stdout.readline(LONGEST))
            if "value" in answer:
                return decode(answer["value"])
            raise CandidateError(str(answer["error"]))
        except (OSError, ValueError, TypeError, LookupError, RecursionError) as error:
            raise CandidateError(f"no answer: {type(error).__name__}") from error

    return call


def missing_names(code: types.CodeType, known: dict[str, object]) -> Iterator[str]:
    """Yield the global names that a function and those inside it read, but that are not defined.

    >>> list(missing_names(compile("print(f(1))", "", "exec"), {}))
    ['f']
    """
    for instruction in dis.get_instructions(code):
        name = instruction.argval
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME") and name not in {*known, *dir(builtins)}:
            yield name
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from missing_names(constant, known)


def main() -> None:
    """Load the tests, start the candidate, and check it."""
    entry_point = sys.argv[1]
    with open("tests.txt", encoding="utf-8") as file:
        source = file.read().split("\n")
    module = types.ModuleType("tests")
    sys.modules["tests"] = module
    importlib.machinery.SourceFileLoader("tests", "tests.txt").exec_module(module)
    check = vars(module).pop("check")  # a tested function may have this name, too
    here = os.getcwd()
    sys.path = [path for path in sys.path if path not in ("", here)]  # the candidate may write here
    command = [sys.executable, "-s", "-B", "-X", "utf8", "candidate_server.py"]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    function = remote(process, entry_point)
    setattr(module, entry_point, function)
    for name in missing_names(check.__code__, vars(module)):  # helpers of the candidate, or its imports
        known = name in sys.stdlib_module_names
        setattr(module, name, importlib.import_module(name) if known else remote(process, name))
    try:
        check(function)
    except BaseException as error:  # noqa: BLE001 - a test may raise anything
        inside = error.__traceback__.tb_next if error.__traceback__ else None
        line = source[inside.tb_lineno - 1].strip() if inside else "check"
        print(f"{line}: {type(error).__name__} {error}"[:500], flush=True)
        os._exit(1)
    os._exit(0)


if __name__ == "__main__":
    main()
