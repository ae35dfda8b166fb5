"""References in settings: fields whose values name a model, a method, code, or a file.

A field is marked by its type, such as ``lm: ModelName | None``. `references` finds all of them, so that
a file can be checked before anything runs, regardless of the method.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import UnionType
from typing import Annotated, Literal, Union, get_args, get_origin

from pydantic import BaseModel

Kind = Literal["model", "backbone", "method", "code", "configuration", "feedback"]
Path = tuple[str | int, ...]


@dataclass(frozen=True)
class Names:
    """Annotation that marks a string as the name of an object of some kind."""

    kind: Kind


ModelName = Annotated[str, Names("model")]
BackboneName = Annotated[str, Names("backbone")]
MethodName = Annotated[str, Names("method")]
CodeName = Annotated[str, Names("code")]
ConfigurationFile = Annotated[str, Names("configuration")]
FeedbackFolder = Annotated[str, Names("feedback")]


@dataclass(frozen=True)
class Reference:
    """A name found in settings.

    Attributes:
        kind: kind of the named object.
        path: path of the field, relative to the searched settings.
        name: the value; ``None`` if the field is not set.
        key: whether the name is the key of a mapping.
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
            if isinstance(mark, Names):
                annotation = Annotated[str, mark]
        yield from _found(getattr(settings, name), annotation, (*path, name))


def _found(value: object, annotation: object, path: Path, *, key: bool = False) -> Iterator[Reference]:
    if isinstance(value, BaseModel):
        yield from references(value, path)
        return
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        marks = [mark for mark in arguments[1:] if isinstance(mark, Names)]
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
