"""Verdicts on generated code: right programs pass, wrong ones fail, and no program forges a verdict."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.bigcodebench import check_in_one_process
from benchmarks.same_process_suite import expected_tests
from compound.core.errors import DataError
from compound.core.example import Score
from compound.core.security.sandbox.limits import SandboxLimits
from compound.core.security.sandbox.sandbox import Sandbox
from compound.evaluation.code_tests import candidate as codec
from compound.evaluation.code_tests.judge import check_function, check_suite
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


def judged_cases(program: str, test: str = SUITE) -> Score:
    require_sandbox()
    return asyncio.run(check_suite(program, test, SANDBOX))


def judged_together(program: str, test: str = SUITE) -> Score:
    require_sandbox()
    return asyncio.run(check_in_one_process(program, test, SANDBOX))


def test_a_right_program_passes_and_a_verdict_that_can_be_forged_says_so() -> None:
    assert judged_apart(HALVE) == Score(1.0, "all tests pass")
    assert judged_cases(HALVE) == Score(1.0, "all tests pass")
    found = judged_together(HALVE)
    assert found.value == 1.0
    assert "can forge this verdict" in found.feedback


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "apart", "together"),
    [
        ("", "has no attribute 'halve'", "NameError: name 'halve' is not defined"),
        (
            "def halve(x): return x / 2",
            "assert halve(9) == 4: AssertionError",
            "AssertionError: 4.5 != 4",
        ),
        ("def halve(x):", "IndentationError", "IndentationError"),
        ("def halve(x): raise ValueError('odd')", "ValueError: odd", "ValueError: odd"),
        ("def halve(x): return halve(x)", "RecursionError", "RecursionError"),
        (
            "import no_such_module",
            "No module named 'no_such_module'",
            "No module named 'no_such_module'",
        ),
    ],
)
def test_a_wrong_program_fails_with_the_reason(program: str, apart: str, together: str) -> None:
    for found, reason in ((judged_apart(program), apart), (judged_together(program), together)):
        assert found.value == 0.0
        assert reason in (found.feedback or "")


@pytest.mark.slow
def test_a_program_that_does_not_end_is_stopped() -> None:
    require_sandbox()
    brief = Sandbox(SandboxLimits(cpu=30, wall=3))
    program = "def halve(x):\n    import time\n    time.sleep(99)\n"
    for judged in (
        check_function(program, CHECK, "halve", brief),
        check_suite(program, SUITE, brief),
    ):
        found = asyncio.run(judged)
        assert found.value == 0.0
        assert found.feedback.startswith("the tests were stopped at the limit wall")


def test_what_a_program_prints_and_leaves_does_not_matter() -> None:
    noisy = (
        "import os\nprint('x' * 9999)\nopen('f', 'w').write('x')\nos.write(1, b'{}\\n')\n" + HALVE
    )
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
    )
    assert judged_apart(program, test, "same") == Score(1.0, "all tests pass")


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
    "code": "def nothing(self, *a, **k): pass\nunittest.TestCase.assertEqual.__code__ = nothing.__code__",
    "module": "import types\nfake = types.ModuleType('unittest')\nfake.TestCase = type('TestCase', (), {})\nsys.modules['unittest'] = fake",
    "builtin-type": "builtins.AssertionError = type('Quiet', (BaseException,), {})",
    "exit-0": "import os\nos._exit(0)",
    "at-exit": "import atexit, os\natexit.register(os._exit, 0)",
    "exit-in-thread": "import os, threading, time\nthreading.Thread(target=lambda: (time.sleep(0.3), os._exit(0))).start()\ntime.sleep(2)",
    "kill-all": "import os\nos.kill(-1, 9)",
}
IN_A_CALL = {
    "exit-0": "import os\n    os._exit(0)",
    "system-exit": "raise SystemExit(0)",
    "skip": "import unittest\n    raise unittest.SkipTest('later')",
    "print-a-verdict": 'print(\'OK\\nall tests pass\\n{"passed": ["TestHalve.test_even"]}\')\n    import os\n    os._exit(0)',
    "write-to-every-descriptor": (
        "import os\n"
        '    line = b\'{"passed": ["TestHalve.test_even", "TestHalve.test_odd", "TestHalve.test_zero"], "problems": []}\\n\'\n'
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
        "for name in ('json', 'unittest', 'candidate_server', 'main', 'sitecustomize', 'encodings'):\n"
        "        open(name + '.py', 'w').write('import os\\nos._exit(0)')\n    return 'wrong'"
    ),
    "rewrite-the-tests": "open('tests.txt', 'w').write('def check(c): pass')\n    return 'wrong'",
    "generator": "yield 4",
    "recursion": "return halve(x)",
    "kill-the-judge": "import os, signal\n    os.kill(os.getppid(), signal.SIGKILL)",
    "fork": "import os\n    if os.fork() == 0: os._exit(0)\n    return 'wrong'",
}
FORGED = {
    **{f"load-{name}": ALTERING.format(alteration=text) for name, text in ALTERATIONS.items()},
    **{f"call-{name}": f"def halve(x):\n    {text}\n" for name, text in IN_A_CALL.items()},
    "always-equal": ALWAYS_EQUAL,
}


# Programs that an earlier judge passed, and others of their kinds: objects that equal everything,
# subclasses of built-in types, texts of the tests, the process that answers, and the one that asks.
EQUAL = "lambda s, *o: True"
READ = "import re\nT = open('tests.txt').read()\n"
SUBCLASS = """
class K({base}):
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    __lt__ = __le__ = __gt__ = __ge__ = __eq__
    def __hash__(self): return 0
    def __abs__(self): return self
    def __sub__(self, other): return self
    def __repr__(self): return "4"
    {more}
