"""Upper bounds of the values and calls of a system run, computed without running the system."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from compound.example import Example
from compound.graph.bounds import CallBound, Extent, Reach, Use, extent_of_values
from compound.graph.component import Component, Input, Source
from compound.graph.composite import Composite
from compound.graph.space import Text
from compound.graph.system import System
from compound.graph.types import as_declared


@dataclass(frozen=True)
class RunLimits:
    """Implements `compound.graph.bounds.Limits` for a run.

    Attributes:
        examples: all examples that the run may read.
        lms: the system's default model.
        start: the initial configuration.
        growth: bytes that a search may add to a text.
        written: maximum tokens of a text written by a model.
        read_corpora: whether to read corpora for their longest passages.
    """

    examples: Sequence[Example]
    lms: tuple[str, ...] = ()
    start: Mapping[str, object] = field(default_factory=dict)
    growth: float = 0
    written: int = 0
    read_corpora: bool = False

    def text(self, key: str, space: Text) -> Extent:
        """Return the extent of a text parameter."""
        start = max(len(space.value.encode()), len(str(self.start.get(key, "")).encode()))
        return Extent(start + self.growth, self.written).truncated(max(space.max_length, start))

    def value(self, key: str, default: object) -> object:
        """Return the initial value of a parameter."""
        return self.start.get(key, default)

    @cached_property
    def gold(self) -> Extent:
        """Extent of the longest gold value of the examples."""
        return extent_of_values(value for example in self.examples for value in example.gold.values())


@dataclass
class Survey:
    """Upper bounds of one system run.

    Attributes:
        uses: bounds of the calls of each component.
        counted: maximum number of calls that count as parts of a system run.
        outputs: extents of the system's outputs.
    """

    uses: dict[str, Use] = field(default_factory=dict)
    counted: float = 0
    outputs: dict[str, Extent] = field(default_factory=dict)

    def add(self, component: Component, inputs: Mapping[str, Extent], reach: Reach, times: float) -> None:
        """Add the calls at one node."""
        self.counted += times * component.cacheable
        known = self.uses.get(component.name)
        if known is None:
            self.uses[component.name] = Use(times, dict(inputs), reach.outputs, reach.requests)
            return
        self.uses[component.name] = Use(
            known.calls + times,
            _merge_extents(known.inputs, inputs),
            _merge_extents(known.outputs, reach.outputs),
            _merge_requests(known.requests, reach.requests),
        )


def _merge_requests(
    some: Sequence[CallBound] | None, others: Sequence[CallBound] | None
) -> Sequence[CallBound] | None:
    """Return requests that bound both alternatives."""
    if some is None or others is None:
        return None
    if len(some) != len(others):
        return [*some, *others]
    return [
        replace(
            a,
            calls=max(a.calls, b.calls),
            prompt=a.prompt.union(b.prompt),
            max_tokens=max(a.max_tokens, b.max_tokens),
            lms=tuple(dict.fromkeys((*a.lms, *b.lms))),
            messages=max(a.messages, b.messages),
        )
        for a, b in zip(some, others, strict=True)
    ]


def _merge_extents(some: Mapping[str, Extent], others: Mapping[str, Extent]) -> dict[str, Extent]:
    both = {name: some[name].union(others[name]) for name in some if name in others}
    return {**some, **others, **both}


def survey(system: System, limits: RunLimits) -> Survey:
    """Compute the upper bounds of one system run."""
    found = Survey()
    inputs = {
        name: extent_of_values(as_declared(kind, example.inputs[name]) for example in limits.examples)
        for name, kind in system.inputs.items()
    }
    found.outputs = _walk(system, inputs, limits, found, 1.0)
    return found


def _walk(
    system: System, inputs: Mapping[str, Extent], limits: RunLimits, found: Survey | None, times: float
) -> dict[str, Extent]:
    """Return the extents of a graph's outputs, and add its calls to ``found``, each ``times``."""
    known: dict[str, Mapping[str, Extent]] = {}

    def read(source: Source) -> Extent:
        return inputs[source.name] if isinstance(source, Input) else known[source.node.name][source.field]

    for name, node in system.nodes.items():
        given = {port: read(source) for port, source in node.wires.items()}
        if isinstance(node.component, Composite):
            known[name] = _walk_composite(node.component, given, limits, found, times)
            continue
        reach = node.component.reach(given, limits)
        known[name] = reach.outputs
        if found is not None:
            found.add(node.component, given, reach, times)
    return {name: read(source) for name, source in system.outputs.items()}


def _walk_composite(
    composite: Composite, given: Mapping[str, Extent], limits: RunLimits, found: Survey | None, times: float
) -> Mapping[str, Extent]:
    """Return the extents of a composite's outputs, iterating since a turn may read the previous outputs."""
    turns = composite.max_turns_bound(given)
    state = composite.first_inputs(given)
    for _ in range(len(composite.body.nodes) + 1):
        outputs = _walk(composite.body, state, limits, None, 0)
        wider = composite.next_inputs(state, outputs)
        if wider == state:
            break
        state = wider
    else:
        why = f"every turn of {composite.name!r} may lengthen the input of the next one"
        state = dict.fromkeys(state, Extent(math.inf, unbounded_reason=why))
    outputs = _walk(composite.body, state, limits, found, times * turns)
    return composite.all_outputs(outputs, turns)
