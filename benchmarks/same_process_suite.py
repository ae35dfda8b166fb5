"""Run a suite of `unittest` in the process of the candidate, and judge it in another one.

The source of this module runs inside the sandbox: as ``main.py`` it is the judge, which never runs
the candidate's code; it starts itself as ``main.py run`` with the candidate and the tests, and
reads the report. The exit status of the judge is the verdict; its standard output is the reason.

Tests that patch the candidate's module or receive its objects need one process for both. **A
program written for this module can forge the verdict**, for example by an object of another module
that equals everything, or by searching the frames of its process. Only what a model might write by
accident is prevented:

- An early exit, whatever its status, leaves no report; printed text is none: it starts with a random word.
- The report lists every test of the source, which the judge has read itself.
- `unittest` and `builtins` must be unchanged around every test, and tests that must fail (`Canary`) do.
- A comparison method of the candidate's own classes decides no assertion of equality.
"""

from __future__ import annotations

import ast
import builtins
import gc
import importlib.machinery
import json
import os
import secrets
import subprocess
import sys
import types
import unittest
import unittest.mock
from collections.abc import Callable, Iterator

globals()["__builtins__"] = dict(vars(builtins))  # functions of this module keep the original ones
MODULE = "__test__"
_WATCHED = (
    builtins,
    unittest,
    *(vars(unittest)[name] for name in ("case", "suite", "loader", "result", "mock")),
)
_COMPARING = (
    "assertEqual",
    "assertAlmostEqual",
    "assertCountEqual",
    "assertListEqual",
    "assertDictEqual",
)


def snapshot() -> dict[str, object]:
    """Return what decides a test: the attributes of modules and classes, and the code of functions."""
    found: dict[str, object] = {}
    for module in _WATCHED:
        found[module.__name__] = sys.modules.get(module.__name__)
        for name, value in vars(module).items():
            found[f"{module.__name__}.{name}"] = value
            if isinstance(value, type) and value.__module__.startswith("unittest"):
                for key, inner in vars(value).items():
                    found[f"{module.__name__}.{name}.{key}"] = inner
                    found[f"{module.__name__}.{name}.{key}()"] = getattr(inner, "__code__", None)
            elif isinstance(value, types.FunctionType):
                found[f"{module.__name__}.{name}()"] = value.__code__
    return found


def is_same(before: dict[str, object], now: dict[str, object]) -> bool:
    """Return whether two snapshots hold the same objects."""
    return before.keys() <= now.keys() and all(now[name] is before[name] for name in before)


class Canary(unittest.TestCase):
    """Tests that must fail."""

    def test_equal(self) -> None:
        """Fail by the most frequent assertion."""
        self.assertEqual([1], [2])  # noqa: PT009

    def test_true(self) -> None:
        """Fail by an assertion about one value."""
        self.assertTrue(0)  # noqa: PT009

    def test_raises(self) -> None:
        """Fail because nothing is raised."""
        with self.assertRaises(ValueError):  # noqa: PT027
            pass

    def test_fail(self) -> None:
        """Fail in any case."""
        self.fail()

    def test_plain(self) -> None:
        """Fail as an ``assert`` does."""
        if len("ab") == 2:
            raise AssertionError


class Report(unittest.TestResult):
    """Results by test, and whether the machinery was intact around each."""

    def __init__(self, intact: Callable[[], bool]) -> None:
        super().__init__()
        self.passed: list[str] = []
        self.problems: list[str] = []
        self._intact = intact

    def addSuccess(self, test: unittest.TestCase) -> None:  # noqa: N802
        """Record a test that passed, if it was not altered."""
        super().addSuccess(test)
        altered = [name for name in vars(test) if callable(vars(unittest.TestCase).get(name))]
        if altered or not self._intact():
            self.problems.append(f"{test.id()}: unittest was altered")
        else:
            self.passed.append(test.id().partition(".")[2])


