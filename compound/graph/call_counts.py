"""Number of calls of each component in one system run, counted from the graph.

Sizes are the maximum numbers of items of lists, and the maximum values of numbers, as far as
declarations and examples determine them. The items of other lists are known at run time only.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from compound.core.example import Example
from compound.graph.component import Input, Source
from compound.graph.composite import Composite
from compound.graph.system import System

__all__ = ["CallCount", "count_calls"]

Sizes = Mapping[str, float]


@dataclass(frozen=True)
class CallCount:
    """Calls of one component in one run.

    Attributes:
        terms: the maximum number of calls by what repeats them: ``""`` for a known number, or text
            such as ``"item of planner.queries"``.
        exact: whether every run makes this number of calls; false inside of branches, loops and
            maps.

    >>> str(CallCount({"": 2.0})), str(CallCount({"": 5.0}, exact=False))
    ('2', 'at most 5')
    >>> str(CallCount({"item of planner.queries": 1.0}, exact=False))
    'at most 1 per item of planner.queries'
    """

    terms: Mapping[str, float] = field(default_factory=lambda: {"": 1.0})
    exact: bool = True

    def __add__(self, other: CallCount) -> CallCount:
        keys = dict.fromkeys((*self.terms, *other.terms))
        terms = {key: self.terms.get(key, 0) + other.terms.get(key, 0) for key in keys}
        return CallCount(terms, self.exact and other.exact)

    def repeated(self, turns: float, per: str) -> CallCount:
        """Return the calls of a body that runs at most ``turns`` times: once ``per`` item if infinite."""
        if math.isfinite(turns):
            return CallCount({key: n * turns for key, n in self.terms.items()}, exact=False)
        terms = {f"{per}, {key}" if key else per: n for key, n in self.terms.items()}
        return CallCount(terms, exact=False)

    @property
    def most(self) -> float:
        """Maximum number of calls; infinite if it is known at run time only."""
        return self.terms[""] if set(self.terms) == {""} else math.inf

    def __str__(self) -> str:
        parts = (f"{n:g} per {key}" if key else f"{n:g}" for key, n in self.terms.items())
        return ("" if self.exact else "at most ") + " + ".join(parts)


def count_calls(system: System, examples: Iterable[Example] = ()) -> dict[str, CallCount]:
    """Return the calls of each component in one run; components of bodies included."""
    found: dict[str, CallCount] = {}
    _count(system, _input_sizes(examples), found, CallCount())
    return found


def _input_sizes(examples: Iterable[Example]) -> Sizes:
    sizes: dict[str, float] = {}
    for example in examples:
        for name, value in example.inputs.items():
            if isinstance(value, list | tuple | int | float):
                size = len(value) if isinstance(value, list | tuple) else value
                sizes[name] = max(sizes.get(name, 0), size)
    return sizes


def _count(
    system: System, inputs: Sizes, found: dict[str, CallCount], around: CallCount
) -> dict[str, float]:
    """Add the calls of a graph, which runs ``around`` times, and return the sizes of its outputs."""
    known: dict[str, Sizes] = {}

    def size(source: Source) -> float:
        if isinstance(source, Input):
            return inputs.get(source.name, math.inf)
        return math.inf if source.path else known[source.node.name].get(source.field, math.inf)

    for name, node in system.nodes.items():
        component = node.component
        given = {port: size(source) for port, source in node.wires.items()}
        calls = around if node.when is None else CallCount(around.terms, exact=False)
        if isinstance(component, Composite):
            turns = component.most_turns(given)
            over = node.wires.get(component.over or "")
            per = f"turn of {name}" if over is None else f"item of {over.label.removeprefix('$')}"
            outputs = _count(component.body, {}, found, calls.repeated(turns, per))
            known[name] = dict.fromkeys(outputs, turns) if component.over else outputs
        else:
            known[name] = component.output_sizes(given)
            found[component.name] = (
                found[component.name] + calls if component.name in found else calls
            )
    return {name: size(source) for name, source in system.outputs.items()}
