"""A selector picks one of a few options, for example which model answers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from compound.component import CallContext, Operation
from compound.ports import Port
from compound.space import Choice, Scalar


class Selector(Operation):
    """Chooses one option. Its inputs are the context a choice may depend on; globally it is one value.

    Example:
        >>> from compound import Input
        >>> model = Selector("model", "smollm2", "openai/gpt-4o-mini")
        >>> model(question=Input("question")).type
        typing.Literal['smollm2', 'openai/gpt-4o-mini']
    """

    kind = "selector"

    def __init__(self, name: str, *options: Scalar, value: Scalar | None = None) -> None:
        self.name = name
        self.space = Choice(*options, value=value)

    @property
    def inputs(self) -> None:  # noqa: D102
        return None

    @property
    def outputs(self) -> Mapping[str, Port]:  # noqa: D102
        return {"choice": Port(self.space.type)}

    @property
    def settings(self) -> Mapping[str, Any]:  # noqa: D102
        return {"choice": self.space}

    @property
    def version(self) -> str:  # noqa: D102
        return "selector:1"

    async def run(  # noqa: D102
        self, inputs: Mapping[str, Any], values: Mapping[str, Any], call: CallContext
    ) -> Mapping[str, Any]:
        return {"choice": values["choice"]}
