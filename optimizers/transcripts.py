"""Traces as text, for a model that reads what a run did: each step's inputs and outputs, shortened."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from compound.component import Component
from compound.configuration import canonical, readable
from compound.system import System
from compound.trace import Trace

LONGEST = 600  # characters of one value


def fields(values: Mapping[str, Any]) -> str:
    """Return values on one line, each shortened.

    >>> fields({"question": "Which river?", "k": 3})
    'question: Which river?; k: 3'
    """
    return "; ".join(f"{name}: {_shortened(value)}" for name, value in values.items()) or "nothing"


def steps(trace: Trace) -> str:
    """Return one line for each call of a trace: its address and what it wrote, or why it failed."""
    return "\n".join(
        f"{call.address} wrote {fields(call.outputs)}"
        + (f" (failed: {call.failure.message})" if call.failure else "")
        for call in trace.calls
    )


def calls(trace: Trace, component: Component) -> str:
    """Return what a component read and wrote in a trace, two lines for each call."""
    made = trace.calls_of(component.name)
    return "\n".join(
        f"It read {fields({n: v for n, v in call.inputs.items() if n not in component.settings})}\n"
        f"It wrote {fields(call.outputs)}" + (f" (failed: {call.failure.message})" if call.failure else "")
        for call in made
    )


def result(trace: Trace) -> str:
    """Return the outputs of a run, or why there are none."""
    return f"the run failed: {trace.failure.message}" if trace.failure else fields(trace.outputs)


def verdict(trace: Trace) -> str:
    """Return what the metric said of a run: its score, and its words where it has some."""
    return f"{trace.score or 0.0:.3f}" + (f" ({trace.feedback})" if trace.feedback else "")


def diagram(system: System) -> str:
    """Return a system in words: which node reads what, and what it writes, those inside others included."""
    return "\n".join(
        f"{node.name}{'' if node.name == node.component.name else f' (a use of {node.component.name})'}"
        f" reads {', '.join(source.label for source in node.wires.values()) or 'nothing'}"
        f" and writes {', '.join(node.component.outputs)}"
        for node in system.all_nodes()
    )


def _shortened(value: Any) -> str:
    text = value if isinstance(value, str) else canonical(readable(value))
    return text if len(text) <= LONGEST else f"{text[:LONGEST]} …"
