"""Draw the graph of a system as SVG, text or Mermaid.

The SVG has layers from left to right. A node's layer is the length of the longest path to it; nodes
without inputs are moved next to their first reader, and outputs to the last layer. An edge across
several layers passes through waypoints, which are ordered together with the nodes of each layer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import networkx as nx

from compound.core.errors import DeclarationError, suggest_name
from compound.graph.draw import GraphDocument, as_document, as_mermaid, as_text
from compound.graph.system import System
from compound.report.figures import clip_name
from compound.report.rendering import render_svg

SWEEPS = 4  # back-and-forth passes of the barycentre heuristic
LETTER, SMALL = 5.6, 4.5  # points, width of a letter of a node's name, and of smaller text
ROW, TALL = 56.0, 33.0  # points, distance of rows and height of a node
OUTER = ("input", "output")
FILL = {
    **{"llm": "llm", "retriever": "retriever", "selector": "choice", "hyperparameter": "choice"},
    **{"loop": "flow", "map": "flow", "input": "paper", "output": "paper"},
}
Edges = Mapping[tuple[str, str], str]  # label by source and target


def draw(system: System, form: str = "text") -> str:
    """Return a drawing of a system.

    Args:
        system: the system.
        form: ``text`` (one line per node, top to bottom), ``mermaid``, or ``svg``.

    Raises:
        DeclarationError: the format is unknown.
    """
    if form == "text":
        return as_text(system)
    forms = {"mermaid": as_mermaid, "svg": graph_svg}
    if form not in forms:
        hint = suggest_name(form, ("text", *forms))
        raise DeclarationError(f"no drawing format {form!r}", hint=hint)
    return forms[form](as_document(system))


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
    chains = {}  # the ends of each edge, with a waypoint for each layer in between
    for a, b in edges:
        between = range(layer[a] + 1, layer[b])
        chains[a, b] = [a, *(f"{a}>{b}@{i}" for i in between), b]
    order = _ordered(layer, chains)
    rows = max((len(names) for names in order.values()), default=1)
    tall = ROW * (rows - 1) + TALL + 14
    boxes, wide = _boxes(order, kinds, edges, tall)
    chains_of = [*chains.values()]
    return render_svg(
        "graph.jinja",
        {
            "wide": wide,
            "tall": tall,
            "edges": [
                (clip_name(edges[edge]), *_path(chains[edge], chains_of, boxes)) for edge in edges
            ],
            "nodes": [(_title(name, kind), kind, boxes[name]) for name, kind in kinds.items()],
            "OUTER": OUTER,
            "fill": FILL,
            "small": SMALL,
        },
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

            def mean_place(name: str, place: Mapping[str, float] = place) -> float:
                found = [place[n] for n in links[name] if n in place]
                return sum(found) / len(found) if found else 0.0

            order[i].sort(key=mean_place)
    return order


def _title(name: str, kind: str) -> str:
    return clip_name(name.lstrip("$=") if kind in OUTER else name)


def _boxes(
    order: Mapping[int, Sequence[str]], kinds: Mapping[str, str], edges: Edges, tall: float
) -> tuple[dict[str, _Box], float]:
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


def _path(
    chain: Sequence[str], chains: Sequence[Sequence[str]], boxes: Mapping[str, _Box]
) -> tuple[str, float, float]:
    """Return the path of an edge, a smooth arrow, and the place of its label near the end."""
    source, *between, target = (boxes[name] for name in chain)
    arriving = [each for each in chains if each[-1] == chain[-1]]
    arriving.sort(key=lambda each: boxes[each[-2]].y)
    # Edges that arrive together are spread over the side.
    step = min(9.0, 0.7 * TALL / len(arriving))
    x, y = target.side(-1)
    end = (x, y + step * (arriving.index(chain) - (len(arriving) - 1) / 2))
    points = [source.side(1), *(box.side(i) for box in between for i in (-1, 1)), end]
    path = f"M{points[0][0]:.1f} {points[0][1]:.1f}"
    for (x0, y0), (x1, y1) in pairwise(points):
        middle = (x0 + x1) / 2
        path += f"C{middle:.1f} {y0:.1f} {middle:.1f} {y1:.1f} {x1:.1f} {y1:.1f}"
    (x0, y0), (x1, y1) = points[-2:]
    part = 0.56  # past the middle, so that two edges that cross in the middle have separate labels
    at = y0 + (y1 - y0) * part * part * (3 - 2 * part) + 2.5
    return path, x0 + (x1 - x0) * part - 3, at
