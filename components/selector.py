"""A selector picks one of a few options, for example which model answers: for all inputs, or for each."""

from __future__ import annotations

from collections.abc import Mapping

from compound.graph.bounds import Extent, Limits, Reach, of_setting
from compound.graph.component import CallContext, Operation
from compound.graph.space import Choice, PerInput, Scalar
from compound.graph.types import Port


class Selector(Operation):
    """Chooses one option. Its inputs are the context a choice may depend on.

    Its value is one option for all inputs. With ``per_input`` it may also be a local reward that method
    ``optimas`` learned: then each call takes the option with the highest reward for its inputs, the first of
    equally good ones.

    Args:
        name: the component's name.
        options: what there is to choose from.
        value: the option to start with; the first by default.
        per_input: whether a reward may choose.

    Example:
        >>> from compound import Input
        >>> model = Selector("model", "smollm2", "openai/gpt-4o-mini", per_input=True)
        >>> model(question=Input("question")).type
        typing.Literal['smollm2', 'openai/gpt-4o-mini']
    """

    kind = "selector"

    def __init__(
        self,
        name: str,
        *options: Scalar,
        value: Scalar | Mapping[str, str] | None = None,
        per_input: bool = False,
    ) -> None:
        self.name = name
        self.space = (PerInput if per_input else Choice)(*options, value=value)

    @property
    def inputs(self) -> None:  # noqa: D102
        return None

    @property
    def outputs(self) -> Mapping[str, Port]:  # noqa: D102
        return {"choice": Port(self.space.type)}

    @property
    def settings(self) -> Mapping[str, object]:  # noqa: D102
        return {"choice": self.space}

    @property
    def version(self) -> str:  # noqa: D102
        return "selector:1"

    def reach(self, given: Mapping[str, Extent], limits: Limits) -> Reach:  # noqa: D102
        return Reach({"choice": given.get("choice", of_setting(self.space))}, ())

    async def run(  # noqa: D102
        self, inputs: Mapping[str, object], values: Mapping[str, object], call: CallContext
    ) -> Mapping[str, object]:
        choice = values["choice"]
        if not isinstance(choice, Mapping):
            return {"choice": choice}
        options = self.space.options
        scores = await call.scores(choice, self.name, [(inputs, {"choice": option}) for option in options])
        return {"choice": max(zip(options, scores, strict=True), key=lambda pair: pair[1])[0]}
