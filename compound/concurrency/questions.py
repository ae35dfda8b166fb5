"""Run a synchronous function in a thread, and answer its questions from an event loop.

The inverse of `compound.concurrency.blocking`, for libraries that use callbacks.
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
    """Raised inside the function when the consumer has stopped.

    Derives from BaseException so that ``except Exception`` in library code does not swallow it.
    """


@dataclass(frozen=True)
class _End:
    error: BaseException | None


_STOP = object()


class CallbackQuestions(Generic[Question]):
    """Questions of a function: iterate, and answer each question before the next.

    The iteration ends when the function returns, and raises its exception. Leaving the ``with`` block
    earlier raises `Stopped` from the pending question, and waits for the thread to end.

    Args:
        function: called with ``ask``, which returns the answer to a question.
        name: name of the thread.

    >>> async def doubled() -> list[int]:
    ...     found: list[int] = []
    ...     with CallbackQuestions(lambda ask: found.extend([ask(1), ask(2)]), "example") as questions:
    ...         async for number in questions:
    ...             questions.answer(2 * number)
    ...     return found
    >>> asyncio.run(doubled())
    [2, 4]
    """

    def __init__(self, function: Callable[[Callable[[Question], object]], object], name: str) -> None:
        self._loop = asyncio.get_running_loop()
        self._questions: asyncio.Queue[Question | _End] = asyncio.Queue()
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
        asked = await self._questions.get()
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
        except BaseException as raised:  # noqa: BLE001 - reraised in the event loop
            error = raised
        self._put(_End(error))

    def _ask(self, question: Question) -> object:
        self._put(question)
        answer = self._answers.get()
        if answer is _STOP:
            self._answers.put(_STOP)  # for further questions while the function exits
            raise Stopped
        return answer

    def _put(self, asked: Question | _End) -> None:
        self._loop.call_soon_threadsafe(self._questions.put_nowait, asked)
