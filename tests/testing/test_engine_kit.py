"""The kit of engines catches each kind of wrong engine by the check that is meant for it."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from compound.core.engine import Completion, Request, TokenRecord, Usage
from compound.core.errors import CallError, CompoundError
from compound.testing import EngineKit, ScriptedLM, run_kit

TEXT = "Monday, Tuesday, Wednesday and Thursday"


class Right(ScriptedLM):
    """Says the days of the week, and what its tokens were."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(lambda message: TEXT, **{"price": 0.001, **settings})

    async def generate(self, request: Request) -> Completion:
        await asyncio.sleep(0.001)
        if request.messages[0].text == "fail":
            raise self.error()
        found = await super().generate(request)
        if request.want_tokens:
            found = replace(found, tokens=self.record(found))
        answer: Completion = self.changed(found, request)
        return answer

    def error(self) -> Exception:
        return CallError("there is no such model")

    def record(self, found: Completion) -> TokenRecord:
        sampled = tuple(range(len(found.text.split())))
        return TokenRecord((1, 2), sampled, (-0.5,) * len(sampled), found.finish_reason)

    def changed(self, found: Completion, request: Request) -> Any:
        return found


def failures(engine: Callable[[], Any], **attributes: Any) -> dict[str, str]:
    class TestWords(EngineKit):
        timeout = 0.5

        def make(self) -> Any:
            return engine()

        def failing(self) -> tuple[Any, Request]:
            request = self.request()
            return engine(), replace(
                request, messages=(replace(request.messages[0], content="fail"),)
            )

    return run_kit(type("TestWords", (TestWords,), attributes))


def test_a_right_engine_passes() -> None:
    assert failures(Right) == {}
    assert failures(lambda: Right(concurrency=1, priced=False, remote=False)) == {}


def wrong(**attributes: Any) -> Callable[[], Any]:
    return type("Wrong", (Right,), attributes)


def using(**usage: Any) -> Callable[[], Any]:
    return wrong(
        changed=lambda self, found, request: replace(found, usage=replace(found.usage, **usage))
    )


def with_record(**record: Any) -> Callable[[], Any]:
    return wrong(record=lambda self, found: replace(Right.record(self, found), **record))


def costing(change: Callable[[Usage, Request], Usage]) -> Callable[[], Any]:
    return wrong(worst_case=lambda self, asked: change(Right.worst_case(self, asked), asked))


def asking(**request: Any) -> Callable[[], Any]:
    async def generate(self: Right, asked: Request) -> Completion:
        return await Right.generate(self, replace(asked, **request))

    return wrong(generate=generate)


