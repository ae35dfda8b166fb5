"""Samples are divided among processes by tokens, whole and once, and passes of all processes correspond."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainings.learners import drawn

pytest.importorskip("torch")

from compound.optimizers.weights.learner.batching import cost, divide, in_step, micro_batches
from compound.optimizers.weights.learner.samples import Sample, probe_sample


def ids(batches: list[list[Sample]]) -> list[list[int]]:
    return sorted([id(sample) for sample in batch] for batch in batches)


@settings(max_examples=40, deadline=None)
@given(
    groups=st.integers(0, 12),
    processes=st.integers(1, 5),
    limit=st.sampled_from([16, 64, 4096]),
    share=st.booleans(),
    seed=st.integers(0, 99),
)
def test_every_sample_is_in_one_micro_batch_of_one_process(
    groups: int, processes: int, limit: int, share: bool, seed: int
) -> None:
    samples = drawn(("x",), groups=groups, seed=seed) if groups else []
    shares = divide(samples, limit, processes, share=share)
    assert len(shares) == processes
    dealt = [id(sample) for own in shares for batch in own for sample in batch]
    assert sorted(dealt) == sorted(map(id, samples))


@pytest.mark.parametrize("processes", [2, 4])
def test_many_micro_batches_are_those_of_one_process_and_balanced(processes: int) -> None:
    samples = drawn(("x",), groups=60)
    shares = divide(samples, 64, processes)
    assert ids([batch for own in shares for batch in own]) == ids(micro_batches(samples, 64))
    loads = [sum(map(cost, own)) for own in shares]
    assert max(loads) <= 1.1 * sum(loads) / processes


def test_few_micro_batches_are_made_smaller_until_every_process_has_as_many_tokens() -> None:
    samples = drawn(("x",), groups=8)
    assert len(micro_batches(samples, 4096)) == 1
    loads = [sum(map(cost, own)) for own in divide(samples, 4096, 4)]
    assert max(loads) <= 1.1 * sum(loads) / 4


def test_tokens_and_not_samples_are_balanced() -> None:
    """One answer of 90 tokens weighs as much as nine of 10."""
    long = probe_sample(range(90), prompt=1)
    short = [probe_sample(range(10 * n, 10 * n + 10), prompt=1) for n in range(1, 10)]
    shares = divide([long, *short], 90, 2)
    assert sorted(sum(len(batch) for batch in own) for own in shares) == [1, 9]


def test_processes_in_step_make_equal_numbers_of_passes() -> None:
    shares = divide([*drawn(("x",), groups=12), probe_sample((1, 2), prompt=1)], 64, 3, share=False)
    shares[2] = shares[2][:1]  # a process with less to do
    passes = [list(in_step(shares, rank)) for rank in range(3)]
    assert len(set(map(len, passes))) == 1
    for rank, own in enumerate(passes):
        assert [batch for batch, counts in own if counts] == shares[rank]
    assert not all(counts for _, counts in passes[2])
