"""How values reach a node and leave a graph: what is there, what a condition left out, what failed.

A value carries the addresses of the calls it came from, through loops, maps and conditions too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from compound.execution.plan import Step
from compound.execution.trace import Call, Failure
from compound.graph.component import Composite, Input, Source, Value, joined
from compound.graph.system import System


class Mark:
    """A stand-in for a value that is not there."""


ABSENT = Mark()  # its node was skipped by a condition
FAILED = Mark()  # its node failed, or waits for one that did


def read(source: Source, inputs: Mapping[str, Value], results: Mapping[str, Mapping[str, Value]]) -> Value:
    """Return the value at a source: an input of the graph, or an output of a node that is done."""
    if isinstance(source, Input):
        return inputs[source.name]
    return results[source.node.name][source.field]


def gather(
    step: Step, inputs: Mapping[str, Value], results: Mapping[str, Mapping[str, Value]]
) -> tuple[dict[str, Value], tuple[str, ...], Mark | None]:
    """Read a node's wires and its condition: its arguments, the calls it depends on, why it cannot run.

    A node that its condition leaves out is absent whatever became of its inputs.
    """
    node = step.node
    arguments: dict[str, Value] = {}
    sources: tuple[str, ...] = ()
    mark: Mark | None = None
    for port, source in step.wires:
        value = read(source, inputs, results)
        sources = joined(sources, value.sources)
        if value.data is FAILED:
            mark = FAILED
        elif value.data is not ABSENT:
            arguments[port] = value
        elif not node.inputs[port].optional:
            mark = mark or ABSENT
    if node.when is not None:
        guard = read(node.when.source, inputs, results)
        sources = joined(sources, guard.sources)
        if guard.data is FAILED:
            mark = FAILED
        elif guard.data is ABSENT or guard.data != node.when.value:
            mark = ABSENT
        if isinstance(node.component, Composite):  # what runs inside it obeys the condition too
            arguments = {p: Value(v.data, joined(v.sources, guard.sources)) for p, v in arguments.items()}
    for port, declared in node.inputs.items():
        if port not in arguments:
            arguments[port] = Value(declared.default)
    return arguments, sources, mark


def finish(
    system: System, results: Mapping[str, Value], calls: Sequence[Call]
) -> tuple[dict[str, object], Failure | None]:
    """Return the outputs, or why there are none: a run fails when one of its outputs is missing."""
    for name, value in results.items():
        if value.data is FAILED:
            reasons = [call.failure for call in calls if call.failure is not None]
            return {}, reasons[0] if reasons else Failure("error", f"output {name!r} failed")
        if value.data is ABSENT:
            return {}, Failure("skipped", f"{skipped_output(system, name)} was skipped by a condition")
    return {name: value.data for name, value in results.items()}, None


def skipped_output(system: System, output: str) -> str:
    """Return how messages name an output that is not there."""
    return f"output {output!r} ({system.outputs[output].label})"