Cheap = costing(lambda usage, asked: replace(usage, cost=0.001 * asked.max_tokens))
Optimistic = costing(
    lambda usage, asked: replace(usage, prompt_tokens=sum(len(m.text) for m in asked.messages) // 8)
)
Unpriced = costing(lambda usage, _: replace(usage, unpriced=1))
Long = asking(max_tokens=16)
Unstoppable = asking(stop=())
Silent = wrong(changed=lambda self, found, _: replace(found, finish_reason="stop", tokens=None))
Including = wrong(
    changed=lambda self, found, request: replace(found, text=found.text + "".join(request.stop))
)
Early = wrong(
    changed=lambda self, found, request: (
        replace(found, text=found.text[:-1]) if request.stop else found
    )
)
NUMBERS = itertools.count()
Numbered = lambda: Right(name=f"words-{next(NUMBERS)}")  # noqa: E731
Forgetful = wrong(
    changed=lambda self, found, _: replace(
        found, text=f"{found.text[: len(found.text) // 2]} {next(NUMBERS)}"
    )
)


class Mixing(Right):
    """Answers with the question, where several are in flight."""

    flying = 0

    async def generate(self, request: Request) -> Completion:
        self.flying += 1
        found = await super().generate(request)
        several, self.flying = self.flying > 1, self.flying - 1
        return replace(found, text=request.messages[-1].text) if several else found


class Locked(Right):
    """Holds its lock for ever after a request that was cancelled."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = asyncio.Lock()

    async def generate(self, request: Request) -> Completion:
        await self.lock.acquire()
        found = await super().generate(request)
        self.lock.release()
        return found


class Shared(Right):
    """All requests in flight wait for one task, which the first one's cancellation ends."""

    task: asyncio.Task[Completion] | None = None

    async def generate(self, request: Request) -> Completion:
        if self.task is None or self.task.done():
            self.task = asyncio.create_task(super().generate(request))
        return await self.task


class Once(Right):
    closed = False

    async def aclose(self) -> None:
        if self.closed:
            raise RuntimeError("it is closed")
        self.closed = True


ENGINE = "test_it_is_an_engine"
WORST = "test_the_worst_case_bounds_the_usage"
MOST = "test_max_tokens_is_respected"
STOP = "test_stop_ends_the_answer"
TOGETHER = "test_concurrent_requests_are_answered"
EQUAL = "test_equal_greedy_requests_have_equal_answers"
CANCELLED = "test_a_cancelled_request_disturbs_no_other"
RECORDS = "test_token_records_are_consistent"
CLOSED = "test_it_may_be_closed_twice"
FAILURE = "test_a_failure_is_an_error_of_this_package"


@pytest.mark.parametrize(
    ("engine", "check", "message"),
    [
        (object, ENGINE, "the engine lacks name, concurrency, remote, priced, generate,"),
        (lambda: Right(name=""), ENGINE, "name must be a non-empty string, but is ''"),
        (lambda: Right(concurrency=0), ENGINE, "concurrency must be an integer >= 1, but is 0"),
        (lambda: Right(remote=None), ENGINE, "remote must be True or False, but is None"),
        (Numbered, ENGINE, "two equivalent engines are named"),
        (using(prompt_tokens=10**6), WORST, "used prompt_tokens=1000000, but worst_case is"),
        (using(calls=2), WORST, "used calls=2, but worst_case is 1"),
        (using(calls=0), WORST, "counts no call"),
        (using(cost=-1.0), WORST, "cost of the usage is -1.0; it must not be negative"),
        (using(completion_tokens=1.5), WORST, "completion_tokens of the usage must be a number,"),
        (Cheap, WORST, "used cost="),
        (Optimistic, WORST, "used prompt_tokens="),
        (Unpriced, WORST, "unpriced=1, but priced is True"),
        (Long, MOST, "tokens, but max_tokens is 1"),
        (with_record(sampled=(1,) * 9, logprobs=(-1.0,) * 9), MOST, "the token record has 9"),
        (Silent, MOST, "was truncated at max_tokens=1, but its finish_reason is 'stop'"),
        (wrong(changed=lambda *_: None), WORST, "generate must return a Completion, but returned"),
        (
            wrong(changed=lambda self, found, _: replace(found, finish_reason="end")),
            WORST,
            "the finish_reason is 'end'",
        ),
        (Unstoppable, STOP, "which is a stop sequence"),
        (Including, STOP, "which is a stop sequence"),
        (Early, STOP, "with stop='o'"),
        (
            wrong(changed=lambda self, found, _: replace(found, text="")),
            STOP,
            "the answer is ''; return a request",
        ),
        (Mixing, TOGETHER, "concurrently, but"),
        (Forgetful, EQUAL, "equal greedy requests are answered"),
        (Locked, CANCELLED, "did not answer within 0.5 s"),
        (Shared, CANCELLED, "cancelling a request cancels another one in flight"),
        (with_record(logprobs=()), RECORDS, "5 sampled tokens, but 0 log-probabilities"),
        (with_record(sampled=("a",) * 5), RECORDS, "sampled of the token record has 'a'"),
        (with_record(logprobs=(0.5,) * 5), RECORDS, "the log-probability 0.5 is above 0"),
        (with_record(logprobs=(float("nan"),) * 5), RECORDS, "the log-probability nan is not"),
        (with_record(prompt=()), RECORDS, "has no prompt"),
        (with_record(finish_reason="length"), RECORDS, "has the finish_reason 'length', the"),
        (
            with_record(sampled=tuple(range(9)), logprobs=(-1.0,) * 9),
            RECORDS,
            "9 sampled tokens, but the usage counts 5",
        ),
        (Once, CLOSED, "RuntimeError: it is closed"),
        (wrong(error=lambda _: KeyError("choices")), FAILURE, "raises KeyError: 'choices'; raise"),
        (wrong(error=lambda _: OSError("gone")), FAILURE, "raises OSError: gone"),
    ],
)
def test_a_wrong_engine_is_caught(engine: Callable[[], Any], check: str, message: str) -> None:
    found = failures(engine)
    assert message in found.get(check, f"{check} passed; failed: {found}")


def test_what_is_declared_and_other_errors_of_the_package_pass() -> None:
    assert failures(Forgetful, deterministic=False) == {}
    assert failures(wrong(error=lambda _: CompoundError("the key is not set"))) == {}


def test_a_request_of_failing_that_is_answered_fails() -> None:
    found = failures(Right, failing=lambda self: (Right(), self.request()))
    assert "the request of failing() did not fail" in found[FAILURE]
