"""Number or choice as a separate node, so that several components can share one value."""

from __future__ import annotations

from collections.abc import Mapping

from compound.graph.bounds import Extent, Limits, Reach, extent_of_setting
from compound.graph.component import CallContext, Operation
from compound.graph.space import Space
from compound.graph.types import Port


class Hyperparameter(Operation):
    """A tunable value that other components read as an input.

    Example:
        >>> from compound.graph.space import Int
        >>> depth = Hyperparameter("depth", Int(1, 10, value=5))
        >>> depth().label, depth.parameters["value"].value
        ('$depth', 5)
    """

    kind = "hyperparameter"

    def __init__(self, name: str, space: Space) -> None:
        self.name = name
        self.space = space

    @property
    def inputs(self) -> Mapping[str, Port]:  # noqa: D102
        return {}

    @property
    def outputs(self) -> Mapping[str, Port]:  # noqa: D102
        return {"value": Port(self.space.type)}

    @property
    def settings(self) -> Mapping[str, object]:  # noqa: D102
        return {"value": self.space}

    @property
    def version(self) -> str:  # noqa: D102
        return "hyperparameter:1"

    def reach(self, given: Mapping[str, Extent], limits: Limits) -> Reach:  # noqa: D102
        return Reach({"value": given.get("value", extent_of_setting(self.space))}, ())

    async def run(  # noqa: D102
        self, inputs: Mapping[str, object], values: Mapping[str, object], call: CallContext
    ) -> Mapping[str, object]:
        return {"value": values["value"]}
