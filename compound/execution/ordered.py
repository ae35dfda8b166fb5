"""Run awaitables concurrently, but reserve and charge system runs in input order.

The result and the amount spent therefore do not depend on which task finishes first.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from compound.errors import first_leaf
from compound.execution.executor import Executor

T = TypeVar("T")


async def gather_ordered(
    executor: Executor,
    factories: Sequence[Callable[[], Awaitable[T]]],
    charge: Callable[[int, T], object],
    max_concurrency: int,
    costs: Sequence[float] | None = None,
) -> list[T]:
    """Run the awaitables with bounded concurrency and return their results in order.

    Args:
        executor: executor whose budget is charged.
        factories: functions that start each awaitable.
        charge: charges a result to the budget, given its index; called in order.
        max_concurrency: maximum number of awaitables in flight.
        costs: system runs to reserve for each; default: one.

    Raises:
        BudgetExhausted: the next one does not fit. Those in flight are cancelled and not charged.
    """
    slots, turn = asyncio.Semaphore(max_concurrency), asyncio.Lock()
    finished: dict[int, T] = {}
    charged = 0

    async def run_one(number: int, make: Callable[[], Awaitable[T]]) -> T:
        nonlocal charged
        async with slots:
            async with turn:
                await executor.meter.reserve_run(1.0 if costs is None else costs[number])
            finished[number] = found = await make()
            while charged in finished:
                charge(charged, finished.pop(charged))
                charged += 1
            return found

    try:
        with executor.sharing_failures():
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(run_one(i, make)) for i, make in enumerate(factories)]
    except BaseExceptionGroup as errors:
        executor.meter.release_runs()
        raise first_leaf(errors) from None
    return [task.result() for task in tasks]
