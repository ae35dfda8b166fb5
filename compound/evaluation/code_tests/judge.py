"""Judge generated code by its unit tests, in the sandbox."""

from __future__ import annotations

import functools
import inspect
import json
import re
from collections.abc import Mapping
from dataclasses import replace
from types import ModuleType

from compound.core.errors import DataError
from compound.core.example import Score
from compound.core.security.sandbox.limits import SandboxLimits
from compound.core.security.sandbox.sandbox import Sandbox
from compound.evaluation.code_tests import candidate, tester

LIMITS = SandboxLimits(
    cpu=60.0,
    wall=120.0,
    memory=4096,
    processes=64,
    file_size=32,
    disk=128,
    open_files=256,
    output=64,
)
"""Limits of a run of tests; libraries such as scikit-learn reserve gigabytes of address space."""
ALONE = (
    "tests cannot patch names of the program or receive its objects, which is in another process"
)
_PATCHES = re.compile(r"\bmock\b|\bpatch\b")
_OBJECTS = re.compile(
    r"not a plain value|function CandidateProcess\.|arg \w+ must be an? (exception )?type"
)


async def check_function(
    program: str, test: str, entry_point: str, sandbox: Sandbox | None = None, *, helpers: str = ""
) -> Score:
    """Score 1 if ``check(function)`` of the tests returns without an exception, else 0.

    The program runs in a process of its own, which receives the arguments of calls and returns
    plain values: numbers, texts, lists, tuples, sets and dictionaries of them, arrays of numbers,
    and built-in exceptions. No code of the program can read the tests or change the verdict.

    Args:
        program: the generated program, which defines the function.
        test: a program that defines ``check``, as in HumanEval (Chen et al. 2021).
        entry_point: the name of the function.
        sandbox: where both run; default: one with `LIMITS`.
        helpers: a program that defines other functions that the tests call.

    Raises:
        DataError: the tests define no function ``check``.
    """
    if not re.search(r"^\s*(async\s+)?def\s+check\s*\(", test, re.MULTILINE):
        raise DataError(
            "the tests define no function 'check'",
            hint="for test cases of unittest, call check_suite",
        )
    return await _judge_apart(program, f"{helpers}\n\n{test}", entry_point.strip(), sandbox)


async def check_suite(program: str, test: str, sandbox: Sandbox | None = None) -> Score:
    """Score 1 if all test cases of a `unittest` module pass, else 0.

    The program runs in a process of its own, as with `check_function`; names that the tests neither
    define nor import are its functions.
    """
    return await _judge_apart(program, test, "", sandbox)


async def _judge_apart(
    program: str, tests: str, entry_point: str, sandbox: Sandbox | None
) -> Score:
    files = {"candidate.txt": program, "candidate_server.py": _source(candidate)}
    given = json.dumps({"tests": tests, "entry_point": entry_point}, ensure_ascii=False)
    found = await verdict_of(_source(tester), files, given, sandbox)
    needs = _OBJECTS.search(found.feedback or "") or _PATCHES.search(tests)
    if found.value or not needs:
        return found
    return replace(found, feedback=f"{found.feedback} ({ALONE})")


async def verdict_of(
    main: str, files: Mapping[str, str], stdin: str, sandbox: Sandbox | None
) -> Score:
    """Run a program in the sandbox, and return its exit status as a score with its output as feedback."""
    result = await (sandbox or shared()).run(main, stdin, files)
    if result.ok:
        return Score(1.0, "all tests pass")
    if result.limit:
        return Score(0.0, f"the tests were stopped at the limit {result.limit}")
    last = result.stderr.strip().rpartition("\n")[2]
    reason = result.stdout.strip() or last or f"status {result.status}"
    return Score(0.0, reason)


@functools.cache
def shared() -> Sandbox:
    """Return the sandbox that is used by default."""
    return Sandbox(LIMITS)


@functools.cache
def _source(module: ModuleType) -> str:
    return inspect.getsource(module)
