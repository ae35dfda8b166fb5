"""Routing of requests to replicas: affinity, and the bound of the load."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from compound.core.engine import Adapter, Forward, Message, Request
from compound.core.image import Image
from compound.engines.replicas import BALANCE, choose, start_of

starts = st.binary(min_size=1, max_size=16)
steps = st.lists(
    st.one_of(starts, st.integers(0, 99)), max_size=200
)  # a request, or the end of one
PLENTY = 10**6


@given(st.integers(1, 6), st.integers(1, 40), steps)
def test_the_load_stays_below_the_bound_and_a_place_is_found_while_there_is_one(
    replicas: int, capacity: int, work: list[bytes | int]
) -> None:
    """After each placement, no replica chosen has more than `BALANCE` times the mean, rounded up."""
    loads = {f"r{i}": 0 for i in range(replicas)}
    running: list[str] = []
    for step in work:
        if isinstance(step, int):
            if running:
                loads[running.pop(step % len(running))] -= 1
            continue
        chosen = choose(step, loads, capacity)
        if chosen is None:
            assert all(load == capacity for load in loads.values())
            continue
        loads[chosen] += 1
        running.append(chosen)
        assert loads[chosen] <= min(capacity, math.ceil(BALANCE * sum(loads.values()) / replicas))


@given(starts, st.integers(2, 6))
def test_only_the_requests_of_a_lost_replica_move(start: bytes, replicas: int) -> None:
    loads = {f"r{i}": 0 for i in range(replicas)}
    preferred = choose(start, loads, PLENTY)
    for lost in loads:
        rest = {name: load for name, load in loads.items() if name != lost}
        if lost != preferred:
            assert choose(start, rest, PLENTY) == preferred


def test_the_start_is_the_adapter_and_the_first_turn() -> None:
    system, first = Message("system", "Be brief."), Message("user", "2 + 2?")
    alone = Request((system, first), seed=1, temperature=1.0)
    assert start_of(
        Request((system, first, Message("assistant", "4"), Message("user", "Sure?")))
    ) == start_of(alone)
    others = [
        Request((Message("system", "Be verbose."), first)),
        Request((system, Message("user", "3 + 3?"))),
        Request((system, first), adapter=Adapter("/a", "0" * 64)),
        Request(
            (
                system,
                Message("user", ("2 + 2?", Image.from_bytes(b"\x89PNG\r\n\x1a\n" + b"0" * 32))),
            )
        ),
        Request((), forward=Forward("chat/completions", '{"messages": []}')),
    ]
    assert len({start_of(each) for each in (alone, *others)}) == len(others) + 1
