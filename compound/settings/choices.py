"""Settings that select one of several options, each with its own settings.

In YAML, a choice is a mapping with one key, ``loss: {grpo: {clip: 0.2}}``, or only the name, ``loss: dapo``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Annotated, ClassVar, Literal, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Discriminator,
    SerializerFunctionWrapHandler,
    Tag,
    model_serializer,
    model_validator,
)

from compound.settings.base import Settings


class OneOf(Settings, ABC):
    """A choice between options: at most one field is set, to the settings of that option.

    Subclasses declare one field per option, ``None`` by default. The first option is the default.

    Attributes:
        REMOVED: options of earlier versions, with the option to use instead.
    """

    REMOVED: ClassVar[Mapping[str, str]] = {}

    @model_validator(mode="after")
    def _one(self) -> Self:
        """Reject several options, or an option that is null."""
        given = [name for name in type(self).model_fields if name in self.model_fields_set]
        if len(given) > 1:
            raise ValueError(f"selects several options: {' and '.join(given)}; keep one")
        for name in given:
            if getattr(self, name) is None:
                raise ValueError(f"{name} must be a mapping; {{}} selects the defaults")
        return self

    @property
    def name(self) -> str:
        """Name of the selected option."""
        options = list(type(self).model_fields)
        return next((name for name in options if getattr(self, name) is not None), options[0])

    @property
    @abstractmethod
    def settings(self) -> Settings:
        """Settings of the selected option."""

    @model_serializer(mode="wrap")
    def _chosen_only(self, dump: SerializerFunctionWrapHandler) -> dict[str, object]:
        """Dump only the selected option, including the default one."""
        chosen = dump(self).get(self.name)
        return {self.name: self.settings.model_dump(mode="json") if chosen is None else chosen}


def or_name(choice: type[OneOf]) -> object:
    """Return a field type that accepts a choice or the bare name of an option."""
    options = tuple(choice.model_fields)
    named: Callable[[object], object] = lambda value: (  # noqa: E731
        choice.model_validate({value: {}}) if isinstance(value, str) else value
    )

    def reject_removed(value: object) -> object:
        given = [value] if isinstance(value, str) else value if isinstance(value, Mapping) else ()
        for name in given:
            if name in choice.REMOVED:
                raise ValueError(f"{name} was removed; use {choice.REMOVED[name]}")
        return value

    return Annotated[
        Annotated[Literal[options], Tag("~name")] | Annotated[choice, Tag("~mapping")],
        Discriminator(lambda value: "~name" if isinstance(value, str) else "~mapping"),
        AfterValidator(named),
        BeforeValidator(reject_removed),
    ]
