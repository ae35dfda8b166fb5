"""The events of a run: their order, their texts, failures, retries, and cancellation."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

import compound as cp
from compound.api.stream import Event
from compound.core.engine import OnText
from compound.core.errors import CallError, TransientError
from compound.core.security import sanitize
from compound.testing import ScriptedLM


def chain() -> cp.System:
    rewriter = cp.LLM("rewriter", prompt=cp.Text("Rewrite."))
    answerer = cp.LLM("answerer", prompt=cp.Text("Answer."))
    query = rewriter(question=cp.Input("question"))
    return cp.System("qa", {"answer": answerer(query=query)}, lm="lm")


def events(system: cp.System, lm: Any, **inputs: object) -> list[Event]:
    async def collect() -> list[Event]:
        engines = {"lm": lm}
        return [e async for e in cp.stream(system, inputs or {"question": "?"}, engines=engines)]

    return asyncio.run(collect())


def texts(found: Sequence[Event], component: str, attempt: int = 1) -> str:
    return "".join(
        event.text
        for event in found
        if (event.kind, event.component, event.attempt) == ("token", component, attempt)
    )


def test_a_run_yields_calls_tokens_outputs_and_usage_in_order() -> None:
    found = events(chain(), ScriptedLM({"Rewrite": "the river of Lima", "Answer": "the Rímac"}))
    assert [(e.kind, e.state) for e in found if e.kind != "token"] == [
        ("call", "started"),
        ("call", "finished"),
        ("call", "started"),
        ("call", "finished"),
        ("output", ""),
        ("usage", ""),
    ]
    assert texts(found, "rewriter") == "the river of Lima"
    assert texts(found, "answerer") == "the Rímac"
    assert found[-2].outputs == {"answer": "the Rímac"}
    assert found[-1].usage.calls == 2


def test_an_engine_that_cannot_stream_gives_whole_outputs() -> None:
    found = events(chain(), WithoutStream())
    assert [event.kind for event in found].count("token") == 0
    assert found[-2].kind == "output"


class WithoutStream:
    """The members that the protocol requires, and no others."""

    name, concurrency, remote, priced = "plain", 4, True, True

    def __init__(self) -> None:
        self._inner = ScriptedLM(lambda message: "yes")
        self.generate, self.worst_case, self.aclose = (
            self._inner.generate,
            self._inner.worst_case,
            self._inner.aclose,
        )


class Interrupted(ScriptedLM):
    """Loses the connection after a part of its first answer."""

    lost = False

    async def stream(self, request: cp.ext.Request, on_text: OnText) -> cp.ext.Completion:
        if not self.lost:
            self.lost = True
            on_text("the R")
            raise TransientError("connection lost")
        return await super().stream(request, on_text)


def test_a_retried_call_starts_its_text_again_with_a_higher_attempt() -> None:
    node = cp.LLM("answerer", retries=1)(question=cp.Input("question"))
    found = events(cp.System("qa", {"answer": node}, lm="lm"), Interrupted(["the Rímac"]))
    assert texts(found, "answerer", 1) == "the R"
    assert texts(found, "answerer", 2) == "the Rímac"


def test_a_failed_run_ends_with_an_error_and_its_usage_without_raising() -> None:
    node = cp.LLM("answerer", retries=0)(question=cp.Input("question"))
    found = events(
        cp.System("qa", {"answer": node}, lm="lm"), ScriptedLM([CallError("no such model")])
    )
    assert [event.kind for event in found] == ["call", "call", "error", "usage"]
    assert found[1].state == "failed"
    assert found[2].failure is not None
    assert found[2].failure.message == "no such model"


def test_wrong_inputs_raise_before_anything_runs() -> None:
    with pytest.raises(cp.CompoundError, match="no input 'query'; possible: question"):
        events(chain(), ScriptedLM([]), query="?")


async def test_closing_the_iterator_cancels_the_run() -> None:
    lm = ScriptedLM(lambda message: "never", latency=60.0)
    found = cp.stream(chain(), {"question": "?"}, engines={"lm": lm})
    async for _ in found:
        await asyncio.sleep(0.01)
        break
    assert lm.in_flight == 1
    await found.aclose()
    assert lm.in_flight == 0


class Echo(ScriptedLM):
    """Reports its answer letter by letter from another thread."""

    async def stream(self, request: cp.ext.Request, on_text: OnText) -> cp.ext.Completion:
        completion = await self.generate(request)

        def report() -> None:
            for letter in completion.text:
                on_text(letter)

        await asyncio.to_thread(report)
        return completion


def test_keys_are_removed_from_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sanitize, "_SECRETS", {"sk-very-secret"})
    node = cp.LLM("answerer")(question=cp.Input("question"))
    found = events(
        cp.System("qa", {"answer": node}, lm="lm"), Echo(["the key sk-very-secret works"])
    )
    assert texts(found, "answerer") == "the key [key removed] works"
    assert "secret" not in repr(found)


def test_concurrent_branches_are_told_apart() -> None:
    one, two = (cp.LLM(name)(question=cp.Input("question")) for name in ("one", "two"))
    system = cp.System("both", {"one": one, "two": two}, lm="lm")
    found = events(system, ScriptedLM(lambda message: "a b c d e"))
    assert texts(found, "one") == texts(found, "two") == "a b c d e"
