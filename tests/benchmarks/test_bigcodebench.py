"""The benchmarks bigcodebench and mbpp: their files, functions and metrics, and whole runs with a scripted model."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from benchmark_systems import BENCHMARKS, data_folder, evaluated, needs_data
from benchmarks.bigcodebench import (
    Keep,
    choose,
    passes_function,
    passes_suite,
)
from benchmarks.measure.controls import code_controls
from compound.core.example import Example
from compound.testing import ScriptedLM
from compound.yaml import load
from compound.yaml.program import Program
from sandboxes import require_sandbox

PROMPT = "import math\n\ndef area(r):\n    '''Return the area of a circle.'''\n"
RIGHT, WRONG = "def area(r):\n    return math.pi * r**2", "def area(r):\n    return r**2"
CHECK = "def check(candidate):\n    assert abs(area(1) - 3.14159) < 1e-3\n"
SUITE = (
    "import unittest\nclass TestCases(unittest.TestCase):\n    def test_case_1(self):\n"
    "        self.assertAlmostEqual(task_func(1), 3.14159, 3)\n"
)
HEADER = "import math\ndef task_func(r):\n"


def answers(message: str) -> str:
    """Answer like a model: wrong code first, right code once its test has failed."""
    if "unit tests" in message:
        return "```python\nassert area(1) > 3\n```"
    if message.startswith("Improve the code"):
        right = RIGHT if "The tests failed" in message else WRONG
        return f"The corrected code:\n```python\nimport math\n{right}\n```"
    return f"```python\n{WRONG}\n```\nIt returns the area."


@pytest.fixture(scope="module")
def program() -> Program:
    return load(BENCHMARKS / "mbpp.yaml")


@pytest.mark.parametrize(("keep", "score"), [("revised", 1.0), ("passing", 1.0), ("initial", 0.0)])
def test_a_failing_test_leads_to_a_revision(program: Program, keep: Keep, score: float) -> None:
    require_sandbox()
    rows = [{"id": "a", "prompt": PROMPT, "test": CHECK, "entry_point": "area"}]
    bound = replace(program, system=program.system.bind({"final_code.keep": keep}))
    found = evaluated(bound, rows, ScriptedLM(answers))
    assert (found.mean, found.failed) == (score, 0)


@pytest.mark.parametrize(
    ("ok", "keep", "chosen"),
    [
        (True, "revised", "b"),
        (True, "passing", "a"),
        (False, "passing", "b"),
        (False, "initial", "a"),
    ],
)
def test_the_last_step_chooses(ok: bool, keep: Keep, chosen: str) -> None:
    assert choose("a", "b", ok, keep) == chosen
    assert choose("a", "", ok, keep) == "a"


@pytest.mark.parametrize(
    ("code", "score"),
    [(RIGHT, 1.0), (WRONG, 0.0), ("", 0.0), ("import os\nos._exit(0)", 0.0), ("print('OK')", 0.0)],
)
def test_hidden_tests_decide_the_score(code: str, score: float) -> None:
    require_sandbox()
    function = Example("a", {"prompt": PROMPT}, {"test": CHECK, "entry_point": "area"})
    assert asyncio.run(passes_function({"code": code}, function)).value == score
    suite = Example("b", {"instruct_prompt": ""}, {"test": SUITE, "code_prompt": HEADER})
    assert (
        asyncio.run(passes_suite({"code": code.replace("area", "task_func")}, suite)).value == score
    )


@needs_data
def test_solutions_of_the_data_pass_and_empty_programs_do_not() -> None:
    require_sandbox()
    folder = data_folder()
    found: dict[str, Any] = asyncio.run(
        code_controls.controls(folder, ["humaneval", "mbpp_sanitized"], 5)
    )
    for kinds in found.values():
        assert [kinds[kind]["passed"] for kind in ("solutions", "empty", "exit")] == [5, 0, 0]
