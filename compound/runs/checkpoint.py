"""Format of a run's checkpoint, and validation of its content.

A checkpoint may be damaged, edited, or written by another version. It is therefore validated completely
before use; a method's own state (its progress and memory) is validated by the method.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from pydantic import BaseModel, ConfigDict, NonNegativeInt, ValidationError

from compound.runs import formats as earlier
from compound.runs.state import RunState
from compound.storage.artifacts import is_reference, leads_outside
from compound.storage.records import Damaged
from compound.storage.state import StateError, first_problem

REMOVED = ("joint",)  # fields of a search that earlier versions stored
FORMAT = 3  # 1: no checksums and no format number; until 2: the state was one dictionary


class _Stored(BaseModel):
    """The file ``checkpoint.json``."""

    model_config = ConfigDict(extra="ignore", strict=True)

    format: NonNegativeInt = 1
    step: NonNegativeInt
    lengths: dict[str, NonNegativeInt]
    checksums: dict[str, str] = {}
    cached: NonNegativeInt = 0
    state: dict[str, Any]


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint of a run.

    Attributes:
        format: format of the run's files.
        step: number of checkpoints written so far.
        lengths: lengths of the append-only files, to which they are truncated on resume.
        checksums: checksums of their last lines.
        cached: number of calls recorded in the cache.
        state: state of the run.
    """

    format: int
    step: int
    lengths: Mapping[str, int]
    checksums: Mapping[str, str]
    cached: int
    state: RunState


def read_checkpoint(value: Mapping[str, Any], appended: tuple[str, ...]) -> Checkpoint:
    """Validate and return a checkpoint.

    Args:
        value: the JSON object.
        appended: the append-only files whose lengths are required.

    Raises:
        Damaged: a value is missing or has the wrong type; the message names the first one.
    """
    try:
        found = _Stored.model_validate(value)
    except (ValidationError, RecursionError) as error:
        raise Damaged(f"it is not a checkpoint of this version: {first_problem(error)}") from None
    if found.format > FORMAT:
        raise Damaged(f"it has format {found.format}, but this version reads formats up to {FORMAT}")
    if missing := [name for name in appended if name not in found.lengths]:
        raise Damaged(f"it is not a checkpoint of this version: lengths.{missing[0]} is missing")
    state = _state(found)
    if state.search is not None:
        search = state.search
        parts = {"best": search.best, "working": search.working, "supported": search.supported}
        for name, values in {**parts, "promising": search.promising or {}}.items():
            _check_places(name, values)
    return Checkpoint(found.format, found.step, found.lengths, found.checksums, found.cached, state)


def _state(stored: _Stored) -> RunState:
    if stored.format < FORMAT and "format" not in stored.state:
        try:
            return earlier.read_state(stored.state)
        except (StateError, LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
            raise Damaged(f"its state cannot be read: {error}") from None
    state, search = dict(stored.state), stored.state.get("search")
    if isinstance(search, Mapping):
        state["search"] = {name: value for name, value in search.items() if name not in REMOVED}
    try:
        return RunState.from_json(state)
    except StateError as error:
        raise Damaged(error.message) from None


def _check_places(part: str, values: Mapping[str, Any]) -> None:
    """Reject a folder outside of the run."""
    for key, value in values.items():
        outside = is_reference(value) and leads_outside(value["path"])
        if outside and not PurePosixPath(value["path"]).is_absolute():
            raise Damaged(
                f"state.search.{part}.{key} refers to {value['path']!r}, which is outside of the run"
            )
