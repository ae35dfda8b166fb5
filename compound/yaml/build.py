"""Build a `System` from the components and references of a file, and report every invalid edge.

All nodes are first created without edges. Their ports are then known, so each edge can be checked
on its own, with all other required ports of its node fed by a source of any type: every invalid
edge is found, and `connect` explains it. The nodes are connected only if the graph has no errors.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin

import networkx as nx

from compound.components.agents.agent import Agent
from compound.components.llm import LLM
from compound.core.errors import CompoundError, DeclarationError, WiringError, suggest_name
from compound.graph.component import (
    NAME,
    Component,
    Condition,
    Input,
    Node,
    Output,
    Source,
    connect,
)
from compound.graph.registry.plugins import warn_if_hidden
from compound.graph.system import System
from compound.graph.types import member_types
from compound.yaml.context import FileContext
from compound.yaml.document import Address, Document
from compound.yaml.kind import Kind, MakeBody, MakeContext
from compound.yaml.kinds import BUILT_IN, find_kind, installed_kinds
from compound.yaml.types import WIRING_KEYS, Reference, Type, When, parse_at


@dataclass(frozen=True)
class NodeUse:
    """Declaration of a node: its name, its component, and the references that feed it.

    ``component`` is None if it is broken. ``complete`` is true if every edge could be read.
    """

    name: str
    address: Address
    component: Component | None
    wires: Mapping[str, str]
    when: tuple[str, object] | None
    complete: bool

    @property
    def references(self) -> list[str]:
        """All references of the node, including that of its condition."""
        return [*self.wires.values(), *([self.when[0]] if self.when else [])]


def read_use(
    document: Document, name: str, address: Address, component: Component | None
) -> NodeUse:
    """Read the edges of a node one by one; schema validation has reported those that are invalid."""
    entry = document.at(address)
    entry = entry if isinstance(entry, dict) else {"in": None}
    edges: object = entry.get("in", {})
    wires = {
        port: reference
        for port, reference in (edges.items() if isinstance(edges, dict) else ())
        if NAME.match(port) and parse_at(document, Reference, (*address, "in", port)) is not None
    }
    conditional = entry.get("when") is not None
    when = parse_at(document, When, (*address, "when")) if conditional else None
    condition = (
        (when, True) if isinstance(when, str) else next(iter(when.items()), None) if when else None
    )
    complete = (
        isinstance(edges, dict)
        and len(wires) == len(edges)
        and (when is not None or not conditional)
    )
    return NodeUse(name, address, component, wires, condition, complete)


def source_name(reference: str) -> str:
    """Return the input or node that a reference names.

    >>> source_name("$planner.questions"), source_name("$question")
    ('planner', 'question')
    """
    return reference[1:].partition(".")[0]


class _Anything(Input):
    """Stands for a source that is broken, or not looked at."""


ANYTHING = _Anything("anything", Any)


def resolve(
    reference: str, inputs: Mapping[str, Input], nodes: Mapping[str, Node | None]
) -> Source:
    """Return the source that a reference names; that of a broken node, which is None, is of any type.

    Raises:
        WiringError: the reference names no input, node or output.
    """
    name, *path = reference[1:].split(".")
    if name in inputs:
        if path:
            raise WiringError(f"${name} is an input and has no fields", hint=f"write ${name}")
        return inputs[name]
    if name not in nodes:
        raise WiringError(
            f"{reference} names neither an input nor a node",
            hint=suggest_name(f"${name}", {f"${known}" for known in (*inputs, *nodes)}),
        )
    node = nodes[name]
    return ANYTHING if node is None else _output(node, path)


def _output(node: Node, path: Sequence[str]) -> Output:
    """Return the output that a path names: a field of the node if it has one by that name, then members."""
    fields = node.component.outputs
    only = next(iter(fields)) if len(fields) == 1 else ""
    if only and path and path[0] not in fields and member_types(fields[only].type):
        path = (only, *path)
    field, members = (path[0], path[1:]) if path else ("", ())
    if not field and len(fields) != 1:
        choices = ", ".join(f"${node.name}.{known}" for known in fields)
        raise WiringError(f"${node.name} has {len(fields)} outputs", hint=f"write one of {choices}")
    if field and field not in fields:
        raise WiringError(f"{node.name} has no output {field!r}", hint=suggest_name(field, fields))
    found = Output(node, field or only)
    for name in members:
        found = found[name]
    return found


def make_component(
    context: FileContext, name: str, address: Address, make_body: MakeBody
) -> Component | None:
    """Return the component of an entry, or None after reporting the errors in it."""
    value = context.document.at(address)
    named = _kinds_in(value) if isinstance(value, Mapping) else []
    for key in value if isinstance(value, Mapping) else ():
        if key in BUILT_IN or key in WIRING_KEYS:
            warn_if_hidden("components", key)
    entry = parse_at(context.document, named[0].entry, address) if len(named) == 1 else None
    if entry is None:
        for kind in named:
            body = (*address, kind.name, "body")
            if kind.has_body and isinstance(context.document.at(body), dict):
                make_body(body, name)  # called only to report the errors in it
        return None
    return named[0].make(entry, MakeContext(context, name, address, make_body))


def _kinds_in(entry: Mapping[str, object]) -> list[Kind]:
    """Return the kinds that an entry names; schema validation reports those that cannot be loaded."""
    found = [kind for name, kind in BUILT_IN.items() if name in entry]
    for name in installed_kinds():
        if name in entry and name not in BUILT_IN:
            with contextlib.suppress(CompoundError):
                found.append(find_kind(name))
    return found


class Graph:
    """A graph of the file: the system itself, or the body of a loop or map."""

    def __init__(
        self, context: FileContext, address: Address, name: str, outer: Graph | None = None
    ) -> None:
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
        self._uses: dict[str, NodeUse] = {}
        self._stubs: dict[str, Node | None] = {}
        self._outputs: dict[str, str] = {}

    @property
    def input_types(self) -> dict[str, object]:
        """Types of the inputs by name."""
        return {name: port.type for name, port in self._inputs.items()}

    def system(self, lm: str | None = None) -> System | None:
        """Return the graph as a system, or None after reporting every error in it."""
        for name in self._entries:
            self._component(name)
        uses = [
            *map(self._component_node, self._entries),
            *map(self._additional_node, self._names("nodes")),
        ]
        self._complete &= all(use.complete for use in uses)
        self._outputs = self._read_outputs()
        self._uses = {use.name: use for use in uses if not self._is_declaration(use, uses)}
        self._stubs = {  # a node without edges has the same outputs
            name: Node(name, use.component, {}) if use.component else None
            for name, use in self._uses.items()
        }
        for use in self._uses.values():
            self._check_edges(use)
        for key, reference in self._outputs.items():
            self._source(reference, (*self._address, "outputs", key))
        order = self._order()
        if self._complete and order is not None:
            self._note_unused()
        broken = any(use.component is None for use in self._uses.values())
        complete = self._complete and not broken and not self._document.has_errors(self._address)
        return self._wired(order, lm) if complete and order is not None else None

    # Reading names, components and uses

    def _names(self, section: str) -> list[str]:
        found = self._document.at((*self._address, section))
        keys = list(found) if isinstance(found, dict) else []
        absent = not self._document.has((*self._address, section))
        self._complete &= (isinstance(found, dict) or absent) and all(
            NAME.match(key) for key in keys
        )
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

    def _component_node(self, name: str) -> NodeUse:
        address = (*self._address, "components", name)
        first = self._context.names.setdefault(name, address)
        if first != address:
            hint = f"the first is at {self._document.label(first, key=True)}"
            self._document.report(address, f"a second component is named {name!r}", hint, key=True)
        self._check_input(name, address)
        return read_use(self._document, name, address, self._cache[name])

    def _additional_node(self, name: str) -> NodeUse:
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

    def _is_declaration(self, use: NodeUse, uses: list[NodeUse]) -> bool:
        """Return whether an entry only declares a component for other nodes to use."""
        bare = use.complete and not use.references and use.address[-2] == "components"
        references = [*self._outputs.values(), *(r for other in uses for r in other.references)]
        return bare and use.name in self._used and use.name not in map(source_name, references)

    # Edges

    def _source(self, reference: str, address: Address, *, key: bool = False) -> Source:
        """Return the source that a reference names, or report it and return a source of any type."""
        try:
            return resolve(reference, self._inputs, self._stubs)
        except WiringError as error:
            self._complete = False
            self._document.report_error(address, error, key=key)
            return ANYTHING

    def _check_edges(self, use: NodeUse) -> None:
        """Report every invalid edge of a node, and every required port without an edge."""
        inside = (*use.address, "in")
        sources = {port: self._source(r, (*inside, port)) for port, r in use.wires.items()}
        when = self._condition(use)
        component = use.component
        if component is None:
            return
        required = [port for port, p in (component.inputs or {}).items() if not p.optional]
        fed: Mapping[str, Source] = dict.fromkeys(required, ANYTHING)
        for port, source in sources.items():
            self._try(use, (*inside, port), {**fed, port: source})
        for port in required if use.complete else ():
            if port not in sources:
                self._try(use, inside, {p: s for p, s in fed.items() if p != port})
        if when is not None:
            self._try(use, (*use.address, "when"), fed, when)
        model = component.model if isinstance(component, Agent) else component
        if isinstance(model, LLM) and (model is not component or "lm" not in sources):
            if model.lm is None:
                self._context.without_model.setdefault(model.name, use.address)
        elif isinstance(model, LLM) and get_origin(sources["lm"].type) is Literal:
            self._context.check_models(get_args(sources["lm"].type), (*inside, "lm"))

    def _condition(self, use: NodeUse) -> Condition | None:
        if use.when is None:
            return None
        reference, value = use.when
        mapping = isinstance(self._document.at((*use.address, "when")), dict)
        address = (*use.address, "when", *([reference] if mapping else []))
        return Condition(self._source(reference, address, key=mapping), value)

    def _try(
        self,
        use: NodeUse,
        address: Address,
        wires: Mapping[str, Source],
        when: Condition | None = None,
    ) -> None:
        assert use.component is not None
        try:
            connect(use.component, use.name, wires, when)
        except DeclarationError as error:
            fix = "write `when: {$node.field: VALUE}` with a value it can have"
            self._document.report(address, error.message, fix if when else error.hint, key=True)

    # The graph as a whole

    def _edges(self) -> nx.DiGraph:
        graph = nx.DiGraph()
        graph.add_nodes_from([*self._uses, *self._inputs])
        for use in self._uses.values():
            graph.add_edges_from((source_name(r), use.name) for r in use.references)
        return graph

    def _order(self) -> list[str] | None:
        """Return the nodes in topological order, or None after reporting every cycle."""
        graph = self._edges().subgraph(self._uses)
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
                self._document.report(
                    address, f"a cycle: {path}", "use a loop for repetition", key=True
                )
        return None

    def _note_unused(self) -> None:
        graph = self._edges()
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
        source = functools.partial(resolve, inputs=self._inputs, nodes=nodes)
        for name in order:
            use = self._uses[name]
            assert use.component is not None
            wires = {port: source(reference) for port, reference in use.wires.items()}
            when = Condition(source(use.when[0]), use.when[1]) if use.when else None
            nodes[name] = connect(use.component, name, wires, when)
        outputs = {key: source(reference) for key, reference in self._outputs.items()}
        return System(self._name, outputs, inputs=list(self._inputs.values()), lm=lm)
