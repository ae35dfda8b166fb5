"""Build a `System` from the components and references of a file, and report every invalid edge.

All nodes are first created without edges. Their ports are then known, so each edge can be checked on its own,
independent of errors elsewhere. The nodes are connected only if the graph has no errors.
"""

from __future__ import annotations

from typing import Any

import networkx as nx

from compound.errors import suggest_name
from compound.graph.component import NAME, Component, Condition, Input, Node, connect
from compound.graph.system import System
from compound.spec.context import Context
from compound.spec.edges import Edges, Names
from compound.spec.make import make_component
from compound.spec.schema.types import Reference, Type
from compound.spec.shape import parse_at
from compound.spec.uses import Use, read_use, source_name
from compound.spec.yaml.document import Address


class Graph:
    """A graph of the file: the system itself, or the body of a loop or map."""

    def __init__(self, context: Context, address: Address, name: str, outer: Graph | None = None) -> None:
        self._context = context
        self._document = context.document
        self._address = address
        self._name = name
        self._outer = outer
        self._cache: dict[str, Component | None] = {}
        self._in_progress: list[str] = []
        self._used: set[str] = set()
        self._complete = True  # whether every name and every edge could be read
        self._inputs = {name: Input(name, self._type(name)) for name in self._names("inputs")}
        self._entries = self._names("components")
        self._uses: dict[str, Use] = {}
        self._outputs: dict[str, str] = {}

    @property
    def input_types(self) -> dict[str, object]:
        """Types of the inputs by name."""
        return {name: port.type for name, port in self._inputs.items()}

    def system(self, lm: str | None = None) -> System | None:
        """Return the graph as a system, or None after reporting every error in it."""
        for name in self._entries:
            self._component(name)
        uses = [*map(self._component_node, self._entries), *map(self._additional_node, self._names("nodes"))]
        self._complete &= all(use.complete for use in uses)
        self._outputs = self._read_outputs()
        self._uses = {use.name: use for use in uses if not self._is_declaration(use, uses)}
        stubs = {name: use.stub() for name, use in self._uses.items()}
        edges = Edges(self._context, Names(self._inputs, stubs))
        for use in self._uses.values():
            edges.check(use)
        for key, reference in self._outputs.items():
            edges.source(reference, (*self._address, "outputs", key))
        order = self._order()
        if self._complete and edges.known and order is not None:
            self._note_unused()
        broken = any(use.component is None for use in self._uses.values())
        if order is None or broken or not self._complete or self._document.has_errors(self._address):
            return None
        return self._wired(order, lm)

    # Reading names, components and uses

    def _names(self, section: str) -> list[str]:
        found = self._document.at((*self._address, section))
        keys = list(found) if isinstance(found, dict) else []
        absent = not self._document.has((*self._address, section))
        self._complete &= (isinstance(found, dict) or absent) and all(NAME.match(key) for key in keys)
        return [key for key in keys if NAME.match(key)]

    def _type(self, name: str) -> object:
        kind = parse_at(self._document, Type, (*self._address, "inputs", name))
        return Any if kind is None else kind

    def _component(self, name: str) -> Component | None:
        """Create a component on first use, because bodies may use components that are declared later."""
        if name not in self._cache:
            address = (*self._address, "components", name)
            if name in self._in_progress:
                cycle = " -> ".join([*self._in_progress, name])
                self._document.report(address, f"contains itself: {cycle}", key=True)
                return None
            self._in_progress.append(name)
            self._cache[name] = make_component(self._context, name, address, self._body)
            self._in_progress.remove(name)
        return self._cache[name]

    def _body(self, address: Address, name: str) -> System | None:
        return Graph(self._context, address, name, outer=self).system()

    def _find(self, name: str) -> Component | None:
        """Return a component by name, from this graph or an enclosing one."""
        if name in self._entries:
            self._used.add(name)
            return self._component(name)
        return self._outer._find(name) if self._outer else None

    def _visible(self) -> list[str]:
        return [*self._entries, *(self._outer._visible() if self._outer else [])]

    def _component_node(self, name: str) -> Use:
        address = (*self._address, "components", name)
        first = self._context.names.setdefault(name, address)
        if first != address:
            hint = f"the first is at {self._document.label(first, key=True)}"
            self._document.report(address, f"a second component is named {name!r}", hint, key=True)
        self._check_input(name, address)
        return read_use(self._document, name, address, self._cache[name])

    def _additional_node(self, name: str) -> Use:
        address = (*self._address, "nodes", name)
        component, used, visible = None, self._document.at((*address, "use")), self._visible()
        if name in self._entries:
            self._document.report(
                address, "this name is used by the node of a component", "choose another", key=True
            )
        self._check_input(name, address)
        if isinstance(used, str) and NAME.match(used):
            component = self._find(used)
            if used not in visible:
                self._document.report(
                    (*address, "use"), f"no component {used!r}", suggest_name(used, visible)
                )
        return read_use(self._document, name, address, component)

    def _check_input(self, name: str, address: Address) -> None:
        if name in self._inputs:
            what = f"${name} is the name of both an input and a node"
            self._document.report(address, what, "rename one of them", key=True)

    def _read_outputs(self) -> dict[str, str]:
        outputs = {}
        for key in self._names("outputs"):
            address = (*self._address, "outputs", key)
            reference = parse_at(self._document, Reference, address)
            if reference is None:
                self._complete = False
            else:
                outputs[key] = reference
        self._complete &= bool(outputs)
        return outputs

    def _is_declaration(self, use: Use, uses: list[Use]) -> bool:
        """Return whether an entry only declares a component for other nodes to use."""
        bare = use.complete and not use.references and use.address[-2] == "components"
        references = [*self._outputs.values(), *(r for other in uses for r in other.references)]
        return bare and use.name in self._used and use.name not in map(source_name, references)

    # The graph as a whole

    def _order(self) -> list[str] | None:
        """Return the nodes in topological order, or None after reporting every cycle."""
        graph = nx.DiGraph()
        graph.add_nodes_from(self._uses)
        for use in self._uses.values():
            graph.add_edges_from(
                (source_name(r), use.name) for r in use.references if source_name(r) in self._uses
            )
        if nx.is_directed_acyclic_graph(graph):
            return list(nx.topological_sort(graph))
        for group in nx.strongly_connected_components(graph):
            part = graph.subgraph(group)
            if part.number_of_edges():
                first = next(name for name in self._uses if name in group)
                cycle = [edge[0] for edge in nx.find_cycle(part, first)]
                start = cycle.index(first) if first in cycle else 0
                path = " -> ".join([*cycle[start:], *cycle[:start], cycle[start]])
                address = self._uses[cycle[start]].address
                self._document.report(address, f"a cycle: {path}", "use a loop for repetition", key=True)
        return None

    def _note_unused(self) -> None:
        graph = nx.DiGraph()
        graph.add_nodes_from([*self._uses, *self._inputs])
        for use in self._uses.values():
            graph.add_edges_from((source_name(r), use.name) for r in use.references)
        targets = {source_name(reference) for reference in self._outputs.values()}
        needed = targets.union(*(nx.ancestors(graph, target) for target in targets))
        for name, use in self._uses.items():
            if name not in needed:
                what = "no output depends on this node"
                self._document.report(use.address, what, "use it or remove it", key=True)
        for name in self._inputs:
            if name not in targets and not graph.out_degree(name):
                address, what = (*self._address, "inputs", name), "nothing reads this input"
                self._document.report(address, what, "connect it or remove it", key=True)

    def _wired(self, order: list[str], lm: str | None) -> System:
        nodes: dict[str, Node | None] = {}
        names = Names(self._inputs, nodes)
        for name in order:
            use = self._uses[name]
            assert use.component is not None
            wires = {port: names.resolve(reference) for port, reference in use.wires.items()}
            when = Condition(names.resolve(use.when[0]), use.when[1]) if use.when else None
            nodes[name] = connect(use.component, name, wires, when)
        outputs = {key: names.resolve(reference) for key, reference in self._outputs.items()}
        return System(self._name, outputs, inputs=list(self._inputs.values()), lm=lm)
