"""Read the edges of nodes: which reference feeds which port."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from compound.graph.component import NAME, Component, Node
from compound.spec.schema.types import Reference
from compound.spec.schema.wiring import When
from compound.spec.shape import parse_at
from compound.spec.yaml.document import Address, Document


@dataclass(frozen=True)
class Use:
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

    def stub(self) -> Node | None:
        """Return the node without edges, which is enough to resolve references to its outputs."""
        return Node(self.name, self.component, {}) if self.component else None


def read_use(document: Document, name: str, address: Address, component: Component | None) -> Use:
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
    condition = (when, True) if isinstance(when, str) else next(iter(when.items()), None) if when else None
    complete = isinstance(edges, dict) and len(wires) == len(edges) and (when is not None or not conditional)
    return Use(name, address, component, wires, condition, complete)


def source_name(reference: str) -> str:
    """Return the input or node that a reference names.

    >>> source_name("$planner.questions"), source_name("$question")
    ('planner', 'question')
    """
    return reference[1:].partition(".")[0]
