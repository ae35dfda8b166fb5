"""Demonstrations from the system's successful traces, with answers corrected to the expected ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from compound.core.example import Example, Metric
from compound.evaluation.metrics.comparison import Comparison
from compound.execution.trace import Call, Trace
from compound.graph.component import Component, Input, Output
from compound.graph.configuration import canonical_json, component_of, to_json_values
from compound.graph.system import System
from compound.graph.types import accepts
from compound.optimization.method import Task
from compound.optimizers.scheduling import demo_keys
from compound.optimizers.search.sources import CandidateSources, Rows

SHARPNESS = 4  # exponent of relative scores in sampling weights; higher values prefer better traces
MAX_CHARACTERS = 1500  # of one demonstration, as JSON

Demo = Mapping[str, Mapping[str, object]]  # ``inputs`` and ``outputs`` of a call
Correction = tuple[
    float, Call
]  # a call with corrected outputs, and the score of the run with these outputs


@dataclass(frozen=True)
class WeightedDemo:
    """A demonstration with its sampling weight relative to the others of its pool."""

    demo: Demo
    weight: float


def bootstrap(
    traces: Sequence[Trace], component: Component, corrections: Sequence[Correction] = ()
) -> list[WeightedDemo]:
    """Return a component's inputs and outputs in traces with a positive score as demonstrations, best first.

    The weight of one is ``(score / best) ** SHARPNESS``: partial credit counts if there is no other.
    """
    scored = [
        (trace.score or 0.0, call)
        for trace in traces
        if trace.failure is None and (trace.score or 0.0) > 0
        for call in trace.calls_of(component.name)
    ]
    scored += [(score, call) for score, call in corrections if call.component == component.name]
    best = max((score for score, _ in scored), default=1.0)
    demos: dict[str, WeightedDemo] = {}
    for score, call in sorted(scored, key=lambda pair: -pair[0]):
        if call.failure is None and component.is_demonstration(call.outputs):
            inputs = {n: v for n, v in call.inputs.items() if n not in component.settings}
            try:
                demo = {"inputs": to_json_values(inputs), "outputs": to_json_values(call.outputs)}
            except (TypeError, ValueError):  # values that a configuration cannot store
                continue
            text = canonical_json(demo)
            if len(text) <= MAX_CHARACTERS:
                demos.setdefault(text, WeightedDemo(demo, (score / best) ** SHARPNESS))
    return list(demos.values())


def correct_calls(
    traces: Sequence[Trace], system: System, metric: Metric, examples: Mapping[str, Example]
) -> list[Correction]:
    """Return the calls that wrote the system's output, with the expected output and its score.

    Only calls of traces with a positive score are corrected, since their inputs led to the answer.
    """
    found = _compared(system, metric)
    if found is None or found[1].node.component.kind != "llm":
        return []
    (comparison, source), corrections = found, list[Correction]()
    for trace in traces:
        if trace.failure is not None or not trace.score or trace.example not in examples:
            continue
        example = examples[trace.example]
        answer = _expected(comparison, source, example)
        if answer is None:
            continue
        score = comparison.score({**trace.outputs, comparison.output: answer}, example).value
        if score > trace.score:
            call = trace.call(source.node.name)
            corrections.append(
                (score, replace(call, outputs={**call.outputs, source.field: answer}))
            )
    return corrections


def _compared(system: System, metric: Metric) -> tuple[Comparison, Output] | None:
    """Return the comparison with expected answers, and the output that it compares, if it is a whole one."""
    source = system.outputs.get(metric.output) if isinstance(metric, Comparison) else None
    if isinstance(metric, Comparison) and isinstance(source, Output) and not source.path:
        return metric, source
    return None


def _expected(comparison: Comparison, source: Output, example: Example) -> object | None:
    """Return the first expected answer that has the type of the output."""
    kind = source.node.component.outputs[source.field].type
    return next((answer for answer in comparison.accepted(example) if accepts(kind, answer)), None)


def draw_demos(pool: Sequence[WeightedDemo], most: int, rng: np.random.Generator) -> list[Demo]:
    """Draw 1 to ``most`` distinct demonstrations, with probability proportional to their weights."""
    count = int(rng.integers(1, min(most, len(pool)) + 1))
    # a weight may underflow to 0, but drawing without replacement needs enough positive weights
    weights = np.array([max(demo.weight, 1e-9) for demo in pool])
    chosen = rng.choice(len(pool), size=count, replace=False, p=weights / weights.sum())
    return [pool[i].demo for i in chosen]


def labelled_demos(
    system: System, metric: Metric, examples: Sequence[Example]
) -> Mapping[str, Sequence[Demo]]:
    """Return demonstrations made of examples and their expected answers, by component.

    They exist for a component that only writes the compared output, and reads inputs of the system only.
    """
    found = _compared(system, metric)
    if found is None:
        return {}
    comparison, source = found
    component = source.node.component
    wires = {
        name: wire for name, wire in source.node.wires.items() if name not in component.settings
    }
    read = {name: wire.name for name, wire in wires.items() if isinstance(wire, Input)}
    if len(component.outputs) > 1 or len(read) < len(wires):
        return {}
    demos: list[Demo] = []
    for example in examples:
        answer = _expected(comparison, source, example)
        if answer is not None:
            inputs = {name: example.inputs[wire] for name, wire in read.items()}
            outputs = to_json_values({source.field: answer})
            demo = {"inputs": to_json_values(inputs), "outputs": outputs}
            demos += [demo] if len(canonical_json(demo)) <= MAX_CHARACTERS else []
    return {component.name: demos}


async def bootstrap_pools(task: Task, examples: Sequence[Example]) -> dict[str, list[WeightedDemo]]:
    """Run the incumbent on pool examples, and return a pool of demonstrations for each key."""
    keys = demo_keys(task)
    if not keys or not examples:
        return {}
    traces = await task.scorer.traces({}, examples)
    corrections = correct_calls(
        traces, task.system, task.context.metric, {e.id: e for e in task.train}
    )
    components = {key: task.system.components[component_of(key)] for key in keys}
    return {key: bootstrap(traces, component, corrections) for key, component in components.items()}


def is_whole(trace: Trace) -> bool:
    """Return whether no call of a trace failed; repeating such a run is free if calls are cached."""
    return trace.failure is None and all(call.failure is None for call in trace.calls)


async def demonstrations(
    task: Task, sources: CandidateSources, rows: Rows
) -> dict[str, Sequence[WeightedDemo]]:
    """Return demonstrations to draw from by key: expected answers, otherwise successful runs."""
    keys = demo_keys(task) if "demos" in sources.names else []
    labelled = labelled_demos(task.system, task.context.metric, rows.read)
    found = {key: labelled.get(component_of(key), ()) for key in keys}
    pools: dict[str, Sequence[WeightedDemo]] = {
        key: [WeightedDemo(demo, 1.0) for demo in demos] for key, demos in found.items() if demos
    }
    if set(keys) - set(pools):
        pools = {**(await bootstrap_pools(task, rows.pool)), **pools}
    return pools
