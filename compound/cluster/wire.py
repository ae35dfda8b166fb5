"""Values, calls, results and traces as JSON, which read back as equal values or are refused.

Plain JSON values travel as they are. Values of classes (pydantic models, dataclasses, enums, dates,
images) travel in their JSON form and are converted by the declared types of their ports, as in the
cache.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping
from typing import Any, cast

from compound.cluster.messages import Document, Numbers, UsageFields, checked_usage_fields
from compound.core.engine import TokenRecord, TokenRow, Usage
from compound.core.errors import DeclarationError
from compound.execution.exchange import Exchange, ExchangeDocument
from compound.execution.results import CallResult
from compound.execution.trace import Call, Failure, FailureRow, Trace
from compound.graph.json_values import dumps, is_json
from compound.graph.system import System
from compound.graph.types import convert

NAMES, NUMBERS = ("address", "node", "component", "key"), ("sample", "invocation", "counted")
RESULT_FIELDS = dataclasses.fields(CallResult)
Types = Callable[[str], object]  # the declared type of a value, by name


def usage_to_wire(usage: Usage) -> Numbers:
    """Return the fields of a usage."""
    # not `astuple`, which copies each field: this is called several times for each request
    return usage.calls, usage.prompt_tokens, usage.completion_tokens, usage.cost, usage.unpriced


def usage_from_wire(numbers: Numbers) -> Usage:
    """Parse the output of `usage_to_wire`, which a validated message holds."""
    return Usage(*numbers)


def values_to_wire(values: Mapping[str, object], types: Types, where: str) -> Document:
    """Return values by name as JSON types, those of classes marked.

    Raises:
        DeclarationError: a value does not read back as an equal one.
    """
    return {name: _to_wire(value, types, name, where) for name, value in values.items()}


def values_from_wire(document: Document, types: Types) -> dict[str, object]:
    """Parse the output of `values_to_wire`."""
    return {
        name: _from_wire(cast("list[object]", item), types, name) for name, item in document.items()
    }


def _to_wire(value: object, types: Types, name: str, where: str) -> list[object]:
    if is_json(value):
        return [value]
    try:
        found = json.loads(dumps(value, allow_nan=True))
        if convert(types(name), found) == value:
            return [found, True]
    except (TypeError, ValueError, KeyError, AttributeError):
        pass
    raise DeclarationError(
        f"{where}: the value of {name!r}, {_shown(value)}, cannot be sent between processes",
        hint="declare it as JSON types, a pydantic model, a dataclass or an enum; or remove optimize.runner",
    )


def _shown(value: object) -> str:
    try:
        return f"{type(value).__name__} {value!r:.80}"
    except ValueError:  # an integer of thousands of digits
        return type(value).__name__


def _from_wire(item: list[object], types: Types, name: str) -> object:
    return convert(types(name), item[0]) if len(item) > 1 else item[0]


def result_to_wire(result: CallResult | Call, types: Types, where: str) -> Document:
    """Return the result of a call as JSON types."""
    return {
        "outputs": values_to_wire(result.outputs, types, where),
        "failure": _failure_row(result.failure),
        "usage": usage_to_wire(result.usage),
        "tokens": [record.row for record in result.tokens],
        "attempts": result.attempts,
        "reused": result.reused,
        "seconds": result.seconds,
        "exchanges": [exchange.to_json() for exchange in result.exchanges],
    }


def result_from_wire(data: Document, types: Types, key: str) -> CallResult:
    """Parse the output of `result_to_wire`.

    Raises:
        ValueError: its usage, seconds or number of attempts is impossible.
    """
    attempts = data["attempts"]
    if type(attempts) is not int or attempts < 0:
        raise ValueError(
            f"attempts of a call must be an integer that is not negative, but is {attempts!r}"
        )
    seconds = cast("float", data["seconds"])
    if not 0 <= seconds < math.inf:
        raise ValueError(f"seconds of a call must be finite and not negative, but is {seconds!r}")
    return CallResult(
        outputs=values_from_wire(cast("Document", data["outputs"]), types),
        failure=_failure(data["failure"]),
        usage=usage_from_wire(checked_usage_fields(cast("UsageFields", data["usage"]))),
        tokens=tuple(map(TokenRecord.from_row, cast("list[TokenRow]", data["tokens"]))),
        attempts=attempts,
        reused=bool(data["reused"]),
        key=key,
        exchanges=tuple(map(Exchange.from_json, cast("list[ExchangeDocument]", data["exchanges"]))),
        seconds=seconds,
    )


class CallCodec:
    """Converts the calls and traces of one system."""

    def __init__(self, system: System) -> None:
        self._system = system
        self._ports = {node.name: node.inputs for node in system.all_nodes()}

    def outputs_of(self, component: str) -> Types:
        """Return the types of a component's outputs."""
        ports = self._system.components[component].outputs
        return lambda name: ports[name].type

    def _inputs_of(self, node: str) -> Types:
        ports = self._ports[node]
        return lambda name: ports[name].type

    def inputs(self) -> Types:
        """Return the types of the system's inputs."""
        return lambda name: self._system.inputs[name]

    def to_wire(self, call: Call) -> Document:
        """Return a call as JSON types."""
        return {
            **result_to_wire(call, self.outputs_of(call.component), call.address),
            **{name: getattr(call, name) for name in (*NAMES, *NUMBERS)},
            "inputs": values_to_wire(call.inputs, self._inputs_of(call.node), call.address),
            "parents": list(call.parents),
        }

    def from_wire(self, data: Document) -> Call:
        """Parse the output of `to_wire`.

        Raises:
            ValueError: its usage, seconds or number of attempts is impossible.
        """
        found = result_from_wire(data, self.outputs_of(str(data["component"])), str(data["key"]))
        shared: dict[str, Any] = {field.name: getattr(found, field.name) for field in RESULT_FIELDS}
        inputs = cast("Document", data["inputs"])
        return Call(
            parents=tuple(cast("list[str]", data["parents"])),
            inputs=values_from_wire(inputs, self._inputs_of(str(data["node"]))),
            **shared,
            **{name: data[name] for name in NUMBERS},  # type: ignore[arg-type]
            **{name: str(data[name]) for name in NAMES if name not in shared},  # type: ignore[arg-type]
        )

    def trace_to_wire(self, trace: Trace) -> Document:
        """Return an unscored trace as JSON types, without its inputs, which the driver has."""
        outputs = self._system.outputs
        return {
            "system": trace.system,
            "configuration": trace.configuration,
            "calls": [self.to_wire(call) for call in trace.calls],
            "outputs": values_to_wire(trace.outputs, lambda name: outputs[name].type, "outputs"),
            "failure": _failure_row(trace.failure),
            "ends": None if trace.ends is None else list(trace.ends),
        }

    def trace_from_wire(self, data: Document, run: Trace) -> Trace:
        """Parse the output of `trace_to_wire`; ``run`` has the fields that the driver knows."""
        outputs, ends = self._system.outputs, cast("list[str] | None", data["ends"])
        return dataclasses.replace(
            run,
            system=str(data["system"]),
            configuration=str(data["configuration"]),
            calls=tuple(self.from_wire(call) for call in cast("list[Document]", data["calls"])),
            outputs=values_from_wire(
                cast("Document", data["outputs"]), lambda name: outputs[name].type
            ),
            failure=_failure(data["failure"]),
            ends=None if ends is None else tuple(ends),
        )


def _failure_row(failure: Failure | None) -> FailureRow | None:
    return None if failure is None else failure.row


def _failure(row: object) -> Failure | None:
    return None if row is None else Failure(*cast("FailureRow", row))
