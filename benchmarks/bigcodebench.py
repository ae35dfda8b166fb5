"""Python steps and metrics of the bigcodebench and mbpp systems: code from answers, own tests, verdicts."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Literal

from compound.core.example import Example, Score
from compound.core.narrowing import entry
from compound.core.security.sandbox.sandbox import Sandbox
from compound.evaluation.code_tests.judge import check_function, verdict_of

Keep = Literal["revised", "passing", "initial"]
LONGEST_REPORT = 600  # characters
FORGEABLE = "the program ran in the process of the tests, where it can forge this verdict"

_BLOCK = re.compile(r"```(?:[Pp]ython3?|py)?[ \t]*\n(.*?)(?:\n[ \t]*```|\Z)", re.DOTALL)


def extract_code(text: str) -> str:
    """Return the code in an answer: its longest fenced block, which may lack its end, or the whole text.

    A text that does not compile is cut after the last line at which it does.

    >>> extract_code("Here it is:\\n```python\\ndef f(x):\\n    return x\\n```\\nIt returns x.")
    'def f(x):\\n    return x'
    >>> extract_code("def f(x):\\n    return x\\n\\nThis function returns x.")
    'def f(x):\\n    return x'
    """
    code = max(_BLOCK.findall(text), key=len, default=text).strip("\n")
    lines = code.split("\n")
    for end in range(len(lines), 0, -1):
        shorter = "\n".join(lines[:end])
        if _compiles(shorter):
            return shorter.rstrip()
    return code


def _compiles(code: str) -> bool:
    try:
        ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True


def with_tests(code: str, tests: str) -> str:
    """Return a program that runs generated tests: statements, or cases of `unittest`.

    >>> print(with_tests("def f(x): return x", "assert f(1) == 1"))
    def f(x): return x
    <BLANKLINE>
    assert f(1) == 1
    """
    program = f"{code}\n\n{tests}"
    if "TestCase" in tests and "unittest.main" not in tests:
        program += "\n\nimport unittest\nunittest.main()"
    return program


def report(ok: bool, limit: str, stderr: str) -> str:
    """Return what a run of generated tests showed, for a model that revises the code.

    >>> report(True, "", "")
    'The tests passed.'
    >>> report(False, "", "Traceback ...\\nAssertionError")
    'The tests failed:\\nTraceback ...\\nAssertionError'
    """
    if ok:
        return "The tests passed."
    if limit:
        return f"The tests were stopped: the program reached its limit of {limit}."
    return f"The tests failed:\n{stderr.strip()[-LONGEST_REPORT:]}"


def choose(initial: str, revised: str, ok: bool, keep: Keep) -> str:
    """Return the final code.

    Args:
        initial: the code before the revision.
        revised: the code after it.
        ok: whether the initial code passed the generated tests.
        keep: ``revised``, as in the paper; ``passing``, the initial code if it passed; or
            ``initial``.

    >>> choose("a", "b", True, "passing"), choose("a", "b", False, "passing")
    ('a', 'b')
    >>> choose("a", "b", True, "revised"), choose("a", "", True, "revised")
    ('b', 'a')
    """
    if keep == "initial" or not revised or (ok and keep == "passing"):
        return initial
    return revised


def split_prompt(prompt: str) -> tuple[str, str]:
    """Split a prompt of MBPP or HumanEval before its last function; return the second part without docstring.

    >>> split_prompt("import math\\n\\ndef f(x):\\n    'Return x.'\\n")
    ('import math\\n\\n', 'def f(x):\\n')
    """
    function = [part for part in ast.parse(prompt).body if isinstance(part, ast.FunctionDef)][-1]
    lines = prompt.splitlines(keepends=True)
    docstring = next(part for part in function.body if isinstance(part, ast.Expr))
    return "".join(lines[: function.lineno - 1]), "".join(
        lines[function.lineno - 1 : docstring.lineno - 1]
    )


async def passes_suite(outputs: Mapping[str, object], example: Example) -> Score:
    """Score 1 if the output ``code`` passes the hidden tests of BigCodeBench, else 0.

    The imports and the header in ``code_prompt`` precede the code, so that an answer need not
    repeat them. It reads the gold fields ``test`` and ``code_prompt``. The tests patch names of the
    program and receive its objects, so they share its process, and a program written for this
    purpose can forge the verdict.
    """
    header = entry(example.gold, "code_prompt", str).rstrip("\n")
    program = f"{header}\n    pass\n\n{entry(outputs, 'code', str)}"
    return await check_in_one_process(program, entry(example.gold, "test", str))


async def check_in_one_process(program: str, test: str, sandbox: Sandbox | None = None) -> Score:
    """Score 1 if all test cases of a `unittest` module pass in the namespace of the program, else 0.

    A program written against this judge can forge the verdict, which the feedback says; see
    ``same_process_suite.py``.
    """
    main = Path(__file__).with_name("same_process_suite.py").read_text(encoding="utf-8")
    found = await verdict_of(main, {"candidate.txt": program, "tests.txt": test}, "", sandbox)
    return replace(found, feedback=f"{found.feedback}; {FORGEABLE}") if found.value else found


async def passes_function(outputs: Mapping[str, object], example: Example) -> Score:
    """Score 1 if the output ``code`` passes the hidden tests of MBPP or HumanEval, else 0.

    What precedes the last function of the prompt, such as imports, precedes the code. It reads the
    input ``prompt`` and the gold fields ``test`` and ``entry_point``.
    """
    prompt = entry(example.inputs, "prompt", str)
    program = f"{split_prompt(prompt)[0]}\n\n{entry(outputs, 'code', str)}"
    return await check_function(
        program,
        entry(example.gold, "test", str),
        entry(example.gold, "entry_point", str),
        helpers=prompt,
    )
