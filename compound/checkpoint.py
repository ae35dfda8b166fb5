"""The checkpoint of a run: its form, and the check that every value in it has the right type.

A checkpoint may be damaged, edited, or written by another version. It is therefore checked as a whole before
anything is done with it; what only a method understands (its own progress and memory) is checked by checksum
alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, NonNegativeInt, ValidationError

from compound.artifacts import is_reference, leads_outside
from compound.contracts import USAGE_FIELDS
from compound.records import Damaged

FORMAT = 2  # 1 had no checksums, and did not say its format


def _number(value: Any) -> float:
    """Accept numbers and nothing that merely looks like one."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"must be a number, got {value!r:.80}")  # noqa: TRY004 - pydantic reports ValueError
    return value


Number = Annotated[float, BeforeValidator(_number)]


def _usage(value: Any) -> Any:
    """Accept what a `Usage` is stored as: numbers by name, or the bare list of earlier versions."""
    numbers = list(value.values()) if isinstance(value, dict) else value
    known = isinstance(value, list) or (isinstance(value, dict) and set(value) <= set(USAGE_FIELDS))
    if not known or len(numbers) < 4 or any(not 0 <= _number(number) < math.inf for number in numbers):
        raise ValueError(f"must be at least four numbers from 0 on, got {value!r:.80}")
    return value


def _row(value: Any) -> list[Any]:
    """Accept a scored run: example, sample, score, and its failure."""
    match value:
        case [str(), int(sample), score, None | [str(), str()]] if not isinstance(sample, bool):
            _number(score)
            return list(value)
    raise ValueError(f"must be [example, sample, score, failure], got {value!r:.80}")


def _tried(value: Any) -> list[Any]:
    """Accept what an earlier job learned: values, score, number of examples."""
    match value:
        case [dict(), score, int()]:
            _number(score)
            return list(value)
    raise ValueError(f"must be [values, score, examples], got {value!r:.80}")


Usage = Annotated[list[float] | dict[str, float], BeforeValidator(_usage)]
Row = Annotated[list[Any], BeforeValidator(_row)]
Tried = Annotated[list[Any], BeforeValidator(_tried)]


class _Part(BaseModel):
    """A part of a checkpoint; what this version does not know is left as it is."""

    model_config = ConfigDict(extra="allow", strict=True)


class _Evaluation(_Part):
    configuration: str
    rows: list[Row]
    usage: Usage
    system_runs: Number


class _Plan(_Part):
    decisions: NonNegativeInt
    jobs: NonNegativeInt
    cost: Number
    level: Number


class _Job(_Part):
    optimizer: str
    keys: list[str]
    reason: dict[str, Any]


class _Done(_Job):
    values: dict[str, Any]
    runs: Number


class _Meter(_Part):
    usage: Usage
    system_runs: Number
    runs: NonNegativeInt
    seconds: Number


class _State(_Part):
    best: dict[str, Any] = {}
    before: _Evaluation | None = None
    incumbent: _Evaluation | None = None
    test_before: _Evaluation | None = None
    test_after: _Evaluation | None = None
    plan: _Plan | None = None
    decision: NonNegativeInt = 0
    idle: NonNegativeInt = 0
    job: NonNegativeInt = 0
    working: dict[str, Any] = {}
    optimizer: dict[str, Any] | None = None
    current: _Job | None = None
    scored: list[Any] = []
    spent: Number = 0.0
    share: Number = 0.0
    history: list[_Done] = []
    tried: list[Tried] = []
    stopped: str = ""
    meters: list[_Meter] = []
    memory: dict[str, Any] = {}
    done: bool = False
    reported: bool = False


class Checkpoint(BaseModel):
    """What ``checkpoint.json`` holds.

    Attributes:
        format: of the run's files.
        step: how many checkpoints were written so far.
        lengths: of the append-only files, which are cut back to them when the run continues.
        checksums: of their last lines.
        cached: how many calls were recorded in the cache.
        state: everything the loop needs to continue.
    """

    model_config = ConfigDict(extra="ignore", strict=True)

    format: NonNegativeInt = 1
    step: NonNegativeInt
    lengths: dict[str, NonNegativeInt]
    checksums: dict[str, str] = {}
    cached: NonNegativeInt = 0
    state: dict[str, Any]


def read_checkpoint(value: Mapping[str, Any], appended: tuple[str, ...]) -> Checkpoint:
    """Return a checkpoint after checking it.

    Args:
        value: the JSON object.
        appended: the append-only files whose lengths it must hold.

    Raises:
        Damaged: something is missing, or of another type; the message names the first of it.
    """
    try:
        found = Checkpoint.model_validate(value)
        _State.model_validate(found.state)
    except (ValidationError, RecursionError) as error:
        raise Damaged(f"it is not a checkpoint of this version: {_first(error)}") from None
    if found.format > FORMAT:
        raise Damaged(f"it has format {found.format}, but this version reads formats up to {FORMAT}")
    if missing := [name for name in appended if name not in found.lengths]:
        raise Damaged(f"it is not a checkpoint of this version: lengths.{missing[0]} is missing")
    for name in ("best", "working"):
        _check_places(name, found.state.get(name, {}))
    return found


def _first(error: ValidationError | RecursionError) -> str:
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    first = error.errors()[0]
    return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"


def _check_places(part: str, values: Mapping[str, Any]) -> None:
    """Refuse a folder that lies above the run."""
    for key, value in values.items():
        outside = is_reference(value) and leads_outside(value["path"])
        if outside and not PurePosixPath(value["path"]).is_absolute():
            raise Damaged(f"state.{part}.{key} refers to {value['path']!r}, which is outside of the run")
