"""A synchronous function in a thread of its own, whose questions an event loop answers.

The other way round from `compound.concurrency.blocking`: for libraries that call back while they work.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue
from threading import Thread
from typing import Generic, Self, TypeVar

Question = TypeVar("Question")


class Stopped(BaseException):
    """Nobody answers any more. No ``except Exception`` on the way out of the function holds it up."""


@dataclass(frozen=True)
class _End:
    error: BaseException | None


_STOP = object()


class Questions(Generic[Question]):
    """What a function asks: iterate, and answer each question before the next.

    The iteration ends when the function does, and raises what it raised. Leaving the ``with`` block
    earlier raises `Stopped` from the question it waits in, and waits for its thread to end.

    Args:
        function: gets ``ask``, which returns the answer to a question.
        name: the thread's name.

    >>> async def doubled() -> list[int]:
    ...     found: list[int] = []
    ...     with Questions(lambda ask: found.extend([ask(1), ask(2)]), "example") as questions:
    ...         async for number in questions:
    ...             questions.answer(2 * number)
    ...     return found
    >>> asyncio.run(doubled())
    [2, 4]
    """

    def __init__(self, function: Callable[[Callable[[Question], object]], object], name: str) -> None:
        self._loop = asyncio.get_running_loop()
        self._asked: asyncio.Queue[Question | _End] = asyncio.Queue()
        self._answers: SimpleQueue[object] = SimpleQueue()
        self._thread = Thread(target=self._run, args=(function,), name=name, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._answers.put(_STOP)
        self._thread.join()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Question:
        asked = await self._asked.get()
        if not isinstance(asked, _End):
            return asked
        if asked.error is not None:
            raise asked.error
        raise StopAsyncIteration

    def answer(self, answer: object) -> None:
        """Answer the last question."""
        self._answers.put(answer)

    def _run(self, function: Callable[[Callable[[Question], object]], object]) -> None:
        error: BaseException | None = None
        try:
            function(self._ask)
        except BaseException as raised:  # noqa: BLE001 - raised again where the questions are answered
            error = raised
        self._tell(_End(error))

    def _ask(self, question: Question) -> object:
        self._tell(question)
        answer = self._answers.get()
        if answer is _STOP:
            self._answers.put(_STOP)  # for what the function may ask on its way out
            raise Stopped
        return answer

    def _tell(self, asked: Question | _End) -> None:
        self._loop.call_soon_threadsafe(self._asked.put_nowait, asked)
