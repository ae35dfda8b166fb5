"""Conformance kit for engines."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import TypeVar
from unittest import SkipTest

from compound.core.engine import (
    Capabilities,
    Completion,
    Engine,
    Message,
    Request,
    TokenRecord,
    Usage,
)
from compound.core.errors import CompoundError
from compound.core.formatting import short_repr

__all__ = ["EngineKit"]

T = TypeVar("T")
ATTRIBUTES = ("name", "concurrency", "remote", "priced", "generate", "worst_case", "aclose")
NUMBERS = ("calls", "prompt_tokens", "completion_tokens", "cost")
FINISHED = ("stop", "length")
ROUNDING = 0.01  # tolerance above 0 for log-probabilities, which servers compute in low precision


class EngineKit:
    """Checks of an engine; subclass it as ``Test…``, and override `make`.

    Each check creates an engine and closes it. Resources that `make` needs, such as a server, may
    come from a pytest fixture: a method with ``@pytest.fixture(autouse=True)`` that stores them on
    ``self``.

    Attributes:
        deterministic: whether the engine guarantees equal answers to equal greedy requests,
            sequential or concurrent. Set it to False for a provider without this guarantee.
        timeout: time limit of a check in seconds.

    Example:
        >>> from compound.core.errors import CallError
        >>> from compound.testing import EngineKit, ScriptedLM, run_kit
        >>> class TestScripted(EngineKit):
        ...     def make(self):
        ...         return ScriptedLM(lambda message: "Monday, Tuesday, Wednesday")
        ...     def failing(self):
        ...         return ScriptedLM([CallError("no such model")]), self.request()
        >>> run_kit(TestScripted)
        {}
    """

    deterministic: bool = True
    timeout: float = 60.0

    def make(self) -> Engine:
        """Return a new engine. Override this; all returned engines must be equivalent."""
        raise NotImplementedError("override make() to return the engine to test")

    def request(self) -> Request:
        """Return a greedy request whose answer has at least two letters."""
        return Request((Message("user", "Name the days of the week."),), max_tokens=16, seed=7)

    def failing(self) -> tuple[Engine, Request] | None:
        """Return an engine and a request that it cannot answer; ``None`` skips the check of failures."""
        return None

    def test_it_is_an_engine(self) -> None:
        """The engine has the attributes of the protocol, with the right types."""

        engine, again = self.make(), self.make()
        missing = [name for name in ATTRIBUTES if not hasattr(engine, name)]
        assert not missing, (
            f"the engine lacks {', '.join(missing)}; see compound.core.engine.Engine"
        )
        count = engine.concurrency
        for name, what, holds in (
            ("name", "a non-empty string", isinstance(engine.name, str) and bool(engine.name)),
            ("concurrency", "an integer >= 1", type(count) is int and count >= 1),
            ("remote", "True or False", isinstance(engine.remote, bool)),
            ("priced", "True or False", isinstance(engine.priced, bool)),
        ):
            assert holds, f"{name} must be {what}, but is {short_repr(getattr(engine, name))}"
        assert engine.name == again.name, (
            f"two equivalent engines are named {engine.name!r} and {again.name!r}; the name is part of cache "
            "keys, so it must depend only on the model and the settings that change answers"
        )

    def test_the_worst_case_bounds_the_usage(self) -> None:
        """The usage of an answer is at most the ``worst_case`` of its request."""

        async def check(engine: Engine) -> None:
            for request in self._requests():
                worst = engine.worst_case(request)
                _check_usage(worst, "worst_case", request)
                assert worst.unpriced == (not engine.priced), (
                    f"worst_case has unpriced={worst.unpriced}, but priced is {engine.priced}; an engine "
                    "without a price counts each call as unpriced"
                )
                completion = await _answer(engine, request)
                _check_usage(completion.usage, "the usage", request)
                _check_within(completion.usage, worst, request)

        self._run(check)

    def test_max_tokens_is_respected(self) -> None:
        """An answer has at most ``max_tokens`` tokens, and reports whether it was truncated."""
        whole = self._run(lambda engine: _answer(engine, self.request()))
        for most in (1, 3):
            request = replace(self.request(), max_tokens=most, want_tokens=True)
            cut = self._run(lambda engine, request=request: _answer(engine, request))  # type: ignore[misc]
            used = cut.usage.completion_tokens
            assert used <= most, f"the answer has {used} tokens, but max_tokens is {most}"
            sampled = len(cut.tokens.sampled) if cut.tokens else 0
            assert sampled <= most, (
                f"the token record has {sampled} tokens, but max_tokens is {most}"
            )
            if self.deterministic and whole.usage.completion_tokens > most:
                assert cut.finish_reason == "length", (
                    f"the answer was truncated at max_tokens={most}, but its finish_reason is "
                    f"{cut.finish_reason!r}; it must be 'length'"
                )

    def test_stop_ends_the_answer(self) -> None:
        """The answer ends before a stop sequence and does not include it."""

        async def check(engine: Engine) -> None:
            text = (await _answer(engine, self.request())).text
            # a letter of the text that differs from its first one
            stop = next(
                (letter for letter in text[1:] if letter.isalnum() and text.find(letter) > 0), ""
            )
            assert stop, (
                f"the answer is {text!r}; return a request whose answer has at least two letters"
            )
            found = (await _answer(engine, replace(self.request(), stop=(stop,)))).text
            assert stop not in found, (
                f"the answer {found!r} contains {stop!r}, which is a stop sequence"
            )
            if self.deterministic:
                expected = text[: text.find(stop)]
                assert found == expected, (
                    f"with stop={stop!r} the answer {text!r} becomes {found!r} instead of {expected!r}"
                )

        self._run(check)

    def test_concurrent_requests_are_answered(self) -> None:
        """Concurrent requests are answered, with the same answers as sequential ones."""
        requests = self._requests()

        async def concurrent(engine: Engine) -> list[Completion]:
            return await _gather(engine, requests)

        async def sequential(engine: Engine) -> list[Completion]:
            return [await _answer(engine, request) for request in requests]

        found = self._run(concurrent)
        if self.deterministic:
            for one, other in zip(found, self._run(sequential), strict=True):
                assert one.text == other.text, (
                    f"a request is answered {one.text!r} concurrently, but {other.text!r} alone; set "
                    "deterministic = False in the kit if the engine does not guarantee equal answers"
                )

    def test_equal_greedy_requests_have_equal_answers(self) -> None:
        """Equal requests with equal seeds get equal answers."""
        if not self.deterministic:
            raise SkipTest("the engine does not guarantee equal answers")

        async def both(engine: Engine) -> list[str]:
            return [(await _answer(engine, self.request())).text for _ in range(2)]

        texts = [*self._run(both), *self._run(both)]
        assert len(set(texts)) == 1, (
            f"equal greedy requests are answered {', '.join(sorted(set(map(repr, texts))))}; set "
            "deterministic = False in the kit if the engine does not guarantee equal answers"
        )

    def test_a_cancelled_request_disturbs_no_other(self) -> None:
        """Other requests in flight are answered, and so are later ones."""

        async def check(engine: Engine) -> None:
            for delay in (0.0, 0.01):
                tasks = [asyncio.create_task(_answer(engine, self.request())) for _ in range(3)]
                await asyncio.sleep(delay)
                tasks[0].cancel()
                await asyncio.wait(tasks)
                for task in tasks[1:]:
                    assert not task.cancelled(), (
                        "cancelling a request cancels another one in flight"
                    )
                    task.result()
                if not tasks[0].cancelled():  # it completed before the cancellation
                    tasks[0].result()
                await _answer(engine, self.request())

        self._run(check)

    def test_token_records_are_consistent(self) -> None:
        """A token record, if there is one, is consistent with the answer."""

        async def records(engine: Engine) -> list[tuple[Completion, TokenRecord]]:
            requests = [
                replace(self.request(), want_tokens=True, temperature=t) for t in (0.0, 1.0)
            ]
            answers = [await _answer(engine, request) for request in requests]
            return [(answer, answer.tokens) for answer in answers if answer.tokens is not None]

        found = self._run(records)
        if not found:
            raise SkipTest("the engine returns no token records")
        for completion, record in found:
            _check_record(completion, record)

    def test_it_may_be_closed_twice(self) -> None:
        """``aclose`` may be called before any request, and repeatedly."""

        async def unused(engine: Engine) -> None:
            await engine.aclose()

        async def used(engine: Engine) -> None:
            await _answer(engine, self.request())
            await engine.aclose()

        for work in (unused, used):
            self._run(work)  # closes the engine a second time

    def test_a_failure_is_an_error_of_this_package(self) -> None:
        """A failed request raises a `CompoundError`, whose class decides how the executor handles it."""
        given = self.failing()
        if given is None:
            raise SkipTest("the kit has no failing request; override failing()")
        engine, request = given

        async def check(_: Engine) -> None:
            try:
                completion = await _answer(engine, request)
            except CompoundError:
                return
            except Exception as error:
                raise AssertionError(
                    f"a failed request raises {type(error).__name__}: {error}; raise TransientError for "
                    "transient failures, and CallError for permanent ones"
                ) from error
            raise AssertionError(f"the request of failing() did not fail: {completion.text!r}")

        self._run(check, engine)

    def _run(self, work: Callable[[Engine], Awaitable[T]], engine: Engine | None = None) -> T:
        async def run() -> T:
            tested = engine or self.make()
            try:
                async with asyncio.timeout(self.timeout):
                    return await work(tested)
            except TimeoutError as error:
                raise AssertionError(
                    f"the engine did not answer within {self.timeout:g} s"
                ) from error
            finally:
                await tested.aclose()

        return asyncio.run(run())

    def _requests(self) -> Sequence[Request]:
        first = self.request()
        (*_, last) = first.messages
        turns = (Message("system", "Be brief."), last, Message("assistant", "Yes?"), last)
        long = Message("user", f"{last.text} " * 4)
        return [
            first,
            replace(first, messages=turns),
            replace(first, messages=(long,), max_tokens=5),
            replace(first, messages=(Message("user", "Grüße, 世界 🙂"),), max_tokens=1),
            replace(first, cue="Answer:", stop=("\n", "###")),
        ]


async def _answer(engine: Engine, request: Request) -> Completion:
    """Send a request as the executor does, and check the type of the answer."""
    await Capabilities(engine).warm_up()
    completion = await engine.generate(request)
    assert isinstance(completion, Completion), (
        f"generate must return a Completion, but returned {short_repr(completion)}"
    )
    assert isinstance(completion.text, str), (
        f"the text of the answer is {short_repr(completion.text)}"
    )
    assert completion.finish_reason in FINISHED, (
        f"the finish_reason is {completion.finish_reason!r}; it must be {' or '.join(map(repr, FINISHED))}"
    )
    return completion


async def _gather(engine: Engine, requests: Sequence[Request]) -> list[Completion]:
    """Send requests concurrently, up to the engine's concurrency."""
    slots = asyncio.Semaphore(engine.concurrency)

    async def answer(request: Request) -> Completion:
        async with slots:
            return await _answer(engine, request)

    return await asyncio.gather(*map(answer, requests))


