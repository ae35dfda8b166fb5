"""The part of a system that a local evaluation runs: a component, its prefix, and its cheap consequences.

A candidate of a component is evaluated locally by running the component on its inputs, without the
expensive components after it. Deterministic descendants that call no model (a function that joins
texts, a BM25 search after a query writer) run too: what they return says more about an output than
the output itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from compound.core.example import Example
from compound.execution.executor import gather_ordered
from compound.execution.schedule import setting_values
from compound.execution.trace import Trace
from compound.graph.component import Component, Node, Output
from compound.graph.composite import Composite
from compound.graph.system import System
from compound.optimization.method import JobContext
from compound.optimization.prices import Prices
from compound.optimization.scorer import TRAIN_SAMPLE

CHEAP = ("function", "retriever")  # kinds that call no model


@dataclass(frozen=True)
class Part:
    """A part of a system."""

    system: System
    component: str
    effects: tuple[str, ...]  # the cheap deterministic descendants, by component
    # the fraction of a run of the whole system that all counted calls of the part are
    weight: float
    price: float  # the fraction that executes again if the settings of the component change

    def bind(self, configuration: Mapping[str, object]) -> System:
        """Return the part bound to the values of a configuration of the whole system."""
        known = self.system.parameters
        return self.system.bind(
            {key: value for key, value in configuration.items() if key in known}
        )


def part_of(system: System, component: str, prices: Prices) -> Part:
    """Return the part of a system that evaluates a component locally."""
    own = {name for name, node in system.nodes.items() if _uses(node, component)}
    kept = _with_effects(system, own)
    outputs = {
        f"{number}_{field}": Output(system.nodes[name], field)
        for number, name in enumerate(n for n in system.nodes if n in kept)
        for field in system.nodes[name].component.outputs
    }
    part = System(system.name, {f"o{key}": source for key, source in outputs.items()}, lm=system.lm)
    part = part.bind({k: v for k, v in system.configuration.items() if k in part.parameters})
    inside = [call for call in prices.calls if call.component in part.components]
    price = sum(call.share for call in inside if component in call.depends)
    weight = sum(call.share for call in inside)
    if not prices.calls:  # nothing is counted, so every run counts as a whole one
        price = weight = 1.0
    after = [name for name in system.nodes if name in kept and name not in own]
    effects = tuple(dict.fromkeys(system.nodes[name].component.name for name in after))
    return Part(part, component, effects, min(1.0, weight), min(1.0, price))


def _with_effects(system: System, own: set[str]) -> set[str]:
    """Return some nodes and the cheap deterministic nodes after them that read nothing else after them."""
    after = frozenset[str]().union(*(system.descendants(name) for name in own))
    kept = set(own)
    for name, node in system.nodes.items():  # sources come before the nodes that read them
        sources = {s.node.name for s in node.sources if isinstance(s, Output)}
        reads_kept_only = bool(sources & kept) and not (sources & after) - kept
        is_after = name in after and name not in own
        if is_after and reads_kept_only and _is_cheap(node.component, system):
            kept.add(name)
    return kept


def _uses(node: Node, component: str) -> bool:
    if node.component.name == component:
        return True
    return isinstance(node.component, Composite) and component in node.component.body.components


def _is_cheap(component: Component, system: System) -> bool:
    if component.kind not in CHEAP and component.cacheable:
        return False
    return not isinstance(component, Composite) and component.deterministic(
        setting_values(component, system)
    )


async def run_parts(
    context: JobContext, part: Part, candidates: Sequence[System], examples: Sequence[Example]
) -> list[list[Trace]]:
    """Run a part on every example for every candidate, charge it, and return the traces by candidate.

    Raises:
        BudgetExhausted: the budget ended before all runs were made.
    """
    executor = context.executor

    async def run(system: System, example: Example) -> Trace:
        inputs = {name: example.inputs[name] for name in system.inputs}
        return await executor.run(system, inputs, example=example.id, sample=TRAIN_SAMPLE)

    jobs = [partial(run, system, example) for system in candidates for example in examples]
    made = await gather_ordered(
        executor,
        jobs,
        lambda _, trace: executor.settle(trace, part.weight, part.weight),
        context.rules.concurrency,
        [part.weight] * len(jobs),
    )
    width = len(examples) or 1
    return [made[start : start + width] for start in range(0, len(made), width)]