def refuse_own_comparisons(path: str) -> None:
    """Let assertions of equality fail on objects whose ``__eq__`` is defined in the file at ``path``."""

    def guarded(original: Callable[..., None]) -> Callable[..., None]:
        def compare(
            self: unittest.TestCase, first: object, second: object, *rest: object, **more: object
        ) -> None:
            for value in (first, second):
                code = getattr(type(value).__eq__, "__code__", None)
                if code is not None and code.co_filename == path:
                    self.fail(f"{type(value).__name__} defines its own equality")
            original(self, first, second, *rest, **more)

        return compare

    for name in _COMPARING:
        setattr(unittest.TestCase, name, guarded(getattr(unittest.TestCase, name)))


def run_suite(word: str, report: int) -> None:
    """Run the tests with the candidate in this process, and write the report."""
    here = os.getcwd()
    candidate = os.path.join(here, "candidate.txt")
    refuse_own_comparisons(candidate)
    unittest.mock.mock_open()  # sets globals of its module at the first call
    before, case, loader, run = snapshot(), unittest.TestCase, unittest.TestLoader(), Canary.run
    canaries = [name for name in vars(Canary) if name.startswith("test_")]

    def intact() -> bool:
        if not is_same(before, snapshot()):
            return False
        result = unittest.TestResult()
        for name in canaries:
            run(Canary(name), result)
        return len(result.failures) == len(canaries)

    module = types.ModuleType(MODULE)
    sys.modules[MODULE] = sys.modules["__main__"] = module
    found = Report(intact)
    try:
        for name in (
            "candidate.txt",
            "tests.txt",
        ):  # separately: no open string of one reaches the other
            importlib.machinery.SourceFileLoader(MODULE, os.path.join(here, name)).exec_module(
                module
            )
    except Exception as error:  # noqa: BLE001 - generated code may raise anything
        found.problems.append(f"{type(error).__name__}: {error}")
    if not intact():
        found.problems.append("unittest or a builtin was altered")
    elif not found.problems:
        kinds = [
            kind
            for kind in vars(module).values()
            if isinstance(kind, type) and issubclass(kind, case)
        ]
        unittest.TestSuite(map(loader.loadTestsFromTestCase, kinds)).run(found)
    wrong = [
        f"{test.id()}: {text.strip().rpartition(chr(10))[2]}"
        for test, text in (*found.failures, *found.errors)
    ]
    document = {
        "passed": found.passed,
        "problems": [text[:300] for text in (*found.problems, *wrong)][:5],
    }
    os.write(report, f"{word}{json.dumps(document)}\n".encode())
    os._exit(0)


def expected_tests(source: str) -> Iterator[str]:
    """Yield the names of the tests in a module: ``Class.test_method``.

    >>> list(expected_tests("class T(unittest.TestCase):\\n    def test_a(self): ...\\n    def x(self): ..."))
    ['T.test_a']
    """
    for kind in ast.parse(source).body:
        if isinstance(kind, ast.ClassDef):
            for item in kind.body:
                if isinstance(
                    item, ast.FunctionDef | ast.AsyncFunctionDef
                ) and item.name.startswith("test"):
                    yield f"{kind.name}.{item.name}"


def judge() -> None:
    """Start the suite, and exit with the verdict."""
    with open("tests.txt", encoding="utf-8") as file:
        wanted = dict.fromkeys(expected_tests(file.read()))
    word = secrets.token_hex(16)
    reading, writing = os.pipe()
    command = [sys.executable, "-s", "-B", "-X", "utf8", "main.py", "run", str(writing)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=2, pass_fds=[writing])
    os.close(writing)
    process.communicate(word.encode())
    with os.fdopen(reading, encoding="utf-8", errors="replace") as pipe:
        said = pipe.read(1 << 20)
    reports = [line.removeprefix(word) for line in said.splitlines() if line.startswith(word)]
    if len(reports) != 1:
        reason, passed = "the program ended before the tests", set()
    else:
        document = json.loads(reports[0])
        passed = set(document["passed"])
        reason = "; ".join(document["problems"]) or "a test did not run"
    missing = [name for name in wanted if name not in passed]
    if wanted and not missing:
        os._exit(0)
    print(f"{len(missing)} of {len(wanted)} tests did not pass: {reason}"[:1000], flush=True)
    os._exit(1)


if __name__ == "__main__":
    if sys.argv[1:2] == ["run"]:
        given = os.read(0, 32).decode()
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        gc.collect()
        run_suite(given, int(sys.argv[2]))
    judge()
