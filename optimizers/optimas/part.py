"""The part of a system that a local evaluation runs: a component, its prefix, and its cheap consequences.

A candidate of a component is evaluated locally by running the component on its inputs, without the expensive
components after it. Deterministic descendants that call no model (a function that joins texts, a BM25 search
after a query writer) run too: what they return says more about an output than the output itself.

Components between which only such cheap ones lie form a segment (`segments`). A local evaluation of the first
of them runs all of them, so their parameters are searched together, and one local reward reads the outputs of
the whole segment. The parameters of one segment usually interact, such as the number of passages and their
length.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from compound.example import Example
from compound.execution.ordered import gather_ordered
from compound.execution.schedule import setting_values
from compound.execution.trace import Call, Trace
from compound.graph.component import Component, Node, Output
from compound.graph.composite import Composite
from compound.graph.configuration import component_of, segment_name
from compound.graph.space import Choice, Float, Int, PerInput
from compound.graph.system import System
from compound.optimization.method import JobContext
from compound.optimization.prices import Prices
from compound.optimization.scorer import TRAIN_SAMPLE
from compound.rewards.template import Template, describe

__all__ = ["Part", "part_of", "run_parts", "segments"]

CHEAP = ("function", "retriever")  # kinds that call no model


@dataclass(frozen=True)
class Part:
    """A part of a system.

    Attributes:
        system: the part as a system; its nodes and parameters have the names of the whole system's.
        components: the component that is evaluated, or those of a segment, in topological order.
        effects: the cheap deterministic descendants, by component.
        weight: the fraction of a run of the whole system that all counted calls of the part are.
        price: the fraction that executes again if the settings of the components change.
    """

    system: System
    components: tuple[str, ...]
    effects: tuple[str, ...]
    weight: float
    price: float

    @property
    def name(self) -> str:
        """Name of the component, or of the segment."""
        return segment_name(self.components)

    def bind(self, configuration: Mapping[str, object]) -> System:
        """Return the part bound to the values of a configuration of the whole system."""
        known = self.system.parameters
        return self.system.bind({key: value for key, value in configuration.items() if key in known})

    def template(self) -> Template:
        """Return the template that renders the calls of the component, or those of the segment."""
        templates = [Template.of(self.system.components[name]) for name in self.components]
        if len(templates) == 1:
            return templates[0]
        labels = {f"{t.component}.{field}": values for t in templates for field, values in t.labels.items()}
        settings = frozenset(f"{t.component}.{setting}" for t in templates for setting in t.settings)
        description = " ".join(describe(self.system.components[name]) for name in self.components)
        return Template(self.name, settings, labels, description)

    def calls(self, trace: Trace) -> Sequence[Call]:
        """Return the calls of the component; those of a segment as one call, or none if one is missing.

        The inputs of a segment are those that come from outside of it; its outputs are those of all its
        components, so that a reward sees every effect of their settings.
        """
        if len(self.components) == 1:
            return trace.calls_of(self.components[0])
        calls = [call for name in self.components for call in trace.calls_of(name)]
        if len(calls) < len(self.components):
            return []
        failure = next((call.failure for call in calls if call.failure is not None), None)
        inputs = {
            f"{call.component}.{port}": call.inputs[port]
            for call in calls
            for port, source in self.system.nodes[call.node].wires.items()
            if port in call.inputs and not self._makes(source)
        }
        outputs = {f"{call.component}.{field}": x for call in calls for field, x in call.outputs.items()}
        return [Call(self.name, self.name, self.name, (), inputs, outputs, failure)]

    def _makes(self, source: object) -> bool:
        """Return whether a source is an output of the segment or of one of its effects."""
        made = {*self.components, *self.effects}
        return isinstance(source, Output) and source.node.component.name in made


def part_of(system: System, components: Sequence[str], prices: Prices) -> Part:
    """Return the part of a system that evaluates a component, or a segment, locally."""
    own = {name for name, node in system.nodes.items() if any(_uses(node, each) for each in components)}
    kept = _with_effects(system, own)
    outputs = {
        f"{number}_{field}": Output(system.nodes[name], field)
        for number, name in enumerate(n for n in system.nodes if n in kept)
        for field in system.nodes[name].component.outputs
    }
    part = System(system.name, {f"o{key}": source for key, source in outputs.items()}, lm=system.lm)
    part = part.bind({k: v for k, v in system.configuration.items() if k in part.parameters})
    inside = [call for call in prices.calls if call.component in part.components]
    price = sum(call.share for call in inside if not set(components).isdisjoint(call.depends))
    weight = sum(call.share for call in inside)
    if not prices.calls:  # nothing is counted, so every run counts as a whole one
        price = weight = 1.0
    effects = tuple(
        dict.fromkeys(
            system.nodes[name].component.name for name in system.nodes if name in kept and name not in own
        )
    )
    if len(components) > 1:
        used = [node.component.name for node in system.nodes.values()]
        components = sorted(components, key=used.index)
    return Part(part, tuple(components), effects, min(1.0, weight), min(1.0, price))


def _with_effects(system: System, own: set[str]) -> set[str]:
    """Return some nodes and the cheap deterministic nodes after them that read nothing else after them."""
    after = frozenset[str]().union(*(system.descendants(name) for name in own))
    kept = set(own)
    for name, node in system.nodes.items():  # sources come before the nodes that read them
        sources = {s.node.name for s in node.sources if isinstance(s, Output)}
        reads_kept_only = bool(sources & kept) and not (sources & after) - kept
        if name in after and name not in own and reads_kept_only and _is_cheap(node.component, system):
            kept.add(name)
    return kept


def segments(system: System) -> list[tuple[str, ...]]:
    """Return the components with choices and numbers, grouped by segment, in topological order.

    Two cheap components are in one segment if a local evaluation of the first one also runs the second one.
    A component that is used several times, or that may choose for each input, is a segment of its own.
    """
    nodes: dict[str, list[str]] = {}
    for name, node in system.nodes.items():
        nodes.setdefault(node.component.name, []).append(name)
    tuned = dict.fromkeys(
        component_of(key)
        for key, space in system.parameters.items()
        if isinstance(space, Choice | Int | Float)
    )
    found: list[list[str]] = []
    for component in sorted(tuned, key=lambda name: list(nodes).index(name) if name in nodes else len(nodes)):
        joined = [group for group in found if _follows(system, group, component, nodes)]
        rest = [group for group in found if group not in joined]
        found = [*rest, [*(name for group in joined for name in group), component]]
    return [tuple(group) for group in found]


def _follows(system: System, group: Sequence[str], component: str, nodes: Mapping[str, list[str]]) -> bool:
    """Return whether a component belongs to the segment of the components before it."""
    if not all(_may_join(system, name, nodes) for name in (*group, component)):
        return False
    (node,) = nodes[component]
    return node in _with_effects(system, {nodes[name][0] for name in group})


def _may_join(system: System, component: str, nodes: Mapping[str, list[str]]) -> bool:
    spaces = [s for key, s in system.parameters.items() if component_of(key) == component]
    is_single = len(nodes.get(component, ())) == 1
    per_input = any(isinstance(space, PerInput) for space in spaces)
    return is_single and not per_input and _is_cheap(system.components[component], system)


def _uses(node: Node, component: str) -> bool:
    if node.component.name == component:
        return True
    return isinstance(node.component, Composite) and component in node.component.body.components


def _is_cheap(component: Component, system: System) -> bool:
    """Return whether a component calls no model and is deterministic."""
    if component.kind not in CHEAP and component.cacheable:
        return False
    return not isinstance(component, Composite) and component.deterministic(setting_values(component, system))


async def run_parts(
    context: JobContext, part: Part, candidates: Sequence[System], examples: Sequence[Example]
) -> list[list[Trace]]:
    """Run a part on every example for every candidate, and charge what it executed.

    Args:
        context: the executor and its rules.
        part: the part.
        candidates: the part bound to the values of each candidate.
        examples: the examples.

    Returns:
        The traces by candidate and example.

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
    return list(_rows(made, len(examples)))


def _rows(traces: Sequence[Trace], width: int) -> Iterator[list[Trace]]:
    for start in range(0, len(traces), width or 1):
        yield list(traces[start : start + width])
