"""Results of calls: their form in the cache, and sharing them between equal calls in flight."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NotRequired

from pydantic import TypeAdapter
from typing_extensions import TypedDict  # pydantic requires it before Python 3.12

from compound.core.engine import Usage
from compound.core.storage.records import Damaged
from compound.core.storage.state import validated
from compound.execution.budget import Meter
from compound.execution.cache import Cache
from compound.execution.exchange import is_stored
from compound.execution.trace import (
    Call,
    CallResult,
    OutcomeDocument,
    StoredUsage,
    outcome_to_json,
    read_outcome,
)
from compound.graph.component import Component
from compound.graph.json_values import dumps, is_json
from compound.graph.types import accepts, convert

Row = dict[str, Any]
"""A `CallResult` as JSON types; a ``typed`` one has outputs to convert by the types of the ports."""


def to_row(result: CallResult) -> Row | None:
    """Return the result as JSON types, or ``None`` if its outputs have no JSON form."""
    try:
        outputs = json.loads(dumps(result.outputs, allow_nan=True).encode())
    except (TypeError, ValueError, AttributeError):
        return None
    # an equal value may be of another class
    typed = not all(map(is_json, result.outputs.values()))
    row: Row = {"outputs": outputs, "typed": typed, **outcome_to_json(result)}
    return row if is_stored() else {**row, "exchanges": []}


def read_outputs(row: Mapping[str, Any], component: Component) -> Mapping[str, object]:
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


def from_row(row: Mapping[str, object], key: str, component: Component) -> CallResult:
    """Parse a row.

    Raises:
        Damaged: it is no result of the component.
    """
    found = validated(_RESULT, row, RESULT)
    outputs = read_outputs(found, component)
    if found["failure"] is None:
        _check_outputs(outputs, component)
    return CallResult(outputs=outputs, key=key, **read_outcome(found))


def read_answer(row: Mapping[str, object]) -> tuple[str, Usage]:
    """Return the text and the usage of a stored answer to a request outside of nodes.

    Raises:
        Damaged: it is none.
    """
    found = validated(_ANSWER, row, ANSWER)
    return found["text"], Usage.from_json(found["usage"])


def check_row(row: Mapping[str, object]) -> None:
    """Check that a row is a result of a call or an answer, of whichever component.

    Raises:
        Damaged: it is neither.
    """
    if "text" in row:
        validated(_ANSWER, row, ANSWER)
    else:
        validated(_RESULT, row, RESULT)


def _check_outputs(outputs: Mapping[str, object], component: Component) -> None:
    ports = component.outputs
    if outputs.keys() != ports.keys():
        raise Damaged(f"its outputs are not those of {component.name}")
    for name, port in ports.items():
        if not accepts(port.type, outputs[name]):
            raise Damaged(f"its output {name!r} has another type than that of {component.name}")


class _ResultRow(OutcomeDocument):
    outputs: dict[str, Any]
    typed: NotRequired[bool]


class _AnswerRow(TypedDict):
    text: str
    usage: StoredUsage


_RESULT, _ANSWER = TypeAdapter(_ResultRow), TypeAdapter(_AnswerRow)
RESULT, ANSWER = "the result of a call", "an answer to a request"


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
        stored = self._stored(key, component)
        if stored is not None and not self.cache.take_pending(key):
            return stored.as_cached()
        future: asyncio.Future[CallResult] = asyncio.get_running_loop().create_future()
        self._in_flight[key] = future
        try:
            if stored is None:
                result = await execute()
            else:  # recorded by an interrupted run, or by another one
                await meter.charge_recorded(stored.usage)
                result = stored
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

    def _stored(self, key: str, component: Component) -> CallResult | None:
        """Return the result in the cache; one that the component cannot have is dropped."""
        assert self.cache is not None
        row = self.cache.get(key)
        if row is None:
            return None
        try:
            return from_row(row, key, component)
        except Damaged as error:
            self.cache.drop(key, str(error))
            return None
