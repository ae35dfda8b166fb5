"""The kind ``class``: any component class, given by its import string."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping

from pydantic import Field

from compound.errors import DeclarationError
from compound.graph.component import Component, Operation
from compound.graph.composite import Composite
from compound.graph.types import Port
from compound.registry.user_code import check_signature, definition, reported
from compound.spec.kinds.kind import (
    DumpContext,
    Kind,
    MakeContext,
    is_same,
    make_settings,
    report_wrong_settings,
)
from compound.spec.schema.settings import AnySetting
from compound.spec.schema.types import Code, Name
from compound.spec.schema.wiring import Wiring
from compound.spec.spelling import Tree, spell_code


class ClassEntry(Wiring):
    """A component of any class, created as Class(name, **settings)."""

    code: Code = Field(alias="class")
    """The class, as module:name; modules are also found in this file's folder."""
    settings: dict[Name, AnySetting] = Field(default={})
    """The keyword arguments of the class."""


def _make(entry: ClassEntry, context: MakeContext) -> Component | None:
    file, address = context.file, (*context.address, "class")
    settings = make_settings(entry.settings)
    found = file.load_code(entry.code, address)
    if found is None:
        return None
    if not (isinstance(found, type) and issubclass(found, Operation | Composite)):
        place = f" at {definition(found)}" if callable(found) else ""
        hint = "use a function as `function: {call: …}`" if inspect.isfunction(found) else ""
        hint = hint or "write class Name(cp.Operation)"
        file.document.report(address, f"{entry.code}{place} is not a subclass of Operation", hint)
        return None
    if report_wrong_settings(file, found, settings, (*context.address, "settings")):
        return None
    who = f"{entry.code} at {definition(found)}"
    return file.attempt(address, lambda: construct(found, entry.code, context.name, settings), code=who)


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
        component = check_component(kind(name, **settings), name)
    if isinstance(component, Operation):
        check_signature(component.run, f"run of {role}", "inputs", "values", "call")
    return component


def check_component(component: Component, name: str) -> Component:
    """Return a user's component after checking its name, ports and parameters, on which later checks rely.

    Raises:
        DeclarationError: a declaration is invalid.
    """
    if component.name != name:
        raise DeclarationError(
            f"a component named {name!r} must keep its name, but its name is {component.name!r}"
        )
    inputs, outputs = component.inputs, component.outputs
    for ports in (outputs, {} if inputs is None else inputs):
        if not isinstance(ports, Mapping) or not all(isinstance(port, Port) for port in ports.values()):
            raise DeclarationError(f"inputs and outputs must map names to ports, but one is {ports!r}")
    dict(component.parameters)
    return component


def dump_arguments(component: Component, context: DumpContext) -> Tree:
    """Return the arguments that a component was created with, read from its attributes and settings.

    Raises:
        DeclarationError: an argument is not stored on the component.
    """
    kind = type(component)
    settings: Tree = {}
    for parameter in list(inspect.signature(kind).parameters.values())[1:]:
        name = parameter.name
        value = getattr(component, name, component.settings.get(name, parameter.empty))
        open_ended = parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
        if value is parameter.empty or open_ended:
            raise DeclarationError(
                f"{component.name}: the argument {name!r} of {kind.__name__} cannot be read back",
                hint=f"store it in an attribute named {name!r}",
            )
        if not is_same(value, parameter.default) or context.is_rebound(name, value):
            settings[name] = context.setting(name, value)
    return settings


def _dump(component: Component, context: DumpContext) -> Tree:
    settings = dump_arguments(component, context)
    code = spell_code(type(component), component.name)
    return {"class": code, **({"settings": settings} if settings else {})}


CLASS_KIND = Kind("class", ClassEntry, _make, (), _dump)
