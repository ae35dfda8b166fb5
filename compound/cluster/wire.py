"""Values and results of calls as JSON, which read back as equal values.

Plain JSON values travel as they are. Values of classes (pydantic models, dataclasses, enums, dates,
images) travel in their JSON form and are converted by the declared types of their ports, as in the
cache.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pydantic import TypeAdapter

from compound.cluster.messages import Document
from compound.core.storage.state import validated
from compound.execution.trace import CallResult, OutcomeDocument, outcome_to_json, read_outcome
from compound.graph.json_values import dumps, is_json
from compound.graph.types import Port, convert

Ports = Mapping[str, Port]


class _WireResult(OutcomeDocument):
    outputs: dict[str, list[Any]]


_RESULT = TypeAdapter(_WireResult)


class NotSendable(Exception):
    """A value does not read back as an equal one."""


def values_to_wire(values: Mapping[str, object], ports: Ports) -> Document:
    """Return values by name as JSON types, those of classes marked.

    Raises:
        NotSendable: a value does not read back as an equal one.
    """
    return {name: _to_wire(value, ports.get(name)) for name, value in values.items()}


def values_from_wire(document: Mapping[str, Any], ports: Ports) -> dict[str, object]:
    """Parse the output of `values_to_wire`."""
    return {
        name: convert(ports[name].type, item[0]) if len(item) > 1 else item[0]
        for name, item in document.items()
    }


def _to_wire(value: object, port: Port | None) -> list[object]:
    if is_json(value):
        return [value]
    try:
        found = json.loads(dumps(value, allow_nan=True))
        if port is not None and convert(port.type, found) == value:
            return [found, True]
    except (TypeError, ValueError, KeyError, AttributeError):
        pass
    raise NotSendable


def result_to_wire(result: CallResult, ports: Ports) -> Document:
    """Return the result of a call as JSON types; raises like `values_to_wire`."""
    return {"outputs": values_to_wire(result.outputs, ports), **outcome_to_json(result)}


def result_from_wire(data: Document, ports: Ports, key: str) -> CallResult:
    """Parse the output of `result_to_wire`.

    Raises:
        Damaged: it has another form, or its usage, seconds or number of attempts is impossible.
    """
    found = validated(_RESULT, data, "the result of a call")
    return CallResult(values_from_wire(found["outputs"], ports), key=key, **read_outcome(found))
