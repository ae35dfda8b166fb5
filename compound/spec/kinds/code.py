"""The kind ``class``: a component class named by module, of which the built-in tables know nothing."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping

from pydantic import Field

from compound.errors import DeclarationError
from compound.graph.component import Component, Operation
from compound.graph.composite import Composite
from compound.graph.types import Port
from compound.registry.user_code import check_signature, definition, reported
from compound.spec.kinds.kind import DumpContext, Kind, MakeContext, is_same, make_settings, report_misfits
from compound.spec.schema.settings import AnySetting
from compound.spec.schema.types import Code, Name
from compound.spec.schema.wiring import Wiring
from compound.spec.spelling import Tree, spell_code


class ClassEntry(Wiring):
    """Any Component subclass, made as Class(name, **settings)."""

    code: Code = Field(alias="class")
    """The class, as module:name; modules are also found beside this file."""
    settings: dict[Name, AnySetting] = Field(default={})
    """What it is made with."""


def _make(entry: ClassEntry, context: MakeContext) -> Component | None:
    file, address = context.file, (*context.address, "class")
    settings = make_settings(entry.settings)
    found = file.code(entry.code, address)
    if found is None:
        return None
    if not (isinstance(found, type) and issubclass(found, Operation | Composite)):
        place = f" at {definition(found)}" if callable(found) else ""
        hint = "a function is used by function: {call: …}" if inspect.isfunction(found) else ""
        hint = hint or "write class Name(cp.Operation)"
        file.document.report(address, f"{entry.code}{place} is not a subclass of Operation", hint)
        return None
    if report_misfits(file, found, settings, (*context.address, "settings")):
        return None
    who = f"{entry.code} at {definition(found)}"
    return file.attempt(address, lambda: construct(found, entry.code, context.name, settings), who=who)


def construct(
    kind: Callable[..., Component], role: str, name: str, settings: Mapping[str, object]
) -> Component:
    """Make a user's component; errors name the file and the line of the user's code.

    Args:
        kind: the class.
        role: names it in messages.
        name: the name of the component.
        settings: what it is made with.

    Raises:
        DeclarationError: the class takes other arguments, or a declaration is not what it must be.
    """
    check_signature(kind, role, "name", **settings)
    with reported(role, kind):
        component = checked(kind(name, **settings), name)
    if isinstance(component, Operation):
        check_signature(component.run, f"run of {role}", "inputs", "values", "call")
    return component


def checked(component: Component, name: str) -> Component:
    """Return a user's component after reading its declarations, which all later checks rely on.

    Raises:
        DeclarationError: a declaration is not what it must be.
    """
    if component.name != name:
        raise DeclarationError(f"a component named {name!r} must keep its name, but says {component.name!r}")
    inputs, outputs = component.inputs, component.outputs
    for ports in (outputs, {} if inputs is None else inputs):
        if not isinstance(ports, Mapping) or not all(isinstance(port, Port) for port in ports.values()):
            raise DeclarationError(f"inputs and outputs must map names to ports, but one is {ports!r}")
    dict(component.parameters)
    return component


def dump_arguments(component: Component, context: DumpContext) -> Tree:
    """Return the arguments that a component was made with, read from its attributes and settings.

    Raises:
        DeclarationError: an argument is not kept.
    """
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
        if not is_same(value, parameter.default) or context.is_rebound(name, value):
            settings[name] = context.setting(name, value)
    return settings


def _dump(component: Component, context: DumpContext) -> Tree:
    settings = dump_arguments(component, context)
    code = spell_code(type(component), component.name)
    return {"class": code, **({"settings": settings} if settings else {})}


CLASS_KIND = Kind("class", ClassEntry, _make, (), _dump)
