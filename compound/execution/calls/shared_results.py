"""Results that equal calls share: from the cache, or from an equal call in flight."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import cast

from compound.execution.budget import Meter
from compound.execution.cache import Cache
from compound.execution.outcomes import CallResult, CallResultRow, from_row, read_outputs, to_row
from compound.execution.trace import Call
from compound.graph.component import Component


@dataclass
class SharedResults:
    """Results by cache key; shared by all callers of one budget tree.

    Attributes:
        cache: stores the results; ``None`` if calls are not cached here, as in workers, whose driver has the
            cache. Only `get` needs it.
    """

    cache: Cache | None
    _in_flight: dict[str, asyncio.Future[CallResult]] = field(default_factory=dict)
    _unsettled: Counter[str] = field(default_factory=Counter)  # executions not yet counted for a trace
    _open_batches: int = 0
    _failed: dict[str, CallResult] = field(default_factory=dict)

    @contextmanager
    def batch(self) -> Iterator[None]:
        """Let equal calls also share failures within a block.

        A failed call is not cached, since it may succeed later. But the number of attempts in a batch must
        not depend on whether equal calls happen to be in flight at the same time.
        """
        self._open_batches += 1
        try:
            yield
        finally:
            self._open_batches -= 1
            if not self._open_batches:
                self._failed.clear()

    async def get(
        self, key: str, component: Component, execute: Callable[[], Awaitable[CallResult]], meter: Meter
    ) -> CallResult:
        """Return the result of a call from the cache or an equal call in flight, or execute it.

        Args:
            key: the cache key of the call.
            component: the component, whose ports convert stored outputs.
            execute: makes the call.
            meter: the budget that a result of an interrupted run is charged to.
        """
        assert self.cache is not None
        while (pending := self._in_flight.get(key)) is not None:
            await asyncio.wait([pending])
            # a cancelled call has no result: look again, since another waiter may have restarted it
            if not pending.cancelled():
                return pending.result().as_cached()
        if key in self._failed:
            return self._failed[key].as_cached()
        stored = self.cache.get(key)
        if stored is not None:
            return await self._reuse(key, component, stored, meter)
        return await self._execute(key, component, execute)

    def settle(self, calls: Sequence[Call]) -> None:
        """Mark which of several equal calls was executed: the first in order, regardless of timing."""
        for call in calls:
            if call.key:
                call.reused = not self._unsettled[call.key]
                self._unsettled[call.key] -= not call.reused
                if not self._unsettled[call.key]:
                    del self._unsettled[call.key]

    async def _execute(
        self, key: str, component: Component, execute: Callable[[], Awaitable[CallResult]]
    ) -> CallResult:
        """Execute a call while equal calls wait; if it is cancelled, one of them executes it."""
        future: asyncio.Future[CallResult] = asyncio.get_running_loop().create_future()
        self._in_flight[key] = future
        try:
            result = await execute()
            self._unsettled[key] += 1
            # a wrong answer is a result like any other; other failures may be transient and are not cached
            if result.failure is None or result.failure.kind in ("parse", "type"):
                self._store(key, component, result)
            elif self._open_batches:
                self._failed[key] = result
        except BaseException as error:
            if isinstance(error, asyncio.CancelledError):
                future.cancel()
            else:
                future.set_exception(error)
                future.exception()  # mark as retrieved; there may be no waiter
            raise
        else:
            future.set_result(result)
            return result
        finally:
            del self._in_flight[key]

    def _store(self, key: str, component: Component, result: CallResult) -> None:
        """Cache a result, unless its JSON form reads back as something else."""
        assert self.cache is not None
        row = to_row(result)
        if row is not None and read_outputs(row, component) == result.outputs:
            self.cache.put(key, row)

    async def _reuse(
        self, key: str, component: Component, row: Mapping[str, object], meter: Meter
    ) -> CallResult:
        """Return a stored result; charge it if an interrupted run recorded it."""
        assert self.cache is not None
        result = from_row(cast("CallResultRow", row), key, component)  # rows are validated by the cache
        if not self.cache.take_pending(key):
            return result.as_cached()
        self._unsettled[key] += 1
        await meter.charge_recorded(result.usage)
        return result
