"""What came of a call, and how a cache keeps it: as a row of JSON types."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from compound.component import Component
from compound.contracts import NO_USAGE, TokenRecord, Usage
from compound.exchange import Exchange
from compound.ports import convert
from compound.trace import Failure


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a call."""

    outputs: Mapping[str, Any]
    failure: Failure | None = None
    usage: Usage = NO_USAGE
    tokens: tuple[TokenRecord, ...] = ()
    attempts: int = 1
    reused: bool = False
    key: str = ""
    exchanges: tuple[Exchange, ...] = ()

    def again(self) -> Outcome:
        """Return the outcome as an equal call has it: reused, and not made."""
        return replace(self, reused=True)


def _json(model: Any) -> Any:
    return model.model_dump(mode="json")


def to_row(outcome: Outcome) -> dict[str, Any] | None:
    """Return an outcome as JSON types, or ``None`` when its outputs have no JSON form."""
    usage, failure = outcome.usage, outcome.failure
    try:
        text = json.dumps(outcome.outputs, ensure_ascii=False, default=_json)
        outputs = json.loads(text.encode())
    except (TypeError, ValueError, AttributeError):
        return None
    return {
        "outputs": outputs,
        "typed": outputs != outcome.outputs,  # models and the like: to be read through the ports
        "failure": [failure.kind, failure.message] if failure else None,
        "usage": usage.to_json(),
        "tokens": [[t.prompt, t.sampled, t.logprobs, t.finish_reason, t.adapter] for t in outcome.tokens],
        "attempts": outcome.attempts,
        "exchanges": [exchange.to_json() for exchange in outcome.exchanges],
    }


def read_outputs(row: Mapping[str, Any], component: Component) -> Mapping[str, Any]:
    """Return the outputs of a row, of the types that the component declares."""
    outputs: Mapping[str, Any] = row["outputs"]
    if not row.get("typed"):
        return outputs
    try:
        return {name: convert(component.outputs[name].type, value) for name, value in outputs.items()}
    except (KeyError, ValueError):
        return {}


def from_row(row: Mapping[str, Any], key: str, component: Component) -> Outcome:
    """Return the outcome that a row holds."""
    return Outcome(
        outputs=read_outputs(row, component),
        failure=Failure(*row["failure"]) if row["failure"] else None,
        usage=Usage.from_json(row["usage"]),
        tokens=tuple(TokenRecord(tuple(p), tuple(s), tuple(lp), f, a) for p, s, lp, f, a in row["tokens"]),
        attempts=row["attempts"],
        key=key,
        exchanges=tuple(map(Exchange.from_json, row.get("exchanges", ()))),
    )
