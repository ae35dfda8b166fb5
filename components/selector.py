"""Selection of one of several options, such as the model that answers, globally or per input."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from compound.core.errors import DeclarationError
from compound.core.narrowing import report_wrong_arguments
from compound.graph.component import CallContext, Operation
from compound.graph.composite import largest_number
from compound.graph.space import Choice, PerInput, Scalar
from compound.graph.types import Port


@report_wrong_arguments
class Selector(Operation):
    """A component that outputs one of several options; its inputs are the context of the choice.

    Its value is one option for all inputs. With ``per_input`` the value may also be a local reward
    learned by method ``optimas``: each call then takes the option with the highest reward for its
    inputs. Ties go to the first option.

    Args:
        name: the component's name.
        *choices: the options.
        options: the options as one list, as in YAML.
        value: the initial option; default: the first.
        per_input: whether a learned reward may choose for each input.

    Example:
        >>> from compound import Input
        >>> model = Selector("model", "smollm2", "openai/gpt-4o-mini", per_input=True)
        >>> model(question=Input("question")).type
        typing.Literal['smollm2', 'openai/gpt-4o-mini']
    """

    kind = "selector"
    inputs = None
    version = "selector:1"

    def __init__(
        self,
        name: str,
        *choices: Scalar,
        options: Sequence[Scalar] = (),
        value: Scalar | Mapping[str, str] | None = None,
        per_input: bool = False,
    ) -> None:
        self.name = name
        if choices and options:
            raise DeclarationError(f"selector {name!r} has options twice", hint="give them once")
        self.space = (PerInput if per_input else Choice)(*choices, *options, value=value)

    @property
    def outputs(self) -> Mapping[str, Port]:  # noqa: D102
        return {"choice": Port(self.space.type)}

    @property
    def settings(self) -> Mapping[str, object]:  # noqa: D102
        return {"choice": self.space}

    def output_sizes(self, sizes: Mapping[str, float]) -> Mapping[str, float]:  # noqa: D102
        return {"choice": largest_number(self.space)}

    async def run(  # noqa: D102
        self, inputs: Mapping[str, object], values: Mapping[str, object], call: CallContext
    ) -> Mapping[str, object]:
        choice = values["choice"]
        if not isinstance(choice, Mapping):
            return {"choice": choice}
        options = self.space.options
        scores = await call.scores(
            choice, self.name, [(inputs, {"choice": option}) for option in options]
        )
        return {"choice": max(zip(options, scores, strict=True), key=lambda pair: pair[1])[0]}
