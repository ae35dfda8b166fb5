"""Schema of graphs, the table of the component kinds, and the kinds ``loop`` and ``map``.

``loop`` and ``map`` are defined here because their schema is recursive: a body has entries of every kind.
"""

from __future__ import annotations

import functools
import typing
from collections.abc import Mapping
from typing import Annotated

from pydantic import Field, Tag

from compound.components.flow import Loop, Map
from compound.spec.kinds.agent import AGENT_KIND
from compound.spec.kinds.code import CLASS_KIND
from compound.spec.kinds.code_runner import CODE_KIND
from compound.spec.kinds.external_agent import EXTERNAL_AGENT_KIND
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
from compound.spec.schema.wiring import Wiring, key_discriminator
from compound.spec.spelling import Tree
from compound.spec.yaml.text import Flow


class LoopSettings(Model):
    """A body that runs repeatedly."""

    body: Body
    """The system of one turn."""
    carry: dict[Name, Name]
    """Maps each body output to the body input that it replaces in the next turn."""
    until: Name | None = None
    """A boolean body output that ends the loop when true."""
    max_turns: IntSetting = 5
    """Maximum number of turns."""


class LoopEntry(Wiring):
    """A loop; it has the inputs and outputs of its body."""

    loop: LoopSettings
    """The body and when to stop."""


def _make_loop(entry: LoopEntry, context: MakeContext) -> Loop | None:
    file, name, inside = context.file, context.name, (*context.address, "loop")
    turn = context.make_body((*inside, "body"), name)
    if turn is None:
        return None
    carry, until = entry.loop.carry, entry.loop.until
    turns = make_settings({"max_turns": entry.loop.max_turns})
    # Each part is checked on its own, so that every error is found and reported at its own line.
    for source, target in carry.items():
        file.attempt((*inside, "carry", source), functools.partial(Loop, name, turn, carry={source: target}))
    file.attempt((*inside, "until"), lambda: Loop(name, turn, carry={}, until=until))
    file.attempt((*inside, "max_turns"), lambda: Loop(name, turn, carry={}, **turns))
    if file.document.has_errors(inside):
        return None
    return Loop(name, turn, carry=carry, until=until, **turns)


def _dump_loop(component: Loop, context: DumpContext) -> Tree:
    rest: Tree = {"carry": Flow(component.carry)}
    if component.until is not None:
        rest["until"] = component.until
    turns = context.setting("max_turns", component.max_turns)
    return {"loop": {"body": context.dump_body(), **rest, "max_turns": turns}}


class MapSettings(Model):
    """A body that runs once per item of a list."""

    body: Body
    """The system for one item."""
    over: Name
    """The body input that receives the items."""


class MapEntry(Wiring):
    """A map; its outputs are lists in the order of the items."""

    map: MapSettings
    """The body and what it runs over."""


def _make_map(entry: MapEntry, context: MakeContext) -> Map | None:
    inside = (*context.address, "map")
    body = context.make_body((*inside, "body"), context.name)
    if body is None:
        return None
    return context.file.attempt((*inside, "over"), lambda: Map(context.name, body, over=entry.map.over))


def _dump_map(component: Map, context: DumpContext) -> Tree:
    return {"map": {"body": context.dump_body(), "over": component.over}}


_KINDS: tuple[AnyKind, ...] = (
    LLM_KIND,
    RETRIEVER_KIND,
    SELECTOR_KIND,
    HYPERPARAMETER_KIND,
    FUNCTION_KIND,
    CODE_KIND,
    AGENT_KIND,
    Kind("loop", LoopEntry, _make_loop, (Loop,), _dump_loop, has_body=True),
    Kind("map", MapEntry, _make_map, (Map,), _dump_map, has_body=True),
    EXTERNAL_AGENT_KIND,
    FIRST_OF_KIND,
    CLASS_KIND,
)
BUILT_IN: Mapping[str, AnyKind] = {kind.name: kind for kind in _KINDS}
"""The built-in component kinds by name."""
if typing.TYPE_CHECKING:
    Entry = Wiring
else:
    Entry = Annotated[
        typing.Union[
            *(Annotated[kind.entry, Tag(f"~{kind.name}")] for kind in _KINDS),
            Annotated[Wiring, INSTALLED, Tag(INSTALLED.tag)],
        ],
        key_discriminator(BUILT_IN, "kind", INSTALLED),
    ]


class UseEntry(Wiring):
    """An additional node for a component; all its nodes share one configuration."""

    use: Name
    """The component."""


class Body(Model):
    """A graph: inputs, components, additional nodes, and outputs."""

    inputs: dict[Name, Type] = Field(default={})
    """The inputs of the graph: the type of each, by name."""
    components: dict[Name, Entry]
    """The components; each is also a node with the same name."""
    nodes: dict[Name, UseEntry] = Field(default={})
    """Additional nodes that use a component under another name."""
    outputs: dict[Name, Reference] = Field(min_length=1)
    """The outputs of the graph: a reference for each, by name."""
