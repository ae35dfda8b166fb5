"""The kind ``selector``: a choice among a few options."""

from __future__ import annotations

from pydantic import Field

from compound.components.selector import Selector
from compound.graph.space import PerInput
from compound.spec.kinds.kind import DumpContext, Kind, MakeContext
from compound.spec.schema.settings import OptionSetting, StoredFolder
from compound.spec.schema.types import Model, Scalar
from compound.spec.schema.wiring import Wiring
from compound.spec.spelling import Tree
from compound.spec.yaml.text import Flow


class SelectorSettings(Model):
    """A choice among a few options."""

    options: list[Scalar] = Field(min_length=1)
    """The options."""
    value: OptionSetting = None  # type: ignore[assignment]  # the first one
    """The initial option; the first by default. With `per_input` also a stored reward model."""
    per_input: bool = False
    """Whether the method `optimas` may choose an option for each input by a local reward."""


class SelectorEntry(Wiring):
    """A selector: returns one of a few options, for example the model that answers."""

    selector: SelectorSettings
    """The options."""


def _make(entry: SelectorEntry, context: MakeContext) -> Selector | None:
    given, chosen, inside = entry.selector, entry.selector.value, (*context.address, "selector")
    file = context.file
    value = (
        file.resolve_stored(chosen.model_dump(), (*inside, "value"))
        if isinstance(chosen, StoredFolder)
        else chosen
    )
    return file.attempt(
        inside,
        lambda: Selector(context.name, *given.options, value=value, per_input=given.per_input),
    )


def _dump(component: Selector, context: DumpContext) -> Tree:
    value = context.values[f"{component.name}.choice"]
    rest = {"per_input": True} if isinstance(component.space, PerInput) else {}
    return {"selector": Flow(options=component.space.options, value=value, **rest)}


SELECTOR_KIND = Kind("selector", SelectorEntry, _make, (Selector,), _dump)
