"""Messages are data, and samples arrive as they were sent."""

from __future__ import annotations

import socket
import threading

from hypothesis import given
from hypothesis import strategies as st

from compound.engine import TokenRecord
from compound.optimizers.weights.distributed.messages import (
    encode,
    receive,
    samples_from_json,
    samples_to_json,
)
from compound.optimizers.weights.learner.samples import Sample

numbers = st.floats(allow_nan=False)
names = st.text(max_size=5)


@st.composite
def samples(draw: st.DrawFn) -> Sample:
    several = st.lists(numbers, max_size=3).map(tuple)
    record = TokenRecord(
        draw(st.sampled_from([(1, 2), (1, 2, 3)])), tuple(draw(st.lists(st.integers(0, 9), max_size=3))),
        draw(several), draw(st.sampled_from(["stop", "length"])), draw(names), draw(names),
    )  # fmt: skip
    return Sample(
        draw(names), draw(names), draw(names), draw(st.integers(0, 9)), record, draw(numbers),
        group=tuple(draw(st.lists(names | st.integers(0, 9), max_size=2))), on_policy=draw(st.booleans()),
        advantages=draw(several), values=draw(several), returns=draw(several), weight=draw(numbers),
        unit=tuple(draw(st.lists(names, max_size=2))),
    )  # fmt: skip


@given(st.lists(samples(), max_size=4))
def test_samples_arrive_exactly(some: list[Sample]) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        threading.Thread(target=ours.sendall, args=(encode(samples_to_json(some)),)).start()
        found = receive(theirs)
    assert found is not None
    assert samples_from_json(found) == some


def test_a_shared_prompt_is_sent_once() -> None:
    prompt = tuple(range(100))
    some = [Sample("a", "e", "a", n, TokenRecord(prompt, (n,), (), "stop"), 0.0) for n in range(8)]
    assert samples_to_json(some)["prompts"] == [list(prompt)]


def test_the_end_of_a_connection_is_no_message() -> None:
    """Neither between messages nor within one."""
    frame = encode({"result": 1})
    for sent in (b"", frame[:4], frame[:-1]):
        ours, theirs = socket.socketpair()
        ours.sendall(sent)
        ours.close()
        with theirs:
            assert receive(theirs) is None