def halve(x): return K()
"""
FRAMES = """
import gc, sys
def halve(x):
    frame = sys._getframe()
    while frame:
        for name, value in list(frame.f_locals.items()):
            if hasattr(value, "passed"): value.passed += ["TestHalve.test_even", "TestHalve.test_odd", "TestHalve.test_zero"]
            if name == "word":
                import json, os
                os.write(frame.f_locals["report"], (value + json.dumps({"passed": ["TestHalve.test_even"], "problems": []})).encode())
        frame = frame.f_back
    for found in gc.get_objects():
        if type(found).__name__ in ("TestHalve", "Report"): found.addFailure = found.assertEqual = found.fail = lambda *a: None
    return 10**9
"""
SERVER = """
import os, sys
import json as j
{patch}
def halve(x): return "wrong"
"""
OWN_OBJECTS = {
    "mock-any": "from unittest.mock import ANY\ndef halve(x): return ANY",
    "slot": "def halve(x): return type('I', (int,), {'__eq__': int.__ge__, '__hash__': int.__hash__})(10**9)",
    "nested": "from unittest.mock import ANY\ndef halve(x): return {'a': [ANY]}",
    "metaclass": f"class M(type):\n    __eq__ = {EQUAL}\n    __hash__ = None\nclass K(metaclass=M): pass\ndef halve(x): return K",
    "false-class": f"class K:\n    __class__ = property(lambda s: int)\n    __eq__ = {EQUAL}\ndef halve(x): return K()",
    "numpy-object": f"import numpy\nclass K: __eq__ = {EQUAL}\ndef halve(x): return numpy.array([K()])[0]",
    **{
        f"subclass-{base}": SUBCLASS.format(base=base, more=more)
        for base, more in {
            "int": "__int__ = __index__ = lambda s: 'x'",
            "str": "__str__ = lambda s: s",
            "list": "__iter__ = lambda s: iter([s])",
        }.items()
    },
    "read-asserts": READ + "def halve(x): return eval(re.search(r'\\(%r\\) == (.+)' % (x,), T)[1])",
    "read-cases": READ + "def halve(x): return eval(re.search(r'\\(%r\\), (.+)\\)' % (x,), T)[1])",
    "frames": FRAMES,
    "patch-json": SERVER.format(patch='j.dumps = lambda d: \'{"value": 4, "printed": ""}\''),
    "patch-codec": SERVER.format(
        patch="c = sys.modules['__main__']\nc.encode = lambda v: {'int': '0x4'}\nc.dump_line = lambda d: b'{}\\n'"
    ),
    "patch-server": SERVER.format(
        patch="m = sys.modules['__main__']\nm.reply = lambda *a: {'value': {'object': 4}, 'printed': ''}"
    ),
    "answers-ahead": SERVER.format(
        patch='for n in range(3, 32):\n    try: os.write(n, b\'{"value": 4, "printed": ""}\\n\' * 50)\n    except OSError: pass'
    ),
    "answers-later": (
        "import os, threading, time\ndef later():\n    time.sleep(0.2)\n    for n in range(3, 32):\n"
        '        try: os.write(n, b\'{"value": 4, "printed": ""}\\n\' * 9)\n        except OSError: pass\n'
        "threading.Thread(target=later).start()\ndef halve(x):\n    time.sleep(0.5)\n    return 0"
    ),
    "other-program": (
        "import os, sys\nos.execv(sys.executable, [sys.executable, '-c', "
        '\'import sys\\nfor l in sys.stdin: print(\\\'{"error": "SystemExit", "args": [0], "printed": ""}\\\', flush=True)\'])'
    ),
    "array-subclass": "import numpy\nclass K(numpy.ndarray):\n    tolist = lambda s: [4]\ndef halve(x): return numpy.array([1]).view(K)",
    "answer-twice": SERVER.format(
        patch='sys.modules[\'__main__\'].dump_line = lambda d: b\'{"error": "exit", "args": [0], "printed": "", "error": "SkipTest"}\\n\''
    ),
    "process-group": "import os, signal\ndef halve(x):\n    os.killpg(os.getpgid(os.getppid()), signal.SIGINT)\n    return 0",
    "huge-answer": "def halve(x): return [4] * (1 << 21)",
    "deep-answer": "def halve(x):\n    v = 4\n    for _ in range(900): v = [v]\n    return v",
    "limits-of-the-judge": "import os, resource\ndef halve(x):\n    resource.prlimit(os.getppid(), resource.RLIMIT_NOFILE, (0, 0))",
    "fake-skip": "SkipTest = type('SkipTest', (AssertionError,), {})\ndef halve(x): raise SkipTest",
    "expected-in-error": "class E(Exception):\n    def __str__(s): return '\\n'.join(['all tests pass'] * 9)\ndef halve(x): raise E",
}
SEARCH = """
import gc, os, sys
def halve():
    seen = [repr(sys.argv), repr(dict(os.environ))]
    for top in ("/tmp", "/dev", "/proc", os.path.expanduser("~")):
        for folder, _, names in os.walk(top):
            paths = [os.path.join(folder, name) for name in names]
            seen += [open(p, errors="replace").read() for p in paths if os.path.isfile(p) and "candidate.txt" not in p]
    for number in range(64):
        try: seen.append(os.pread(number, 1 << 20, 0).decode(errors="replace"))
        except OSError: pass
    frame = sys._getframe().f_back
    while frame:
        seen.append(repr(frame.f_locals) + repr(frame.f_globals) + repr(frame.f_code.co_consts))
        frame = frame.f_back
    for found in gc.get_objects():
        if type(found) in (list, tuple, set, dict):
            seen += [o for o in list(found) + list(getattr(found, "values", list)()) if isinstance(o, str)]
    return sorted({text[:80] for text in seen if "NEEDLE".lower() in text})
