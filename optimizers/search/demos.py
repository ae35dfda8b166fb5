"""Demonstrations from the system's own successful traces, and of what their answers should have been."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from compound.evaluation.metrics import Comparison
from compound.example import Example, Metric
from compound.execution.trace import Call, Trace
from compound.graph.component import Component, Output
from compound.graph.configuration import canonical, plain_values
from compound.graph.system import System
from compound.graph.types import accepts

SHARPNESS = 4  # how much likelier a demonstration from a better trace is drawn
LONGEST = 1500  # characters of one demonstration

Demo = Mapping[str, Mapping[str, object]]  # ``inputs`` and ``outputs`` of a call
Correction = tuple[float, Call]  # what a call would have scored with the outputs it has here


@dataclass(frozen=True)
class Found:
    """A demonstration and how likely it is to be drawn, against the others of its pool."""

    demo: Demo
    weight: float


def bootstrap(
    traces: Sequence[Trace], component: Component, corrections: Sequence[Correction] = ()
) -> list[Found]:
    """Return demonstrations of a component: what it read and wrote in traces that scored, best first.

    A trace's demonstrations weigh ``(score / best) ** SHARPNESS``: where the best traces are exact, those
    with partial credit are rarely drawn; where none is, they are what there is. Equal demonstrations
    appear once; very long ones are left out.

    Args:
        traces: of the system, scored.
        component: whose demonstrations.
        corrections: calls with other outputs, and what they would have scored; see `corrected`.
    """
    scored = [
        (trace.score or 0.0, call)
        for trace in traces
        if trace.failure is None and (trace.score or 0.0) > 0
        for call in trace.calls_of(component.name)
    ]
    scored += [(score, call) for score, call in corrections if call.component == component.name]
    best = max((score for score, _ in scored), default=1.0)
    found: dict[str, Found] = {}
    for score, call in sorted(scored, key=lambda pair: -pair[0]):
        if call.failure is None:
            inputs = {n: v for n, v in call.inputs.items() if n not in component.settings}
            try:
                demo = {"inputs": plain_values(inputs), "outputs": plain_values(call.outputs)}
            except (TypeError, ValueError):  # what a configuration cannot hold
                continue
            text = canonical(demo)
            if len(text) <= LONGEST:
                found.setdefault(text, Found(demo, (score / best) ** SHARPNESS))
    return list(found.values())


def corrected(
    traces: Sequence[Trace], system: System, metric: Metric, examples: Mapping[str, Example]
) -> list[Correction]:
    """Return calls that made the system's answer, as they should have been, with what that would have scored.

    Where the metric compares an output that an LLM component wrote with a right answer, the component's best
    demonstration is not what it wrote but what it should have written: a right answer in too many words has
    partial credit. Only calls of traces that scored are corrected: what they read led to the answer.

    Args:
        traces: of the system, scored.
        system: says which component makes the output.
        metric: says which output it compares with what; any other metric corrects nothing.
        examples: by name; traces of others are left out.
    """
    source = system.outputs.get(metric.output) if isinstance(metric, Comparison) else None
    if not isinstance(metric, Comparison) or not isinstance(source, Output):
        return []
    node, field = source.node, source.field
    if node.component.kind != "llm":
        return []
    found: list[Correction] = []
    for trace in traces:
        if trace.failure is not None or not trace.score or trace.example not in examples:
            continue
        example = examples[trace.example]
        fitting = (a for a in metric.accepted(example) if accepts(node.component.outputs[field].type, a))
        answer = next(fitting, None)
        if answer is None:
            continue
        score = metric.score({**trace.outputs, metric.output: answer}, example).value
        if score > trace.score:
            call = trace.call(node.name)
            found.append((score, replace(call, outputs={**call.outputs, field: answer})))
    return found


def draw(pool: Sequence[Found], most: int, rng: np.random.Generator) -> list[Demo]:
    """Draw 1 to ``most`` different demonstrations, by weight."""
    count = int(rng.integers(1, min(most, len(pool)) + 1))
    weights = np.array([max(found.weight, 1e-9) for found in pool])
    chosen = rng.choice(len(pool), size=count, replace=False, p=weights / weights.sum())
    return [pool[i].demo for i in chosen]
