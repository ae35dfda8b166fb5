"""Composites: components with a system as their body."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import ClassVar

from compound.graph.bounds import Extent
from compound.graph.component import CompositeBase, Value
from compound.graph.system import System

RunBody = Callable[[int, Mapping[str, Value]], Awaitable[Mapping[str, Value] | None]]


class Composite(CompositeBase):
    """A component that runs its body several times; addresses of the body's calls carry an index.

    Attributes:
        body: the system that runs.
        keeps_partial_outputs: whether a turn returns the outputs that exist if nodes were skipped or failed.
            Skipped outputs are left out, and failed ones have a mark as their value. Without it, such a turn
            returns ``None``.
    """

    keeps_partial_outputs: ClassVar[bool] = False
    body: System

    def max_turns_bound(self, given: Mapping[str, Extent]) -> float:
        """Return the maximum number of body runs; infinite if unknown."""
        return math.inf

    def first_inputs(self, given: Mapping[str, Extent]) -> dict[str, Extent]:
        """Return the extents of the body's inputs in the first turn."""
        return {name: given[name] for name in self.body.inputs}

    def next_inputs(self, inputs: Mapping[str, Extent], outputs: Mapping[str, Extent]) -> dict[str, Extent]:
        """Return extents that cover the body's inputs in this turn and the next."""
        return dict(inputs)

    def all_outputs(self, outputs: Mapping[str, Extent], turns: float) -> dict[str, Extent]:
        """Return the extents of the composite's outputs, given those of one turn."""
        return {name: replace(extent.times(turns), items=turns) for name, extent in outputs.items()}

    @abstractmethod
    async def drive(
        self, inputs: Mapping[str, Value], values: Mapping[str, object], body: RunBody
    ) -> Mapping[str, Value] | None:
        """Run the body as often as needed; return ``None`` if one of its runs failed."""
