"""Interface of a component kind, and the contexts in which it creates and writes components."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from compound.errors import DeclarationError, suggest_name
from compound.graph.component import Component
from compound.graph.space import Space
from compound.graph.system import System
from compound.spec.context import Context
from compound.spec.schema.settings import SPACES, make_setting
from compound.spec.schema.signature import hints_of, problem_of
from compound.spec.schema.types import Model
from compound.spec.schema.wiring import Wiring
from compound.spec.spelling import Tree, spell_space, spell_type
from compound.spec.yaml.document import Address, format_value

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

MakeBody = Callable[[Address, str], System | None]
EntryT = TypeVar("EntryT", bound=Wiring)
ComponentT = TypeVar("ComponentT", bound=Component)


@dataclass(frozen=True)
class MakeContext:
    """Inputs for creating the component of an entry.

    Attributes:
        file: the context of the file.
        name: the name of the component.
        address: the address of the entry.
        make_body: creates the system of a loop's or map's body from its address and the component's name.
    """

    file: Context
    name: str
    address: Address
    make_body: MakeBody


@dataclass(frozen=True)
class DumpContext:
    """Inputs for writing a component.

    Attributes:
        name: the name of the component.
        values: the configuration that the system is bound to.
        wired: the connected ports of the component's own node, in order.
        dump_body: returns the graph of a loop's or map's body.
        class_schemas: whether classes are written as the JSON schemas of their values.
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

    def setting(self, name: str, value: object) -> object:
        """Return the YAML form of a setting; a space starts at the value that the system is bound to.

        Raises:
            DeclarationError: a plain value would be read as a space.
        """
        if isinstance(value, Space):
            return spell_space(value, self._value_of(name, value))
        if isinstance(value, Mapping) and any(key in value for key in SPACES):
            raise DeclarationError(f"{self.name}.{name}: {value!r} would be read as a space to tune")
        return value

    def is_rebound(self, name: str, value: object) -> bool:
        """Return whether a setting is a space bound to a value other than its declared one."""
        return isinstance(value, Space) and self._value_of(name, value) != value.value

    def _value_of(self, name: str, space: Space) -> object:
        return self.values.get(f"{self.name}.{name}", space.value)

    def changed_fields(self, source: DataclassInstance, skip: Collection[str] = ("name",)) -> Tree:
        """Return the fields of a dataclass that differ from their defaults."""
        found: Tree = {}
        for field in dataclasses.fields(source):
            value = getattr(source, field.name)
            default = field.default_factory() if callable(field.default_factory) else field.default
            if field.name not in skip and not is_same(value, default):
                found[field.name] = self.setting(field.name, value)
        return found


@dataclass(frozen=True)
class Kind(Generic[EntryT, ComponentT]):
    """A component kind.

    Attributes:
        name: the key of an entry that selects the kind.
        entry: the model of an entry.
        make: creates the component of an entry, or returns None after reporting the errors.
        components: the component classes that ``dump`` writes.
        dump: returns the kind-specific part of a component's entry.
        tags: models of unions in the entry, by their tag in the location of an error.
        has_body: whether the settings contain a graph under the key ``body``.
    """

    name: str
    entry: type[EntryT]
    make: Callable[[EntryT, MakeContext], ComponentT | None]
    components: tuple[type[ComponentT], ...]
    dump: Callable[[ComponentT, DumpContext], Tree]
    tags: Mapping[str, type[Model]] = dataclasses.field(default_factory=dict)
    has_body: bool = False


AnyKind = Kind[Any, Any]


def make_settings(given: Mapping[str, object]) -> dict[str, Any]:
    """Convert settings of the file to arguments of a component, which validates them itself."""
    return {key: make_setting(value) for key, value in given.items()}


def report_wrong_settings(
    context: Context, target: Callable[..., object], given: Mapping[str, object], address: Address
) -> bool:
    """Report settings that a function or class does not take; return whether there are any.

    Args:
        context: of the file.
        target: the function or class.
        given: the settings as `make_settings` returns them.
        address: where they stand.
    """
    try:
        parameters = inspect.signature(target).parameters
    except (TypeError, ValueError):
        return False
    is_open = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    hints, document, found = hints_of(target), context.document, False
    for name, value in given.items():
        if name not in parameters and not is_open:
            document.report((*address, name), "unknown setting", suggest_name(name, parameters), key=True)
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
