"""A system: a directed acyclic graph of nodes with named inputs and outputs, bound to a configuration.

The graph is a ``networkx.DiGraph``; ordering, cycle detection and drawings use networkx. A system
is immutable: `bind` returns a new one, so two threads can run two configurations concurrently.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import get_args

import networkx as nx

from compound.core import notebook
from compound.core.engine import Engine
from compound.core.errors import ConfigurationError, WiringError, suggest_name
from compound.core.formatting import format_names, format_repr
from compound.core.narrowing import report_wrong_arguments
from compound.graph.component import (
    Component,
    CompositeBase,
    Input,
    Node,
    Output,
    Outputs,
    Source,
    check_name,
)
from compound.graph.configuration import Configuration, canonical_json, digest, to_readable_json
from compound.graph.space import Space
from compound.graph.types import format_type, identify_type, quote_names


@report_wrong_arguments
@dataclass(frozen=True, eq=False, init=False, repr=False)
class System:
    """A compound AI system.

    Args:
        name: name for run directories and reports.
        outputs: outputs of the system by name; the nodes are collected from here.
        inputs: the declared inputs, each of which must be used; collected as well if omitted.
        nodes: the declared nodes, each of which must lead to an output; collected as well if
            omitted.
        lm: default model of LLM components that name none.

    Attributes:
        engines: function that returns the engine of a model name, set if the system was loaded from
            a file with ``engines:``. It is not part of the system's identity.

    Example:
        >>> from compound.components.function import Function
        >>> question = Input("question", str)
        >>> def shout(text: str) -> str:
        ...     return text.upper()
        >>> system = System("demo", outputs={"answer": Function("shout", shout)(text=question)})
        >>> list(system.nodes), list(system.inputs)
        (['shout'], ['question'])
    """

    name: str
    inputs: Mapping[str, object]
    outputs: Mapping[str, Source]
    nodes: Mapping[str, Node]
    configuration: Configuration
    defaults: Mapping[str, object] = field(default_factory=dict)
    engines: Callable[[str], Engine] | None = None

    def __init__(
        self,
        name: str,
        outputs: Mapping[str, Source],
        *,
        inputs: Sequence[Input] | None = None,
        nodes: Sequence[Node | Output | Outputs] | None = None,
        lm: str | None = None,
    ) -> None:
        check_name("System", name)
        found_inputs, found_nodes = _collect(name, outputs)
        if inputs is not None:
            _check_inputs_used(name, inputs, found_inputs)
        if nodes is not None:
            _check_nodes_used(name, nodes, found_nodes)
        set_ = functools.partial(object.__setattr__, self)
        set_("name", name)
        set_("inputs", {i: found_inputs[i].type for i in sorted(found_inputs)})
        set_("outputs", dict(outputs))
        set_("nodes", _sort_nodes(name, found_nodes))
        set_("defaults", {"lm": lm} if lm else {})
        set_("engines", None)
        start = {key: space.value for key, space in self.parameters.items()}
        for node in self.all_nodes():
            if isinstance(node.component, CompositeBase):  # a bound body keeps its values
                bound = node.component.body.configuration
                start |= {key: value for key, value in bound.items() if key in start}
        set_("configuration", Configuration(start))

    @functools.cached_property
    def graph(self) -> nx.DiGraph:
        """The graph: inputs as ``$name``, nodes by name; edges carry the ``ports`` that they feed."""
        return _graph(self.inputs, self.nodes)

    @functools.cached_property
    def components(self) -> Mapping[str, Component]:
        """Every component by name, including those inside loops and maps."""
        found: dict[str, Component] = {}
        for component in (node.component for node in self.all_nodes()):
            other = found.setdefault(component.name, component)
            if other is not component:
                raise WiringError(
                    f"two components are named {component.name!r} in system {self.name!r}",
                    hint="rename one, or use one component at several nodes with name=…",
                )
        return found

    @functools.cached_property
    def parameters(self) -> Mapping[str, Space]:
        """Tunable parameters by ``component.parameter``, except those fed by a wire at every node."""
        wires: dict[str, set[str]] = {}
        for node in self.all_nodes():
            wires.setdefault(node.component.name, set(node.wires)).intersection_update(node.wires)
        return {
            f"{name}.{parameter}": space
            for name, component in sorted(self.components.items())
            for parameter, space in component.parameters.items()
            if parameter not in wires[name]
        }

    @functools.cached_property
    def signature(self) -> str:
        """Digest of the structure: components, their versions, wires and outputs, but not the values."""
        return digest(_structure(self))

    @property
    def lm(self) -> str | None:
        """Default model of components that name none, or None."""
        found = self.defaults.get("lm")
        return found if isinstance(found, str) else None

    @functools.cached_property
    def lms(self) -> tuple[str, ...]:
        """Models that the system may call: the default, then those of components and of selectors."""
        found: list[object] = [self.lm]
        for name, component in self.components.items():
            setting = component.settings.get("lm")
            found += [
                self.configuration.get(f"{name}.lm"),
                *getattr(setting, "options", (setting,)),
            ]
        for node in self.all_nodes():
            if "lm" in node.component.settings and isinstance(
                source := node.wires.get("lm"), Output
            ):
                found.append(self.configuration.get(f"{source.node.component.name}.{source.field}"))
                found += get_args(source.type)
        return tuple(dict.fromkeys(lm for lm in found if isinstance(lm, str) and lm))

    @functools.cached_property
    def settings(self) -> Mapping[str, object]:
        """Settings that are not tunable, by ``component.setting``, as JSON types."""
        return {
            f"{name}.{setting}": to_readable_json(value)
            for name, component in sorted(self.components.items())
            for setting, value in component.settings.items()
            if not isinstance(value, Space)
        }

    @functools.cached_property
    def identity(self) -> str:
        """Digest of everything that a run depends on except configuration, inputs and random streams."""
        return digest([self.signature, self.settings, self.defaults])

    @functools.cached_property
    def successors(self) -> Mapping[str, tuple[str, ...]]:
        """Maps each node to the nodes that wait for it, in execution order."""
        position = {name: i for i, name in enumerate(self.nodes)}
        return {
            name: tuple(sorted(self.graph.successors(name), key=position.__getitem__))
            for name in self.nodes
        }

    def all_nodes(self) -> Iterator[Node]:
        """Yield the nodes, including those inside composites."""
        return _all_nodes(self.nodes.values())

    def descendants(self, node: str) -> frozenset[str]:
        """Return the names of the nodes downstream of ``node``."""
        return frozenset(nx.descendants(self.graph, node))

    def bind(self, values: Mapping[str, object]) -> System:
        """Return a copy with some parameters set.

        Raises:
            ConfigurationError: a key is not a parameter, or a value is outside its space.
        """
        for key, value in values.items():
            if key not in self.parameters:
                raise ConfigurationError(
                    f"system {self.name!r} has no parameter {key!r}",
                    hint=suggest_name(key, self.parameters),
                )
            problem = self.parameters[key].problem(value)
            if problem:
                raise ConfigurationError(f"{key} {problem}")
        return replace_configuration(self, self.configuration.replace(values))

    def with_lm(self, lm: str) -> System:
        """Return a copy with another default model."""
        other = _copy(self, defaults={**self.defaults, "lm": lm})
        other.__dict__.pop("identity", None)
        return other

    def with_engines(self, engines: Callable[[str], Engine] | None) -> System:
        """Return a copy with another function that finds engines; `run`, `evaluate` and `optimize` use it."""
        return _copy(self, engines=engines)

    def __repr__(self) -> str:
        return format_repr(
            "System",
            repr(self.name),
            inputs=format_names(self.inputs),
            nodes=format_names(self.nodes),
            outputs=format_names(self.outputs),
            parameters=format_names(self.parameters) if self.parameters else "",
            lm=repr(self.defaults["lm"]) if "lm" in self.defaults else "",
        )

    def _repr_svg_(self) -> str | None:
        """Return the graph as an SVG image, for notebooks; ``None`` for large ones."""
        return notebook.system_svg(self) if len(self.nodes) <= notebook.MAX_LINES else None

    def _repr_html_(self) -> str | None:
        """Return the graph as text, for notebooks that cannot show `_repr_svg_`."""
        if self._repr_svg_() is not None:
            return None  # notebooks would prefer the text
        return notebook.system_text(self.name, self)

    def __copy__(self) -> System:
        return self

    def __deepcopy__(self, memo: dict[int, object]) -> System:
        """Return the system itself, since it is immutable."""
        return self


def replace_configuration(system: System, configuration: Configuration) -> System:
    """Return a copy bound to ``configuration``, which must have been validated."""
    return _copy(system, configuration=configuration)


def _copy(system: System, **changes: object) -> System:
    clone = object.__new__(System)
    clone.__dict__.update(system.__dict__)
    clone.__dict__.update(changes)
    return clone


def _collect(name: str, outputs: Mapping[str, Source]) -> tuple[dict[str, Input], dict[str, Node]]:
    """Collect inputs and nodes backward from the outputs, checking that names are unique."""
    if not outputs:
        raise WiringError(f"system {name!r} has no outputs", hint="outputs={'answer': some_output}")
    inputs: dict[str, Input] = {}
    nodes: dict[str, Node] = {}
    stack: list[Source] = []
    for key, source in outputs.items():
        check_name("Output", key)
        if not isinstance(source, Input | Output):
            raise WiringError(
                f"output {key!r} of system {name!r} is not produced by any node: got {source!r}",
                hint="name one field of a node"
                if isinstance(source, Outputs)
                else "give a node's output",
            )
        stack.append(source)
    while stack:
        source = stack.pop()
        if isinstance(source, Input):
            _check_same_type(inputs.setdefault(source.name, source), source)
        elif nodes.get(source.node.name) is not source.node:
            if source.node.name in nodes:
                raise WiringError(
                    f"two nodes are named {source.node.name!r} in system {name!r}",
                    hint="give the second use its own name: component(..., name='other')",
                )
            nodes[source.node.name] = source.node
            stack.extend(source.node.sources)
    return inputs, nodes


def _check_inputs_used(system: str, inputs: Sequence[Input], used: Mapping[str, Input]) -> None:
    declared = [item.name for item in inputs]
    unused = [name for name in declared if name not in used]
    if unused:
        raise WiringError(
            f"system {system!r} declares unused inputs: {quote_names(unused)}",
            hint="connect them or remove them",
        )
    undeclared = sorted(set(used) - set(declared))
    if undeclared:
        raise WiringError(
            f"system {system!r} reads undeclared inputs: {quote_names(undeclared)}",
            hint=f"declared: {quote_names(declared)}",
        )
    for item in inputs:
        _check_same_type(used[item.name], item)


def _check_same_type(known: Input, other: Input) -> None:
    if known.type != other.type:
        raise WiringError(
            f"input {known.name!r} is declared as {format_type(known.type)} and as {format_type(other.type)}"
        )


def _check_nodes_used(
    system: str, declared: Sequence[Node | Output | Outputs], reached: Mapping[str, Node]
) -> None:
    nodes = [_node(item) for item in declared]
    lost = [node.name for node in nodes if reached.get(node.name) is not node]
    if lost:
        raise WiringError(
            f"system {system!r} has nodes that no output depends on: {quote_names(lost)}",
            hint="use their outputs or remove them",
        )


def _node(item: Node | Output | Outputs) -> Node:
    if isinstance(item, Node):
        return item
    return item.node if isinstance(item, Output) else item._node


def _graph(inputs: Mapping[str, object], nodes: Mapping[str, Node]) -> nx.DiGraph:
    graph = nx.DiGraph()
    for name, kind in inputs.items():
        graph.add_node(f"${name}", kind="input", type=format_type(kind))
    for name, node in nodes.items():
        graph.add_node(name, kind=node.component.kind, component=node.component.name)
    for name, node in nodes.items():
        for port, source in [
            *node.wires.items(),
            *([("when", node.when.source)] if node.when else []),
        ]:
            origin = f"${source.name}" if isinstance(source, Input) else source.node.name
            if graph.has_edge(origin, name):
                graph.edges[origin, name]["ports"] += (port,)
            else:
                graph.add_edge(origin, name, ports=(port,))
    return graph


def _sort_nodes(system: str, nodes: Mapping[str, Node]) -> dict[str, Node]:
    """Return the nodes in topological order, ties by name, independent of declaration order and hashing."""
    graph = nx.DiGraph()
    graph.add_nodes_from(nodes)
    for name, node in nodes.items():
        graph.add_edges_from((s.node.name, name) for s in node.sources if isinstance(s, Output))
    try:
        return {name: nodes[name] for name in nx.lexicographical_topological_sort(graph)}
    except nx.NetworkXUnfeasible:
        cycle = " -> ".join([edge[0] for edge in nx.find_cycle(graph)])
        raise WiringError(
            f"system {system!r} has a cycle: {cycle} -> {cycle.split(' ', 1)[0]}",
            hint="use a loop component for repetition",
        ) from None


def _all_nodes(nodes: Iterable[Node]) -> Iterator[Node]:
    for node in nodes:
        yield node
        if isinstance(node.component, CompositeBase):
            yield from _all_nodes(node.component.body.nodes.values())


def _structure(system: System) -> dict[str, object]:
    return {
        "inputs": {name: identify_type(kind) for name, kind in system.inputs.items()},
        "outputs": {name: source.label for name, source in system.outputs.items()},
        "nodes": {
            name: {
                "component": node.component.name,
                "version": node.component.version,
                "wires": {port: source.label for port, source in node.wires.items()},
                "when": [node.when.source.label, canonical_json(node.when.value)]
                if node.when
                else None,
            }
            for name, node in system.nodes.items()
        },
        "parameters": {key: space.to_json() for key, space in system.parameters.items()},
    }
