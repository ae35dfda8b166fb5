"""Run tests against a program in another process, which exchanges only plain values with this one.

The source of this module runs inside the sandbox as ``main.py``. It never runs the candidate's
code, which in turn sees only the arguments of its calls: the tests arrive on standard input and are
in no file. The exit status is the verdict: 0 if the tests pass. Standard output is the reason.
"""

from __future__ import annotations

import builtins
import importlib
import importlib.abc
import json
import os
import subprocess
import sys
import threading
import types
import unittest
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn

try:
    from candidate_server import (  # type: ignore[import-not-found]  # inside the sandbox
        decode,
        dump_line,
        encode,
    )
except ImportError:
    from compound.evaluation.code_tests.candidate import decode, dump_line, encode

LONGEST = 1 << 22  # bytes of an answer
_CONTROL = (
    StopIteration,
    StopAsyncIteration,
    GeneratorExit,
    KeyboardInterrupt,
)  # would end a loop of the tests


def fail(reason: str) -> NoReturn:
    """End with the verdict that the tests fail; no ``except`` of the tests can prevent it."""
    os.write(1, reason[:1000].encode("utf-8", "replace"))
    os._exit(1)


class CandidateProcess:
    """The process of the program."""

    def __init__(self) -> None:
        command = [sys.executable, "-s", "-B", "-X", "utf8", "candidate_server.py"]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        self._turn = threading.Lock()

    def function(self, name: str) -> Callable[..., object]:
        """Return a function that calls a function of the program."""

        def call(*args: object, **named: object) -> object:
            try:
                request = dump_line(
                    {"name": name, "args": encode(list(args)), "named": encode(named)}
                )
            except TypeError as error:
                fail(f"the tests call {name} with {error}")
            try:
                with self._turn:
                    answer = json.loads(self._exchange(request))
                if "fault" in answer:
                    fail(str(answer["fault"]))
                sys.stdout.write(answer["printed"])
                if "value" in answer:
                    return decode(answer["value"])
                raised = rebuild(answer["error"], [decode(item) for item in answer["args"]])
            except (
                OSError,
                ValueError,
                TypeError,
                LookupError,
                RecursionError,
                ImportError,
            ) as error:
                fail(f"no answer of {name}: {type(error).__name__}")
            raise raised

        return call

    def _exchange(self, request: bytes) -> bytes:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(request)
        self._process.stdin.flush()
        return self._process.stdout.readline(LONGEST)


def refuse_pickles() -> None:
    """Fail if the tests unpickle objects, which can be code of the program that wrote them."""
    judge = os.getpid()

    def watch(event: str, _: object) -> None:
        if event == "pickle.find_class" and os.getpid() == judge:
            fail("the tests unpickle an object that is not a plain value")

    sys.addaudithook(watch)


def rebuild(name: str, args: Iterable[object]) -> BaseException:
    """Return a built-in exception by its name.

    >>> rebuild("KeyError", ["a"]), rebuild("StopIteration", [])
    (KeyError('a'), RuntimeError())
    """
    kind = vars(builtins)[name]
    if not issubclass(kind, BaseException) or issubclass(kind, _CONTROL):
        kind = RuntimeError
    raised: BaseException = kind(*args)
    return raised


class CandidateNames(dict[str, Any]):
    """The builtins of the tests; names that these do not define are modules, or functions of the program."""

    def __init__(self, candidate: CandidateProcess) -> None:
        super().__init__(vars(builtins))
        self._candidate = candidate

    def __missing__(self, name: str) -> object:
        """Return what the tests mean by a name that they do not define."""
        if name.startswith("__"):
            raise KeyError(name)
        if name in sys.stdlib_module_names:
            return importlib.import_module(name)
        return self._candidate.function(name)


class Tests(importlib.abc.InspectLoader):
    """Loads the tests without a file and without a cache, which the candidate could write."""

    def __init__(self, source: str) -> None:
        self._source = source

    def get_source(self, fullname: str) -> str:
        """Return the source of the tests."""
        return self._source


def run_cases(module: types.ModuleType) -> Iterator[str]:
    """Run the test cases of a module, and yield why they do not pass."""
    kinds = [kind for kind in vars(module).values() if isinstance(kind, type)]
    cases = [kind for kind in kinds if issubclass(kind, unittest.TestCase)]
    result = unittest.TestResult()
    unittest.TestSuite(map(unittest.TestLoader().loadTestsFromTestCase, cases)).run(result)
    for test, text in (*result.failures, *result.errors):
        yield f"{test.id()}: {text.strip().rpartition(chr(10))[2]}"
    yield from (f"{test.id()}: unexpected success" for test in result.unexpectedSuccesses)
    if result.testsRun <= len(result.skipped):
        yield "no test ran"


def main() -> None:
    """Run the tests."""
    given = json.load(sys.stdin)
    source, entry_point = given["tests"], given["entry_point"]
    here = os.getcwd()
    sys.path = [path for path in sys.path if path not in ("", here)]  # the candidate may write here
    candidate = CandidateProcess()
    os.environ["HOME"] = "/"  # as above: libraries read settings there
    module = types.ModuleType("tests")
    sys.modules["tests"] = module
    vars(module)["__builtins__"] = CandidateNames(candidate)
    sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - until the end of the process
    refuse_pickles()
    try:
        Tests(source).exec_module(module)
        if entry_point:
            check = vars(module).pop("check")  # a tested function may have this name, too
            function = candidate.function(entry_point)
            setattr(module, entry_point, function)
            check(function)
        elif problems := list(run_cases(module)):
            fail("; ".join(problems[:5]))
    except BaseException as error:  # noqa: BLE001 - a test may raise anything
        lines, place = source.split("\n"), error.__traceback__
        line = ""
        while place is not None:
            if place.tb_frame.f_globals is vars(module) and place.tb_lineno <= len(lines):
                line = line or f"{lines[place.tb_lineno - 1].strip()}: "
            place = place.tb_next
        fail(f"{line}{type(error).__name__}: {error}")
    os._exit(0)


if __name__ == "__main__":
    main()
