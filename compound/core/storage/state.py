"""Typed state stored in checkpoints, from which a run, a job, or an optimizer resumes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import ClassVar, Self, TypeVar

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError
from pydantic_core import PydanticSerializationError

from compound.core.errors import FRESH, CompoundError
from compound.core.storage.records import Damaged

__all__ = ["State", "StateError", "first_problem", "validated"]

T = TypeVar("T")


class StateError(CompoundError):
    """A stored state cannot be read: it is damaged, or was written by another version."""


class State(BaseModel):
    """State that is stored as JSON with a format number.

    Subclasses declare fields; unknown fields and values of the wrong type are rejected. Fields may
    be assigned; `to_json` takes a snapshot.

    Attributes:
        FORMAT: format number. Increase it whenever states stored in the earlier form cannot be
            read.

    Example:
        >>> class Annealing(State):
        ...     step: int = 0
        ...     best: dict[str, object] = {}
        >>> state = Annealing(step=3)
        >>> state.to_json()
        {'format': 1, 'step': 3, 'best': {}}
        >>> Annealing.from_json(state.to_json()) == state
        True
    """

    model_config = ConfigDict(extra="forbid", strict=True, ser_json_inf_nan="constants")
    FORMAT: ClassVar[int] = 1

    def to_json(self) -> dict[str, object]:
        """Return the state as JSON types.

        Raises:
            StateError: a value has no JSON representation.
        """
        try:
            return {"format": self.FORMAT, **self.model_dump(mode="json")}
        except PydanticSerializationError as error:
            raise StateError(
                f"{type(self).__name__} holds a value that is not JSON: {error}"
            ) from error

    @classmethod
    def from_json(cls, value: Mapping[str, object]) -> Self:
        """Parse the output of `to_json`.

        Raises:
            StateError: the format differs, or a field is missing, unknown, or of the wrong type.
        """
        if value.get("format") != cls.FORMAT:
            found = value.get("format")
            raise StateError(
                f"{cls.__name__} has format {found!r}, but this version reads format {cls.FORMAT}",
                hint=f"resume with the version that wrote it, or {FRESH}",
            )
        fields = {name: field for name, field in value.items() if name != "format"}
        try:
            try:
                document = json.dumps(fields, ensure_ascii=False).encode()
            except UnicodeEncodeError:  # pydantic rejects JSON with lone surrogates
                return cls.model_validate(fields, strict=False)
            return cls.model_validate_json(document)
        except (ValidationError, RecursionError) as error:
            raise StateError(
                f"{cls.__name__} cannot be read: {first_problem(error)}", hint=FRESH
            ) from error


def first_problem(error: ValidationError | RecursionError) -> str:
    """Return the first validation problem, with its location."""
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    first = error.errors()[0]
    return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"


def validated(adapter: TypeAdapter[T], value: object, what: str) -> T:
    """Return a stored value in its declared form, without unknown fields.

    Raises:
        Damaged: it has another form; a checksum does not prevent that, since anyone can compute it.
    """
    try:
        return adapter.validate_python(value)
    except (ValidationError, RecursionError) as error:
        raise Damaged(f"it is not {what}: {first_problem(error)}") from None
