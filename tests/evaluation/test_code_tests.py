"""Verdicts on generated code: right programs pass, wrong ones fail, and no program forges a verdict."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compound.evaluation.code_tests import codec, suite, tester
from compound.evaluation.code_tests.judge import check_function, check_suite
from compound.example import Score
from compound.security.sandbox.limits import SandboxLimits
from compound.security.sandbox.sandbox import Sandbox
from sandboxes import require_sandbox

SANDBOX = Sandbox(SandboxLimits(cpu=30, wall=60, memory=1024, processes=16))
HALVE = "def halve(x):\n    return x // 2\n"
CHECK = "def check(candidate):\n    assert candidate(8) == 4\n    assert halve(9) == 4\n    assert halve(2) == 1\n"
SUITE = """
import unittest
from unittest.mock import patch, mock_open
class TestHalve(unittest.TestCase):
    def setUp(self):
        self.maxDiff = None
    def test_even(self):
        self.assertEqual(halve(8), 4)
    def test_odd(self):
        self.assertEqual(halve(9), 4)
        self.assertTrue(halve(9) == 4)
    @patch("builtins.open", new_callable=mock_open)
    def test_zero(self, opened):
        self.assertEqual(halve(0), 0)
"""


def judged_apart(program: str, test: str = CHECK, entry_point: str = "halve", **more: str) -> Score:
    require_sandbox()
    return asyncio.run(check_function(program, test, entry_point, SANDBOX, **more))


def judged_together(program: str, test: str = SUITE) -> Score:
    require_sandbox()
    return asyncio.run(check_suite(program, test, SANDBOX))


# --- right and wrong programs ------------------------------------------------------------------------------


def test_a_right_program_passes() -> None:
    assert judged_apart(HALVE) == Score(1.0, "all tests pass")
    assert judged_together(HALVE) == Score(1.0, "all tests pass")


@pytest.mark.parametrize(
    ("program", "apart", "together"),
    [
        ("", "has no attribute 'halve'", "NameError: name 'halve' is not defined"),
        ("def halve(x): return x / 2", "assert halve(9) == 4: AssertionError", "AssertionError: 4.5 != 4"),
        ("def halve(x):", "IndentationError", "IndentationError"),
        ("def halve(x): raise ValueError('odd')", "ValueError: odd", "ValueError: odd"),
        ("def halve(x): return halve(x)", "RecursionError", "RecursionError"),
        ("import no_such_module", "No module named 'no_such_module'", "No module named 'no_such_module'"),
    ],
)
def test_a_wrong_program_fails_and_the_feedback_says_why(program: str, apart: str, together: str) -> None:
    for found, reason in ((judged_apart(program), apart), (judged_together(program), together)):
        assert found.value == 0.0
        assert reason in (found.feedback or "")


def test_a_program_that_does_not_end_is_stopped() -> None:
    require_sandbox()
    brief = Sandbox(SandboxLimits(cpu=30, wall=3))
    program = "def halve(x):\n    import time\n    time.sleep(99)\n"
    for judged in (check_function(program, CHECK, "halve", brief), check_suite(program, SUITE, brief)):
        assert asyncio.run(judged) == Score(0.0, "the tests were stopped at the limit wall")


def test_what_a_program_prints_and_leaves_does_not_matter() -> None:
    noisy = "import os\nprint('x' * 9999)\nopen('f', 'w').write('x')\nos.write(1, b'{}\\n')\n" + HALVE
    assert judged_apart(noisy).value == 1.0
    assert judged_together(noisy).value == 1.0


def test_tests_call_helpers_of_the_prompt_and_of_the_program() -> None:
    prompt = "import math\ndef twice(x):\n    return 2 * x\ndef halve(x):\n    '''Halve.'''\n"
    program = "def halve(x): return x // 2\ndef third(x): return x // 3\n"
    test = (
        "def check(candidate):\n    assert candidate(twice(3)) == third(9) == 3\n    assert math.floor(2.5) == 2\n"
        "    assert string.digits\n"
    )
    assert judged_apart(program, test, helpers=prompt).value == 1.0
    assert judged_apart(HALVE, test, helpers=prompt).value == 0.0


def test_a_tested_function_may_be_named_like_the_test() -> None:
    test = "def check(candidate):\n    assert check(4) == 2\n"
    for entry_point in ("check", "half", " half "):
        program = "def half(x): return x // 2\ndef check(x): return half(x)\n"
        assert judged_apart(program, test, entry_point).value == 1.0
    assert judged_apart("def check(x): return 0", test, "check").value == 0.0


def test_values_keep_their_types_between_the_processes() -> None:
    program = "def same(x): return x"
    test = (
        "def check(candidate):\n"
        "    for v in [(1, [2]), {1: (2,)}, {1, 2}, frozenset({1}), 2.5, float('inf'), 2**80, -2**63, 1j, b'x', None, True, 'é\\ud800']:\n"
        "        assert candidate(v) == v and type(candidate(v)) is type(v)\n"
        "    assert candidate(float('nan')) != candidate(float('nan'))\n"
    )  # fmt: skip
    assert judged_apart(program, test, "same") == Score(1.0, "all tests pass")


# --- forgeries ---------------------------------------------------------------------------------------------

ALTERING = """
import builtins, sys, unittest
{alteration}
def halve(x):
    return "wrong"
