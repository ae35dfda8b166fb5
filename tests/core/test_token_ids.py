"""Token ids are shared objects, whatever a record is made from."""

from __future__ import annotations

import json
from typing import Any

import pytest

from compound.core.engine import SIZE, TokenRecord, token_ids

LARGE = 123_457  # Python itself shares integers up to 256


def test_records_of_equal_tokens_share_their_objects() -> None:
    row = json.dumps([[LARGE, 5], [LARGE, 6], [-0.5, -0.5], "stop", ""])
    one, other = (TokenRecord.from_row(json.loads(row)) for _ in range(2))
    assert one == other
    assert {id(t) for t in (one.prompt[0], other.prompt[0], one.sampled[0])} == {id(one.prompt[0])}


@pytest.mark.parametrize(
    "ids", [[], [-1, 5], [SIZE - 1, SIZE], [LARGE + 1.0, 5], ["a", 5], [None], [[1], 2]]
)
def test_other_values_are_kept_as_they_are(ids: list[Any]) -> None:
    found = token_ids(ids)
    assert found == tuple(ids)
    assert [type(token) for token in found] == [type(token) for token in ids]
