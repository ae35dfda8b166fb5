"""Draw a graph as text or Mermaid, or describe it as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypedDict, cast

from compound.graph.component import Node
from compound.graph.composite import Composite
from compound.graph.system import System
from compound.graph.types import format_type


class GraphDocument(TypedDict):
    """A graph as JSON: nodes with kinds, edges with ports, and the source label of each output."""

    nodes: Sequence[Sequence[str]]
    edges: Sequence[tuple[str, str, Sequence[str]]]
    outputs: Mapping[str, str]


def as_document(system: System) -> GraphDocument:
    """Return the graph of a system as JSON."""
    edges = [[a, b, list(d["ports"])] for a, b, d in sorted(system.graph.edges(data=True))]
    return {
        "nodes": [[name, data["kind"]] for name, data in sorted(system.graph.nodes(data=True))],
        "edges": cast("list[tuple[str, str, list[str]]]", edges),  # lists, as JSON reads them back
        "outputs": {name: source.label for name, source in system.outputs.items()},
    }


def as_text(system: System) -> str:
    """Return one line per input, node and output, in execution order."""
    lines = [f"${name}: {format_type(kind)}" for name, kind in system.inputs.items()]
    lines += _nodes(system, "")
    lines += [f"=> {name}: {source.label}" for name, source in system.outputs.items()]
    return "\n".join(lines)


def _nodes(system: System, indent: str) -> list[str]:
    lines = []
    for node in system.nodes.values():
        lines.append(indent + _line(node))
        if isinstance(node.component, Composite):
            lines += _nodes(node.component.body, indent + "    ")
    return lines


def _line(node: Node) -> str:
    component = node.component
    wires = ", ".join(f"{port}={source.label}" for port, source in node.wires.items())
    outputs = ", ".join(
        f"{name}: {format_type(port.type)}" for name, port in component.outputs.items()
    )
    free = [name for name in component.parameters if name not in node.wires]
    tuned = f"  [{', '.join(free)}]" if free else ""
    use = "" if component.name == node.name else f" = {component.name}"
    when = f"  when {node.when.source.label} == {node.when.value!r}" if node.when else ""
    return f"{node.name}{use}: {component.kind}({wires}) -> {outputs}{tuned}{when}"


def as_mermaid(drawing: GraphDocument) -> str:
    """Return a Mermaid flow chart of a graph, given as by `as_document`."""
    ids = {name: f"n{i}" for i, (name, _) in enumerate(drawing["nodes"])}
    lines = ["flowchart LR"]
    for name, kind in drawing["nodes"]:
        title = _label(name.lstrip("$"))
        shape = f'(["{title}"])' if kind == "input" else f'["{title}<br/>{_label(kind)}"]'
        lines.append(f"    {ids[name]}{shape}")
    for a, b, ports in drawing["edges"]:
        lines.append(f'    {ids[a]} -->|"{_label(", ".join(ports))}"| {ids[b]}')
    for i, (name, label) in enumerate(drawing["outputs"].items()):
        origin = label.removeprefix("$").split(".")[0]
        source = ids.get(origin) or ids[f"${origin}"]
        lines.append(f'    {source} --> out{i}(["{_label(name)}"])')
    return "\n".join(lines)


def _label(text: str) -> str:
    return " ".join(text.split()).replace("#", "#35;").replace('"', "#quot;").replace("<", "#lt;")
