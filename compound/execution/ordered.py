"""Things made side by side whose system runs are reserved and counted in order.

What fits into a budget, and what is counted for it, then never depends on which of them was faster.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from compound.errors import first_of
from compound.execution.executor import Executor

T = TypeVar("T")


async def gather_ordered(
    executor: Executor,
    making: Sequence[Callable[[], Awaitable[T]]],
    settle: Callable[[int, T], object],
    concurrency: int,
    sizes: Sequence[float] | None = None,
) -> list[T]:
    """Make things, so many at once as may be; return them in order.

    Args:
        executor: whose budget counts.
        making: starts each of them.
        settle: counts one against the budget, given its number; called in order.
        concurrency: how many may be in flight.
        sizes: the system runs that each may take; one whole run by default.

    Raises:
        BudgetExhausted: the next one does not fit. Those in flight are given up, and not counted.
    """
    places, turn = asyncio.Semaphore(concurrency), asyncio.Lock()
    made: dict[int, T] = {}
    settled = 0

    async def one(number: int, make: Callable[[], Awaitable[T]]) -> T:
        nonlocal settled
        async with places:
            async with turn:
                await executor.meter.reserve_run(1.0 if sizes is None else sizes[number])
            made[number] = found = await make()
            while settled in made:
                settle(settled, made.pop(settled))
                settled += 1
            return found

    try:
        with executor.batch():
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(one(i, make)) for i, make in enumerate(making)]
    except BaseExceptionGroup as errors:
        executor.meter.release_runs()
        raise first_of(errors) from None
    return [task.result() for task in tasks]
