"""The kind ``hyperparameter``: a tunable value as a separate node."""

from __future__ import annotations

from dataclasses import replace

from compound.components.hyperparameter import Hyperparameter
from compound.graph.space import Weights
from compound.spec.kinds.kind import DumpContext, Kind, MakeContext
from compound.spec.schema.settings import AnySpace
from compound.spec.schema.wiring import Wiring
from compound.spec.spelling import Tree


class HyperparameterEntry(Wiring):
    """A tunable value as a separate node, so that several components can read it."""

    hyperparameter: AnySpace
    """The space of the value."""


def _make(entry: HyperparameterEntry, context: MakeContext) -> Hyperparameter:
    space = entry.hyperparameter.make()
    if isinstance(space, Weights) and space.value is not None:
        inside = (*context.address, "hyperparameter", "value")
        space = replace(space, value=context.file.resolve_stored(space.value, inside))
    return Hyperparameter(context.name, space)


def _dump(component: Hyperparameter, context: DumpContext) -> Tree:
    return {"hyperparameter": context.setting("value", component.space)}


HYPERPARAMETER_KIND = Kind("hyperparameter", HyperparameterEntry, _make, (Hyperparameter,), _dump)
