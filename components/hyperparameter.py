"""Value as a separate node, tunable or constant, so that several components can share it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal, TypeGuard

from compound.core.errors import DeclarationError
from compound.core.formatting import short_repr
from compound.core.narrowing import report_wrong_arguments
from compound.graph.component import CallContext, Operation
from compound.graph.composite import largest_number
from compound.graph.space import Space
from compound.graph.types import Port

Constant = str | bool | int | float | list[object] | tuple[object, ...]


def is_constant(value: object) -> TypeGuard[Constant]:
    """Return whether a value can be a constant of a graph.

    >>> is_constant("formal"), is_constant([1, 2]), is_constant({"a": 1}), is_constant(None)
    (True, True, False, False)
    """
    if isinstance(value, list | tuple) and type(value) in (list, tuple):
        return all(is_constant(item) for item in value)
    return type(value) in (str, bool, int, float)


def _type(value: Constant) -> object:
    if isinstance(value, str):
        return Literal[value]
    return list if isinstance(value, tuple) else type(value)


@report_wrong_arguments
class Hyperparameter(Operation):
    """A value that other components read as an input: a tunable one, or a constant.

    Args:
        name: the component's name.
        space: the space of the value, or a constant: a string, a number, a boolean, or a list of
            them.

    Example:
        >>> from compound.graph.space import Int
        >>> depth = Hyperparameter("depth", Int(1, 10, value=5))
        >>> depth().label, depth.parameters["value"].value
        ('$depth', 5)
        >>> Hyperparameter("tone", "formal")()
        Output($tone: one of formal)
    """

    kind = "hyperparameter"
    inputs: ClassVar[Mapping[str, Port]] = {}
    version = "hyperparameter:1"

    def __init__(self, name: str, space: Space | Constant) -> None:
        if not isinstance(space, Space) and not is_constant(space):
            raise DeclarationError(
                f"hyperparameter {name!r} must be a space or a constant, but got {short_repr(space)}",
                hint="such as cp.Int(1, 10), 'formal' or ['a', 'b']",
            )
        self.name = name
        self.space = space

    @property
    def outputs(self) -> Mapping[str, Port]:  # noqa: D102
        return {
            "value": Port(self.space.type if isinstance(self.space, Space) else _type(self.space))
        }

    @property
    def settings(self) -> Mapping[str, object]:  # noqa: D102
        return {"value": self.space}

    def output_sizes(self, sizes: Mapping[str, float]) -> Mapping[str, float]:  # noqa: D102
        return {"value": largest_number(self.space)}

    async def run(  # noqa: D102
        self, inputs: Mapping[str, object], values: Mapping[str, object], call: CallContext
    ) -> Mapping[str, object]:
        value = values["value"]
        return {"value": list(value) if type(value) is tuple else value}
