"""Results of calls, and their representation in the cache."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NotRequired, TypedDict

from compound.engine import NO_USAGE, TokenRecord, TokenRow, Usage, UsageDocument, UsageRow
from compound.execution.exchange import Exchange, ExchangeDocument, is_stored
from compound.execution.trace import Failure, FailureRow
from compound.graph.component import Component
from compound.graph.json_values import dumps, is_json
from compound.graph.types import convert


@dataclass(frozen=True, slots=True)
class CallResult:
    """Result of one component call: outputs or failure, usage, token records, seconds of its execution."""

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


class CallResultRow(TypedDict):
    """An `CallResult` as JSON types.

    Attributes:
        outputs: the outputs.
        typed: whether the outputs hold models or similar objects, to be converted by the ports' types.
        failure: kind and message.
        seconds: of the execution; earlier versions did not store it.
    """

    outputs: dict[str, object]
    typed: NotRequired[bool]
    failure: FailureRow | None
    usage: UsageDocument | UsageRow
    tokens: list[TokenRow]
    attempts: int
    exchanges: NotRequired[list[ExchangeDocument]]
    seconds: NotRequired[float]


def to_row(result: CallResult) -> CallResultRow | None:
    """Return the result as JSON types, or ``None`` if its outputs have no JSON form."""
    usage, failure = result.usage, result.failure
    try:
        outputs = json.loads(dumps(result.outputs, allow_nan=True).encode())
    except (TypeError, ValueError, AttributeError):
        return None
    return {
        "outputs": outputs,
        "typed": not all(map(is_json, result.outputs.values())),  # an equal value may be of another class
        "failure": failure.row if failure else None,
        "usage": usage.to_json(),
        "tokens": [record.row for record in result.tokens],
        "attempts": result.attempts,
        "exchanges": [exchange.to_json() for exchange in result.exchanges if is_stored()],
        "seconds": round(result.seconds, 6),
    }


def read_outputs(row: CallResultRow, component: Component) -> Mapping[str, object]:
    """Return the outputs of a row, converted to the declared types."""
    outputs = row["outputs"]
    if not row.get("typed"):
        return outputs
    try:
        return {name: convert(component.outputs[name].type, value) for name, value in outputs.items()}
    except (KeyError, ValueError):
        return {}


def from_row(row: CallResultRow, key: str, component: Component) -> CallResult:
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
