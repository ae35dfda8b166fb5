"""Demonstrations bootstrapped from the system's own successful traces."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from compound.component import Component, Output
from compound.configuration import canonical, plain
from compound.contracts import Example, Metric
from compound.metrics import apply
from compound.ports import accepts
from compound.system import System
from compound.trace import Trace

SHARPNESS = 4  # how much likelier a demonstration from a better trace is drawn
LONGEST = 1500  # characters of one demonstration


@dataclass(frozen=True)
class Found:
    """A demonstration and how likely it is to be drawn, against the others of its pool."""

    demo: Mapping[str, Any]
    weight: float


def bootstrap(traces: Sequence[Trace], component: Component) -> list[Found]:
    """Return demonstrations of a component: what it read and wrote in traces that scored, best first.

    A trace's demonstrations weigh ``(score / best) ** SHARPNESS``: where the best traces are exact, those
    with partial credit are rarely drawn; where none is, they are what there is. Equal demonstrations
    appear once; very long ones are left out.
    """
    scored = [(t.score or 0.0, t) for t in traces if t.failure is None and (t.score or 0.0) > 0]
    best = max((score for score, _ in scored), default=1.0)
    found: dict[str, Found] = {}
    for score, trace in sorted(scored, key=lambda pair: -pair[0]):
        for call in trace.calls_of(component.name):
            if call.failure is None:
                inputs = {n: v for n, v in call.inputs.items() if n not in component.settings}
                try:
                    demo = plain({"inputs": inputs, "outputs": dict(call.outputs)})
                except (TypeError, ValueError):  # what a configuration cannot hold
                    continue
                text = canonical(demo)
                if len(text) <= LONGEST:
                    found.setdefault(text, Found(demo, (score / best) ** SHARPNESS))
    return list(found.values())


async def corrected(
    traces: Sequence[Trace], system: System, metric: Metric, examples: Mapping[str, Example]
) -> tuple[str, list[Trace]]:
    """Return traces that would have scored higher with the gold answer, with that answer in its place.

    Where the metric compares an output of an LLM component with a field of the example, that component's best
    demonstration is not what it wrote but what it should have written: a right answer in too many words has
    partial credit. Only traces that scored are corrected: what they read led to the answer.

    Args:
        traces: of the system, scored.
        system: says which component makes the output.
        metric: says which output it compares with which field; any other one corrects nothing.
        examples: by name.

    Returns:
        The component (``""`` when there is none), and the corrected traces with their scores.
    """
    output, gold = str(getattr(metric, "output", "")), str(getattr(metric, "gold", ""))
    source = system.outputs.get(output)
    if not isinstance(source, Output) or source.node.component.kind != "llm":
        return "", []
    node, found = source.node, []
    for trace in traces:
        answer = examples[trace.example].gold.get(gold) if trace.example in examples else None
        kind = node.component.outputs[source.field].type
        answer = answer[0] if isinstance(answer, list) and answer and not accepts(kind, answer) else answer
        if answer is None or not accepts(kind, answer) or trace.failure is not None or not trace.score:
            continue
        score = (await apply(metric, {**trace.outputs, output: answer}, examples[trace.example])).value
        if score > trace.score:
            calls = tuple(
                replace(call, outputs={**call.outputs, source.field: answer})
                if call.address == node.name else call
                for call in trace.calls
            )  # fmt: skip
            found.append(replace(trace, calls=calls, score=score))
    return node.component.name, found


def draw(pool: Sequence[Found], most: int, rng: np.random.Generator) -> list[Mapping[str, Any]]:
    """Draw 1 to ``most`` different demonstrations, by weight."""
    count = int(rng.integers(1, min(most, len(pool)) + 1))
    weights = np.array([max(found.weight, 1e-9) for found in pool])
    chosen = rng.choice(len(pool), size=count, replace=False, p=weights / weights.sum())
    return [pool[i].demo for i in chosen]
