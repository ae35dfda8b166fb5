"""The kind ``first_of``: the first of several inputs whose node ran."""

from __future__ import annotations

from pydantic import Field

from compound.components.function import FirstOf
from compound.spec.kinds.kind import DumpContext, Kind, MakeContext
from compound.spec.schema.types import Model, Name, Type
from compound.spec.schema.wiring import Wiring
from compound.spec.spelling import Tree
from compound.spec.yaml.text import Flow


class FirstOfSettings(Model):
    """The ports of a `first_of` component."""

    ports: list[Name] | None = None
    """The ports in order of preference; by default those under `in`, in their order."""


class FirstOfEntry(Wiring):
    """Returns the first of its inputs whose node ran, and so joins conditional branches."""

    first_of: FirstOfSettings
    """The settings; usually {}."""
    out: Type = Field(default="str", validate_default=True)
    """The type of the inputs and of the output."""


def _make(entry: FirstOfEntry, context: MakeContext) -> FirstOf | None:
    ports = tuple(entry.first_of.ports or entry.wires)
    if not ports:
        address = (*context.address, "first_of")
        context.file.document.report(address, "has no inputs", "connect some under `in`", key=True)
        return None
    return FirstOf(context.name, entry.out, ports)


def _dump(component: FirstOf, context: DumpContext) -> Tree:
    ports = list(component.inputs)
    kind = context.output_types(component)["output"]
    return {"first_of": Flow({} if ports == list(context.wired) else {"ports": ports}), "out": kind}


FIRST_OF_KIND = Kind("first_of", FirstOfEntry, _make, (FirstOf,), _dump)
