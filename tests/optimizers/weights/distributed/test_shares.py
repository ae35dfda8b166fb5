"""Samples are divided among processes by tokens, whole and once, and passes of all processes correspond."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainings.learners import drawn

pytest.importorskip("torch")

from compound.optimizers.weights.learner.batching import Pass, cost, divide, in_step, micro_batches
from compound.optimizers.weights.learner.forward import saves_enough
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


def test_one_process_has_the_micro_batches_of_before() -> None:
    samples = drawn(("x",))
    assert divide(samples, 64, 1) == [micro_batches(samples, 64)]


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


def test_a_shared_prompt_costs_its_tokens_once() -> None:
    prompt = tuple(range(20))
    several = [probe_sample((*prompt, n, n), prompt=20) for n in range(3)]
    assert saves_enough(several)
    assert cost(several) == 20 + 3 * 2
    assert cost(several, share=False) == 3 * (20 + 1)  # the last token is not read


@pytest.mark.parametrize("share", [True, False])
def test_processes_in_step_make_equal_passes(share: bool) -> None:
    samples = [*drawn(("x",), groups=12), probe_sample((1, 2), prompt=1)]
    shares = divide(samples, 64, 3, share=share)
    shares[2] = shares[2][:1]  # a process with less to do
    passes = [list(in_step(shares, rank, share=share)) for rank in range(3)]
    assert len({len(own) for own in passes}) == 1

    def runs(each: Pass) -> int:
        """Return how often a pass runs the layers."""
        shared = (share and saves_enough(each.samples)) if each.shared is None else each.shared
        return 1 + (shared and max(s.length for s in each.samples) > 1)

    for turn in zip(*passes, strict=True):
        assert len(set(map(runs, turn))) == 1
    for rank, own in enumerate(passes):
        assert ids([each.samples for each in own if each.counts]) == ids(shares[rank])
        assert all(each.shared is None for each in own if each.counts)  # as in a process of its own
    assert not all(each.counts for each in passes[2])
    assert {runs(each) for each in passes[0]} == ({1, 2} if share else {1})
