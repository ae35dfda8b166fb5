"""From one entry of the file to its component; what the component's class refuses is noted at its line."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from compound.components.flow import Loop, Map
from compound.components.function import FirstOf, Function
from compound.components.hyperparameter import Hyperparameter
from compound.components.index import BM25, Dense, PassageIndex
from compound.components.llm import LLM
from compound.components.retriever import Retriever
from compound.components.selector import Selector
from compound.errors import DeclarationError, nearest
from compound.graph.component import Component, Operation
from compound.graph.composite import Composite
from compound.graph.space import Choice, Weights
from compound.graph.system import System
from compound.graph.types import Port, spell
from compound.spec.context import Context
from compound.spec.schema.components import (
    BM25Settings,
    ClassEntry,
    DenseSettings,
    Entry,
    FirstOfEntry,
    FunctionEntry,
    HyperparameterEntry,
    LLMEntry,
    LoopEntry,
    MapEntry,
    RetrieverEntry,
    SelectorEntry,
)
from compound.spec.schema.settings import StoredFolder, made
from compound.spec.shape import fitted
from compound.spec.yaml.document import Address
from compound.storage.artifacts import Reference, located

MakeBody = Callable[[Address, str], System | None]


def make_component(context: Context, name: str, address: Address, body: MakeBody) -> Component | None:
    """Return the component of an entry, or None when it is wrong; the mistakes are noted."""
    entry = fitted(context.document, Entry, address)
    if entry is None:
        for kind in ("loop", "map"):
            inside = (*address, kind, "body")
            if isinstance(context.document.at(inside), dict):
                body(inside, name)
        return None
    return _MAKERS[type(entry)](context, name, entry, address, body)


def _made(given: Mapping[str, object]) -> dict[str, Any]:
    """Return settings as arguments of a component, which checks them itself."""
    return {key: made(value) for key, value in given.items()}


def _stored(context: Context, value: Reference, address: Address) -> Reference:
    """Return a reference to a stored folder with its path made absolute."""
    context.place(value["path"], (*address, "path"))
    return located(value, context.folder)


def _llm(context: Context, name: str, entry: LLMEntry, address: Address, _: MakeBody) -> LLM | None:
    inside = (*address, "llm")
    given = _made(entry.llm.given)
    if isinstance(entry.llm.demos, list):
        given["demos"] = tuple(demo.model_dump() for demo in entry.llm.demos)
    lm = given.get("lm")
    if lm is not None:
        context.check_models(lm.options if isinstance(lm, Choice) else [lm], (*inside, "lm"))
    if isinstance(weights := given.get("weights"), Weights) and weights.value is not None:
        given["weights"] = replace(
            weights, value=_stored(context, weights.value, (*inside, "weights", "value"))
        )
    given |= {"stop": tuple(entry.llm.stop), "output": entry.out}
    return context.attempt(inside, lambda: LLM(name, **given))


def _retriever(
    context: Context, name: str, entry: RetrieverEntry, address: Address, _: MakeBody
) -> Retriever | None:
    inside = (*address, "retriever")
    given = _made(entry.retriever.given)
    kind = {BM25Settings: BM25, DenseSettings: Dense}.get(type(entry.retriever), PassageIndex)
    index = {key: value for key, value in given.items() if key not in ("index", "k")}
    if "corpus" in index:
        index["corpus"], index["within"] = context.place(index["corpus"], (*inside, "corpus"))
    if index.get("model"):
        context.may_lead_to(index["model"], (*inside, "model"))
    rest = {"k": given["k"]} if "k" in given else {}
    return context.attempt(inside, lambda: Retriever(name, kind(**index), **rest))


def _selector(
    context: Context, name: str, entry: SelectorEntry, address: Address, _: MakeBody
) -> Selector | None:
    given, chosen, inside = entry.selector, entry.selector.value, (*address, "selector", "value")
    value = _stored(context, chosen.model_dump(), inside) if isinstance(chosen, StoredFolder) else chosen
    return context.attempt(
        (*address, "selector"),
        lambda: Selector(name, *given.options, value=value, per_input=given.per_input),
    )


def _hyperparameter(
    context: Context, name: str, entry: HyperparameterEntry, address: Address, _: MakeBody
) -> Hyperparameter | None:
    space = entry.hyperparameter.make()
    if isinstance(space, Weights) and space.value is not None:
        inside = (*address, "hyperparameter", "value")
        space = replace(space, value=_stored(context, space.value, inside))
    return Hyperparameter(name, space)


def _function(
    context: Context, name: str, entry: FunctionEntry, address: Address, _: MakeBody
) -> Function | None:
    inside = (*address, "function")
    settings = _made(entry.function.model_extra or {})
    function = context.function(entry.function.call, (*inside, "call"))
    if function is None or _unknown(context, function, settings, inside):
        return None
    rest = {key: value for key, value in entry.function.given.items() if key != "call"}
    outputs = entry.out if isinstance(entry.out, dict) else None
    component = context.attempt(
        inside, lambda: Function(name, function, outputs=outputs, **rest, **settings), who=entry.function.call
    )
    if component is not None and outputs is None and entry.out is not None:
        returned = component.outputs["output"].type
        if entry.out != returned:
            wrong = f"says {spell(entry.out)}, but the function returns {spell(returned)}"
            context.document.report((*address, "out"), wrong)
    return component


def _first_of(
    context: Context, name: str, entry: FirstOfEntry, address: Address, _: MakeBody
) -> FirstOf | None:
    ports = tuple(entry.first_of.ports or entry.wires)
    if not ports:
        context.document.report((*address, "first_of"), "has no inputs", "connect some under `in`", key=True)
        return None
    return FirstOf(name, entry.out, ports)


def _loop(context: Context, name: str, entry: LoopEntry, address: Address, body: MakeBody) -> Loop | None:
    inside = (*address, "loop")
    turn = body((*inside, "body"), name)
    if turn is None:
        return None
    carry, until, turns = entry.loop.carry, entry.loop.until, _made({"max_turns": entry.loop.max_turns})
    # Each part is tried alone, so that every mistake is found and stands at its own line.
    for source, target in carry.items():
        context.attempt(
            (*inside, "carry", source), functools.partial(Loop, name, turn, carry={source: target})
        )
    context.attempt((*inside, "until"), lambda: Loop(name, turn, carry={}, until=until))
    context.attempt((*inside, "max_turns"), lambda: Loop(name, turn, carry={}, **turns))
    if context.document.wrong(inside):
        return None
    return Loop(name, turn, carry=carry, until=until, **turns)


def _map(context: Context, name: str, entry: MapEntry, address: Address, body: MakeBody) -> Map | None:
    inside = (*address, "map")
    one = body((*inside, "body"), name)
    if one is None:
        return None
    return context.attempt((*inside, "over"), lambda: Map(name, one, over=entry.map.over))


def _class(context: Context, name: str, entry: ClassEntry, address: Address, _: MakeBody) -> Component | None:
    inside = (*address, "settings")
    settings = _made(entry.settings)
    found = context.code(entry.code, (*address, "class"))
    if found is None:
        return None
    if not (isinstance(found, type) and issubclass(found, Operation | Composite)):
        context.document.report((*address, "class"), f"{entry.code} is not a subclass of Operation")
        return None
    if _unknown(context, found, settings, inside):
        return None
    kind: Callable[..., Component] = found
    return context.attempt((*address, "class"), lambda: _sound(kind(name, **settings), name), who=entry.code)


def _sound(component: Component, name: str) -> Component:
    """Return a user's component whose declarations can be read; the rest relies on them."""
    if component.name != name:
        raise DeclarationError(f"a component named {name!r} must keep its name, but says {component.name!r}")
    inputs, outputs = component.inputs, component.outputs
    for ports in (outputs, {} if inputs is None else inputs):
        if not isinstance(ports, Mapping) or not all(isinstance(port, Port) for port in ports.values()):
            raise DeclarationError(f"inputs and outputs must map names to ports, but one is {ports!r}")
    dict(component.parameters)
    return component


def _unknown(context: Context, target: Callable[..., object], names: Iterable[str], address: Address) -> bool:
    """Note settings that a function or class does not take."""
    try:
        parameters = inspect.signature(target).parameters
    except (TypeError, ValueError):
        return False
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return False
    unknown = [name for name in names if name not in parameters]
    for name in unknown:
        context.document.report((*address, name), "unknown setting", nearest(name, parameters), key=True)
    return bool(unknown)


_MAKERS: Mapping[type[object], Callable[..., Component | None]] = {
    LLMEntry: _llm,
    RetrieverEntry: _retriever,
    SelectorEntry: _selector,
    HyperparameterEntry: _hyperparameter,
    FunctionEntry: _function,
    FirstOfEntry: _first_of,
    LoopEntry: _loop,
    MapEntry: _map,
    ClassEntry: _class,
}
