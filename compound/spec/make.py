"""Create the component of an entry by its kind, and report errors at their lines."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

from compound.errors import CompoundError
from compound.graph.component import Component
from compound.registry.plugins import warn_if_hidden
from compound.spec.context import Context
from compound.spec.kinds.body import BUILT_IN
from compound.spec.kinds.installed import KINDS as INSTALLED
from compound.spec.kinds.installed import find_kind
from compound.spec.kinds.kind import AnyKind, MakeBody, MakeContext
from compound.spec.schema.wiring import WIRING_KEYS
from compound.spec.shape import parse_at
from compound.spec.yaml.document import Address


def make_component(context: Context, name: str, address: Address, make_body: MakeBody) -> Component | None:
    """Return the component of an entry, or None after reporting the errors in it."""
    value = context.document.at(address)
    named = _kinds_in(value) if isinstance(value, Mapping) else []
    for key in value if isinstance(value, Mapping) else ():
        if key in BUILT_IN or key in WIRING_KEYS:
            warn_if_hidden("components", key)
    entry = parse_at(context.document, named[0].entry, address) if len(named) == 1 else None
    if entry is None:
        for kind in named:
            body = (*address, kind.name, "body")
            if kind.has_body and isinstance(context.document.at(body), dict):
                make_body(body, name)  # called only to report the errors in it
        return None
    component: Component | None = named[0].make(entry, MakeContext(context, name, address, make_body))
    return component


def _kinds_in(entry: Mapping[str, object]) -> list[AnyKind]:
    """Return the kinds that an entry names; schema validation reports those that cannot be loaded."""
    found = [kind for name, kind in BUILT_IN.items() if name in entry]
    for name in INSTALLED.names():
        if name in entry and name not in BUILT_IN:
            with contextlib.suppress(CompoundError):
                found.append(find_kind(name))
    return found
