"""Traces as text for prompts: shortened inputs and outputs of each call, with bounds on their length."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from compound.execution.trace import Call, Trace
from compound.graph.bounds import Extent, Use
from compound.graph.component import Component
from compound.graph.configuration import canonical_json, to_readable_json
from compound.graph.system import System
from compound.optimization.bounds import Outlook

VALUE = 600  # maximum characters of one value
FAILURE = 300  # maximum bytes of the message of a failed call
FEEDBACK = 2_000  # maximum bytes of a metric's feedback
DEPTH = 4  # assumed maximum nesting of loops and maps in an address
MARKS = 24  # upper bound on the bytes of fixed text around a value or a call


def fields(values: Mapping[str, object]) -> str:
    """Return values on one line, each shortened.

    >>> fields({"question": "Which river?", "k": 3})
    'question: Which river?; k: 3'
    """
    return "; ".join(f"{name}: {_shortened(value)}" for name, value in values.items()) or "nothing"


def steps(trace: Trace) -> str:
    """Return one line per call of a trace: its address and outputs, and the message if it failed."""
    return "\n".join(
        f"{call.address} wrote {fields(call.outputs)}"
        + (f" (failed: {_cut_bytes(call.failure.message, FAILURE)})" if call.failure else "")
        for call in trace.calls
    )


def calls(trace: Trace, component: Component) -> str:
    """Return the inputs and outputs of a component's calls in a trace, two lines per call."""
    return "\n".join(_lines(call, component, "It") for call in trace.calls_of(component.name))


def calls_of_others(trace: Trace, component: Component, system: System) -> str:
    """Return the inputs and outputs of the other components' calls in a trace, in order."""
    return "\n".join(
        _lines(call, system.components[call.component], call.address)
        for call in trace.calls
        if call.component != component.name
    )


def read_and_written(call: Call, system: System) -> str:
    """Return the inputs and outputs of a call, on two lines."""
    return _lines(call, system.components[call.component], "It")


def _lines(call: Call, component: Component, subject: str) -> str:
    """Return the inputs of a call, without settings, and its outputs, with the message if it failed."""
    given = {name: value for name, value in call.inputs.items() if name not in component.settings}
    failed = f" (failed: {_cut_bytes(call.failure.message, FAILURE)})" if call.failure else ""
    return f"{subject} read {fields(given)}\n{subject} wrote {fields(call.outputs)}{failed}"


def result(trace: Trace) -> str:
    """Return the outputs of a run, or the message if it failed."""
    if trace.failure:
        return f"the run failed: {_cut_bytes(trace.failure.message, FAILURE)}"
    return fields(trace.outputs)


def verdict(trace: Trace) -> str:
    """Return the score of a run, with the metric's feedback if there is any."""
    return f"{trace.score or 0.0:.3f}" + (
        f" ({_cut_bytes(trace.feedback, FEEDBACK)})" if trace.feedback else ""
    )


def diagram(system: System) -> str:
    """Return a description of the inputs and outputs of all nodes, including nested ones, one per line."""
    return "\n".join(
        f"{node.name}{'' if node.name == node.component.name else f' (a use of {node.component.name})'}"
        f" reads {', '.join(source.label for source in node.wires.values()) or 'nothing'}"
        f" and writes {', '.join(node.component.outputs)}"
        for node in system.all_nodes()
    )


def _shortened(value: object) -> str:
    text = value if isinstance(value, str) else canonical_json(to_readable_json(value))
    return text if len(text) <= VALUE else f"{text[:VALUE]} …"


def _cut_bytes(text: str, longest: int) -> str:
    encoded = text.encode(errors="replace")
    return text if len(encoded) <= longest else f"{encoded[:longest].decode(errors='ignore')} …"


def longest_fields(values: Mapping[str, Extent]) -> Extent:
    """Return a bound on the length of `fields` for values of the given extents."""
    named = Extent(MARKS + sum(len(name.encode()) + MARKS for name in values))
    return sum((extent.truncated(VALUE) for extent in values.values()), named)


def longest_of(examples: Iterable[Mapping[str, object]]) -> Extent:
    """Return the maximum length of `fields` over the given values."""
    return Extent(max((len(fields(values).encode(errors="replace")) for values in examples), default=0))


def longest_calls(use: Use) -> Extent:
    """Return a bound on the length of `calls` for one run."""
    one = longest_fields(use.inputs) + longest_fields(use.outputs) + Extent(2 * MARKS + FAILURE)
    return one.times(use.calls)


def longest_calls_of_others(outlook: Outlook, component: str) -> Extent:
    """Return a bound on the length of `calls_of_others` for one run."""
    addresses = Extent(2 * _longest_address(outlook))
    uses = [(name, use) for name, use in outlook.uses.items() if name != component]
    return sum((longest_calls(use) + addresses.times(use.calls) for _, use in uses), Extent())


def _longest_address(outlook: Outlook) -> int:
    names = [len(node.name.encode()) + MARKS for node in outlook.system.all_nodes()]
    return DEPTH * max(names, default=0)


def longest_steps(outlook: Outlook) -> Extent:
    """Return a bound on the length of `steps` for one run."""
    mark = Extent(_longest_address(outlook) + FAILURE)
    parts = [(longest_fields(use.outputs) + mark).times(use.calls) for use in outlook.uses.values()]
    return sum(parts, Extent())


def longest_run(outlook: Outlook) -> Extent:
    """Return a bound on the total length of `result` and `verdict` for one run."""
    return longest_fields(outlook.outputs) + Extent(FAILURE + FEEDBACK + 2 * MARKS)
