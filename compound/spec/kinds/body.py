"""Graphs in the file, with the table of their component kinds, and the kinds that have a graph inside.

``loop`` and ``map`` stand here because their schema is recursive: a body holds entries of every kind.
"""

from __future__ import annotations

import functools
import typing
from collections.abc import Mapping
from typing import Annotated

from pydantic import Field, Tag

from compound.components.flow import Loop, Map
from compound.spec.kinds.code import CLASS_KIND
from compound.spec.kinds.first_of import FIRST_OF_KIND
from compound.spec.kinds.function import FUNCTION_KIND
from compound.spec.kinds.hyperparameter import HYPERPARAMETER_KIND
from compound.spec.kinds.installed import KINDS as INSTALLED
from compound.spec.kinds.kind import AnyKind, DumpContext, Kind, MakeContext, make_settings
from compound.spec.kinds.llm import LLM_KIND
from compound.spec.kinds.retriever import RETRIEVER_KIND
from compound.spec.kinds.selector import SELECTOR_KIND
from compound.spec.schema.settings import IntSetting
from compound.spec.schema.types import Model, Name, Reference, Type
from compound.spec.schema.wiring import Wiring, one_key
from compound.spec.spelling import Tree
from compound.spec.yaml.text import Flow


class LoopSettings(Model):
    """A body that runs turn after turn."""

    body: Body
    """The system of one turn."""
    carry: dict[Name, Name]
    """Body output -> body input it replaces in the next turn."""
    until: Name | None = None
    """A boolean body output that ends the loop when true."""
    max_turns: IntSetting = 5
    """The most turns."""


class LoopEntry(Wiring):
    """A loop; its inputs and outputs are those of its body."""

    loop: LoopSettings
    """The body and when to stop."""


def _make_loop(entry: LoopEntry, context: MakeContext) -> Loop | None:
    file, name, inside = context.file, context.name, (*context.address, "loop")
    turn = context.make_body((*inside, "body"), name)
    if turn is None:
        return None
    carry, until = entry.loop.carry, entry.loop.until
    turns = make_settings({"max_turns": entry.loop.max_turns})
    # Each part is tried alone, so that every mistake is found and stands at its own line.
    for source, target in carry.items():
        file.attempt((*inside, "carry", source), functools.partial(Loop, name, turn, carry={source: target}))
    file.attempt((*inside, "until"), lambda: Loop(name, turn, carry={}, until=until))
    file.attempt((*inside, "max_turns"), lambda: Loop(name, turn, carry={}, **turns))
    if file.document.wrong(inside):
        return None
    return Loop(name, turn, carry=carry, until=until, **turns)


def _dump_loop(component: Loop, context: DumpContext) -> Tree:
    rest: Tree = {"carry": Flow(component.carry)}
    if component.until is not None:
        rest["until"] = component.until
    turns = context.setting("max_turns", component.max_turns)
    return {"loop": {"body": context.dump_body(), **rest, "max_turns": turns}}


class MapSettings(Model):
    """A body that runs for each item of a list."""

    body: Body
    """The system for one item."""
    over: Name
    """The body input that receives the items."""


class MapEntry(Wiring):
    """A map; its outputs are lists in the items' order."""

    map: MapSettings
    """The body and what it runs over."""


def _make_map(entry: MapEntry, context: MakeContext) -> Map | None:
    inside = (*context.address, "map")
    one = context.make_body((*inside, "body"), context.name)
    if one is None:
        return None
    return context.file.attempt((*inside, "over"), lambda: Map(context.name, one, over=entry.map.over))


def _dump_map(component: Map, context: DumpContext) -> Tree:
    return {"map": {"body": context.dump_body(), "over": component.over}}


_KINDS: tuple[AnyKind, ...] = (
    LLM_KIND,
    RETRIEVER_KIND,
    SELECTOR_KIND,
    HYPERPARAMETER_KIND,
    FUNCTION_KIND,
    Kind("loop", LoopEntry, _make_loop, (Loop,), _dump_loop, has_body=True),
    Kind("map", MapEntry, _make_map, (Map,), _dump_map, has_body=True),
    FIRST_OF_KIND,
    CLASS_KIND,
)
BUILT_IN: Mapping[str, AnyKind] = {kind.name: kind for kind in _KINDS}
"""The kinds of this package, by name."""
if typing.TYPE_CHECKING:
    Entry = Wiring
else:
    Entry = Annotated[
        typing.Union[
            *(Annotated[kind.entry, Tag(f"~{kind.name}")] for kind in _KINDS),
            Annotated[Wiring, INSTALLED, Tag(INSTALLED.tag)],
        ],
        one_key(BUILT_IN, "kind", INSTALLED),
    ]


class UseEntry(Wiring):
    """A further use of a component under another name; both share one configuration."""

    use: Name
    """The component."""


class Body(Model):
    """A graph: inputs, components, further uses of them, and outputs."""

    inputs: dict[Name, Type] = Field(default={})
    """What the graph reads, by name and type."""
    components: dict[Name, Entry]
    """The components; each is a node of its own name."""
    nodes: dict[Name, UseEntry] = Field(default={})
    """Further uses of components under other names."""
    outputs: dict[Name, Reference] = Field(min_length=1)
    """What the graph returns, by name."""
