"""Execution plan of a graph: the order of its nodes, and the flow of values between them.

Everything independent of the example is computed once, in an `ExecutionPlan`. A value carries the addresses
of the calls that produced it, also through loops, maps and conditions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeGuard

from compound.execution.trace import Call, Failure
from compound.graph.component import Component, Input, Node, Output, Source, Value, merge_addresses
from compound.graph.composite import Composite
from compound.graph.members import read_members
from compound.graph.space import Space
from compound.graph.system import System
from compound.graph.types import accepts, format_type


@dataclass(frozen=True, slots=True)
class Step:
    """A node with its position in the order, its wires, and the values of its settings."""

    node: Node
    place: int
    wires: tuple[tuple[str, Source], ...]
    wired_settings: tuple[str, ...]
    values: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class ExecutionPlan:
    """Steps in order, their dependencies, and whether at most one node can be ready at a time."""

    steps: Mapping[str, Step]
    successors: Mapping[str, tuple[str, ...]]
    waiting: dict[str, int]
    roots: tuple[str, ...]
    sequential: bool


def prepare(system: System, bound: System) -> ExecutionPlan:
    """Plan the execution of ``system`` (or a composite's body) with the configuration of ``bound``."""
    steps = {
        name: Step(
            node=node,
            place=place,
            wires=tuple(node.wires.items()),
            wired_settings=tuple(port for port in node.wires if port in node.component.settings),
            values=setting_values(node.component, bound),
        )
        for place, (name, node) in enumerate(system.nodes.items())
    }
    waiting = {
        name: len({s.node.name for s in node.sources if isinstance(s, Output)})
        for name, node in system.nodes.items()
    }
    roots = tuple(name for name, count in waiting.items() if not count)
    chain = len(roots) == 1 and all(len(following) <= 1 for following in system.successors.values())
    return ExecutionPlan(steps, system.successors, waiting, roots, chain)


def setting_type_error(step: Step, values: Mapping[str, object]) -> str:
    """Return an error message if a wired setting received a value of the wrong type, else ``""``."""
    for name in step.wired_settings:
        kind = step.node.inputs[name].type
        if not accepts(kind, values[name]):
            return f"{step.node.name}.{name} must be {format_type(kind)}, but got {values[name]!r:.200}"
    return ""


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


def read_source(
    source: Source, inputs: Mapping[str, Value], results: Mapping[str, Mapping[str, Value]]
) -> Value:
    """Return the value of a source: an input of the graph, or an output of a finished node."""
    if isinstance(source, Input):
        return inputs[source.name]
    value = results[source.node.name][source.field]
    if source.path and not isinstance(value.data, Mark):
        return Value(read_members(value.data, source.path), value.sources)
    return value


def gather_inputs(
    step: Step, inputs: Mapping[str, Value], results: Mapping[str, Mapping[str, Value]]
) -> tuple[dict[str, Value], tuple[str, ...], Mark | None]:
    """Return a node's arguments, the calls it depends on, and a mark if it cannot run.

    A node that is skipped by its condition is absent even if its inputs failed.
    """
    node = step.node
    arguments: dict[str, Value] = {}
    sources: tuple[str, ...] = ()
    mark: Mark | None = None
    for port, source in step.wires:
        value = read_source(source, inputs, results)
        sources = merge_addresses(sources, value.sources)
        if is_failed(value.data):
            mark = value.data
        elif value.data is not ABSENT:
            arguments[port] = value
        elif not node.inputs[port].optional:
            mark = mark or ABSENT
    if node.when is not None:
        guard = read_source(node.when.source, inputs, results)
        sources = merge_addresses(sources, guard.sources)
        if is_failed(guard.data):
            mark = guard.data
        elif guard.data is ABSENT or guard.data != node.when.value:
            mark = ABSENT
        if isinstance(node.component, Composite):  # the condition also applies to the body
            arguments = {
                p: Value(v.data, merge_addresses(v.sources, guard.sources)) for p, v in arguments.items()
            }
    for port, declared in node.inputs.items():
        if port not in arguments:
            arguments[port] = Value(declared.default)
    return arguments, sources, mark


def collect_outputs(
    system: System, results: Mapping[str, Value], calls: Sequence[Call]
) -> tuple[dict[str, object], Failure | None]:
    """Return the outputs, or the failure if one of them is missing."""
    for name, value in results.items():
        if is_failed(value.data):
            reasons = [call.failure for call in calls if call.failure is not None]
            return {}, reasons[0] if reasons else Failure("error", f"output {name!r} failed")
        if value.data is ABSENT:
            return {}, Failure("skipped", f"{skipped_output(system, name)} was skipped by a condition")
    return {name: value.data for name, value in results.items()}, None


def skipped_output(system: System, output: str) -> str:
    """Return the description of a missing output for messages."""
    return f"output {output!r} ({system.outputs[output].label})"
