"""Base of settings, choices among settings, and names in settings.

In YAML, a choice is a mapping with one key, ``loss: {grpo: {clip: 0.2}}``, or only the name,
``loss: dapo``. A field whose value names a model, a method, code or a file is marked by its type,
such as ``lm: ModelName | None``; `references` finds all of them, so that a file can be checked
before anything runs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import UnionType
from typing import Annotated, ClassVar, Literal, Self, TypeVar, Union, get_args, get_origin

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    SerializerFunctionWrapHandler,
    Tag,
    model_serializer,
    model_validator,
)


class Settings(BaseModel):
    """Base of all settings: unknown keys are rejected, and values are immutable.

    Descriptions are the docstrings of the attributes.

    Example:
        >>> class AnnealingSettings(Settings):
        ...     temperature: float = 1.0
        >>> AnnealingSettings(temperature=0.5)
        AnnealingSettings(temperature=0.5)
    """

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False
    )


class NoSettings(Settings):
    """Settings of a method without options."""


S = TypeVar("S", bound=Settings)


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


Kind = Literal["model", "backbone", "method", "code", "configuration", "feedback"]
Path = tuple[str | int, ...]


@dataclass(frozen=True)
class NameMark:
    """Annotation that marks a string as the name of an object of some kind."""

    kind: Kind


ModelName = Annotated[str, NameMark("model")]
BackboneName = Annotated[str, NameMark("backbone")]
MethodName = Annotated[str, NameMark("method")]
CodeName = Annotated[str, NameMark("code")]
ConfigurationFile = Annotated[str, NameMark("configuration")]
FeedbackFolder = Annotated[str, NameMark("feedback")]


@dataclass(frozen=True)
class Reference:
    """A name found in settings.

    Attributes:
        path: path of the field, relative to the searched settings.
        name: the value; ``None`` if the field is not set.
    """

    kind: Kind
    path: Path
    name: str | None
    key: bool = False


def references(settings: BaseModel, path: Path = ()) -> Iterator[Reference]:
    """Yield every reference in settings, including nested models.

    >>> class Writing(BaseModel):
    ...     lm: ModelName | None = None
    ...     rules: dict[str, CodeName] = {}
    >>> [(found.kind, found.path, found.name) for found in references(Writing(rules={"a": "my:rule"}))]
    [('model', ('lm',), None), ('code', ('rules', 'a'), 'my:rule')]
    """
    for name, field in type(settings).model_fields.items():
        annotation: object = field.annotation
        for mark in field.metadata:
            if isinstance(mark, NameMark):
                annotation = Annotated[str, mark]
        yield from _found(getattr(settings, name), annotation, (*path, name))


def _found(
    value: object, annotation: object, path: Path, *, key: bool = False
) -> Iterator[Reference]:
    if isinstance(value, BaseModel):
        yield from references(value, path)
        return
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        marks = [mark for mark in arguments[1:] if isinstance(mark, NameMark)]
        if marks and (value is None or isinstance(value, str)):
            yield Reference(marks[0].kind, path, value, key)
        elif not marks:
            yield from _found(value, arguments[0], path, key=key)
    elif origin in (Union, UnionType):
        for argument in arguments:
            yield from _found(value, argument, path, key=key)
    elif isinstance(value, Mapping) and len(arguments) == 2:
        for name, item in value.items():
            yield from _found(name, arguments[0], (*path, name), key=True)
            yield from _found(item, arguments[1], (*path, name))
    elif isinstance(value, Sequence) and not isinstance(value, str) and arguments:
        for place, item in enumerate(value):
            yield from _found(item, arguments[0], (*path, place))
