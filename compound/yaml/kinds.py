"""The component kinds of the YAML file, and the schema of graphs."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Annotated, Literal, Required, TypeGuard, cast

from pydantic import ConfigDict, Field

from compound.components.agents.agent import Agent
from compound.components.code import CodeRunner
from compound.components.flow import Loop, Map
from compound.components.function import FirstOf, Function
from compound.components.hyperparameter import Constant, Hyperparameter
from compound.components.index import BM25, Dense, PassageIndex
from compound.components.llm import LLM
from compound.components.retriever import Retriever
from compound.components.selector import Selector
from compound.core.formatting import short_repr
from compound.core.security.sandbox.limits import SandboxLimits
from compound.graph.component import Component, Operation
from compound.graph.composite import Composite
from compound.graph.registry.plugins import plugins, visible
from compound.graph.registry.user_code import UserCodeError, definition
from compound.graph.space import Space
from compound.graph.types import format_type
from compound.yaml.agents import EXTERNAL_AGENT_KIND, TOOLS_OF_AGENTS, make_tools
from compound.yaml.document import Address
from compound.yaml.kind import (
    Given,
    Kind,
    Made,
    MakeContext,
    arguments,
    class_kind,
    construct,
    report_wrong_settings,
)
from compound.yaml.spaces import (
    MODEL_FORMS,
    AnySetting,
    IntSetting,
    OptionSetting,
    ValueSetting,
    settings_model,
    summary,
)
from compound.yaml.types import (
    WIRING_KEYS,
    Code,
    MadeModel,
    Model,
    Name,
    Out,
    Reference,
    Scalar,
    SelectedModel,
    Type,
    Wiring,
)

LLM_KIND = class_kind("llm", LLM, forms=MODEL_FORMS, out=True)

# Agents


def _read_agent(given: Given, context: MakeContext, at: Address) -> Given | None:
    tools = make_tools(given["tools"], context.file, (*at, "tools"))
    return None if tools is None else {**given, "tools": tools}


AGENT_KIND = class_kind(
    "agent",
    Agent,
    forms={**MODEL_FORMS, "tools": TOOLS_OF_AGENTS, "texts": dict[str, str]},
    out=True,
    read=_read_agent,
)

# Retrievers

INDEXES = {"bm25": BM25, "dense": Dense, "passages": PassageIndex}
INDEX_SETTINGS = {
    label: settings_model(
        label,
        index,
        Retriever,
        skip=("name", "within", "index"),
        forms={
            "index": Required[Annotated[Literal[label], Field(description=summary(index))]],
            **({} if index is PassageIndex else {"corpus": str}),
        },
    )
    for label, index in INDEXES.items()
}


def _read_retriever(given: Given, context: MakeContext, at: Address) -> Given:
    kind, file = INDEXES[given.pop("index")], context.file
    rest = {"k": given.pop("k")} if "k" in given else {}
    if "corpus" in given:
        given["corpus"], given["within"] = file.resolve_data(given["corpus"], (*at, "corpus"))
    if given.get("model"):
        file.may_read(given["model"], (*at, "model"))
    return {"index": kind(**given), **rest}


RETRIEVER_KIND = class_kind(
    "retriever",
    Retriever,
    settings=Annotated[Model, SelectedModel("index", INDEX_SETTINGS, label="index")],
    read=_read_retriever,
)

# Choices and values


_OPTIONS = Required[Annotated[list[Scalar], Field(min_length=1, description="The options.")]]
SELECTOR_KIND = class_kind(
    "selector", Selector, forms={"options": _OPTIONS, "value": OptionSetting}
)


class HyperparameterEntry(Wiring):
    """A tunable value or a constant as a separate node, so that several components can read it."""

    hyperparameter: ValueSetting
    """The space of the value, or a constant."""


def _make_hyperparameter(entry: HyperparameterEntry, context: MakeContext) -> Hyperparameter:
    given = {"hyperparameter": entry.hyperparameter}
    space = arguments(given, context.file, context.address)["hyperparameter"]
    return Hyperparameter(context.name, cast("Space | Constant", space))


# Python code


class _OpenModel(MadeModel):
    """Base of settings with additional keys, which may be tunable."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, AnySetting]


