"""Read the wiring of nodes: which references feed which ports."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from compound.graph.component import NAME, Component, Node
from compound.spec.schema.types import Reference
from compound.spec.schema.wiring import When
from compound.spec.shape import fitted
from compound.spec.yaml.document import Address, Document


@dataclass(frozen=True)
class Use:
    """A node to be: a component under a name, with the references that feed it.

    ``component`` is None when it is broken. ``whole`` says that every edge could be read.
    """

    name: str
    address: Address
    component: Component | None
    wires: Mapping[str, str]
    when: tuple[str, object] | None
    whole: bool

    @property
    def references(self) -> list[str]:
        """Every reference of the node."""
        return [*self.wires.values(), *([self.when[0]] if self.when else [])]

    def stub(self) -> Node | None:
        """Return the node without its wires: enough to know what others can read from it."""
        return Node(self.name, self.component, {}) if self.component else None


def read_use(document: Document, name: str, address: Address, component: Component | None) -> Use:
    """Read how a node is wired, edge by edge; what cannot be read was noted with the file's shape."""
    entry = document.at(address)
    entry = entry if isinstance(entry, dict) else {"in": None}
    edges: object = entry.get("in", {})
    wires = {
        port: reference
        for port, reference in (edges.items() if isinstance(edges, dict) else ())
        if NAME.match(port) and fitted(document, Reference, (*address, "in", port)) is not None
    }
    conditional = entry.get("when") is not None
    when = fitted(document, When, (*address, "when")) if conditional else None
    condition = (when, True) if isinstance(when, str) else next(iter(when.items()), None) if when else None
    whole = isinstance(edges, dict) and len(wires) == len(edges) and (when is not None or not conditional)
    return Use(name, address, component, wires, condition, whole)


def head(reference: str) -> str:
    """Return the input or node that a reference names.

    >>> head("$planner.questions"), head("$question")
    ('planner', 'question')
    """
    return reference[1:].partition(".")[0]
