"""Schema of the edges of a node, which all component kinds share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated

from pydantic import Discriminator, Field, Tag

from compound.spec.schema.installed import Installed
from compound.spec.schema.types import Model, Name, OneType, Reference, Scalar, Type

WIRING_KEYS = ("in", "when", "out", "settings")
"""Keys of an entry other than its kind."""
When = Annotated[
    Annotated[Reference, Tag("~always")]
    | Annotated[dict[Reference, Scalar], Field(min_length=1, max_length=1), Tag("~equals")],
    Discriminator(lambda value: "~equals" if isinstance(value, Mapping) else "~always"),
]
_INLINE = {"required": ["json_schema"], "properties": {"json_schema": {"type": "object"}}}
Out = Annotated[
    Annotated[OneType, Tag("~one")]
    | Annotated[dict[Name, Type], Field(min_length=1, json_schema_extra={"not": _INLINE}), Tag("~several")],
    Discriminator(
        lambda value: "~several" if isinstance(value, Mapping) and not _is_schema(value) else "~one"
    ),
]


def _is_schema(value: Mapping[object, object]) -> bool:
    return isinstance(value.get("json_schema"), Mapping)


class Wiring(Model):
    """The incoming edges and the condition of a node."""

    wires: dict[Name, Reference] = Field(default={}, alias="in")
    """The input or output that feeds each port; edges may also feed settings."""
    when: When | None = None
    """Condition to run the node: an output that must be true, or equal a value: {$router.route: search}."""


def key_discriminator(
    names: Iterable[str], noun: str, installed: Installed, prefix: str = ""
) -> Discriminator:
    """Return the discriminator of entries that must have exactly one of some keys.

    Args:
        names: the keys.
        noun: what the key selects; see `compound.spec.file.POSSIBLE`.
        installed: further keys, of installed extensions.
        prefix: prefix of the tags.
    """
    known = tuple(names)

    def tag(value: object) -> str | None:
        if not isinstance(value, Mapping):
            return None
        found = [name for name in known if name in value]
        others = [name for name in installed.names() if name in value and name not in known]
        if len(found) + len(others) != 1:
            return None
        return f"~{prefix}{found[0]}" if found else installed.tag

    return Discriminator(tag, custom_error_type="one_key", custom_error_message=noun)


def label_discriminator(key: str, labels: Iterable[str]) -> Discriminator:
    """Return the discriminator of mappings by the label at a key."""
    known = tuple(labels)

    def tag(value: object) -> str | None:
        label = value.get(key) if isinstance(value, Mapping) else None
        return f"~{label}" if label in known else None

    return Discriminator(
        tag,
        custom_error_type="one_label",
        custom_error_message=key,
        custom_error_context={"labels": ", ".join(known)},
    )
