"""Waiting for async code from ordinary code, in a notebook too, where an event loop is running already."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

Result = TypeVar("Result")


def blocking(coroutine: Coroutine[Any, Any, Result]) -> Result:
    """Run a coroutine to its end and return its result.

    >>> async def answer() -> int:
    ...     return 42
    >>> blocking(answer())
    42
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(coroutine)
    with ThreadPoolExecutor(1, "compound-blocking") as thread:
        return thread.submit(asyncio.run, coroutine).result()
