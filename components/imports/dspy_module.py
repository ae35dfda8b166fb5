"""DSPy modules as single components, for programs whose predictors are not to be tuned."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from compound.components.imports.black_box import BlackBox, Price, Report, counted
from compound.components.imports.dspy_import import GivenOutputs, module_ports
from compound.components.imports.dspy_models import describe_model
from compound.components.imports.dspy_program import field_of
from compound.concurrency.own_thread import run_in_own_thread
from compound.engine import Usage
from compound.errors import CallError, DeclarationError
from compound.extras import explain_missing
from compound.graph.configuration import canonical_json, to_readable_json
from compound.graph.types import Port
from compound.narrowing import report_wrong_arguments

if TYPE_CHECKING:
    import dspy


class DSPyModule(BlackBox):
    """A DSPy module as a component. Made by `compound.from_dspy_module`."""

    kind = "dspy_module"

    def __init__(self, name: str, module: Any, lm: Any, **options: Any) -> None:  # noqa: ANN401
        super().__init__(name, **options)
        self.module, self.lm = module, lm

    async def invoke(self, arguments: Mapping[str, object], reports: list[Report]) -> Mapping[str, object]:  # noqa: D102
        returned = await run_in_own_thread(lambda: self._call(arguments, reports), f"dspy {self.name}")
        try:
            return {name: field_of(returned, name) for name in self.outputs}
        except (AttributeError, KeyError):
            given = ", ".join(map(str, getattr(returned, "keys", tuple)()))
            wanted = ", ".join(self.outputs)
            raise CallError(
                f"the module returned no {wanted}, but {given or type(returned).__name__}"
            ) from None

    def _call(self, arguments: Mapping[str, object], reports: list[Report]) -> object:
        import dspy

        chosen = {"lm": self.lm} if self.lm is not None else {}
        with dspy.context(track_usage=True, **chosen), dspy.track_usage() as tracker:
            try:
                return self.module(**arguments)
            finally:
                for model, entries in tracker.usage_data.items():
                    asked = sum(counted(entry.get("prompt_tokens")) for entry in entries)
                    answered = sum(counted(entry.get("completion_tokens")) for entry in entries)
                    reports.append(Report(model, len(entries), asked, answered))


@report_wrong_arguments
@explain_missing("cp.from_dspy_module")
def from_dspy_module(
    module: dspy.Module,
    name: str = "",
    *,
    lm: dspy.LM | None = None,
    inputs: Mapping[str, object] | None = None,
    outputs: GivenOutputs | None = None,
    version: str = "",
    price: Price | None = None,
    worst: Usage | None = None,
    cache: bool = True,
    timeout: float | None = None,
) -> DSPyModule:
    """Make one component of a DSPy module, which calls its models through DSPy.

    Use `from_dspy` instead to tune its predictors. Usage is charged to the budget as DSPy reports it, after
    each run; answers from DSPy's cache cost nothing.

    Args:
        module: the module.
        name: the component's name; default: ``module``.
        lm: the model of DSPy; default: that of the module or of ``dspy.configure``.
        inputs: types of the arguments; default: as in `from_dspy`.
        outputs: types of the fields of its prediction; default: as in `from_dspy`.
        version: text that changes when the module's behavior does, for the cache; added to its state.
        price: dollars per million prompt and completion tokens; default: litellm's price of the model.
        worst: upper bound of the usage of one run, which is reserved before it.
        cache: whether results are cached.
        timeout: time limit of one run in seconds.

    Raises:
        DeclarationError: it is no module, or its inputs or outputs are not known.
    """
    import dspy

    if not isinstance(module, dspy.Module):
        raise DeclarationError(f"from_dspy_module needs a dspy.Module, but got {type(module).__name__}")
    takes, returns = module_ports(module, inputs, outputs)
    used = lm or dspy.settings.lm
    described = canonical_json(to_readable_json([version, module.dump_state(), describe_model(used)]))
    return DSPyModule(
        name or "module", module, lm, inputs={field: Port(kind) for field, kind in takes.items()},
        outputs=returns, version=described, settings={}, price=price, worst=worst, cache=cache,
        timeout=timeout,
    )  # fmt: skip
