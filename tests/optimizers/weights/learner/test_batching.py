"""Micro-batches: tokens that samples begin with are processed once, and processes share samples."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
pytest.importorskip("peft")

from compound import LoRA  # noqa: E402
from compound.core.engine import TokenRecord  # noqa: E402
from compound.optimizers.weights.learner import forward as forward_module  # noqa: E402
from compound.optimizers.weights.learner.adapters import Adapters  # noqa: E402
from compound.optimizers.weights.learner.batching import (  # noqa: E402
    Passes,
    cost,
    divide,
    in_step,
    micro_batches,
)
from compound.optimizers.weights.learner.samples import Sample, probe_sample  # noqa: E402
from trainings.learners import drawn  # noqa: E402

PROMPT = tuple(range(20))


def group(size: int) -> list[Sample]:
    return [
        Sample("x", "e", "x", 0, TokenRecord(PROMPT, tuple(range(n, n + 5)), (), "stop"), 0.0)
        for n in range(size)
    ]


def test_the_last_token_is_not_processed_and_a_packed_prompt_once() -> None:
    assert cost(group(4)) == 20 + 4 * 4
    assert cost(group(4), share=False) == 4 * 24


def test_micro_batches_count_every_prompt_where_prompts_are_not_shared() -> None:
    some = group(8)  # 192 tokens, or 52
    assert len(micro_batches(some, 100)) == 1
    assert len(micro_batches(some, 100, share=False)) == 2  # four samples of 24 tokens each


def test_packed_micro_batches_end_where_samples_have_least_in_common() -> None:
    """Two groups of four fit into 82 tokens but for one sample, which would read its prompt again."""
    other = [replace(s, tokens=replace(s.tokens, prompt=PROMPT[::-1])) for s in group(4)]
    some = [*group(4), *other]
    assert cost(some) == 2 * 36
    assert sorted(map(len, micro_batches(some, 71))) == [4, 4]
    assert sorted(map(len, micro_batches(group(8), 40))) == [3, 5]


@pytest.mark.parametrize("unshared", ["", "other layers"])
def test_the_trainer_runs_the_layers_once(
    toy_model: Path, monkeypatch: pytest.MonkeyPatch, unshared: str
) -> None:
    adapters = Adapters(str(toy_model), {"x": LoRA(rank=2)}, dtype="float32")
    adapters.unshared, runs, decoder = unshared, list[Any](), forward_module._decoder

    def counted(model: Any) -> Any:
        runs.append(model)
        return decoder(model)

    monkeypatch.setattr(forward_module, "_decoder", counted)
    passes = Passes(adapters, {"x": "x"}, 4096, 1.0, constrained=False, in_step=False)
    with adapters.using("x") as model:
        for batch, _ in passes.share(group(4)):
            passes.run(model, batch, temperature=1.0)
    assert len(runs) == 1


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


@pytest.mark.parametrize(("groups", "limit"), [(60, 64), (8, 4096)])
def test_micro_batches_are_those_of_one_process_or_smaller_and_balanced(
    groups: int, limit: int
) -> None:
    samples = drawn(("x",), groups=groups)
    shares, one = divide(samples, limit, 4), micro_batches(samples, limit)
    assert (ids([batch for own in shares for batch in own]) == ids(one)) == (len(one) > 1)
    loads = [sum(map(cost, own)) for own in shares]
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
