"""Composites: components with a system as their body."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Mapping
from typing import ClassVar

from compound.graph.component import CompositeBase, Value
from compound.graph.system import System

RunBody = Callable[[int, Mapping[str, Value]], Awaitable[Mapping[str, Value] | None]]


class Composite(CompositeBase):
    """A component that runs its body several times; addresses of the body's calls carry an index.

    Attributes:
        body: the system that runs.
        keeps_partial_outputs: whether a turn returns the outputs that exist if nodes were skipped
            or failed. Skipped outputs are left out, and failed ones have a mark as their value.
            Without it, such a turn returns ``None``.
        over: the input whose items the turns are; ``None`` if turns do not run over the items of a
            list.
    """

    keeps_partial_outputs: ClassVar[bool] = False
    body: System
    over: str | None = None

    def most_turns(self, sizes: Mapping[str, float]) -> float:
        """Return the maximum number of body runs; infinite if it is known at run time only."""
        return math.inf

    @abstractmethod
    async def drive(
        self, inputs: Mapping[str, Value], values: Mapping[str, object], body: RunBody
    ) -> Mapping[str, Value] | None:
        """Run the body as often as needed; return ``None`` if one of its runs failed."""


def largest_number(setting: object) -> float:
    """Return the largest number that a setting may have; infinite without one."""
    values = getattr(setting, "options", None) or [getattr(setting, "high", setting)]
    return max((v for v in values if isinstance(v, int | float)), default=math.inf)
