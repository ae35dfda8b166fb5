"""Price of a change: the expected fraction of a system run that executes again.

A run of a changed configuration takes every call that does not depend on the change from the cache.
The price of a change is the share of the counted calls that the components and their descendants
make. It is measured on traces once there are some, and estimated from the graph before.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping

from pydantic import Field

from compound.core.storage.state import State
from compound.execution.trace import Trace
from compound.graph.component import Output
from compound.graph.composite import Composite
from compound.graph.configuration import component_of
from compound.graph.system import System

Origin = frozenset[str]  # names of the components that a call depends on, including its own


class CallShare(State):
    """Share of a run's counted calls that one component makes under the same dependencies."""

    component: str
    # the components whose settings can change them: its own, those upstream, and the loops and maps
    # around it
    depends: list[str]
    share: float  # the mean number of these calls divided by the number of counted calls of the run


class Prices(State):
    """Expected fractions of a system run, by what changes.

    >>> prices = Prices(calls=[
    ...     CallShare(component="a", depends=["a"], share=0.25),
    ...     CallShare(component="b", depends=["a", "b"], share=0.75),
    ... ])
    >>> prices.change(["a"]), prices.change(["b"]), prices.call("a")
    (1.0, 0.75, 0.25)
    """

    # the counted calls of a run. Empty if no call is counted, in which case nothing is cached and
    # every price is 1
    calls: list[CallShare] = Field(default_factory=list)

    def change(self, components: Collection[str]) -> float:
        """Return the fraction of a run that executes again if the settings of some components change."""
        if not self.calls:
            return 1.0
        changed = frozenset(components)
        return min(1.0, sum(c.share for c in self.calls if not changed.isdisjoint(c.depends)))

    def keys(self, keys: Iterable[str]) -> float:
        """Return the price of a change of some parameters."""
        return self.change({component_of(key) for key in keys})

    def call(self, component: str) -> float:
        """Return the fraction of a run that the calls of a component are: the price of a local evaluation."""
        if not self.calls:
            return 1.0
        return min(1.0, sum(c.share for c in self.calls if c.component == component))


def measure_prices(system: System, traces: Iterable[Trace]) -> Prices:
    """Measure the shares of calls on traces; failed runs count with the calls they made."""
    total: defaultdict[tuple[str, Origin], float] = defaultdict(float)
    size = 0
    for trace in traces:
        counted = sum(call.counted for call in trace.calls)
        if not counted:
            continue
        size += 1
        for component, origin in _origins(system, trace):
            total[component, origin] += 1 / counted
    return _prices({key: share / size for key, share in total.items()})


def _origins(system: System, trace: Trace) -> Iterator[tuple[str, Origin]]:
    known: dict[str, Origin] = {}
    for call in trace.calls:  # parents come before their children
        around = _enclosing(system, call.address)
        upstream = (known.get(parent, frozenset()) for parent in call.parents)
        known[call.address] = frozenset((call.component, *around)).union(*upstream)
        if call.counted:
            yield call.component, known[call.address]


def _enclosing(system: System, address: str) -> list[str]:
    *outer, _ = address.split("/")
    found: list[str] = []
    for part in outer:
        component = system.nodes[part.partition("[")[0]].component
        if not isinstance(component, Composite):
            break
        found.append(component.name)
        system = component.body
    return found


def estimate_prices(system: System, calls: Mapping[str, float] | None = None) -> Prices:
    """Estimate the shares of calls from the graph, before there are traces."""
    nodes = list(_counted_nodes(system, frozenset()))
    uses = Counter(component for component, _ in nodes)
    given = calls or {}
    weights: defaultdict[tuple[str, Origin], float] = defaultdict(float)
    for component, origin in nodes:
        times = given.get(component, math.inf)
        weights[component, origin] += times / uses[component] if 0 < times < math.inf else 1.0
    total = sum(weights.values())
    return _prices({key: weight / total for key, weight in weights.items()})


def _counted_nodes(system: System, around: Origin) -> Iterator[tuple[str, Origin]]:
    """Yield the component and the dependencies of each counted node, including those inside composites."""
    known: dict[str, Origin] = {}
    for name, node in system.nodes.items():
        component = node.component
        upstream = (
            known[source.node.name] for source in node.sources if isinstance(source, Output)
        )
        known[name] = frozenset([component.name]).union(around, *upstream)
        if isinstance(component, Composite):
            body = list(_counted_nodes(component.body, known[name]))
            yield from body
            known[name] = known[name].union(*(origin for _, origin in body))
        elif component.cacheable:
            yield component.name, known[name]


def _prices(shares: Mapping[tuple[str, Origin], float]) -> Prices:
    return Prices(
        calls=[
            CallShare(component=component, depends=sorted(origin), share=share)
            for (component, origin), share in sorted(
                shares.items(), key=lambda item: (item[0][0], sorted(item[0][1]))
            )
        ]
    )
