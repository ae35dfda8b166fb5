"""Composites: components whose body is a system of its own."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace

from compound.graph.bounds import Extent
from compound.graph.component import CompositeBase, Value
from compound.graph.system import System

RunBody = Callable[[int, Mapping[str, Value]], Awaitable[Mapping[str, Value] | None]]


class Composite(CompositeBase):
    """A component made of a body that runs several times; its calls carry an index in their address."""

    body: System

    def most_turns(self, given: Mapping[str, Extent]) -> float:
        """Return how often the body runs at most; infinite when that is not known."""
        return math.inf

    def first_inputs(self, given: Mapping[str, Extent]) -> dict[str, Extent]:
        """Return the longest inputs of the body in the first turn."""
        return {name: given[name] for name in self.body.inputs}

    def next_inputs(self, inputs: Mapping[str, Extent], outputs: Mapping[str, Extent]) -> dict[str, Extent]:
        """Return the longest inputs of the body in this turn and the next one."""
        return dict(inputs)

    def all_outputs(self, outputs: Mapping[str, Extent], turns: float) -> dict[str, Extent]:
        """Return the longest outputs, from those of one turn."""
        return {name: replace(extent.times(turns), items=turns) for name, extent in outputs.items()}

    @abstractmethod
    async def drive(
        self, inputs: Mapping[str, Value], values: Mapping[str, object], body: RunBody
    ) -> Mapping[str, Value] | None:
        """Run the body as often as needed; ``None`` when one of its runs failed."""
