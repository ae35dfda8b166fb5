"""Run a blocking function of another library in a thread of its own."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import threading
from collections.abc import Callable, Iterator
from typing import TypeVar

from compound.errors import CallError

T = TypeVar("T")


async def run_in_own_thread(function: Callable[[], T], name: str) -> T:
    """Run a function in a new thread, with the current context variables, and await its result.

    Unlike in a pool, the number of functions that wait at the same time is not limited. If the awaiting task
    is cancelled, the function continues, and its result is discarded.

    Args:
        function: the function.
        name: name of the thread.

    >>> asyncio.run(run_in_own_thread(lambda: threading.current_thread().name, "example"))
    'example'
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()
    context = contextvars.copy_context()

    def finish(result: list[T], error: BaseException | None) -> None:
        if done.done():
            return
        if error is not None:
            done.set_exception(error)
        else:
            done.set_result(result[0])

    def work() -> None:
        result: list[T] = []
        problem: BaseException | None = None
        try:
            with exit_as_error(name):
                result.append(context.run(function))
        except StopIteration as error:  # a future cannot hold it
            problem = RuntimeError(f"{name} raised StopIteration")
            problem.__cause__ = error
        except BaseException as error:  # noqa: BLE001 - raised again in the event loop
            problem = error
        if not loop.is_closed():
            loop.call_soon_threadsafe(finish, result, problem)

    threading.Thread(target=work, name=name, daemon=True).start()
    return await done


@contextlib.contextmanager
def exit_as_error(name: str) -> Iterator[None]:
    """Turn ``sys.exit`` of a user's function into an error of its call: it must not end the event loop."""
    try:
        yield
    except SystemExit as error:
        raise CallError(
            f"{name} called sys.exit({'' if error.code is None else repr(error.code)})"
        ) from error
