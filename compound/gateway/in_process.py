"""Call an agent's function in a thread of this process."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import threading
from collections.abc import Callable, Mapping

from compound.gateway.processes import Endpoint

_ENDPOINT: contextvars.ContextVar[Endpoint | None] = contextvars.ContextVar("gateway_endpoint", default=None)
PARAMETERS = ("base_url", "api_key")


def endpoint() -> Endpoint | None:
    """Return the address and key of the gateway for the agent that runs in this context."""
    return _ENDPOINT.get()


def takes_address(function: Callable[..., object]) -> bool:
    """Return whether a function has a parameter for the address of its model.

    >>> def agent(question: str, base_url: str, api_key: str) -> str: ...
    >>> takes_address(agent), takes_address(print)
    (True, False)
    """
    try:
        return "base_url" in inspect.signature(function).parameters
    except (TypeError, ValueError):
        return False


async def call_in_thread(
    function: Callable[..., object], inputs: Mapping[str, object], found: Endpoint
) -> object:
    """Call a function, sync or async, in a new thread, and return its result.

    Its parameters ``base_url`` and ``api_key`` receive the address and key of the run. An async function
    runs on an event loop of its own, so that code that blocks does not block the gateway. A thread cannot be
    ended: one that is cancelled continues, but its requests are refused.
    """
    parameters = inspect.signature(function).parameters
    given = {name: getattr(found, name) for name in PARAMETERS if name in parameters}
    loop = asyncio.get_running_loop()
    result: asyncio.Future[object] = loop.create_future()

    def work() -> None:
        _ENDPOINT.set(found)
        try:
            value = function(**inputs, **given)
            if inspect.isawaitable(value):
                value = asyncio.run(_finish(value))
        except BaseException as error:  # noqa: BLE001 - raised again where the result is awaited
            _deliver(loop, result, None, error)
        else:
            _deliver(loop, result, value, None)

    context = contextvars.copy_context()
    threading.Thread(target=context.run, args=(work,), name="compound-agent", daemon=True).start()
    return await result


async def _finish(value: object) -> object:
    return await value  # type: ignore[misc]  # it is awaitable


def _deliver(
    loop: asyncio.AbstractEventLoop,
    result: asyncio.Future[object],
    value: object,
    error: BaseException | None,
) -> None:
    def settle() -> None:
        if result.done():
            return
        if isinstance(error, Exception) and not isinstance(error, StopIteration):
            result.set_exception(error)
        elif error is not None:
            result.set_exception(RuntimeError(f"{type(error).__name__}: {error}"))
        else:
            result.set_result(value)

    if not loop.is_closed():
        loop.call_soon_threadsafe(settle)
