"""Make the component of an entry, by its kind; mistakes are reported at their lines."""

from __future__ import annotations

from collections.abc import Mapping

from compound.graph.component import Component
from compound.spec.context import Context
from compound.spec.kinds.body import BUILT_IN
from compound.spec.kinds.kind import MakeBody, MakeContext
from compound.spec.shape import fitted
from compound.spec.yaml.document import Address


def make_component(context: Context, name: str, address: Address, make_body: MakeBody) -> Component | None:
    """Return the component of an entry, or None when it is wrong; the mistakes are reported."""
    value = context.document.at(address)
    named = [kind for key, kind in BUILT_IN.items() if isinstance(value, Mapping) and key in value]
    entry = fitted(context.document, named[0].entry, address) if len(named) == 1 else None
    if entry is None:
        for kind in named:
            body = (*address, kind.name, "body")
            if kind.has_body and isinstance(context.document.at(body), dict):
                make_body(body, name)  # reports the mistakes in it
        return None
    component: Component | None = named[0].make(entry, MakeContext(context, name, address, make_body))
    return component