def _check_usage(usage: Usage, what: str, request: Request) -> None:
    for name in NUMBERS:
        value = getattr(usage, name)
        kinds = (int, float) if name == "cost" else (int,)
        assert type(value) in kinds, f"{name} of {what} must be a number, but is {value!r}"
        assert math.isfinite(value), f"{name} of {what} is {value}; it must be finite"
        assert value >= 0, f"{name} of {what} is {value}; it must not be negative"
    assert usage.calls >= 1, f"{what} of {short_repr(request)} counts no calls"


def _check_within(usage: Usage, worst: Usage, request: Request) -> None:
    for name in NUMBERS:
        found, most = getattr(usage, name), getattr(worst, name)
        slack = 1e-12 + 1e-9 * most if name == "cost" else 0
        assert found <= most + slack, (
            f"an answer used {name}={found}, but worst_case is {most} for {short_repr(request)}; budgets "
            "reserve the worst case, so it must be an upper bound"
        )


def _check_record(completion: Completion, record: TokenRecord) -> None:
    assert record.prompt, "the token record has no prompt"
    for name in ("prompt", "sampled"):
        ids = getattr(record, name)
        wrong = [token for token in ids if type(token) is not int or token < 0]
        assert not wrong, (
            f"{name} of the token record has {wrong[0]!r}; token ids are integers >= 0"
        )
    assert len(record.sampled) == len(record.logprobs), (
        f"the token record has {len(record.sampled)} sampled tokens, but {len(record.logprobs)} "
        "log-probabilities; return one per token"
    )
    for logprob in record.logprobs:
        assert isinstance(logprob, float), f"the log-probability {logprob!r} is not a float"
        assert math.isfinite(logprob), f"the log-probability {logprob} is not finite"
        assert logprob <= ROUNDING, (
            f"the log-probability {logprob:g} is above 0; return log-probabilities, not logits or "
            "probabilities"
        )
    assert record.finish_reason == completion.finish_reason, (
        f"the token record has the finish_reason {record.finish_reason!r}, the answer "
        f"{completion.finish_reason!r}; they must be equal"
    )
    used = completion.usage.completion_tokens
    assert len(record.sampled) <= used, (
        f"the token record has {len(record.sampled)} sampled tokens, but the usage counts {used}"
    )
