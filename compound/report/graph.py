"""Draw the graph of a system as SVG, text or Mermaid.

The SVG has layers from left to right. A node's layer is the length of the longest path to it; nodes
without inputs are moved next to their first reader, and outputs to the last layer. An edge across
several layers passes through waypoints, which are ordered together with the nodes of each layer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from html import escape
from itertools import pairwise

import networkx as nx

from compound.core.errors import DeclarationError, suggest_name
from compound.graph.draw import GraphDocument, as_document, as_mermaid, as_text
from compound.graph.system import System
from compound.report.figures import PALETTE, clip_name

SWEEPS = 4  # back-and-forth passes of the barycentre heuristic
LETTER, SMALL = 5.6, 4.5  # points, width of a letter of a node's name, and of smaller text
ROW, TALL = 56.0, 33.0  # points, distance of rows and height of a node
OUTER = ("input", "output")
FILL = {
    "llm": "llm",
    "retriever": "retriever",
    "selector": "choice",
    "hyperparameter": "choice",
    "loop": "flow",
    "map": "flow",
    "input": "paper",
    "output": "paper",
}
Edges = Mapping[tuple[str, str], str]  # label by source and target
Points = Sequence[tuple[float, float]]


def draw(system: System, form: str = "text") -> str:
    """Return a drawing of a system.

    Args:
        system: the system.
        form: ``text`` (one line per node, top to bottom), ``mermaid``, or ``svg``.

    Raises:
        DeclarationError: the format is unknown.
    """
    forms: Mapping[str, Callable[[], str]] = {
        "text": lambda: as_text(system),
        "mermaid": lambda: as_mermaid(as_document(system)),
        "svg": lambda: graph_svg(as_document(system)),
    }
    if form not in forms:
        raise DeclarationError(f"no drawing format {form!r}", hint=suggest_name(form, forms))
    return forms[form]()


@dataclass(frozen=True)
class _Box:
    """A node or a waypoint of an edge: its middle, width and height in points."""

    x: float
    y: float
    width: float
    height: float = 0.0

    def side(self, sign: int) -> tuple[float, float]:
        """Return the middle of the left (-1) or the right (1) side."""
        return self.x + sign * self.width / 2, self.y


def graph_svg(drawing: GraphDocument) -> str:
    """Return the SVG of a graph, given as by `compound.graph.draw.as_document`."""
    kinds, edges = _with_outputs(drawing)
    layer = _layers(kinds, edges)
    chains = {edge: _chain(edge, layer) for edge in edges}
    order = _ordered(layer, chains)
    rows = max((len(names) for names in order.values()), default=1)
    tall = ROW * (rows - 1) + TALL + 14
    boxes, wide = _boxes(order, kinds, edges, tall)
    parts = [_edge(edges[edge], chains[edge], [*chains.values()], boxes) for edge in edges]
    parts += [_node(name, kind, boxes[name]) for name, kind in kinds.items()]
    arrow = (
        '<marker id="graph-arrow" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="8" '
        'markerHeight="8" orient="auto"><path d="M0 1 8 4 0 7Z" '
        f'style="fill:{PALETTE["muted"]}"/></marker>'
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{wide:.1f}pt" height="{tall:.1f}pt" '
        f'viewBox="0 0 {wide:.1f} {tall:.1f}" font-family="sans-serif"><defs>{arrow}</defs>'
        f"{''.join(parts)}</svg>"
    )


def _with_outputs(drawing: GraphDocument) -> tuple[dict[str, str], dict[tuple[str, str], str]]:
    """Return the kinds of all nodes and the labels of all edges, with a node for each output."""
    kinds = {str(name): str(kind) for name, kind in drawing["nodes"]}
    edges = {
        (a, b): ", ".join(ports) for a, b, ports in drawing["edges"] if a in kinds and b in kinds
    }
    for name, label in drawing["outputs"].items():
        kinds[f"={name}"] = "output"
        read = label.removeprefix("$").split(".")[0]  # of $node, $node.field or an input $name
        edges[read if read in kinds else f"${read}", f"={name}"] = label.partition(".")[2]
    return kinds, edges


def _layers(kinds: Mapping[str, str], edges: Edges) -> dict[str, int]:
    graph = nx.DiGraph(list(edges))
    graph.add_nodes_from(kinds)
    layer = {name: i for i, names in enumerate(nx.topological_generations(graph)) for name in names}
    last = max(layer.values(), default=0)
    for name, kind in kinds.items():
        readers = [layer[reader] for reader in graph.successors(name)]
        if readers and not graph.in_degree(name):
            layer[name] = min(readers) - 1
        elif kind == "output":
            layer[name] = last
    return layer


def _chain(edge: tuple[str, str], layer: Mapping[str, int]) -> list[str]:
    """Return the ends of an edge with a waypoint for each layer in between."""
    source, target = edge
    between = range(layer[source] + 1, layer[target])
    return [source, *(f"{source}>{target}@{i}" for i in between), target]


def _ordered(
    layer: Mapping[str, int], chains: Mapping[tuple[str, str], list[str]]
) -> dict[int, list[str]]:
    """Order each layer by the mean position of the neighbours, to reduce crossings."""
    order: dict[int, list[str]] = {i: [] for i in range(max(layer.values(), default=0) + 1)}
    links = nx.Graph()
    for name, i in layer.items():
        order[i].append(name)
        links.add_node(name)
    for (source, _), chain in chains.items():
        for step, name in enumerate(chain[1:-1], layer[source] + 1):
            order[step].append(name)
        nx.add_path(links, chain)
    for sweep in range(2 * SWEEPS):
        forth = sweep % 2 == 0
        for i in sorted(order, reverse=not forth):
            adjacent = order.get(i - 1 if forth else i + 1, [])
            place = {name: index - (len(adjacent) - 1) / 2 for index, name in enumerate(adjacent)}
            order[i].sort(key=partial(_barycentre, links, place))
    return order


def _barycentre(links: nx.Graph[str], place: Mapping[str, float], name: str) -> float:
    """Return the mean position of the neighbours that have a place, 0 if none has."""
    found = [place[n] for n in links[name] if n in place]
    return sum(found) / len(found) if found else 0.0


def _title(name: str, kind: str) -> str:
    return clip_name(name.lstrip("$=") if kind in OUTER else name)


def _boxes(
    order: Mapping[int, Sequence[str]], kinds: Mapping[str, str], edges: Edges, tall: float
) -> tuple[dict[str, _Box], float]:
    """Return the boxes of all nodes and waypoints, and the width of the drawing."""
    widths = {
        name: max(58.0, LETTER * len(_title(name, kind)) + 22, SMALL * len(kind) + 22)
        for name, kind in kinds.items()
    }
    boxes, x = {}, 4.0
    for i, names in order.items():
        labels = [len(clip_name(label)) for (_, b), label in edges.items() if b in names]
        x += max([40.0, *(SMALL * length + 30 for length in labels)]) if i else 0
        column = max([widths[name] for name in names if name in widths], default=14.0)
        for row, name in enumerate(names):
            y = tall / 2 + ROW * (row - (len(names) - 1) / 2)
            height = TALL * (0.7 if kinds.get(name) in OUTER else 1)
            boxes[name] = _Box(x + column / 2, y, widths.get(name, column), height)
        x += column
    return boxes, x + 4


def _node(name: str, kind: str, box: _Box) -> str:
    """Draw a node: outer ones as pills, choices dashed, loops and maps with a shadow."""
    outer, fill = kind in OUTER, FILL.get(kind, "function")
    radius = box.height / 2 if outer else 0 if kind == "function" else 6
    dashes = ";stroke-dasharray:3 2" if fill == "choice" else ""
    style = f"fill:{PALETTE[fill]};stroke:{PALETTE['muted']}{dashes}"

    def shape(shift: float) -> str:
        x, y = box.side(-1)[0] + shift, box.y - box.height / 2 + shift
        size = f'width="{box.width:.1f}" height="{box.height:.1f}" rx="{radius:.1f}"'
        return f'<rect x="{x:.1f}" y="{y:.1f}" {size} style="{style}"/>'

    title = _text(box.x, box.y + (3.4 if outer else -2), _title(name, kind), 9.5, "ink")
    below = "" if outer else _text(box.x, box.y + 10, kind, 7.5, "muted")
    return f"{shape(3.5) if fill == 'flow' else ''}{shape(0)}{title}{below}"


def _text(x: float, y: float, text: str, size: float, color: str) -> str:
    look = f"font-size:{size}px;text-anchor:middle;fill:{PALETTE[color]}"
    return f'<text x="{x:.1f}" y="{y:.1f}" style="{look}">{escape(text)}</text>'


def _edge(
    label: str, chain: Sequence[str], chains: Sequence[Sequence[str]], boxes: Mapping[str, _Box]
) -> str:
    """Draw an edge as a smooth arrow, labelled with its ports near the end."""
    source, *between, target = (boxes[name] for name in chain)
    arriving = [each for each in chains if each[-1] == chain[-1]]
    arriving.sort(key=lambda each: boxes[each[-2]].y)
    step = min(
        9.0, 0.7 * TALL / len(arriving)
    )  # edges that arrive together are spread over the side
    x, y = target.side(-1)
    end = (x, y + step * (arriving.index(chain) - (len(arriving) - 1) / 2))
    points = [source.side(1), *(box.side(i) for box in between for i in (-1, 1)), end]
    path = f"M{points[0][0]:.1f} {points[0][1]:.1f}"
    for (x0, y0), (x1, y1) in pairwise(points):
        middle = (x0 + x1) / 2
        path += f"C{middle:.1f} {y0:.1f} {middle:.1f} {y1:.1f} {x1:.1f} {y1:.1f}"
    style = f"fill:none;stroke:{PALETTE['muted']}"
    line = f'<path d="{path}" style="{style}" marker-end="url(#graph-arrow)"/>'
    (x0, y0), (x1, y1) = points[-2:]
    part = 0.56  # past the middle, so that two edges that cross in the middle have separate labels
    at = (x0 + (x1 - x0) * part - 3, y0 + (y1 - y0) * part * part * (3 - 2 * part) + 2.5)
    if not label:
        return line
    width = SMALL * len(clip_name(label)) + 4
    behind = f'x="{at[0] - width / 2:.1f}" y="{at[1] - 8:.1f}" width="{width:.1f}" height="10.5"'
    rect = f'<rect {behind} style="fill:{PALETTE["paper"]}"/>'
    return line + rect + _text(*at, clip_name(label), 7.5, "muted")
