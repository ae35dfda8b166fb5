"""Typed state that checkpoints hold: what a run, a job, or an optimizer needs in order to continue."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import ClassVar, Self

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import PydanticSerializationError

from compound.errors import FRESH, CompoundError

__all__ = ["State", "StateError", "first_problem"]


class StateError(CompoundError):
    """A stored state cannot be read: it is damaged, or was written by another version."""


class State(BaseModel):
    """State that is stored as JSON with the number of its format.

    Subclasses declare fields; unknown fields and values of another type are refused. Fields may be assigned;
    `to_json` takes a snapshot.

    Attributes:
        FORMAT: the number of the format. Raise it whenever stored states of the earlier form cannot be read.

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
            StateError: a value has no representation in JSON.
        """
        try:
            return {"format": self.FORMAT, **self.model_dump(mode="json")}
        except PydanticSerializationError as error:
            raise StateError(f"{type(self).__name__} holds a value that is not JSON: {error}") from error

    @classmethod
    def from_json(cls, value: Mapping[str, object]) -> Self:
        """Return the state that `to_json` described.

        Raises:
            StateError: the format is another one, or a field is missing, unknown, or of another type.
        """
        if value.get("format") != cls.FORMAT:
            found = value.get("format")
            raise StateError(
                f"{cls.__name__} has format {found!r}, but this version reads format {cls.FORMAT}",
                hint=f"continue with the version that wrote it, or {FRESH}",
            )
        fields = {name: field for name, field in value.items() if name != "format"}
        try:
            try:
                document = json.dumps(fields, ensure_ascii=False).encode()
            except UnicodeEncodeError:  # pydantic reads no JSON with half a character
                return cls.model_validate(fields, strict=False)
            return cls.model_validate_json(document)
        except (ValidationError, RecursionError) as error:
            raise StateError(f"{cls.__name__} cannot be read: {first_problem(error)}", hint=FRESH) from error


def first_problem(error: ValidationError | RecursionError) -> str:
    """Return the first thing that is wrong, with its place."""
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    first = error.errors()[0]
    return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
