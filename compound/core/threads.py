"""Threads: functions of users, CPU-bound work, and callbacks of other libraries.

A function of a user that takes microseconds runs on the event loop, since a thread costs more than
its work. One that blocked the loop once, and every function while a server runs, is called in a
thread of its own. CPU-bound work runs in one dedicated thread: glibc keeps per-thread arenas, so
training steps on a thread pool would hold one step's peak memory per worker.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import inspect
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from queue import SimpleQueue
from threading import Thread
from typing import Any, Generic, Literal, ParamSpec, Self, TypeVar, get_args

from compound.core.errors import CallError, DeclarationError

S = TypeVar("S")
T = TypeVar("T")

ThreadUse = Literal["auto", "always", "never"]
"""Where a synchronous function runs: on the event loop until a call was slow; always or never in a thread."""
SLOW = 0.01  # seconds on the event loop, after which a function with "auto" is called in threads
PLAIN = frozenset((str, int, float, bool, list, dict, tuple, type(None)))  # never awaited
MAX_THREADS = 64  # per event loop; further calls wait
_ALL_IN_THREADS: ContextVar[bool] = ContextVar("_ALL_IN_THREADS", default=False)
_PLACES: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = (
    weakref.WeakKeyDictionary()
)


class FunctionRunner:
    """Calls a function, sync or async, on the event loop or in a thread."""

    def __init__(
        self, name: str, function: Callable[..., object], thread: ThreadUse = "auto"
    ) -> None:
        if thread not in get_args(ThreadUse):
            raise DeclarationError(
                f"function {name!r}: thread must be one of {list(get_args(ThreadUse))}, but is {thread!r}"
            )
        self._name, self._function, self._thread = name, function, thread
        self._slow = False  # whether a call has blocked the event loop
        self._async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
            getattr(type(function), "__call__", None)  # noqa: B004 - the method, to see whether it is async
        )

    def __repr__(self) -> str:
        # constant: stored runs hold it as part of the description of their metric
        return "<compound.concurrency.functions.FunctionRunner object>"

    async def call(self, /, *positional: object, **named: object) -> object:
        """Call the function and return its result, awaited if necessary."""
        try:
            if self._async or self._thread == "never":
                result = self._function(*positional, **named)
            elif self._thread == "auto" and not self._slow and not _ALL_IN_THREADS.get():
                started = time.perf_counter()
                try:
                    result = self._function(*positional, **named)
                finally:
                    if time.perf_counter() - started > SLOW:
                        self._slow = True
            else:
                call = functools.partial(self._function, *positional, **named)
                result = await run_in_thread(call, self._name)
            if type(result) in PLAIN or not inspect.isawaitable(result):
                return result
            return await result
        except SystemExit as error:
            raise exit_error(self._name, error) from error


async def run_in_thread(function: Callable[[], T], name: str) -> T:
    """Run a blocking function in a thread, at most `MAX_THREADS` at a time, and await its result.

    If the awaiting task is cancelled, the function continues, and keeps its place until it returns.
    """
    loop = asyncio.get_running_loop()
    places = _PLACES.setdefault(loop, asyncio.Semaphore(MAX_THREADS))
    await places.acquire()

    def work() -> T:
        try:
            return function()
        finally:
            with contextlib.suppress(RuntimeError):  # the loop is closed: no call waits for a place
                loop.call_soon_threadsafe(places.release)

    return await run_in_own_thread(work, name)


@contextlib.contextmanager
def all_in_threads() -> Iterator[None]:
    """Call all functions of ``thread="auto"`` in threads, for servers, which must answer meanwhile."""
    token = _ALL_IN_THREADS.set(True)
    try:
        yield
    finally:
        _ALL_IN_THREADS.reset(token)


async def run_in_own_thread(function: Callable[[], T], name: str) -> T:
    """Run a function in a new thread, with the current context variables, and await its result.

    Unlike in a pool, the number of functions that wait at the same time is not limited. If the
    awaiting task is cancelled, the function continues, and its result is discarded.

    >>> asyncio.run(run_in_own_thread(lambda: threading.current_thread().name, "example"))
    'example'
    """
    done: Future[T] = Future()
    context = contextvars.copy_context()

    def work() -> None:
        try:
            with exit_as_error(name):
                result = context.run(function)
        except StopIteration as error:  # a future cannot hold it
            problem = RuntimeError(f"{name} raised StopIteration")
            problem.__cause__ = error
            _settle(done.set_exception, problem)
        except BaseException as error:  # noqa: BLE001 - raised again in the event loop
            _settle(done.set_exception, error)
        else:
            _settle(done.set_result, result)

    threading.Thread(target=work, name=name, daemon=True).start()
    return await asyncio.wrap_future(done)


def _settle(set_result: Callable[[S], None], value: S) -> None:
    """Set a result, unless the awaiting task is cancelled, or its loop closed."""
    with contextlib.suppress(InvalidStateError, RuntimeError):
        set_result(value)


@contextlib.contextmanager
def exit_as_error(name: str) -> Iterator[None]:
    """Turn ``sys.exit`` of a user's function into an error of its call: it must not end the event loop."""
    try:
        yield
    except SystemExit as error:
        raise exit_error(name, error) from error


def exit_error(name: str, error: SystemExit) -> CallError:
    """Return the error of a call whose function called ``sys.exit``."""
    return CallError(f"{name} called sys.exit({'' if error.code is None else repr(error.code)})")


P = ParamSpec("P")
_THREAD = ThreadPoolExecutor(1, "compute")


async def compute(function: Callable[P, T], /, *arguments: P.args, **named: P.kwargs) -> T:
    """Run a function in the compute thread, one at a time, and await its result."""
    run = functools.partial(contextvars.copy_context().run, function, *arguments, **named)
    return await asyncio.get_running_loop().run_in_executor(_THREAD, run)


@contextmanager
def one_matrix_thread() -> Iterator[None]:
    """Limit matrix products of NumPy and SciPy to one thread, which is faster if the matrices are small.

    Without threadpoolctl, a part of scikit-learn, nothing is limited.
    """
    try:
        controller = _controller()
    except ImportError:
        yield
        return
    with controller.limit(limits=1, user_api="blas"):
        yield


@functools.cache
def _controller() -> Any:  # noqa: ANN401 - threadpoolctl has no types
    """Return the controller of the loaded libraries; finding them takes a millisecond."""
    import scipy.linalg  # noqa: F401 - it loads a library of its own
    from threadpoolctl import ThreadpoolController

    return ThreadpoolController()


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

    The iteration ends when the function returns, and raises its exception. Leaving the ``with``
    block earlier raises `Stopped` from the pending question, and waits for the thread to end.
    """

    def __init__(
        self, function: Callable[[Callable[[Question], object]], object], name: str
    ) -> None:
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