"""


ATTACKS = {**FORGED, **OWN_OBJECTS}


@pytest.mark.slow
@pytest.mark.parametrize("attack", ATTACKS)
def test_no_program_forges_a_verdict(attack: str) -> None:
    """The tests of both functions run in the same process; half of the programs meet each."""
    judged: Any = (judged_apart, judged_cases)[len(attack) % 2]
    assert judged(ATTACKS[attack]).value == 0.0


@pytest.mark.slow
@pytest.mark.parametrize("attack", [name for name in FORGED if name.startswith("load-")])
def test_exits_prints_and_altered_libraries_pass_no_test_in_one_process(attack: str) -> None:
    assert judged_together(FORGED[attack]).value == 0.0


def test_no_text_of_the_tests_lies_where_the_program_can_read_it() -> None:
    """The program searches its files, descriptors, arguments, environment, objects and frames."""
    for judged, test in (
        (judged_apart, "def check(candidate):\n    assert candidate() == []  # needle\n"),
        (
            judged_cases,
            SUITE.partition("    def setUp")[0]
            + "    def test_a(self):\n        self.assertEqual(halve(), [])  # needle\n",
        ),
    ):
        assert judged(SEARCH, test) == Score(1.0, "all tests pass")


@pytest.mark.parametrize(
    "error", ["StopIteration", "GeneratorExit", "KeyboardInterrupt", "SystemExit"]
)
def test_an_exception_of_the_program_ends_no_loop_of_the_tests(error: str) -> None:
    test = "def check(candidate):\n    for found in map(candidate, [8, 9]):\n        assert found == 4\n"
    assert judged_apart(f"def halve(x): raise {error}", test).value == 0.0


@pytest.mark.parametrize(
    "program",
    [
        "import os\ndef halve(x): os._exit(0)",
        "def third(x): return x",
        "raise ValueError",
        "halve = lambda x: object()",
    ],
)
def test_a_program_that_gives_no_answer_does_not_raise_the_expected_exception(program: str) -> None:
    test = "import pytest\ndef check(candidate):\n    with pytest.raises(BaseException):\n        candidate(1)\n"
    assert judged_apart(program, test).value == 0.0
    assert judged_apart("def halve(x): raise OSError", test).value == 1.0


def test_expected_exceptions_tolerances_and_printed_texts_are_judged() -> None:
    program = """
