"""Component kinds: the entry of each, and how components are made of entries.

The settings of an entry are the parameters of the constructor of its component; see `class_kind`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, TypeAlias

from pydantic import Field

from compound.core.errors import DeclarationError, suggest_name
from compound.graph.component import Component, Operation
from compound.graph.registry.user_code import check_signature, definition, reported
from compound.graph.space import Choice, Space, Weights
from compound.graph.system import System
from compound.graph.types import Port
from compound.yaml.context import FileContext
from compound.yaml.document import Address, format_value
from compound.yaml.spaces import (
    FolderSetting,
    hints_of,
    make_model,
    make_setting,
    problem_of,
    settings_model,
    summary,
)
from compound.yaml.types import MadeWiring, Out, Wiring

MakeBody = Callable[[Address, str], System | None]
Made: TypeAlias = Any
"""An instance of a model that was created from the parameters of a constructor."""
OUT = "The type of the answer, or the types of the output fields."


@dataclass(frozen=True)
class MakeContext:
    """Inputs for creating the component of an entry; ``make_body`` makes the system of its body."""

    file: FileContext
    name: str
    address: Address
    make_body: MakeBody


@dataclass(frozen=True)
class Kind:
    """A component kind: its key and entry, and how components are made of entries.

    With ``has_body``, the settings contain a graph under the key ``body``.
    """

    name: str
    entry: type[Wiring]
    make: Callable[[Any, MakeContext], Component | None]
    has_body: bool = False


Given: TypeAlias = dict[str, Any]
"""The settings of an entry, or arguments of a constructor, by name."""


def class_kind(
    name: str,
    component: type[Component],
    *,
    settings: object = None,
    forms: Mapping[str, object] = MappingProxyType({}),
    out: bool = False,
    output: object = Out,
    read: Callable[[Given, MakeContext, Address], Given | None] = lambda given, _, at: given,
    has_body: bool = False,
    build: Callable[..., Component] | None = None,
) -> Kind:
    """Return the kind of a class: its settings are the parameters of the constructor.

    Args:
        name: the key of an entry.
        component: the class.
        settings: the model of the settings, if they are not the parameters.
        forms: types of settings whose form in the file differs from the parameter's type.
        out: whether the entry has a key ``out`` beside the kind: the argument ``output``.
        output: the type of this key.
        read: turns settings into arguments; None after reporting why it cannot.
        has_body: whether the settings contain a graph.
        build: makes a component of a user's class, of its name and arguments.
    """
    maker: Callable[..., Component] = build or component
    skip = ("name", "output") if out else ("name",)
    model = settings or settings_model(f"kind_{name}", component, skip=skip, forms=forms)

    def make(entry: Made, context: MakeContext) -> Component | None:
        inside = (*context.address, name)
        given = arguments(getattr(entry, name).given, context.file, inside, models=build is None)

        def made() -> Component | None:
            found = read({**given, **({"output": entry.out} if out else {})}, context, inside)
            return None if found is None else maker(context.name, **found)

        code = "" if build is None else f"{name} at {definition(component)}"
        return context.file.attempt(inside, made, code)

    doc = summary(component)
    fields: dict[str, tuple[object, object]] = {name: (model, Field(description=doc))}
    if out:
        fields["out"] = (output, Field("str", validate_default=True, description=OUT))
    entry = make_model(f"{name}_entry", doc, fields, MadeWiring)
    return Kind(name, entry, make, has_body)


def arguments(
    given: Mapping[str, object], file: FileContext, address: Address, *, models: bool = True
) -> dict[str, Any]:
    """Return settings of a file as arguments of a component, which validates them itself.

    Stored folders that may not be read are reported, and, with ``models``, a setting ``lm`` that no
    engine serves.
    """
    made = {key: make_setting(value) for key, value in given.items()}
    if models and (lm := made.get("lm")) is not None:
        file.check_models(lm.options if isinstance(lm, Choice) else [lm], (*address, "lm"))
    for key, value in made.items():
        if isinstance(value, FolderSetting):
            made[key] = file.resolve_stored(value.reference, (*address, key))
        elif isinstance(value, Weights) and value.value is not None:
            stored = file.resolve_stored(value.value, (*address, key, "value"))
            made[key] = replace(value, value=stored)
    return made


def construct(
    kind: Callable[..., Component], role: str, name: str, **settings: object
) -> Component:
    """Make a user's component; errors name the file and the line of the user's code.

    Raises:
        DeclarationError: the class takes other arguments, or a declaration is not what it must be.
    """
    check_signature(kind, role, "name", **settings)
    with reported(role, kind):
        component = kind(name, **settings)
        if component.name != name:
            raise DeclarationError(
                f"a component named {name!r} must keep its name, but its name is {component.name!r}"
            )
        inputs = {} if component.inputs is None else component.inputs
        for ports in (component.outputs, inputs):
            if not isinstance(ports, Mapping) or not all(
                isinstance(port, Port) for port in ports.values()
            ):
                raise DeclarationError(
                    f"inputs and outputs must map names to ports, but one is {ports!r}"
                )
        dict(component.parameters)  # later checks rely on it
    if isinstance(component, Operation):
        check_signature(component.run, f"run of {role}", "inputs", "values", "call")
    return component


def report_wrong_settings(
    context: FileContext,
    target: Callable[..., object],
    given: Mapping[str, object],
    address: Address,
) -> bool:
    """Report settings that a function or class does not take; return whether there are any."""
    try:
        parameters = inspect.signature(target).parameters
    except (TypeError, ValueError):
        return False
    is_open = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    hints, document, found = hints_of(target), context.document, False
    for name, value in given.items():
        if name not in parameters and not is_open:
            document.report(
                (*address, name), "unknown setting", suggest_name(name, parameters), key=True
            )
            found = True
        elif name in hints and not isinstance(value, Space):
            raw = document.at((*address, name))
            if problem := problem_of(hints[name], raw):
                document.report((*address, name), f"{problem}, but got {format_value(raw)}")
                found = True
    return found
