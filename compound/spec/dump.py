"""From a `System` to the text of its YAML file: what `load` reads back as the same system."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from compound.components.flow import Loop, Map
from compound.components.function import FirstOf, Function
from compound.components.hyperparameter import Hyperparameter
from compound.components.index import BM25, Dense, PassageIndex
from compound.components.llm import LLM
from compound.components.retriever import Retriever
from compound.components.selector import Selector
from compound.errors import DeclarationError
from compound.graph.component import Component, Condition, Node, Source
from compound.graph.composite import Composite
from compound.graph.space import PerInput, Space
from compound.graph.system import System
from compound.spec.schema.settings import SPACES
from compound.spec.spelling import Tree, spell_code, spell_space, spell_type
from compound.spec.yaml.text import Flow, write

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


TOP = ""
INDEXES: Mapping[type[object], str] = {BM25: "bm25", Dense: "dense", PassageIndex: "passages"}


def dump(system: System) -> str:
    """Return the YAML text of a system, bound to the values it has now.

    Raises:
        DeclarationError: a part of it has no name that a file could hold: a lambda, a local function.

    >>> from compound import Input, Text
    >>> answerer = LLM("answerer", prompt=Text("Answer."))
    >>> print(dump(System("demo", {"answer": answerer(question=Input("question"))}, lm="smollm2")), end="")
    system: demo
    lm: smollm2
    inputs: {question: str}
    components:
      answerer:
        llm:
          prompt: {tune: Answer.}
        in: {question: $question}
    outputs: {answer: $answerer}
    """
    lm: Tree = {"lm": system.lm} if system.lm else {}
    return write({"system": system.name, **lm, **_Dumping(system).graph(TOP)})


class _Dumping:
    """One system on its way to YAML. A graph inside is named by the loop or map it is the body of."""

    def __init__(self, system: System) -> None:
        self._values = system.configuration
        self._components = system.components
        bodies = {name: c.body for name, c in self._components.items() if isinstance(c, Composite)}
        self._graphs: Mapping[str, System] = {TOP: system, **bodies}

    def graph(self, name: str) -> Tree:
        """Return a graph: its inputs, the components that are declared in it, further nodes, outputs."""
        system = self._graphs[name]
        owned = [c for c in self._components.values() if self._home(c.name) == name]
        self._refuse_clashes(system, {c.name for c in owned})
        places = {node: place for place, node in enumerate(system.nodes)}
        owned.sort(key=lambda c: places.get(c.name, len(places)))
        names = {c.name for c in owned}
        further = {n: node for n, node in system.nodes.items() if n not in names}
        nodes = {n: {"use": node.component.name, **_wiring(node)} for n, node in further.items()}
        return {
            "inputs": Flow({i: spell_type(kind, f"input {i}") for i, kind in system.inputs.items()}),
            "components": {c.name: self._entry(c, system.nodes.get(c.name)) for c in owned},
            **({"nodes": nodes} if nodes else {}),
            "outputs": Flow({key: source.label for key, source in system.outputs.items()}),
        }

    def _home(self, component: str) -> str:
        """Return the innermost graph from which every use of a component can see it."""
        users = [g for g, system in self._graphs.items() if system.nodes_of(component)]
        around = [self._around(user) for user in users]
        return next(graph for graph in around[0] if all(graph in others for others in around))

    def _around(self, graph: str) -> list[str]:
        """Return a graph and the ones around it, innermost first."""
        return [TOP] if graph == TOP else [graph, *self._around(self._home(graph))]

    def _refuse_clashes(self, system: System, owned: set[str]) -> None:
        for name, node in system.nodes.items():
            if name in system.inputs:
                raise DeclarationError(f"${name} would name an input and a node", hint="rename one of them")
            if name in owned and name != node.component.name:
                raise DeclarationError(
                    f"node {name!r} uses {node.component.name!r}, but a component is named {name!r} too",
                    hint="rename the node",
                )

    def _entry(self, component: Component, node: Node | None) -> Tree:
        make = _ENTRIES.get(type(component), _Dumping._class)
        wired = component.inputs is not None and node is not None
        ports = list(node.wires) if node is not None and wired else []
        return {**make(self, component, ports), **(_wiring(node) if node else {})}

    def _setting(self, component: Component, name: str, value: object) -> object:
        """Return a setting: plain, or a space that starts at the value the system is bound to."""
        if isinstance(value, Space):
            return spell_space(value, self._values.get(f"{component.name}.{name}", value.value))
        if isinstance(value, Mapping) and any(key in value for key in SPACES):
            raise DeclarationError(f"{component.name}.{name}: {value!r} would be read as a space to tune")
        return value

    def _given(
        self, component: Component, source: DataclassInstance, skip: tuple[str, ...] = ("name",)
    ) -> Tree:
        """Return the fields of a dataclass that differ from their defaults."""
        found: Tree = {}
        for field in dataclasses.fields(source):
            value = getattr(source, field.name)
            default = field.default_factory() if callable(field.default_factory) else field.default
            if field.name not in skip and not _same(value, default):
                found[field.name] = self._setting(component, field.name, value)
        return found

    def _llm(self, component: LLM, _: list[str]) -> Tree:
        given = self._given(component, component, ("name", "output", "takes"))
        if component.takes is not None:
            given["takes"] = {
                n: spell_type(kind, f"{component.name}.{n}") for n, kind in component.takes.items()
            }
        return {"llm": given, **_out(component, plain={"output": str})}

    def _retriever(self, component: Retriever, _: list[str]) -> Tree:
        index = component.index
        if not isinstance(index, BM25 | Dense | PassageIndex) or type(index) not in INDEXES:
            raise DeclarationError(f"{component.name}: the index {type(index).__name__} has no name in YAML")
        given: Tree = {"index": INDEXES[type(index)], **self._given(component, index, ("within",))}
        if "corpus" in given:
            given["corpus"] = str(given["corpus"])
        return {"retriever": {**given, "k": self._setting(component, "k", component.k)}}

    def _selector(self, component: Selector, _: list[str]) -> Tree:
        value = self._values[f"{component.name}.choice"]
        rest = {"per_input": True} if isinstance(component.space, PerInput) else {}
        return {"selector": Flow(options=component.space.options, value=value, **rest)}

    def _hyperparameter(self, component: Hyperparameter, _: list[str]) -> Tree:
        return {"hyperparameter": self._setting(component, "value", component.space)}

    def _function(self, component: Function, _: list[str]) -> Tree:
        settings = {s: self._setting(component, s, value) for s, value in component.settings.items()}
        reserved = [name for name in settings if name in ("call", "timeout", "retries")]
        if reserved:
            raise DeclarationError(f"{component.name}: a setting named {reserved[0]!r} has no place in YAML")
        limits = {"timeout": component.timeout} if component.timeout is not None else {}
        tries = {"retries": component.retries} if component.retries else {}
        call = spell_code(component.function, component.name)
        out = {} if component._single else _out(component, {})
        return {"function": {"call": call, **limits, **tries, **settings}, **out}

    def _first_of(self, component: FirstOf, wired: list[str]) -> Tree:
        ports = list(component.inputs)
        kind = spell_type(component.outputs["output"].type, component.name)
        return {"first_of": Flow({} if ports == wired else {"ports": ports}), "out": kind}

    def _loop(self, component: Loop, _: list[str]) -> Tree:
        rest: Tree = {"carry": Flow(component.carry)}
        if component.until is not None:
            rest["until"] = component.until
        turns = self._setting(component, "max_turns", component.max_turns)
        return {"loop": {"body": self.graph(component.name), **rest, "max_turns": turns}}

    def _map(self, component: Map, _: list[str]) -> Tree:
        return {"map": {"body": self.graph(component.name), "over": component.over}}

    def _class(self, component: Component, _: list[str]) -> Tree:
        """Write any other component as its class and what it was made with, read from its attributes."""
        kind = type(component)
        settings: Tree = {}
        for parameter in list(inspect.signature(kind).parameters.values())[1:]:
            name = parameter.name
            value = getattr(component, name, component.settings.get(name, parameter.empty))
            open_ended = parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
            if value is parameter.empty or open_ended:
                raise DeclarationError(
                    f"{component.name}: what {kind.__name__} was made with as {name!r} cannot be told",
                    hint=f"keep it as an attribute named {name!r}",
                )
            if not _same(value, parameter.default):
                settings[name] = self._setting(component, name, value)
        return {"class": spell_code(kind, component.name), **({"settings": settings} if settings else {})}


_ENTRIES: Mapping[type[object], Callable[..., Tree]] = {
    LLM: _Dumping._llm,
    Retriever: _Dumping._retriever,
    Selector: _Dumping._selector,
    Hyperparameter: _Dumping._hyperparameter,
    Function: _Dumping._function,
    FirstOf: _Dumping._first_of,
    Loop: _Dumping._loop,
    Map: _Dumping._map,
}


def _same(value: object, default: object) -> bool:
    return type(value) is type(default) and bool(value == default)


def _wiring(node: Node) -> Tree:
    wires = {"in": Flow({port: source.label for port, source in node.wires.items()})} if node.wires else {}
    return {**wires, **({"when": _condition(node.when)} if node.when else {})}


def _condition(when: Condition) -> object:
    source: Source = when.source
    return source.label if when.value is True else Flow({source.label: when.value})


def _out(component: Component, plain: Mapping[str, object]) -> Tree:
    """Return ``out`` unless the outputs are what they would be without it."""
    kinds = {name: port.type for name, port in component.outputs.items()}
    if kinds == plain:
        return {}
    spelled = {name: spell_type(kind, f"{component.name}.{name}") for name, kind in kinds.items()}
    single = component.kind == "llm" and list(kinds) == ["output"]
    return {"out": spelled["output"] if single else Flow(spelled)}
