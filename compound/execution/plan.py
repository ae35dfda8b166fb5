"""A graph prepared for execution: all that does not depend on the example, worked out once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from compound.graph.component import Component, Node, Output, Source
from compound.graph.space import Space
from compound.graph.system import System
from compound.graph.types import accepts, spell


@dataclass(frozen=True, slots=True)
class Step:
    """A node with its place in the order, its wires, and the values of its settings."""

    node: Node
    place: int
    wires: tuple[tuple[str, Source], ...]
    wired_settings: tuple[str, ...]
    values: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class ExecutionPlan:
    """Steps in order, who waits for whom, and whether two nodes can ever be ready together."""

    steps: Mapping[str, Step]
    successors: Mapping[str, tuple[str, ...]]
    waiting: dict[str, int]
    roots: tuple[str, ...]
    sequential: bool


def prepare(system: System, bound: System) -> ExecutionPlan:
    """Plan the execution of ``system`` (or the body of a composite) with the configuration of ``bound``."""
    steps = {
        name: Step(
            node=node,
            place=place,
            wires=tuple(node.wires.items()),
            wired_settings=tuple(port for port in node.wires if port in node.component.settings),
            values=values_of(node.component, bound),
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


def misfit(step: Step, values: Mapping[str, object]) -> str:
    """Return which setting got a value of another type over its wire, or ``""``."""
    for name in step.wired_settings:
        kind = step.node.inputs[name].type
        if not accepts(kind, values[name]):
            return f"{step.node.name}.{name} must be {spell(kind)}, but got {values[name]!r:.200}"
    return ""


def values_of(component: Component, bound: System) -> dict[str, object]:
    """Return the settings a component runs with: configured, fixed, or the system's default."""
    values: dict[str, object] = {}
    for name, setting in component.settings.items():
        value = setting
        if isinstance(setting, Space):  # a setting that is wired at every node has no key
            value = bound.configuration.get(f"{component.name}.{name}", setting.value)
        values[name] = bound.defaults.get(name) if value is None else value
    return values
