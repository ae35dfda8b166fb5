"""Run awaitables concurrently, but reserve and charge system runs in input order.

The result and the amount spent therefore do not depend on which task finishes first.
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
    """Run the awaitables with bounded concurrency and return their results in order.

    Args:
        executor: executor whose budget is charged.
        making: functions that start each awaitable.
        settle: charges a result to the budget, given its index; called in order.
        concurrency: maximum number of awaitables in flight.
        sizes: system runs to reserve for each; default: one.

    Raises:
        BudgetExhausted: the next one does not fit. Those in flight are cancelled and not charged.
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
