"""Worked examples of a component's task as text, for requests that ask a model for a new prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from compound.core.example import Example, Metric
from compound.evaluation.metrics.comparison import Comparison
from compound.execution.trace import Call, Trace
from compound.graph.component import Component, Output
from compound.graph.system import System
from compound.optimizers.search.proposers.transcripts import fields

MOST_KEPT = 24  # exemplars of a component that a job stores


def exemplars(
    component: Component,
    traces: Sequence[Trace],
    system: System,
    metric: Metric,
    examples: Mapping[str, Example],
) -> list[str]:
    """Return what a component read in each run, and the right answer as far as it is known.

    If the metric compares the component's output with an expected answer, an exemplar shows that
    answer. Otherwise it shows the component's own output with the score of the run, and the result
    expected of the whole system if the metric compares one.
    """
    shown = []
    for trace in traces:
        calls = [call for call in trace.calls_of(component.name) if call.failure is None]
        if trace.failure is None and calls and trace.example in examples:
            expected = _expected(metric, examples[trace.example])
            shown.append(
                _exemplar(
                    calls[0], trace, component, expected, _is_judged(system, metric, calls[0])
                )
            )
    return list(dict.fromkeys(shown))[:MOST_KEPT]


def _exemplar(
    call: Call, trace: Trace, component: Component, expected: str | None, is_judged: bool
) -> str:
    read = fields({name: v for name, v in call.inputs.items() if name not in component.settings})
    if expected is not None and is_judged:
        return f"Input: {read}\nRight answer: {expected}"
    text = (
        f"Input: {read}\nOutput: {fields(call.outputs)}\nScore of the run: {trace.score or 0.0:.3f}"
    )
    return text if expected is None else f"{text}\nRight result of the whole system: {expected}"


def _expected(metric: Metric, example: Example) -> str | None:
    """Return the first expected answer as text; ``None`` if the metric compares none."""
    accepted = metric.accepted(example) if isinstance(metric, Comparison) else []
    return fields({"answer": accepted[0]}).removeprefix("answer: ") if accepted else None


def _is_judged(system: System, metric: Metric, call: Call) -> bool:
    """Return whether a call wrote the output that the metric compares."""
    source = system.outputs.get(metric.output) if isinstance(metric, Comparison) else None
    return isinstance(source, Output) and source.node.name == call.node
