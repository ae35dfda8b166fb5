"""What the kits share: they are light to import, need no pytest, and are collected where they are inherited."""

from __future__ import annotations

import asyncio
import inspect
import os
import random
import subprocess
import sys
from pathlib import Path
from unittest import SkipTest

import numpy as np
import pytest

from compound import testing
from compound.core.engine import Message, Request
from compound.testing import ScriptedLM, run_kit
from compound.testing.checks import (
    json_problem,
    seeded_global_generators,
    without_global_generators,
)
from compound.testing.doubles import Script

ROOT = Path(__file__).parents[2]
KITS_OF = "[getattr(testing, name) for name in testing.__all__]"
KITS = [getattr(testing, name) for name in testing.__all__ if name.endswith("Kit")]


def python(*arguments: str, folder: Path = ROOT) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_ADDOPTS": ""}
    command = [sys.executable, *arguments]
    ran = subprocess.run(
        command, env=environment, cwd=folder, capture_output=True, text=True, check=False
    )
    return ran.stdout + ran.stderr


@pytest.mark.parametrize(
    ("names", "heavy"),
    [
        ("", ("pytest", "pydantic", "networkx", "scipy", "torch", "unittest")),
        (KITS_OF, ("pytest", "torch", "transformers", "litellm", "optuna", "gepa")),
    ],
    ids=["doubles", "kits"],
)
def test_the_import_is_light(names: str, heavy: tuple[str, ...]) -> None:
    program = "import sys; from compound import testing; {}; print({!r} & set(sys.modules))"
    assert python("-c", program.format(names or "0", {*heavy})) == "set()\n"


@pytest.mark.parametrize("kit", KITS)
def test_every_check_and_every_kit_is_described(kit: type[object]) -> None:
    text = inspect.getdoc(kit) or ""
    assert "Example:" in text
    checks = [getattr(kit, name) for name in dir(kit) if name.startswith("test_")]
    assert len(checks) >= 7
    assert all(check.__doc__ for check in checks)


@pytest.mark.parametrize("kit", KITS)
def test_a_hook_that_must_be_overridden_says_so(kit: type[object]) -> None:
    assert any("override make(" in message for message in run_kit(kit).values())


class Checks:
    """Checks of which one passes, one is left out, and the others fail."""

    def test_that_passes(self) -> None:
        pass

    def test_that_is_left_out(self) -> None:
        raise SkipTest("there is nothing to check")

    def test_that_fails(self) -> None:
        raise AssertionError("the engine is wrong; mend it")

    def test_that_raises(self) -> None:
        raise KeyError("words")

    def helper(self) -> None:
        raise ValueError("not a check")


def test_run_kit_returns_what_failed() -> None:
    line = Checks.test_that_raises.__code__.co_firstlineno + 1
    expected = {
        "test_that_fails": "the engine is wrong; mend it",
        "test_that_raises": f"KeyError: 'words' ({__file__}:{line})",
    }
    assert run_kit(Checks) == expected


def test_pytest_collects_a_kit_under_a_test_s_name(tmp_path: Path) -> None:
    """The imported kit itself is not collected; what does not apply is skipped, with the reason."""
    (tmp_path / "test_mine.py").write_text("""
from compound.testing import EngineKit, ScriptedLM

class TestMine(EngineKit):
    def make(self):
        return ScriptedLM(lambda message: "one two three")

class TestWrong(TestMine):
    def make(self):
        return ScriptedLM(lambda message: "one two three", concurrency=0)

    def test_concurrent_requests_are_answered(self):
        "It would wait for a place for ever."
""")
    printed = python(
        "-m", "pytest", "-q", "-ra", "-p", "no:cacheprovider", "test_mine.py", folder=tmp_path
    )
    assert "FAILED test_mine.py::TestWrong::test_it_is_an_engine" in printed
    assert "concurrency must be an integer >= 1, but is 0" in printed
    assert "the engine returns no token records" in printed
    assert "1 failed, 15 passed, 4 skipped" in printed


def test_the_global_generators_are_given_back_their_states() -> None:
    before = random.getstate(), np.random.get_state()[1].tobytes()  # type: ignore[index]
    with seeded_global_generators(1):
        drawn = random.random(), np.random.random()
    with seeded_global_generators(1):
        assert (random.random(), np.random.random()) == drawn
    with (
        pytest.raises(AssertionError, match="it used or seeded the global generator of random"),
        without_global_generators("it"),
    ):
        random.random()
    with pytest.raises(ZeroDivisionError), without_global_generators("it"):
        _ = 1 / 0
    assert (random.getstate(), np.random.get_state()[1].tobytes()) == before  # type: ignore[index]


def test_the_global_generator_of_torch_is_watched() -> None:
    torch = pytest.importorskip("torch")
    state = torch.get_rng_state()
    with pytest.raises(AssertionError, match="of torch"), without_global_generators("it"):
        torch.rand(1)
    assert bool((torch.get_rng_state() == state).all())


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ({"a": [1, 2.5, None, True, "x", (1, 2)]}, ""),
        ({"a": {"b": [object]}}, "a.b.0 is <class 'object'>"),
        ({1: 2}, "it has the key 1, which is not a string"),
        ({"a": [{"b": {2: 3}}]}, "a.0.b has the key 2, which is not a string"),
        (np.int64(3), "it is np.int64(3)"),
    ],
)
def test_what_is_no_json_is_named_by_its_place(value: object, problem: str) -> None:
    assert json_problem(value) == problem


class Draws:
    def __call__(self, message: str, rng: np.random.Generator) -> str:
        return f"{message} {type(rng).__name__}"


def reply(script: Script) -> str:
    return asyncio.run(ScriptedLM(script).generate(Request((Message("user", "hello"),)))).text


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        (lambda message, answer="bound": answer, "bound"),
        (lambda message, *, answer="bound": answer, "bound"),
        (lambda message, *further: str(len(further)), "0"),
        (lambda message, rng: type(rng).__name__, "Generator"),
        (Draws(), "hello Generator"),
        (str.upper, "HELLO"),
    ],
)
def test_a_script_gets_the_generator_if_it_requires_a_second_argument(
    script: Script, expected: str
) -> None:
    assert reply(script) == expected