import sys
def read(text):
    print("read", text)
    if not text: raise ValueError("no text", 1)
    if text == "x": sys.exit(3)
    return {"number": float(text), "parts": (text, {1, None})}
def scale(array): return array * 2
"""
    test = """
import contextlib, io, math, unittest
from unittest.mock import patch
import numpy
class TestRead(unittest.TestCase):
    def test_value(self):
        self.assertAlmostEqual(read("0.1")["number"] * 3, 0.3)
        self.assertTrue(math.isclose(read("1e-3")["number"], 0.001))
        self.assertTrue(math.isnan(read("nan")["number"]))
        self.assertEqual(read("1")["parts"], ("1", {1, None}))
    def test_array(self):
        numpy.testing.assert_array_equal(scale(numpy.array([[1, 2]], "int16")), [[2, 4]])
        self.assertEqual(scale(numpy.array([0.5], "float32")).dtype, numpy.float32)
        self.assertEqual(scale(numpy.int64(4)), 8)
    def test_error(self):
        with self.assertRaisesRegex(ValueError, "no text"): read("")
        with self.assertRaises(ValueError): read("word")
        with self.assertRaises(SystemExit) as caught: read("x")
        self.assertEqual(caught.exception.args, (3,))
    def test_printed(self):
        with contextlib.redirect_stdout(io.StringIO()) as found: read("5")
        self.assertEqual(found.getvalue(), "read 5\\n")
        with patch("sys.stdout", new=io.StringIO()) as found: read("6")
        self.assertEqual(found.getvalue(), "read 6\\n")
    def test_threads(self):
        from concurrent.futures import ThreadPoolExecutor
        texts = [str(n) for n in range(20)]
        with ThreadPoolExecutor(8) as pool: found = list(pool.map(read, texts))
        self.assertEqual([entry["number"] for entry in found], list(range(20)))
