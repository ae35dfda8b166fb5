"""JSON forms of values of other classes, and their way back through `convert`."""

from __future__ import annotations

import dataclasses
import datetime as dt
import enum
import json
import uuid
from decimal import Decimal
from pathlib import PurePosixPath
from typing import Any, NamedTuple

import pytest

from compound.graph.configuration import canonical_json, to_readable_json
from compound.graph.fingerprint import describe_code
from compound.graph.json_values import dumps, is_json
from compound.graph.types import as_declared, convert


class Mood(enum.Enum):
    GOOD = "good"
    BAD = "bad"


class Label(str, enum.Enum):  # noqa: UP042 - formatted by its name, unlike a StrEnum
    GOOD = "good"


@dataclasses.dataclass
class Visit:
    day: dt.date


class Pair(NamedTuple):
    number: int
    name: str


@pytest.mark.parametrize(
    ("kind", "value", "form"),
    [
        (dt.date, dt.date(2024, 1, 2), "2024-01-02"),
        (dt.datetime, dt.datetime(2024, 1, 2, 3, 4, 5), "2024-01-02T03:04:05"),
        (dt.datetime, dt.datetime(2024, 1, 2, tzinfo=dt.UTC), "2024-01-02T00:00:00Z"),
        (dt.time, dt.time(1, 2), "01:02:00"),
        (dt.timedelta, dt.timedelta(hours=1), "PT1H"),
        (Decimal, Decimal("1.50"), "1.50"),
        (uuid.UUID, uuid.UUID(int=5), "00000000-0000-0000-0000-000000000005"),
        (bytes, "ñ".encode(), "ñ"),
        (PurePosixPath, PurePosixPath("a/b"), "a/b"),
        (set[int], {3, 1}, [1, 3]),
        (set[Mood], {Mood.GOOD, Mood.BAD}, ["bad", "good"]),
        (frozenset[str | None], frozenset({"a", None}), ["a", None]),
        (tuple[int, dt.date], (1, dt.date(2024, 1, 2)), [1, "2024-01-02"]),
        (Pair, Pair(1, "a"), [1, "a"]),
        (dict[dt.date, Mood], {dt.date(2024, 1, 2): Mood.GOOD}, {"2024-01-02": "good"}),
        (dict[Mood, int], {Mood.GOOD: 1}, {"good": 1}),
        (dict[int, str], {1: "a"}, {"1": "a"}),
        (Visit, Visit(dt.date(2024, 1, 2)), {"day": "2024-01-02"}),
        (Label, Label.GOOD, "good"),
        (list[dt.date | None], [dt.date(2024, 1, 2), None], ["2024-01-02", None]),
    ],
)
def test_a_value_has_a_json_form_and_is_made_from_it(kind: Any, value: Any, form: Any) -> None:
    written = json.loads(dumps(value))
    assert written == form == json.loads(canonical_json(value)) == to_readable_json(value)
    assert is_json(written)
    assert not is_json(value)
    for made in (convert(kind, written), as_declared(kind, written)):
        assert made == value
        assert type(made) is type(value)


@pytest.mark.parametrize("value", [object(), {object(): 1}, {"a": [object()]}, {(1, 2): 3}, Mood])
def test_a_value_without_a_json_form_is_an_error(value: Any) -> None:
    with pytest.raises(TypeError):
        dumps(value)


def test_bytes_that_are_not_text_and_infinite_numbers_have_no_json_form() -> None:
    for value in (b"\xff", float("inf"), float("nan")):
        with pytest.raises(ValueError, match="."):
            dumps(value)
    assert dumps(float("inf"), allow_nan=True) == "Infinity"


def test_the_digest_of_code_keeps_its_spelling_of_dates() -> None:
    """The version of a function, and with it the keys of cached results, depends on its defaults."""
    assert describe_code([dt.date(2024, 1, 2), Decimal("1.5"), b"x"]) == [
        "datetime.date(2024, 1, 2)",
        "Decimal('1.5')",
        "b'x'",
    ]
