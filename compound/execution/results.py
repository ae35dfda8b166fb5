"""Results of calls: their form in the cache, and sharing them between equal calls in flight."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from compound.core.engine import NO_USAGE, TokenRecord, Usage
from compound.execution.budget import Meter
from compound.execution.cache import Cache
from compound.execution.exchange import Exchange, is_stored
from compound.execution.trace import Call, Failure
from compound.graph.component import Component
from compound.graph.json_values import dumps, is_json
from compound.graph.types import convert


@dataclass(slots=True)
class CallResult:
    """Result of one component call: outputs or failure, usage, token records, seconds of its execution.

    Treat it as immutable once it is returned; it is not frozen because it is created in hot code.
    """

    outputs: Mapping[str, object]
    failure: Failure | None = None
    usage: Usage = NO_USAGE
    tokens: tuple[TokenRecord, ...] = ()
    attempts: int = 1
    reused: bool = False
    key: str = ""
    exchanges: tuple[Exchange, ...] = ()
    seconds: float = 0.0

    def as_cached(self) -> CallResult:
        """Return a copy marked as reused from an equal call."""
        return replace(self, reused=True)


Row = dict[str, Any]
"""A `CallResult` as JSON types; a ``typed`` one has outputs to convert by the types of the ports."""


def to_row(result: CallResult) -> Row | None:
    """Return the result as JSON types, or ``None`` if its outputs have no JSON form."""
    usage, failure = result.usage, result.failure
    try:
        outputs = json.loads(dumps(result.outputs, allow_nan=True).encode())
    except (TypeError, ValueError, AttributeError):
        return None
    # an equal value may be of another class
    return {
        "outputs": outputs,
        "typed": not all(map(is_json, result.outputs.values())),
        "failure": failure.row if failure else None,
        "usage": usage.to_json(),
        "tokens": [record.row for record in result.tokens],
        "attempts": result.attempts,
        "exchanges": [exchange.to_json() for exchange in result.exchanges if is_stored()],
        "seconds": round(result.seconds, 6),
    }


def read_outputs(row: Row, component: Component) -> Mapping[str, object]:
    """Return the outputs of a row, converted to the declared types."""
    outputs: Mapping[str, object] = row["outputs"]
    if not row.get("typed"):
        return outputs
    try:
        return {
            name: convert(component.outputs[name].type, value) for name, value in outputs.items()
        }
    except (KeyError, ValueError):
        return {}


def from_row(row: Row, key: str, component: Component) -> CallResult:
    """Parse a row."""
    return CallResult(
        outputs=read_outputs(row, component),
        failure=Failure(*row["failure"]) if row["failure"] else None,
        usage=Usage.from_json(row["usage"]),
        tokens=tuple(map(TokenRecord.from_row, row["tokens"])),
        attempts=row["attempts"],
        key=key,
        exchanges=tuple(map(Exchange.from_json, row.get("exchanges", ()))),
        seconds=row.get("seconds", 0.0),
    )


@dataclass
class SharedResults:
    """Results that equal calls share; one object for all callers of a budget and its parts."""

    cache: Cache | None
    _in_flight: dict[str, asyncio.Future[CallResult]] = field(default_factory=dict)
    # executions not yet counted for a trace
    _unsettled: Counter[str] = field(default_factory=Counter)
    _open_batches: int = 0
    _failed: dict[str, CallResult] = field(default_factory=dict)

    @contextmanager
    def batch(self) -> Iterator[None]:
        """Let equal calls also share failures within a block.

        A failed call is not cached, since it may succeed later. But the number of attempts in a
        batch must not depend on whether equal calls happen to be in flight at the same time.
        """
        self._open_batches += 1
        try:
            yield
        finally:
            self._open_batches -= 1
            if not self._open_batches:
                self._failed.clear()

    async def get(
        self,
        key: str,
        component: Component,
        execute: Callable[[], Awaitable[CallResult]],
        meter: Meter,
    ) -> CallResult:
        """Return the result of a call from the cache or an equal call in flight, or execute it.

        Equal calls wait for the one that is executed; if it is cancelled, one of them executes it.
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
        future: asyncio.Future[CallResult] = asyncio.get_running_loop().create_future()
        self._in_flight[key] = future
        try:
            result = await execute()
            self._record(key, component, result)
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

    def settle(self, calls: Sequence[Call]) -> None:
        """Mark which of several equal calls was executed: the first in order, regardless of timing."""
        for call in calls:
            if call.key:
                call.reused = not self._unsettled[call.key]
                self._unsettled[call.key] -= not call.reused
                if not self._unsettled[call.key]:
                    del self._unsettled[call.key]

    def _record(self, key: str, component: Component, result: CallResult) -> None:
        """Cache a result, unless its JSON form reads back as something else.

        A wrong answer is a result like any other; other failures may be transient and are not
        cached.
        """
        assert self.cache is not None
        self._unsettled[key] += 1
        if result.failure is None or result.failure.kind in ("parse", "type"):
            row = to_row(result)
            if row is not None and read_outputs(row, component) == result.outputs:
                self.cache.put(key, row)
        elif self._open_batches:
            self._failed[key] = result

    async def _reuse(
        self, key: str, component: Component, row: Mapping[str, object], meter: Meter
    ) -> CallResult:
        """Return a stored result; charge it if an interrupted run recorded it."""
        assert self.cache is not None
        # rows are validated by the cache
        result = from_row(dict(row), key, component)
        if not self.cache.take_pending(key):
            return result.as_cached()
        self._unsettled[key] += 1
        await meter.charge_recorded(result.usage)
        return result
