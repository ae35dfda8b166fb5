"""Component kinds of installed packages; their settings are the parameters of the component's class."""

from __future__ import annotations

import functools
from collections.abc import Mapping

from pydantic import ConfigDict

from compound.formatting import short_repr
from compound.graph.component import Component, Operation
from compound.graph.composite import Composite
from compound.registry.plugins import plugins, visible
from compound.registry.user_code import UserCodeError, definition
from compound.spec.kinds.code import construct, dump_arguments
from compound.spec.kinds.kind import AnyKind, DumpContext, Kind, MakeContext, make_settings
from compound.spec.schema.installed import Installed
from compound.spec.schema.signature import make_model, settings_model, summary
from compound.spec.schema.types import Model
from compound.spec.schema.wiring import WIRING_KEYS, Wiring
from compound.spec.spelling import Tree


class _Made(Wiring):
    """Base of the entry models created from fields with explicit descriptions."""

    model_config = ConfigDict(use_attribute_docstrings=False)


def names() -> Mapping[str, object]:
    """Return the installed kinds, by name."""
    return visible("components", WIRING_KEYS)


def find_kind(name: str) -> AnyKind:
    """Return an installed kind.

    Raises:
        DeclarationError: its package cannot be loaded.
        UserCodeError: the entry point is not a component class.
    """
    return _kind(name, plugins("components")[name].load())


@functools.cache
def _kind(name: str, found: object) -> AnyKind:
    if not (isinstance(found, type) and issubclass(found, Operation | Composite)):
        raise UserCodeError(
            f"component kind {name!r} is {short_repr(found)}, which is not a subclass of Operation",
            hint="name a class, such as class Shout(cp.Operation)",
        )
    settings = settings_model(f"kind_{name}", found, skip=("self", "name"))
    entry = make_model(f"kind_{name}_entry", summary(found), {name: (settings, ...)}, _Made)

    def make(entry: Wiring, context: MakeContext) -> Component | None:
        given = make_settings(getattr(entry, name).given)

        def build() -> Component:
            return construct(found, f"component kind {name!r}", context.name, given)

        return context.file.attempt((*context.address, name), build, code=f"{name} at {definition(found)}")

    def dump(component: Component, context: DumpContext) -> Tree:
        return {name: dump_arguments(component, context)}

    return Kind(name, entry, make, (found,), dump)


def kind_of(component: Component) -> AnyKind | None:
    """Return the installed kind of a component, or None if its class is not an installed one."""
    for name, plugin in plugins("components").items():
        place = f"{type(component).__module__}:{type(component).__qualname__}"
        if plugin.value == place:
            return _kind(name, type(component))
    return None


def _entry(name: str) -> type[Model]:
    found: type[Model] = find_kind(name).entry
    return found


KINDS = Installed("kind", names, _entry)