"""
ALWAYS_EQUAL = """
class Anything:
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __hash__(self): return 0
    def __bool__(self): return True
def halve(x): return Anything()
"""
ALTERATIONS = {
    "assertEqual": "unittest.TestCase.assertEqual = lambda *a, **k: None\nunittest.TestCase.assertTrue = lambda *a, **k: None",
    "fail": "unittest.TestCase.fail = lambda *a: None\nunittest.TestCase.failureException = Exception",
    "code": "def nothing(self, *a, **k): pass\nunittest.TestCase.assertEqual.__code__ = nothing.__code__",
    "run": "unittest.TestCase.run = lambda self, result=None: result.addSuccess(self)",
    "suite": "unittest.TestSuite.run = lambda self, result, debug=False: [result.addSuccess(t) for t in self]",
    "result": "unittest.TestResult.addFailure = unittest.TestResult.addError = lambda *a: None",
    "module": "import types\nfake = types.ModuleType('unittest')\nfake.TestCase = type('TestCase', (), {})\nsys.modules['unittest'] = fake",
    "case-class": "class Fake(unittest.TestCase):\n    def assertEqual(self, *a): pass\n    assertTrue = assertEqual\nunittest.TestCase = Fake",
    "case-metaclass": "unittest.case.TestCase.__call__ = lambda self, *a: None",
    "builtin-type": "builtins.AssertionError = type('Quiet', (BaseException,), {})",
    "builtin-all": "builtins.all = builtins.any = builtins.isinstance = lambda *a: True",
    "builtin-all-only": "builtins.all = lambda *a: True\nunittest.TestCase.assertEqual = unittest.TestCase.assertTrue = lambda *a: None",
    "builtin-vars": "known = vars(unittest.TestCase)\nbuiltins.vars = lambda *a: {}\nunittest.TestCase.assertEqual = unittest.TestCase.assertTrue = lambda *a: None",
    "main-module": (
        "import __main__\nfor name in list(vars(__main__)):\n"
        "    if callable(getattr(__main__, name)): setattr(__main__, name, lambda *a, **k: True)\n"
        "unittest.TestCase.assertEqual = unittest.TestCase.assertTrue = lambda *a: None"
    ),
    "builtin-callable": "builtins.print = lambda *a: None\nbuiltins.getattr = lambda *a: None",
    "loader": "unittest.TestLoader.loadTestsFromTestCase = lambda self, kind: unittest.TestSuite()",
    "exit-0": "import os\nos._exit(0)",
    "sys-exit": "sys.exit(0)",
    "at-exit": "import atexit, os\natexit.register(os._exit, 0)",
    "quit": "raise SystemExit",
    "exit-in-thread": "import os, threading, time\nthreading.Thread(target=lambda: (time.sleep(0.3), os._exit(0))).start()\ntime.sleep(2)",
    "trace": "sys.settrace(lambda *a: None)\nsys.exit = lambda *a: None",
    "hook": "sys.excepthook = lambda *a: None",
    "open-string": "text = '''",
    "skip": "unittest.skipAll = True\nraise unittest.SkipTest",
    "own-tests": "class TestHalve(unittest.TestCase):\n    def test_even(self): pass\n    def test_odd(self): pass\n    def test_zero(self): pass",
    "kill-the-judge": "import os, signal\nos.kill(os.getppid(), signal.SIGTERM)",
    "kill-all": "import os\nos.kill(-1, 9)",
}  # fmt: skip
IN_A_CALL = {
    "exit-0": "import os\n    os._exit(0)",
    "system-exit": "raise SystemExit(0)",
    "skip": "import unittest\n    raise unittest.SkipTest('later')",
    "print-a-verdict": "print('OK\\nall tests pass\\n{\"passed\": [\"TestHalve.test_even\"]}')\n    import os\n    os._exit(0)",
    "write-to-every-descriptor": (
        "import os\n"
        "    line = b'{\"passed\": [\"TestHalve.test_even\", \"TestHalve.test_odd\", \"TestHalve.test_zero\"], \"problems\": []}\\n'\n"
        "    for number in range(1, 64):\n        try: os.write(number, line)\n        except OSError: pass\n"
        "    os._exit(0)"
    ),
    "answer-by-itself": (
        "import os\n    for number in range(1, 64):\n"
        "        try: os.write(number, b'{\"value\": 4}\\n' * 9)\n        except OSError: pass\n    os._exit(0)"
    ),
    "patch-the-test": (
        "import sys\n    frame = sys._getframe()\n"
        "    while frame:\n        test = frame.f_locals.get('self')\n"
        "        if hasattr(test, 'assertEqual'): test.assertEqual = test.assertTrue = lambda *a: None\n"
        "        frame = frame.f_back\n    return 'wrong'"
    ),
    "alter-in-a-call": "import unittest\n    unittest.TestCase.assertEqual = unittest.TestCase.assertTrue = lambda *a: None\n    return 1",
    "write-modules": (
        "for name in ('json', 'unittest', 'codec', 'main', 'sitecustomize', 'encodings'):\n"
        "        open(name + '.py', 'w').write('import os\\nos._exit(0)')\n    return 'wrong'"
    ),
    "rewrite-the-tests": "open('tests.txt', 'w').write('def check(c): pass')\n    return 'wrong'",
    "generator": "yield 4",
    "recursion": "return halve(x)",
    "kill-the-judge": "import os, signal\n    os.kill(os.getppid(), signal.SIGKILL)",
    "fork": "import os\n    if os.fork() == 0: os._exit(0)\n    return 'wrong'",
}  # fmt: skip
FORGED = {
    **{f"load-{name}": ALTERING.format(alteration=text) for name, text in ALTERATIONS.items()},
    **{f"call-{name}": f"def halve(x):\n    {text}\n" for name, text in IN_A_CALL.items()},
    "always-equal": ALWAYS_EQUAL,
}


@pytest.mark.parametrize("attack", FORGED)
@pytest.mark.parametrize("judged", [judged_apart, judged_together])
def test_no_program_forges_a_verdict(judged: Any, attack: str) -> None:
    tests = SUITE if judged is judged_together else CHECK
    assert judged(FORGED[attack], tests).value == 0.0


def test_an_unknown_answer_of_the_candidate_fails() -> None:
    program = "import os\nos.write(1, b'[' * 100000 + b'\\n')\ndef halve(x): return 4\n" + (
        "import sys\nfor n in range(3, 64):\n    try: os.write(n, b'[' * 99999 + b'\\n')\n    except OSError: pass\n"
    )
    assert judged_apart(program).value == 0.0


def test_a_suite_without_tests_does_not_pass() -> None:
    assert judged_together(HALVE, "import unittest").value == 0.0


def test_a_failing_fixture_fails_the_suite() -> None:
    test = SUITE + "    @classmethod\n    def setUpClass(cls):\n        raise OSError('no data')\n"
    found = judged_together(HALVE, test)
    assert found.value == 0.0
    assert "no data" in (found.feedback or "")


# --- parts that run inside ---------------------------------------------------------------------------------

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary() | st.complex_numbers(allow_nan=False),
    lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.integers() | st.tuples(st.integers()), inner) | st.lists(inner).map(tuple)
    | st.sets(st.integers() | st.text()) | st.frozensets(st.text()),
)  # fmt: skip


@given(PLAIN)
def test_plain_values_survive_the_codec(value: object) -> None:
    found = codec.decode(codec.encode(value))
    assert found == value
    assert repr(found) == repr(value) or isinstance(value, set | frozenset | list | dict | tuple)


def test_only_plain_values_are_encoded_and_only_encoded_ones_decoded() -> None:
    for value in (object(), len, iter([]), [{1: object()}]):
        with pytest.raises(TypeError, match="not a plain value"):
            codec.encode(value)
    wrong: list[object] = [{}, {"int": 5}, {"object": []}, {"int": "0x1", "float": "0"}, 1.5, [{"tuple": 3}]]
    for data in wrong:
        with pytest.raises(ValueError, match="not an encoded value"):
            codec.decode(data)
    assert math.isnan(codec.decode(codec.encode(math.nan)))  # type: ignore[arg-type]


def test_missing_names_are_found_in_functions_inside() -> None:
    code = compile("def f():\n    return [g(x) for x in h] + len(known)\n", "", "exec")
    assert sorted(set(tester.missing_names(code, {"known": 1}))) == ["g", "h"]


def test_the_expected_tests_are_those_of_the_classes() -> None:
    source = "def test_a(): ...\nclass A:\n    async def test_b(self): ...\n    def x(self): ...\nclass B:\n    def testC(self): ..."
    assert list(suite.expected_tests(source)) == ["A.test_b", "B.testC"]
