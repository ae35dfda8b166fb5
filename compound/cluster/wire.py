"""Values, calls, results and traces as JSON, which read back as equal values or are refused.

Plain JSON values travel as they are. Values of classes (pydantic models, dataclasses, enums, dates,
images) travel in their JSON form and are converted by the declared types of their ports, as in the
cache.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from typing import Any, cast

from pydantic import TypeAdapter

from compound.cluster.messages import Document
from compound.core.errors import DeclarationError
from compound.core.storage.state import validated
from compound.execution.trace import (
    Call,
    CallResult,
    Failure,
    FailureRow,
    OutcomeDocument,
    Trace,
    outcome_to_json,
    read_outcome,
)
from compound.graph.json_values import dumps, is_json
from compound.graph.system import System
from compound.graph.types import convert

NAMES, NUMBERS = ("address", "node", "component", "key"), ("sample", "invocation", "counted")
RESULT_FIELDS = dataclasses.fields(CallResult)
Types = Callable[[str], object]  # the declared type of a value, by name


class _WireResult(OutcomeDocument):
    outputs: dict[str, list[Any]]
    reused: bool


_RESULT = TypeAdapter(_WireResult)


def values_to_wire(values: Mapping[str, object], types: Types, where: str) -> Document:
    """Return values by name as JSON types, those of classes marked.

    Raises:
        DeclarationError: a value does not read back as an equal one.
    """
    return {name: _to_wire(value, types, name, where) for name, value in values.items()}


def values_from_wire(document: Mapping[str, Any], types: Types) -> dict[str, object]:
    """Parse the output of `values_to_wire`."""
    return {
        name: convert(types(name), item[0]) if len(item) > 1 else item[0]
        for name, item in document.items()
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


def result_to_wire(result: CallResult | Call, types: Types, where: str) -> Document:
    """Return the result of a call as JSON types."""
    outputs = values_to_wire(result.outputs, types, where)
    return {"outputs": outputs, "reused": result.reused, **outcome_to_json(result)}


def result_from_wire(data: Document, types: Types, key: str) -> CallResult:
    """Parse the output of `result_to_wire`.

    Raises:
        Damaged: it has another form, or its usage, seconds or number of attempts is impossible.
    """
    found = validated(_RESULT, data, "the result of a call")
    outputs = values_from_wire(found["outputs"], types)
    return CallResult(outputs, reused=found["reused"], key=key, **read_outcome(found))


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
        """Parse the output of `to_wire`; raises like `result_from_wire`."""
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
