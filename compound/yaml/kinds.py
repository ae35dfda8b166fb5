"""The component kinds of the YAML file, and the schema of graphs."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Annotated, Literal, Required, TypeGuard, cast

from pydantic import ConfigDict, Field

from compound.components.agents.agent import Agent
from compound.components.agents.tool_texts import setting_name
from compound.components.code import CodeRunner
from compound.components.declaration import FunctionComponent, LLMFunction
from compound.components.flow import Loop, Map
from compound.components.function import FirstOf, Function
from compound.components.hyperparameter import Constant, Hyperparameter
from compound.components.index import BM25, Dense, PassageIndex
from compound.components.llm import LLM
from compound.components.retriever import Retriever
from compound.components.selector import Selector
from compound.core.errors import DeclarationError
from compound.core.formatting import short_repr
from compound.core.security.sandbox.limits import SandboxLimits
from compound.graph.component import Component, Operation
from compound.graph.composite import Composite
from compound.graph.registry.plugins import plugins, visible
from compound.graph.registry.user_code import UserCodeError, definition
from compound.graph.space import PerInput, Space, Text
from compound.graph.types import format_type
from compound.yaml.agents import EXTERNAL_AGENT_KIND, TOOLS_OF_AGENTS, dump_tools, make_tools
from compound.yaml.document import Address
from compound.yaml.kind import (
    DumpContext,
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
from compound.yaml.text import Flow, Tree, spell_code
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

LLM_KIND = class_kind("llm", LLM, LLMFunction, forms=MODEL_FORMS, out=True)

# Agents


def _read_agent(given: Given, context: MakeContext, at: Address) -> Given | None:
    tools = make_tools(given["tools"], context.file, (*at, "tools"))
    return None if tools is None else {**given, "tools": tools}


def _write_agent(agent: Agent, context: DumpContext, given: Tree) -> Tree:
    texts = dict(agent.texts)
    for tool in agent.tools:  # with the values that the system is bound to
        declared = agent.tool_texts.get(setting_name(tool))
        if isinstance(declared, Text):
            name = f"{agent.model.name}.{setting_name(tool)}"
            value = str(context.values.get(name, declared.value))
            if value != declared.value or tool.name in agent.texts:
                texts[tool.name] = value
    turns = context.setting("max_turns", agent.max_turns)
    rest = {"texts": texts} if texts else {}
    return {"tools": dump_tools(agent), **given, "max_turns": turns, **rest}


AGENT_KIND = class_kind(
    "agent",
    Agent,
    forms={**MODEL_FORMS, "tools": TOOLS_OF_AGENTS, "texts": dict[str, str]},
    out=True,
    read=_read_agent,
    write=_write_agent,
    written=("tools", "texts", "max_turns"),
    parts=lambda agent: (agent, agent.model),
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


def _write_retriever(component: Retriever, context: DumpContext, _: Tree) -> Tree:
    index = component.index
    label = next((label for label, kind in INDEXES.items() if type(index) is kind), None)
    if label is None:
        raise DeclarationError(
            f"{component.name}: the index {type(index).__name__} cannot be written in YAML"
        )
    given = {"index": label, **context.arguments(type(index), index, skip=("within",))}
    if "corpus" in given:
        given["corpus"] = str(given["corpus"])
    return {**given, "k": context.setting("k", component.k)}


RETRIEVER_KIND = class_kind(
    "retriever",
    Retriever,
    settings=Annotated[Model, SelectedModel("index", INDEX_SETTINGS, label="index")],
    read=_read_retriever,
    write=_write_retriever,
    written=("index", "k"),
)

# Choices and values


def _write_selector(component: Selector, context: DumpContext, _: Tree) -> Tree:
    value = context.values[f"{component.name}.choice"]
    rest = {"per_input": True} if isinstance(component.space, PerInput) else {}
    return Flow(options=component.space.options, value=value, **rest)


_OPTIONS = Required[Annotated[list[Scalar], Field(min_length=1, description="The options.")]]
SELECTOR_KIND = class_kind(
    "selector",
    Selector,
    forms={"options": _OPTIONS, "value": OptionSetting},
    write=_write_selector,
    written=("choices", "options", "value", "per_input"),
)


class HyperparameterEntry(Wiring):
    """A tunable value or a constant as a separate node, so that several components can read it."""

    hyperparameter: ValueSetting
    """The space of the value, or a constant."""


def _make_hyperparameter(entry: HyperparameterEntry, context: MakeContext) -> Hyperparameter:
    given = {"hyperparameter": entry.hyperparameter}
    space = arguments(given, context.file, context.address)["hyperparameter"]
    return Hyperparameter(context.name, cast("Space | Constant", space))


def _dump_hyperparameter(component: Hyperparameter, context: DumpContext) -> Tree:
    return {"hyperparameter": context.setting("value", component.space)}


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


def _dump_function(component: Function, context: DumpContext) -> Tree:
    settings = {name: context.setting(name, value) for name, value in component.settings.items()}
    reserved = [name for name in settings if name in FUNCTION_SETTINGS.model_fields]
    if reserved:
        raise DeclarationError(
            f"{component.name}: a setting named {reserved[0]!r} cannot be written in YAML",
            hint="rename the function's parameter",
        )
    call = spell_code(component.function, component.name)
    own = context.arguments(Function, component, skip=("name", "function", "outputs", "settings"))
    outputs = {} if component.single else context.output_types(component)
    return {
        "function": {"call": call, **own, **settings},
        **({"out": Flow(outputs)} if outputs else {}),
    }


FUNCTION_KIND = Kind(
    "function", FunctionEntry, _make_function, _dump_function, (Function, FunctionComponent)
)


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
    write=lambda found, context, given: {
        **context.arguments(SandboxLimits, found.limits),
        **given,
    },
    written=("limits",),
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


def _dump_class(component: Component, context: DumpContext) -> Tree:
    settings = context.arguments(type(component), component, skip=_first(type(component)))
    code = spell_code(type(component), component.name)
    return {"class": code, **({"settings": settings} if settings else {})}


CLASS_KIND = Kind("class", ClassEntry, _make_class, _dump_class)


def _is_component(found: object) -> TypeGuard[type[Component]]:
    return isinstance(found, type) and issubclass(found, Operation | Composite)


def _first(kind: type[Component]) -> tuple[str, ...]:
    """Return the name of the first parameter, which is the component's name."""
    return tuple(inspect.signature(kind).parameters)[:1]


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


