"""Drawing a graph: as text, as Mermaid for documents, or as SVG."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from compound.errors import DeclarationError, nearest
from compound.graph.component import Composite, Input, Node, Source
from compound.graph.system import System
from compound.graph.types import spell


def draw(system: System, form: str = "text") -> str:
    """Return a drawing of a system.

    Args:
        system: what to draw.
        form: ``text`` (one line per node, top to bottom), ``mermaid``, or ``svg``.
    """
    forms: Mapping[str, Callable[[System], str]] = {"text": as_text, "mermaid": as_mermaid, "svg": as_svg}
    if form not in forms:
        raise DeclarationError(f"no drawing format {form!r}", hint=nearest(form, forms))
    return forms[form](system)


def as_text(system: System) -> str:
    """Return one line for each input, node and output, in execution order."""
    lines = [f"${name}: {spell(kind)}" for name, kind in system.inputs.items()]
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
    outputs = ", ".join(f"{name}: {spell(port.type)}" for name, port in component.outputs.items())
    free = [name for name in component.parameters if name not in node.wires]
    tuned = f"  [{', '.join(free)}]" if free else ""
    use = "" if component.name == node.name else f" = {component.name}"
    when = f"  when {node.when.source.label} == {node.when.value!r}" if node.when else ""
    return f"{node.name}{use}: {component.kind}({wires}) -> {outputs}{tuned}{when}"


def as_mermaid(system: System) -> str:
    """Return a Mermaid flow chart."""
    lines = ["flowchart LR"]
    lines += [f'    in_{name}(["{name}"])' for name in system.inputs]
    lines += [
        f'    {node.name}["{node.name}<br/><i>{node.component.kind}</i>"]' for node in system.nodes.values()
    ]
    lines += [f'    out_{name}(["{name}"])' for name in system.outputs]
    for node in system.nodes.values():
        lines += [f"    {_id(source)} -->|{port}| {node.name}" for port, source in node.wires.items()]
        if node.when is not None:
            lines.append(f"    {_id(node.when.source)} -.->|when| {node.name}")
    lines += [f"    {_id(source)} --> out_{name}" for name, source in system.outputs.items()]
    return "\n".join(lines)


def _id(source: Source) -> str:
    return f"in_{source.name}" if isinstance(source, Input) else source.node.name


def as_svg(system: System) -> str:
    """Return an SVG picture.

    Raises:
        MissingExtra: matplotlib is not installed.
    """
    from compound.api.optimize import drawing
    from compound.report.figures.graph import graph_svg

    return graph_svg(drawing(system))
