"""Token ids are shared objects, whatever a record is made from."""

from __future__ import annotations

import json

import pytest

from compound import token_ids as module
from compound.engine import TokenRecord
from compound.token_ids import token_ids

LARGE = 123_457  # Python itself shares integers up to 256


def test_records_of_equal_tokens_share_their_objects() -> None:
    row = json.dumps([[LARGE, 5], [LARGE], [-0.5], "stop", ""])
    one, other = (TokenRecord.from_row(json.loads(row)) for _ in range(2))
    assert one == other
    assert {id(token) for token in (one.prompt[0], other.prompt[0], one.sampled[0])} == {id(one.prompt[0])}


def test_numbers_of_another_type_are_kept_as_they_are() -> None:
    assert [type(token) for token in token_ids([LARGE + 1.0, True, LARGE + 1])] == [float, bool, int]  # type: ignore[list-item]


def test_a_server_that_sends_many_ids_fills_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    shared = module._SharedIds()
    monkeypatch.setattr(module, "_SHARED", shared)
    monkeypatch.setattr(shared, "CAPACITY", 3)
    assert token_ids(range(1000, 1010)) == tuple(range(1000, 1010))
    assert len(shared) == 3
