"""Packed rows: common beginnings occur once, and tokens attend to those before them in their sequence."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from compound.engines.local.prefill import common_prefix  # noqa: E402
from compound.optimizers.weights.learner import packing  # noqa: E402
from compound.optimizers.weights.learner.packing import Forest, Pack  # noqa: E402

Tokens = tuple[int, ...]


@st.composite
def rows(draw: st.DrawFn) -> list[Tokens]:
    """Draw sorted sequences, of which none is a prefix of another."""
    tokens = st.lists(st.integers(0, 1), min_size=1, max_size=12)
    found = {tuple(row) for row in draw(st.lists(tokens, min_size=1, max_size=8))}
    return sorted(row for row in found if not any(r != row and r[: len(row)] == row for r in found))


@pytest.fixture(autouse=True)
def short_beginnings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "MIN_SHARED", 2)


SHARING = settings(
    deadline=None,
    max_examples=100,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


@SHARING
@given(rows(), rows())
def test_a_common_prefix_is_the_longest(some: list[Tokens], others: list[Tokens]) -> None:
    for one in some:
        for other in others:
            length = common_prefix(one, other)
            assert one[:length] == other[:length]
            assert one[: length + 1] != other[: length + 1] or length == min(len(one), len(other))


@SHARING
@given(rows())
def test_every_sequence_is_in_the_row_at_its_places(some: list[Tokens]) -> None:
    pack = Pack(some, torch.device("cpu"))
    for row, index in zip(some, pack.indices, strict=True):
        assert tuple(pack.ids[index].tolist()) == row
        assert pack.places[index].tolist() == list(range(len(row)))
    assert len(pack.ids) == Forest(some).size(0, len(some)) <= sum(map(len, some))
    for one, other in zip(pack.indices, pack.indices[1:], strict=False):
        shared = set(one.tolist()) & set(other.tolist())
        assert not shared or len(shared) >= 2  # as many as `MIN_SHARED`
    first = {row[:2] for row in some}  # each beginning of two tokens is in the row once
    starts = [index[:2].tolist() for index, row in zip(pack.indices, some, strict=True)]
    assert len({tuple(start) for start in starts}) == len(first)


@SHARING
@given(rows(), st.sampled_from([None, 1, 3]))
def test_a_token_attends_to_its_sequence_within_the_window(
    some: list[Tokens], window: int | None
) -> None:
    pack = Pack(some, torch.device("cpu"))
    seen = {
        int(index[place]): set(index[max(0, place + 1 - (window or len(row))) : place + 1].tolist())
        for row, index in zip(some, pack.indices, strict=True)
        for place in range(len(row))
    }
    blocks = torch.arange(len(pack.ids)).split(pack.sizes)
    for own, before, mask in zip(blocks, pack.before, pack.masks(window), strict=True):
        keys = torch.cat([*(blocks[n] for n in before), own])
        causal = torch.ones(len(own), len(keys), dtype=torch.bool).tril()
        for query, row in zip(own.tolist(), causal if mask is None else mask, strict=True):
            assert set(keys[row].tolist()) == seen[query]


def test_short_last_branches_are_one_block() -> None:
    prompt = tuple(range(20))
    pack = Pack([(*prompt, n, n) for n in range(11)], torch.device("cpu"))
    assert pack.sizes == [20, 20, 2]  # ten answers of 2 tokens, then one
    assert pack.before == [[], [0], [0]]
