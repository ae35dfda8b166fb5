"""Lay out a graph in layers from left to right, with long edges routed between the nodes.

A node's layer is the length of the longest path to it. Nodes without inputs are moved next to their first
reader, and outputs to the last layer. An edge across several layers passes through waypoints, which are
ordered together with the nodes of each layer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import networkx as nx

from compound.graph.draw import GraphDocument

SWEEPS = 4  # back-and-forth passes of the barycentre heuristic
Point = tuple[float, float]


@dataclass(frozen=True)
class Box:
    """A node to draw: name, kind, layer, and vertical position in rows (0 is the middle)."""

    name: str
    kind: str
    layer: int
    row: float


@dataclass(frozen=True)
class Route:
    """An edge to draw: the ports it feeds, and the (layer, row) of its waypoints."""

    source: str
    target: str
    label: str
    through: Sequence[Point]


@dataclass(frozen=True)
class Layout:
    """A graph in layers; ``rows`` is the size of the largest layer."""

    boxes: Sequence[Box]
    routes: Sequence[Route]
    layers: int
    rows: int


def layout(drawing: GraphDocument) -> Layout:
    """Lay out a graph in the form of ``config.json``: nodes with kinds, edges with ports, outputs."""
    kinds = {str(name): str(kind) for name, kind in drawing["nodes"]}
    edges = {(a, b): ", ".join(ports) for a, b, ports in drawing["edges"] if a in kinds and b in kinds}
    for name, label in drawing["outputs"].items():
        kinds[f"={name}"] = "output"
        read = label.removeprefix("$").split(".")[0]  # of $node, $node.field or an input $name
        edges[read if read in kinds else f"${read}", f"={name}"] = label.partition(".")[2]
    layer = _layers(kinds, edges)
    chains = {edge: _chain(edge, layer) for edge in edges}
    order = _ordered(layer, chains)
    rows = max((len(names) for names in order.values()), default=1)
    places = _places(order, rows)
    boxes = [Box(name, kind, *places[name]) for name, kind in kinds.items()]
    routes = [Route(*edge, edges[edge], [places[n] for n in chain[1:-1]]) for edge, chain in chains.items()]
    return Layout(boxes, routes, len(order), rows)


def _layers(kinds: Mapping[str, str], edges: Mapping[tuple[str, str], str]) -> dict[str, int]:
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


def _ordered(layer: Mapping[str, int], chains: Mapping[tuple[str, str], list[str]]) -> dict[int, list[str]]:
    """Order each layer by the mean position of the neighbours, back and forth, to reduce crossings."""
    order: dict[int, list[str]] = {i: [] for i in range(max(layer.values(), default=0) + 1)}
    neighbours: dict[str, list[str]] = {}
    for name, i in layer.items():
        order[i].append(name)
    for (source, _), chain in chains.items():
        for step, name in enumerate(chain[1:-1], layer[source] + 1):
            order[step].append(name)
        for a, b in pairwise(chain):
            neighbours.setdefault(a, []).append(b)
            neighbours.setdefault(b, []).append(a)
    for sweep in range(2 * SWEEPS):
        forth = sweep % 2 == 0
        for i in sorted(order, reverse=not forth):
            adjacent = order.get(i - 1 if forth else i + 1, [])
            place = {name: index - (len(adjacent) - 1) / 2 for index, name in enumerate(adjacent)}
            order[i].sort(key=lambda name: _mean([place[n] for n in neighbours.get(name, []) if n in place]))
    return order


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _places(order: Mapping[int, Sequence[str]], rows: int) -> dict[str, tuple[int, float]]:
    """Return layer and row of each name, from networkx's multipartite layout rescaled to unit steps."""
    graph = nx.DiGraph()
    graph.add_nodes_from(name for names in order.values() for name in names)
    unit = max((len(order) - 1) / 2, (rows - 1) / 2)
    spots = nx.multipartite_layout(graph, subset_key=order) if graph else {}
    return {name: (i, -float(spots[name][1]) * unit) for i, names in order.items() for name in names}