_CALL = "The function, as module:name; modules are also found in this file's folder."
FUNCTION_SETTINGS = settings_model(
    "kind_function",
    Function,
    skip=("name", "function", "outputs"),
    forms={"call": Required[Annotated[Code, Field(description=_CALL)]]},
    base=_OpenModel,
)


class FunctionEntry(Wiring):
    """A Python function, sync or async."""

    function: FUNCTION_SETTINGS  # type: ignore[valid-type]
    """The function and its settings."""
    out: Out | None = None
    """The types of the output fields, if the function returns a mapping."""


def _make_function(entry: Made, context: MakeContext) -> Function | None:
    file, inside, given = context.file, (*context.address, "function"), entry.function
    settings = arguments(given.model_extra or {}, file, inside, models=False)
    function = file.load_function(given.call, (*inside, "call"))
    rest = {key: value for key, value in given.given.items() if key != "call"}
    if isinstance(function, Function):  # made by `compound.component`; the file overrides it
        settings = {**function.settings, **settings}
        own = {name: getattr(function, name) for name in ("timeout", "retries", "thread")}
        function, rest = function.function, {**own, **rest}
    if function is None or report_wrong_settings(file, function, settings, inside):
        return None
    outputs = entry.out if isinstance(entry.out, dict) else None
    component = file.attempt(
        inside,
        lambda: Function(context.name, function, outputs=outputs, **rest, **settings),
        code=given.call,
    )
    if component is not None and outputs is None and entry.out is not None:
        returned = component.outputs["output"].type
        if entry.out != returned:
            file.document.report(
                (*context.address, "out"),
                f"is {format_type(entry.out)}, but the function returns {format_type(returned)}",
            )
    return component


def _read_code(given: Given, context: MakeContext, at: Address) -> Given | None:
    if not context.file.allow_import:  # the programs may come from the file's own data
        what = "runs generated code, and imports are not allowed"
        context.file.document.report(at, what, key=True)
        return None
    reproducible = given.pop("reproducible", False)
    return {"limits": SandboxLimits(**given), "reproducible": reproducible}


CODE_KIND = class_kind(
    "code",
    CodeRunner,
    settings=settings_model("kind_code", SandboxLimits, CodeRunner, skip=("name", "limits")),
    read=_read_code,
)


class ClassEntry(Wiring):
    """A component of any class, created as Class(name, **settings)."""

    code: Code = Field(alias="class")
    """The class, as module:name; modules are also found in this file's folder."""
    settings: dict[Name, AnySetting] = Field(default={})
    """The keyword arguments of the class."""


def _make_class(entry: ClassEntry, context: MakeContext) -> Component | None:
    file, address = context.file, (*context.address, "class")
    inside = (*context.address, "settings")
    settings = arguments(entry.settings, file, inside, models=False)
    found = file.load_code(entry.code, address)
    if found is None:
        return None
    if not _is_component(found):
        place = f" at {definition(found)}" if callable(found) else ""
        hint = "use a function as `function: {call: …}`" if inspect.isfunction(found) else ""
        hint = hint or "write class Name(cp.ext.Operation)"
        file.document.report(address, f"{entry.code}{place} is not a subclass of Operation", hint)
        return None
    if report_wrong_settings(file, found, settings, inside):
        return None
    who = f"{entry.code} at {definition(found)}"
    return file.attempt(
        address, lambda: construct(found, entry.code, context.name, **settings), code=who
    )


def _is_component(found: object) -> TypeGuard[type[Component]]:
    return isinstance(found, type) and issubclass(found, Operation | Composite)


# Installed packages


def installed_kinds() -> Collection[str]:
    """Return the names of the installed kinds that a file can use."""
    return visible("components", WIRING_KEYS)


def find_kind(name: str) -> Kind:
    """Return an installed kind.

    Raises:
        DeclarationError: its package cannot be loaded.
        UserCodeError: the entry point is not a component class.
    """
    return _installed_kind(name, plugins("components")[name].load())


