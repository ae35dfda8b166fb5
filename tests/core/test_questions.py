"""A function in a thread of its own, whose questions an event loop answers."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

from compound.core.threads import CallbackQuestions, Stopped

Ask = Callable[[Any], Any]


def alive() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "asking"]


async def answered(function: Callable[[Ask], object], most: int | None = None) -> list[Any]:
    """Answer every number by its double; leave before answering more than ``most``."""
    asked: list[Any] = []
    with CallbackQuestions[Any](function, "asking") as questions:
        async for question in questions:
            assert alive() == ["asking"]
            asked.append(question)
            if len(asked) == most:
                break
            await asyncio.sleep(0)
            questions.answer(2 * question)
    return asked


def test_each_question_gets_its_answer_and_the_end_ends_the_iteration() -> None:
    got: list[int] = []

    def function(ask: Ask) -> None:
        got.extend(ask(number) for number in (1, 2, 3))

    assert asyncio.run(answered(function)) == [1, 2, 3]
    assert got == [2, 4, 6]
    assert alive() == []


def test_what_the_function_raises_is_raised_where_it_is_answered() -> None:
    def function(ask: Ask) -> None:
        raise KeyError(ask(1))

    with pytest.raises(KeyError, match="2"):
        asyncio.run(answered(function))
    assert alive() == []


@pytest.mark.parametrize("most", [1, 2, 3])
def test_leaving_early_stops_the_function_at_its_question_whatever_it_catches(most: int) -> None:
    """Nor does it hang in what it asks while it is being stopped."""
    stopped: list[int] = []

    def function(ask: Ask) -> None:
        for number in range(1, 10):
            try:
                ask(number)
            except Exception:  # noqa: BLE001 - what a library may do
                pass
            except Stopped:
                stopped.append(number)
                raise
            finally:
                if stopped:
                    ask("on the way out")

    assert len(asyncio.run(answered(function, most))) == most
    assert stopped == [most]
    assert alive() == []


async def test_being_cancelled_stops_the_function() -> None:
    async def waiting(begun: asyncio.Event) -> None:
        with CallbackQuestions[Any](lambda ask: ask(1), "asking") as questions:
            async for _ in questions:
                begun.set()
                await asyncio.Event().wait()

    begun = asyncio.Event()
    task = asyncio.create_task(waiting(begun))
    await begun.wait()
    assert alive() == ["asking"]
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert alive() == []
