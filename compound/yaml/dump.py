"""Write a `System` as YAML that `load` reads back as the same system."""

from __future__ import annotations

import functools
from collections.abc import Mapping

from compound.core.errors import DeclarationError
from compound.graph.component import Component, Node
from compound.graph.composite import Composite
from compound.graph.system import System
from compound.yaml.kind import DumpContext, Kind
from compound.yaml.kinds import BUILT_IN, CLASS_KIND, kind_of
from compound.yaml.text import Flow, Tree, spell_type, write

TOP = ""
_DUMPED: Mapping[type[Component], Kind] = {
    component: kind for kind in BUILT_IN.values() for component in kind.components
}


def dump(system: System, *, class_schemas: bool = False) -> str:
    """Return the YAML text of a system with its current values.

    Args:
        system: the system.
        class_schemas: write classes, such as pydantic models, as the JSON schemas of their values:
            the models get the same requests, but the system that is read back has dictionaries in
            place of instances.

    Raises:
        DeclarationError: a part of it cannot be named in a file, such as a lambda or a local
            function.

    >>> from compound import LLM, Input, Text
    >>> answerer = LLM("answerer", prompt=Text("Answer."))
    >>> print(dump(System("demo", {"answer": answerer(question=Input("question"))}, lm="smollm2")), end="")
    system: demo
    lm: smollm2
    inputs: {question: str}
    components:
      answerer:
        llm:
          prompt: {tune: Answer.}
        in: {question: $question}
    outputs: {answer: $answerer}
    """
    lm: Tree = {"lm": system.lm} if system.lm else {}
    return write({"system": system.name, **lm, **_Dumping(system, class_schemas).graph(TOP)})


class _Dumping:
    """Writer of one system. An inner graph has the name of the loop or map whose body it is."""

    def __init__(self, system: System, class_schemas: bool) -> None:
        self._class_schemas = class_schemas
        self._values = system.configuration
        self._components = system.components
        bodies = {name: c.body for name, c in self._components.items() if isinstance(c, Composite)}
        self._graphs: Mapping[str, System] = {TOP: system, **bodies}

    def graph(self, name: str) -> Tree:
        """Return a graph: its inputs, the components declared in it, additional nodes, and outputs."""
        system = self._graphs[name]
        owned = [c for c in self._components.values() if self._home(c.name) == name]
        self._check_node_names(system, {c.name for c in owned})
        places = {node: place for place, node in enumerate(system.nodes)}
        owned.sort(key=lambda c: places.get(c.name, len(places)))
        names = {c.name for c in owned}
        further = {n: node for n, node in system.nodes.items() if n not in names}
        nodes = {n: {"use": node.component.name, **_wiring(node)} for n, node in further.items()}
        return {
            "inputs": Flow(
                {i: self._type(kind, f"input {i}") for i, kind in system.inputs.items()}
            ),
            "components": {c.name: self._entry(c, system.nodes.get(c.name)) for c in owned},
            **({"nodes": nodes} if nodes else {}),
            "outputs": Flow({key: source.label for key, source in system.outputs.items()}),
        }

    def _type(self, kind: object, where: str) -> str | Tree:
        return spell_type(kind, where, class_schemas=self._class_schemas)

    def _home(self, component: str) -> str:
        """Return the innermost graph whose components are visible to every use of this one."""
        users = [g for g, system in self._graphs.items() if system.nodes_of(component)]
        around = [self._around(user) for user in users]
        return next(graph for graph in around[0] if all(graph in others for others in around))

    def _around(self, graph: str) -> list[str]:
        """Return a graph and its enclosing graphs, innermost first."""
        return [TOP] if graph == TOP else [graph, *self._around(self._home(graph))]

    def _check_node_names(self, system: System, owned: set[str]) -> None:
        for name, node in system.nodes.items():
            if name in system.inputs:
                raise DeclarationError(
                    f"${name} is the name of both an input and a node", hint="rename one of them"
                )
            if name in owned and name != node.component.name:
                raise DeclarationError(
                    f"node {name!r} uses {node.component.name!r}, but a component is named {name!r} too",
                    hint="rename the node",
                )

    def _entry(self, component: Component, node: Node | None) -> Tree:
        wired = component.inputs is not None and node is not None
        ports = list(node.wires) if node is not None and wired else []
        context = DumpContext(
            component.name,
            self._values,
            ports,
            functools.partial(self.graph, component.name),
            self._class_schemas,
        )
        kind = _DUMPED.get(type(component)) or kind_of(component) or CLASS_KIND
        return {**kind.dump(component, context), **(_wiring(node) if node else {})}


def _wiring(node: Node) -> Tree:
    tree: dict[str, object] = {}
    if node.wires:
        tree["in"] = Flow({port: source.label for port, source in node.wires.items()})
    if node.when:
        label, value = node.when.source.label, node.when.value
        tree["when"] = label if value is True else Flow({label: value})
    return tree