@functools.cache
def _installed_kind(name: str, found: object) -> Kind:
    if not _is_component(found):
        raise UserCodeError(
            f"component kind {name!r} is {short_repr(found)}, which is not a subclass of Operation",
            hint="name a class, such as class Shout(cp.ext.Operation)",
        )

    build = functools.partial(construct, found, f"component kind {name!r}")
    return class_kind(name, found, build=build)


# Graphs


class FirstOfSettings(Model):
    """The ports of a `first_of` component."""

    ports: list[Name] | None = None
    """The ports in order of preference; by default those under `in`, in their order."""


def _read_first_of(given: Given, context: MakeContext, at: Address) -> Given | None:
    wires = context.file.document.at((*context.address, "in"))
    ports = given.get("ports") or (list(wires) if isinstance(wires, dict) else ())
    if not ports:
        context.file.document.report(at, "has no inputs", "connect some under `in`", key=True)
        return None
    return {"kind": given["output"], "ports": tuple(ports)}


class LoopSettings(Model):
    """A body that runs repeatedly."""

    body: GraphEntry
    """The system of one turn."""
    carry: dict[Name, Name]
    """Maps each body output to the body input that it replaces in the next turn."""
    until: Name | None = None
    """A boolean body output that ends the loop when true."""
    max_turns: IntSetting = 5
    """Maximum number of turns."""


def _read_loop(given: Given, context: MakeContext, at: Address) -> Given | None:
    file, name = context.file, context.name
    body = context.make_body((*at, "body"), name)
    if body is None:
        return None
    given["body"] = body
    rest = {key: value for key, value in given.items() if key not in ("body", "carry")}
    # Each part is checked on its own, so that every error is found and reported at its own line.
    for source, target in given["carry"].items():
        part = functools.partial(Loop, name, body, carry={source: target})
        file.attempt((*at, "carry", source), part)
    for key, value in rest.items():
        file.attempt((*at, key), functools.partial(Loop, name, body, carry={}, **{key: value}))
    return None if file.document.has_errors(at) else given


class MapSettings(Model):
    """A body that runs once per item of a list."""

    body: GraphEntry
    """The system for one item."""
    over: Name
    """The body input that receives the items."""


def _read_map(given: Given, context: MakeContext, at: Address) -> Given | None:
    body = context.make_body((*at, "body"), context.name)
    if body is None:
        return None
    made = functools.partial(Map, context.name, body, over=given["over"])
    found = context.file.attempt((*at, "over"), made)
    return None if found is None else {"body": body, "over": found.over}


_KINDS = (
    LLM_KIND,
    RETRIEVER_KIND,
    SELECTOR_KIND,
    Kind("hyperparameter", HyperparameterEntry, _make_hyperparameter),
    Kind("function", FunctionEntry, _make_function),
    CODE_KIND,
    AGENT_KIND,
    class_kind("loop", Loop, settings=LoopSettings, read=_read_loop, has_body=True),
    class_kind("map", Map, settings=MapSettings, read=_read_map, has_body=True),
    EXTERNAL_AGENT_KIND,
    class_kind(
        "first_of", FirstOf, settings=FirstOfSettings, out=True, output=Type, read=_read_first_of
    ),
    Kind("class", ClassEntry, _make_class),
)
BUILT_IN: Mapping[str, Kind] = {kind.name: kind for kind in _KINDS}
"""The built-in component kinds by name."""
if TYPE_CHECKING:
    ComponentEntry = Wiring
else:
    _ENTRIES = {kind.name: kind.entry for kind in _KINDS}
    ComponentEntry = Annotated[
        Model, SelectedModel("kind", _ENTRIES, installed_kinds, lambda name: find_kind(name).entry)
    ]


class UseEntry(Wiring):
    """An additional node for a component; all its nodes share one configuration."""

    use: Name
    """The component."""


class GraphEntry(Model):
    """A graph: inputs, components, additional nodes, and outputs."""

    inputs: dict[Name, Type] = Field(default={})
    """The inputs of the graph: the type of each, by name."""
    components: dict[Name, ComponentEntry]
    """The components; each is also a node with the same name."""
    nodes: dict[Name, UseEntry] = Field(default={})
    """Additional nodes that use a component under another name."""
    outputs: dict[Name, Reference] = Field(min_length=1)
    """The outputs of the graph: a reference for each, by name."""
