"""Resolve the references of a graph, and check whether each may feed its port.

Each edge is checked on its own, with all other required ports of its node fed by a source of any type, so
every invalid edge is found and `connect` explains it. A reference to a broken component also counts as a
source of any type, so that one error is not reported twice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin

from compound.components.agents.agent import Agent
from compound.components.llm import LLM
from compound.errors import DeclarationError, WiringError, suggest_name
from compound.graph.component import Component, Condition, Input, Node, Output, Source, connect
from compound.graph.members import member_types
from compound.spec.context import Context
from compound.spec.uses import Use
from compound.spec.yaml.document import Address


class _Anything(Input):
    """Stands for a source that is broken, or not looked at."""


ANYTHING = _Anything("anything", Any)


@dataclass(frozen=True)
class Names:
    """Inputs and nodes that references of a graph can name; a broken node is None."""

    inputs: Mapping[str, Input]
    nodes: Mapping[str, Node | None]

    def resolve(self, reference: str) -> Source:
        """Return the source that a reference names.

        Raises:
            WiringError: the reference names no input, node or output.
        """
        name, *path = reference[1:].split(".")
        if name in self.inputs:
            if path:
                raise WiringError(f"${name} is an input and has no fields", hint=f"write ${name}")
            return self.inputs[name]
        if name not in self.nodes:
            possible = {f"${known}" for known in (*self.inputs, *self.nodes)}
            raise WiringError(
                f"{reference} names neither an input nor a node", hint=suggest_name(f"${name}", possible)
            )
        node = self.nodes[name]
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


class Edges:
    """Checker of the edges of one graph; ``known`` becomes False at the first unresolved reference."""

    def __init__(self, context: Context, names: Names) -> None:
        self._context = context
        self._document = context.document
        self._names = names
        self.known = True

    def source(self, reference: str, address: Address, *, key: bool = False) -> Source:
        """Return the source that a reference names, or report it and return a source of any type."""
        try:
            return self._names.resolve(reference)
        except WiringError as error:
            self.known = False
            self._document.report_error(address, error, key=key)
            return ANYTHING

    def check(self, use: Use) -> None:
        """Report every invalid edge of a node, and every required port without an edge."""
        sources = {port: self.source(r, (*use.address, "in", port)) for port, r in use.wires.items()}
        condition = self._condition(use)
        component = use.component
        if component is None:
            return
        required = [port for port, p in (component.inputs or {}).items() if not p.optional]
        fed: Mapping[str, Source] = dict.fromkeys(required, ANYTHING)
        for port, source in sources.items():
            self._try(component, use, (*use.address, "in", port), {**fed, port: source})
        for port in required if use.complete else ():
            if port not in sources:
                self._try(component, use, (*use.address, "in"), {p: s for p, s in fed.items() if p != port})
        if condition is not None:
            self._try(component, use, (*use.address, "when"), fed, condition)
        if isinstance(component, LLM):
            self._check_model(component, use, sources)
        elif isinstance(component, Agent):
            self._check_model(component.model, use, {})

    def _condition(self, use: Use) -> Condition | None:
        if use.when is None:
            return None
        reference, value = use.when
        mapping = isinstance(self._document.at((*use.address, "when")), dict)
        address = (*use.address, "when", *([reference] if mapping else []))
        return Condition(self.source(reference, address, key=mapping), value)

    def _try(
        self,
        component: Component,
        use: Use,
        address: Address,
        wires: Mapping[str, Source],
        when: Condition | None = None,
    ) -> None:
        try:
            connect(component, use.name, wires, when)
        except DeclarationError as error:
            hint = "write `when: {$node.field: VALUE}` with a value it can have" if when else error.hint
            self._document.report(address, error.message, hint, key=True)

    def _check_model(self, component: LLM, use: Use, sources: Mapping[str, Source]) -> None:
        if "lm" not in sources:
            if component.lm is None:
                self._context.without_model.setdefault(component.name, use.address)
        elif get_origin(sources["lm"].type) is Literal:
            self._context.check_models(get_args(sources["lm"].type), (*use.address, "in", "lm"))
