"""Judge generated code by its unit tests, in the sandbox."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from types import ModuleType

from compound.evaluation.code_tests import candidate, codec, suite, tester
from compound.example import Score
from compound.security.sandbox.limits import SandboxLimits
from compound.security.sandbox.sandbox import Sandbox

LIMITS = SandboxLimits(
    cpu=60.0, wall=120.0, memory=4096, processes=64, file_size=32, disk=128, open_files=256, output=64
)
"""Limits of a run of tests; libraries such as scikit-learn reserve gigabytes of address space."""


async def check_function(
    program: str, test: str, entry_point: str, sandbox: Sandbox | None = None, *, helpers: str = ""
) -> Score:
    """Score 1 if ``check(function)`` of the tests returns without an exception, else 0.

    The function runs in a process of its own and exchanges plain values with the tests: numbers, texts,
    lists, tuples, sets and dictionaries of them. No code of the program can change the verdict.

    Args:
        program: the generated program, which defines the function.
        test: a program that defines ``check``, as in HumanEval (Chen et al. 2021).
        entry_point: the name of the function.
        sandbox: where both run; default: one with `LIMITS`.
        helpers: a program that defines other functions that the tests call.
    """
    files = {
        "candidate.txt": program,
        "tests.txt": f"{helpers}\n\n{test}",
        "candidate_server.py": _source(candidate),
        "codec.py": _source(codec),
    }
    return await _verdict(tester, files, entry_point.strip(), sandbox)


async def check_suite(program: str, test: str, sandbox: Sandbox | None = None) -> Score:
    """Score 1 if all test cases of a `unittest` module pass in the namespace of the program, else 0.

    The tests share a process with the program, since they patch its names and receive its objects; see
    `compound.evaluation.code_tests.suite` for what a program can and cannot do to the verdict.

    Args:
        program: the generated program.
        test: the test cases, as in BigCodeBench (Zhuo et al. 2024).
        sandbox: where both run; default: one with `LIMITS`.
    """
    return await _verdict(suite, {"candidate.txt": program, "tests.txt": test}, "", sandbox)


async def _verdict(
    main: ModuleType, files: Mapping[str, str], entry_point: str, sandbox: Sandbox | None
) -> Score:
    arguments = [entry_point] if entry_point else []
    result = await (sandbox or shared()).run(_source(main), files=files, arguments=arguments)
    if result.ok:
        return Score(1.0, "all tests pass")
    if result.limit:
        return Score(0.0, f"the tests were stopped at the limit {result.limit}")
    reason = result.stdout.strip() or result.stderr.strip().rpartition("\n")[2] or f"status {result.status}"
    return Score(0.0, reason)


@functools.cache
def shared() -> Sandbox:
    """Return the sandbox that is used by default."""
    return Sandbox(LIMITS)


@functools.cache
def _source(module: ModuleType) -> str:
    return inspect.getsource(module)
