"""Execution plan of a graph: the order of its nodes, and the flow of values between them.

Everything independent of the example is computed once, in an `ExecutionPlan`. A value carries the
addresses of the calls that produced it, also through loops, maps and conditions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeGuard

from compound.execution.trace import Call, Failure
from compound.graph.component import (
    Component,
    Input,
    Node,
    Operation,
    Output,
    Source,
    Value,
    merge_addresses,
)
from compound.graph.composite import Composite
from compound.graph.space import Space
from compound.graph.system import System
from compound.graph.types import Port, read_members


class Wire(NamedTuple):
    """Where a value is read: an input of the graph, or an output field of a node."""

    target: str
    node: str | None
    field: str
    path: tuple[str, ...] = ()


NodeResult = Call | Mapping[str, Value]
"""A node's call, or the values of the outputs of a composite or of a node that was skipped."""


@dataclass(frozen=True, slots=True)
class PlannedNode:
    """A node with what a run reads of it."""

    node: Node
    place: int
    wires: tuple[Wire, ...]
    guard: Wire | None
    wired_settings: tuple[str, ...]
    values: Mapping[str, object]
    outputs: Mapping[str, Port]
    operation: Operation | None


@dataclass(frozen=True, slots=True)
class ExecutionPlan:
    """Nodes in order, their dependencies, and whether at most one node can be ready at a time."""

    nodes: Mapping[str, PlannedNode]
    outputs: tuple[Wire, ...]
    successors: Mapping[str, tuple[str, ...]]
    waiting: dict[str, int]
    roots: tuple[str, ...]
    sequential: bool


def prepare(system: System, bound: System) -> ExecutionPlan:
    """Plan the execution of ``system`` (or a composite's body) with the configuration of ``bound``."""
    nodes = {
        name: PlannedNode(
            node=node,
            place=place,
            wires=tuple(_wire(port, source) for port, source in node.wires.items()),
            guard=_wire("when", node.when.source) if node.when is not None else None,
            wired_settings=tuple(port for port in node.wires if port in node.component.settings),
            values=setting_values(node.component, bound),
            outputs=node.component.outputs,
            operation=node.component if isinstance(node.component, Operation) else None,
        )
        for place, (name, node) in enumerate(system.nodes.items())
    }
    waiting = {
        name: len({s.node.name for s in node.sources if isinstance(s, Output)})
        for name, node in system.nodes.items()
    }
    roots = tuple(name for name, count in waiting.items() if not count)
    chain = len(roots) == 1 and all(len(following) <= 1 for following in system.successors.values())
    outputs = tuple(_wire(name, source) for name, source in system.outputs.items())
    return ExecutionPlan(nodes, outputs, system.successors, waiting, roots, chain)


def _wire(target: str, source: Source) -> Wire:
    if isinstance(source, Input):
        return Wire(target, None, source.name)
    return Wire(target, source.node.name, source.field, source.path)


def setting_values(component: Component, bound: System) -> dict[str, object]:
    """Return the values of a component's settings: configured, fixed, or the system's default."""
    values: dict[str, object] = {}
    for name, setting in component.settings.items():
        value = setting
        if isinstance(setting, Space):  # a setting wired at every node has no key
            value = bound.configuration.get(f"{component.name}.{name}", setting.value)
        values[name] = bound.defaults.get(name) if value is None else value
    return values


@dataclass(frozen=True, slots=True, eq=False)
class Mark:
    """Placeholder for a missing value; ``failed`` is the kind of the failure that it follows from, if any."""

    failed: str = ""


ABSENT = Mark()  # the node was skipped by a condition


def is_failed(value: object) -> TypeGuard[Mark]:
    """Return whether a value is missing because a call failed."""
    return isinstance(value, Mark) and value.failed != ""


def read_wire(wire: Wire, inputs: Mapping[str, Value], results: Mapping[str, NodeResult]) -> Value:
    """Return the value of a wire: an input of the graph, or an output of a finished node."""
    _, node, field, path = wire
    if node is None:
        return inputs[field]
    result = results[node]
    if not isinstance(result, Call):
        value = result[field]
    elif result.failure is not None:
        value = Value(Mark(result.failure.kind), (result.address,))
    else:
        value = Value(result.outputs[field], (result.address,))
    if path and not isinstance(value.data, Mark):
        return Value(read_members(value.data, path), value.sources)
    return value


def gather_inputs(
    step: PlannedNode, inputs: Mapping[str, Value], results: Mapping[str, NodeResult]
) -> tuple[dict[str, Value], dict[str, object], tuple[str, ...], Mark | None]:
    """Return a node's arguments, their data, the calls it depends on, and a mark if it cannot run.

    A node that is skipped by its condition is absent even if its inputs failed.
    """
    node = step.node
    arguments: dict[str, Value] = {}
    data: dict[str, object] = {}
    sources: tuple[str, ...] = ()
    mark: Mark | None = None
    for wire in step.wires:
        value = read_wire(wire, inputs, results)
        sources = merge_addresses(sources, value.sources) if sources else value.sources
        if not isinstance(value.data, Mark):
            arguments[wire.target], data[wire.target] = value, value.data
        elif is_failed(value.data):
            mark = value.data
        elif not node.inputs[wire.target].optional:
            mark = mark or ABSENT
    if step.guard is not None and node.when is not None:
        guard = read_wire(step.guard, inputs, results)
        sources = merge_addresses(sources, guard.sources)
        if is_failed(guard.data):
            mark = guard.data
        elif guard.data is ABSENT or guard.data != node.when.value:
            mark = ABSENT
        if isinstance(node.component, Composite):  # the condition also applies to the body
            arguments = {
                p: Value(v.data, merge_addresses(v.sources, guard.sources))
                for p, v in arguments.items()
            }
    if len(arguments) < len(node.inputs):
        for port, declared in node.inputs.items():
            if port not in arguments:
                arguments[port], data[port] = Value(declared.default), declared.default
    return arguments, data, sources, mark


def collect_outputs(
    system: System, results: Mapping[str, Value], calls: Sequence[Call]
) -> tuple[dict[str, object], Failure | None]:
    """Return the outputs, or the failure if one of them is missing."""
    for name, value in results.items():
        if is_failed(value.data):
            reasons = [call.failure for call in calls if call.failure is not None]
            return {}, reasons[0] if reasons else Failure("error", f"output {name!r} failed")
        if value.data is ABSENT:
            return {}, Failure(
                "skipped", f"{skipped_output(system, name)} was skipped by a condition"
            )
    return {name: value.data for name, value in results.items()}, None


def skipped_output(system: System, output: str) -> str:
    """Return the description of a missing output for messages."""
    return f"output {output!r} ({system.outputs[output].label})"