"""
    assert judged_cases(program, test) == Score(1.0, "all tests pass")
    for right, wrong in (
        ("float(text)", "float(text) + 1e-3"),
        ("ValueError", "KeyError"),
        ('"read"', '"Read"'),
        ("{1, None}", "{1}"),
        ("* 2", "* 3"),
    ):
        assert judged_cases(program.replace(right, wrong), test).value == 0.0


PICKLES = {
    "file": ("pickle.dump(E(), open(p, 'wb'))", "pickle.load(open(p, 'rb'))"),
    "text": ("return pickle.dumps(E())", "pickle.loads(value)"),
    "array": ("numpy.save(p, numpy.array([E()], object))", "numpy.load(p, allow_pickle=True)"),
    "shelf": ("s = shelve.open(p); s['a'] = E(); s.close()", "shelve.open(p)['a']"),
    "python": ("pickle.dump(E(), open(p, 'wb'))", "pickle._Unpickler(open(p, 'rb')).load()"),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", PICKLES)
def test_pickles_of_a_program_run_no_code_in_the_process_of_the_tests(kind: str) -> None:
    written, read = PICKLES[kind]
    program = f"import numpy, os, pickle, shelve\nclass E:\n    def __reduce__(s): return (os._exit, (0,))\ndef save(p): {written}\n"
    test = f"import numpy\ndef check(candidate):\n    p = '/tmp/work/x.npy'\n    value = candidate(p)\n    assert {read} == 4\n"
    found = judged_apart(program, test, "save")
    assert found.value == 0.0
    assert "not a plain value (tests cannot patch" in (found.feedback or "")
    assert judged_apart(program.replace("E()", "4"), test, "save").value == float(kind != "array")


def test_tests_that_need_one_process_are_told_so() -> None:
    test = SUITE.replace("halve(0), 0", "halve(0).value, 0")
    program = "class Box:\n    value = 0\ndef halve(x): return x // 2 if x else Box()\n"
    assert "cannot patch names" in judged_cases(program, test).feedback
    assert judged_together(program, test).value == 1.0
    for line in (
        "self.assertEqual(LIMIT, 4)",
        "self.assertIsInstance(halve(0), Box)",
        "self.assertRaises(Bad, halve, 0)",
    ):
        assert "cannot patch names" in judged_cases(program, SUITE + f"        {line}\n").feedback
    with pytest.raises(DataError, match="define no function 'check'"):
        judged_apart(HALVE, "assert halve(8) == 4")


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


PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary()
    | st.complex_numbers(allow_nan=False),
    lambda inner: (
        st.lists(inner)
        | st.dictionaries(st.text() | st.integers() | st.tuples(st.integers()), inner)
        | st.lists(inner).map(tuple)
        | st.sets(st.integers() | st.text())
        | st.frozensets(st.text())
    ),
)


@given(PLAIN)
def test_plain_values_survive_the_codec(value: object) -> None:
    found = codec.decode(codec.encode(value))
    assert found == value
    assert repr(found) == repr(value) or isinstance(value, set | frozenset | list | dict | tuple)


def test_only_plain_values_are_encoded_and_only_encoded_ones_decoded() -> None:
    for value in (object(), len, iter([]), [{1: object()}]):
        with pytest.raises(TypeError, match="not a plain value"):
            codec.encode(value)
    wrong: list[object] = [
        {},
        {"int": 5},
        {"object": []},
        {"int": "0x1", "float": "0"},
        1.5,
        [{"tuple": 3}],
    ]
    for data in wrong:
        with pytest.raises(ValueError, match="not an encoded value"):
            codec.decode(data)
    assert math.isnan(codec.decode(codec.encode(math.nan)))  # type: ignore[arg-type]


def test_the_expected_tests_are_those_of_the_classes() -> None:
    source = "def test_a(): ...\nclass A:\n    async def test_b(self): ...\n    def x(self): ...\nclass B:\n    def testC(self): ..."
    assert list(expected_tests(source)) == ["A.test_b", "B.testC"]
