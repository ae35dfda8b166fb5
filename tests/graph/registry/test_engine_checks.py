"""Engines of a user that do not keep to their role are refused with the file, the line and the fix."""

from __future__ import annotations

from typing import Any

import pytest

import compound as cp
from compound.core.engine import Capabilities
from compound.graph.registry.user_code import UserCodeError
from compound.testing import ScriptedLM


class Echo:
    name, concurrency, remote, priced = "echo", 4, False, True

    def worst_case(self, request: Any) -> Any:
        return cp.ext.Usage(1, 9, request.max_tokens)

    async def generate(self, request: Any) -> Any:
        return cp.ext.Completion("ok", cp.ext.Usage(1, 9, 1))

    async def aclose(self) -> None:
        pass


class NoRequest(Echo):
    async def generate(self) -> Any:  # type: ignore[override]
        pass


class NotAwaited(Echo):
    def generate(self, request: Any) -> Any:
        return cp.ext.Completion("ok")


class Text(Echo):
    async def generate(self, request: Any) -> Any:
        return "ok"


class Nothing(Echo):
    async def generate(self, request: Any) -> Any:
        pass


class NoText(Echo):
    async def generate(self, request: Any) -> Any:
        return cp.ext.Completion(None)  # type: ignore[arg-type]


class NoUsage(Echo):
    async def generate(self, request: Any) -> Any:
        return cp.ext.Completion("ok", None)  # type: ignore[arg-type]


class Number(Echo):
    def worst_case(self, request: Any) -> Any:
        return 9


class NoWorst(Echo):
    def worst_case(self) -> Any:  # type: ignore[override]
        pass


class Broken(Echo):
    def worst_case(self, request: Any) -> Any:
        return request.words


class Closed:
    name, concurrency, remote, priced = "closed", 4, False, True


def run(engine: Any) -> Any:
    answerer = cp.LLM("answerer")(question=cp.Input("question", str))
    return cp.run(
        cp.System("demo", outputs={"y": answerer}, lm="lm"),
        {"question": "?"},
        engines={"lm": engine},
    )


def line_of(method: Any) -> int:
    line: int = method.__code__.co_firstlineno
    return line


@pytest.mark.parametrize(
    ("engine", "method", "said", "hint"),
    [
        (NoRequest, "generate", "has the signature", "called with (request)"),
        (NotAwaited, "generate", "returned Completion(", "write async def"),
        (Text, "generate", "returned 'ok'", "return compound.ext.Completion("),
        (Nothing, "generate", "returned None", "return compound.ext.Completion("),
        (NoText, "generate", "returned Completion(", "text must be a str"),
        (NoUsage, "generate", "returned Completion(", "its usage a Usage"),
        (Number, "worst_case", "returned 9", "return compound.ext.Usage("),
        (NoWorst, "worst_case", "has the signature", "with (request)"),
    ],
)
def test_a_mistake_names_line_and_fix(engine: Any, method: str, said: str, hint: str) -> None:
    with pytest.raises(UserCodeError) as raised:
        run(engine())
    place = f"{__file__}:{line_of(getattr(engine, method))}"
    assert raised.value.message.startswith(f"{method} of engine 'echo' at {place} {said}")
    assert hint in raised.value.hint


def test_an_exception_in_the_worst_case_is_no_failed_call() -> None:
    with pytest.raises(UserCodeError, match=rf"engine 'echo' .*{__file__}:\d+, in worst_case: "):
        run(Broken())


@pytest.mark.parametrize(
    ("engine", "said", "hint"),
    [
        (
            Closed(),
            "engine 'lm' at {} lacks worst_case, generate, aclose",
            "an engine has name, concurrency",
        ),
        (Echo, "engine 'lm' is the class Echo at {}, not an engine", "create an instance: Echo()"),
    ],
)
def test_what_is_no_engine_is_refused(engine: Any, said: str, hint: str) -> None:
    with pytest.raises(UserCodeError) as raised:
        run(engine)
    before, after = said.split("{}")
    assert raised.value.message.startswith(f"{before}{__file__}:")
    assert raised.value.message.endswith(after)
    assert hint in raised.value.hint


def test_an_engine_needs_none_of_the_optional_members() -> None:
    def add(a: int, b: int) -> int:
        """Add two numbers."""
        return a + b

    plain, able = (
        Capabilities(Echo()),
        Capabilities(ScriptedLM(["ok"], native_tools=True, takes_images=True)),
    )
    assert (plain.native_tools, plain.takes_images, plain.max_wait) == (False, False, 600.0)
    assert (able.native_tools, able.takes_images, able.max_wait) == (True, True, 600.0)
    agent = cp.Agent("agent", prompt="Add.", tools=[add])(question=cp.Input("question", str))
    system = cp.System("adder", outputs={"answer": agent}, lm="lm")
    assert cp.run(system, {"question": "1 + 1?"}, engines={"lm": Echo()}).outputs == {
        "answer": "ok"
    }
