"""Component kinds: the entry of each, and how components are made of entries and written as them.

The settings of an entry are the parameters of the constructor of its component; see `class_kind`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
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
    SPACES,
    FolderSetting,
    hints_of,
    make_model,
    make_setting,
    problem_of,
    settings_model,
    summary,
)
from compound.yaml.text import Flow, Tree, spell_space, spell_type
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
class DumpContext:
    """Inputs for writing a component.

    ``values`` are those that the system is bound to, ``wired`` the connected ports of the
    component's own node in order; ``dump_body`` returns the graph of a loop's or map's body.
    """

    name: str
    values: Mapping[str, object]
    wired: Collection[str]
    dump_body: Callable[[], Tree]
    class_schemas: bool = False

    def types(self, kinds: Mapping[str, object]) -> dict[str, str | Tree]:
        """Return the YAML form of the types of the component's ports by name."""
        return {
            name: spell_type(kind, f"{self.name}.{name}", class_schemas=self.class_schemas)
            for name, kind in kinds.items()
        }

    def output_types(self, component: Component) -> dict[str, str | Tree]:
        """Return the YAML form of the types of a component's outputs."""
        return self.types({name: port.type for name, port in component.outputs.items()})

    def out(self, component: Component) -> Tree:
        """Return the key ``out`` of a component, which a single text does not need."""
        found = self.output_types(component)
        if found == {"output": "str"}:
            return {}
        return {"out": found["output"] if list(found) == ["output"] else Flow(found)}

    def setting(self, name: str, value: object) -> object:
        """Return the YAML form of a setting; a space starts at the value that the system is bound to.

        Raises:
            DeclarationError: a plain value would be read as a space.
        """
        if isinstance(value, Space):
            return spell_space(value, self._value_of(name, value))
        if name == "takes" and isinstance(value, Mapping):
            return self.types(value)
        if isinstance(value, Mapping) and any(key in value for key in SPACES):
            raise DeclarationError(
                f"{self.name}.{name}: {value!r} would be read as a space to tune"
            )
        return value

    def _value_of(self, name: str, space: Space) -> object:
        return self.values.get(f"{self.name}.{name}", space.value)

    def arguments(
        self, kind: Callable[..., object], *sources: object, skip: Collection[str] = ("name",)
    ) -> Tree:
        """Return the arguments of a constructor that differ from its defaults.

        Each is read from the first source that has an attribute, or a setting, of its name.

        Raises:
            DeclarationError: no source stores an argument.
        """
        found: Tree = {}
        for parameter in inspect.signature(kind).parameters.values():
            if parameter.name in skip:
                continue
            owner, value = _stored(parameter, sources)
            bound = replace(self, name=getattr(owner, "name", self.name))
            is_rebound = (
                isinstance(value, Space) and bound._value_of(parameter.name, value) != value.value
            )
            if is_rebound or not is_same(value, parameter.default):
                found[parameter.name] = bound.setting(parameter.name, value)
        return found


def _stored(parameter: inspect.Parameter, sources: Collection[object]) -> tuple[object, object]:
    """Return the value of an argument, after the object that stores it."""
    name, missing = parameter.name, parameter.empty
    if parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
        for source in sources:
            value = getattr(source, name, getattr(source, "settings", {}).get(name, missing))
            if value is not missing:
                return source, value
    first = next(iter(sources))
    raise DeclarationError(
        f"{getattr(first, 'name', '')}: the argument {name!r} of {type(first).__name__} cannot be read back",
        hint=f"store it in an attribute named {name!r}",
    )


@dataclass(frozen=True)
class Kind:
    """A component kind: its key and entry, and how components are made of entries and written.

    ``components`` are the classes that ``dump`` writes; with ``has_body``, the settings contain a
    graph under the key ``body``.
    """

    name: str
    entry: type[Wiring]
    make: Callable[[Any, MakeContext], Component | None]
    dump: Callable[[Any, DumpContext], Tree]
    components: tuple[type[Component], ...] = ()
    has_body: bool = False


Given: TypeAlias = dict[str, Any]
"""The settings of an entry, or arguments of a constructor, by name."""


def class_kind(
    name: str,
    component: type[Component],
    *others: type[Component],
    settings: object = None,
    forms: Mapping[str, object] = MappingProxyType({}),
    out: bool = False,
    output: object = Out,
    read: Callable[[Given, MakeContext, Address], Given | None] = lambda given, _, at: given,
    write: Callable[[Any, DumpContext, Tree], Tree] = lambda found, context, given: given,
    written: Collection[str] = (),
    parts: Callable[[Any], Sequence[object]] = lambda found: (found,),
    has_body: bool = False,
    build: Callable[..., Component] | None = None,
) -> Kind:
    """Return the kind of a class: its settings are the parameters of the constructor.

    Args:
        name: the key of an entry.
        component: the class.
        others: subclasses that are written as this kind.
        settings: the model of the settings, if they are not the parameters.
        forms: types of settings whose form in the file differs from the parameter's type.
        out: whether the entry has a key ``out`` beside the kind: the argument ``output``.
        output: the type of this key.
        read: turns settings into arguments; None after reporting why it cannot.
        write: turns arguments into settings; ``written`` are those that it adds.
        parts: the objects that store the arguments of a component.
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

    def dump(found: Component, context: DumpContext) -> Tree:
        given = context.arguments(component, *parts(found), skip=(*skip, *written))
        return {name: write(found, context, given), **(context.out(found) if out else {})}

    doc = summary(component)
    fields: dict[str, tuple[object, object]] = {name: (model, Field(description=doc))}
    if out:
        fields["out"] = (output, Field("str", validate_default=True, description=OUT))
    entry = make_model(f"{name}_entry", doc, fields, MadeWiring)
    return Kind(name, entry, make, dump, (component, *others), has_body)


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


def is_same(value: object, default: object) -> bool:
    """Return whether two values are equal and of the same type.

    >>> is_same(1, 1), is_same(1, True), is_same(1, 1.0)
    (True, False, False)
    """
    return type(value) is type(default) and bool(value == default)
