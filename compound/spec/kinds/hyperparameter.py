"""The kind ``hyperparameter``: a value as a separate node."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

from compound.components.hyperparameter import Constant, Hyperparameter
from compound.graph.space import Space, Weights
from compound.spec.kinds.kind import DumpContext, Kind, MakeContext
from compound.spec.schema.settings import ValueSetting, make_setting
from compound.spec.schema.wiring import Wiring
from compound.spec.spelling import Tree


class HyperparameterEntry(Wiring):
    """A tunable value or a constant as a separate node, so that several components can read it."""

    hyperparameter: ValueSetting
    """The space of the value, or a constant."""


def _make(entry: HyperparameterEntry, context: MakeContext) -> Hyperparameter:
    space = make_setting(entry.hyperparameter)
    if isinstance(space, Weights) and space.value is not None:
        inside = (*context.address, "hyperparameter", "value")
        space = replace(space, value=context.file.resolve_stored(space.value, inside))
    return Hyperparameter(context.name, cast("Space | Constant", space))


def _dump(component: Hyperparameter, context: DumpContext) -> Tree:
    return {"hyperparameter": context.setting("value", component.space)}


HYPERPARAMETER_KIND = Kind("hyperparameter", HyperparameterEntry, _make, (Hyperparameter,), _dump)
