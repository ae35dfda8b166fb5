"""Settings that choose one of several options, each with settings of its own.

In YAML a choice is a mapping with one key, ``loss: {grpo: {clip: 0.2}}``, or the name alone, ``loss: dapo``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Annotated, Literal, Self

from pydantic import (
    AfterValidator,
    Discriminator,
    SerializerFunctionWrapHandler,
    Tag,
    model_serializer,
    model_validator,
)

from compound.settings.base import Settings


class OneOf(Settings, ABC):
    """A choice: at most one of its fields is given, with the settings of that option.

    Subclasses declare a field for each option, ``None`` by default. The first option is the default choice.
    """

    @model_validator(mode="after")
    def _one(self) -> Self:
        """Refuse several options, or one that is null."""
        given = [name for name in type(self).model_fields if name in self.model_fields_set]
        if len(given) > 1:
            raise ValueError(f"names several: {' and '.join(given)}; keep one")
        for name in given:
            if getattr(self, name) is None:
                raise ValueError(f"{name} must be a mapping; {{}} takes the defaults")
        return self

    @property
    def name(self) -> str:
        """The option that was chosen."""
        options = list(type(self).model_fields)
        return next((name for name in options if getattr(self, name) is not None), options[0])

    @property
    @abstractmethod
    def settings(self) -> Settings:
        """The settings of the option that was chosen."""

    @model_serializer(mode="wrap")
    def _chosen_only(self, dump: SerializerFunctionWrapHandler) -> dict[str, object]:
        """Leave out the options that were not chosen, and spell the default choice out."""
        chosen = dump(self).get(self.name)
        return {self.name: self.settings.model_dump(mode="json") if chosen is None else chosen}


def or_name(choice: type[OneOf]) -> object:
    """Return the type of a field that takes a choice, or only the name of an option."""
    options = tuple(choice.model_fields)
    named: Callable[[object], object] = lambda value: (  # noqa: E731
        choice.model_validate({value: {}}) if isinstance(value, str) else value
    )
    return Annotated[
        Annotated[Literal[options], Tag("~name")] | Annotated[choice, Tag("~mapping")],
        Discriminator(lambda value: "~name" if isinstance(value, str) else "~mapping"),
        AfterValidator(named),
    ]