def kind_of(component: Component) -> Kind | None:
    """Return the installed kind of a component, or None if its class is not an installed one."""
    place = f"{type(component).__module__}:{type(component).__qualname__}"
    for name, plugin in plugins("components").items():
        if plugin.value == place:
            return _installed_kind(name, type(component))
    return None


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


def _write_first_of(component: FirstOf, context: DumpContext, _: Tree) -> Tree:
    ports = list(component.inputs)
    return Flow({} if ports == list(context.wired) else {"ports": ports})


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


def _write_loop(component: Loop, context: DumpContext, given: Tree) -> Tree:
    turns = context.setting("max_turns", component.max_turns)
    carry = Flow(component.carry)
    return {"body": context.dump_body(), "carry": carry, **given, "max_turns": turns}


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
    Kind(
        "hyperparameter",
        HyperparameterEntry,
        _make_hyperparameter,
        _dump_hyperparameter,
        (Hyperparameter,),
    ),
    FUNCTION_KIND,
    CODE_KIND,
    AGENT_KIND,
    class_kind(
        "loop",
        Loop,
        settings=LoopSettings,
        read=_read_loop,
        write=_write_loop,
        written=("body", "carry", "max_turns"),
        has_body=True,
    ),
    class_kind(
        "map",
        Map,
        settings=MapSettings,
        read=_read_map,
        write=lambda found, context, given: {"body": context.dump_body(), **given},
        written=("body",),
        has_body=True,
    ),
    EXTERNAL_AGENT_KIND,
    class_kind(
        "first_of",
        FirstOf,
        settings=FirstOfSettings,
        out=True,
        output=Type,
        read=_read_first_of,
        write=_write_first_of,
        written=("kind", "ports"),
    ),
    CLASS_KIND,
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
