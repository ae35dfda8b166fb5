"""Noise of sampling: bit-exact on the CPU, drawn on the device elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from compound.engines.local.decoding import (  # noqa: E402
    SampleTokens,
    SamplingRow,
    device_noise,
)

SIZE = 6
Noise = Callable[[Sequence[SamplingRow], int, Any], Any]


def step(rows: Sequence[SamplingRow], logits: Any) -> list[int]:
    """Sample one token per row, and return the last tokens."""
    SampleTokens(rows, lambda row: "length" if len(row.sampled) >= row.max_tokens else None)(
        torch.zeros(len(rows), 1), logits.clone()
    )
    return [row.sampled[-1] for row in rows]


def row(seed: int, tokens: int = 8, temperature: float = 1.0) -> SamplingRow:
    return SamplingRow((1,), tokens, temperature, seed=seed, want_logprobs=True)


def test_existing_seeds_give_the_same_tokens_on_the_cpu() -> None:
    """The expected tokens are computed with numpy alone: argmax of logits plus Gumbel noise of Philox."""
    logits = torch.linspace(-1, 1, 3 * SIZE).reshape(3, SIZE)
    rows = [row(seed) for seed in (0, 7, 2**64 - 1)]
    streams = [np.random.Generator(np.random.Philox(r.seed)) for r in rows]
    for _ in range(4):
        expected = [
            int(np.argmax(line - np.log(stream.standard_exponential(SIZE, dtype=np.float32))))
            for line, stream in zip(logits.numpy(), streams, strict=True)
        ]
        assert step(rows, logits) == expected


def test_noise_of_a_device_depends_on_the_row_alone() -> None:
    cpu = torch.device("cpu")
    together, alone = [row(3), row(4)], row(4)
    for _ in range(3):  # the stream goes on from token to token
        noise = device_noise(together, SIZE, cpu)
        assert torch.equal(noise[1], device_noise([alone], SIZE, cpu)[0])
        assert not torch.equal(noise[0], noise[1])


def test_noise_of_a_device_leaves_the_global_generator_alone() -> None:
    before = torch.get_rng_state()
    device_noise([row(2**64 - 1), row(0)], SIZE, torch.device("cpu"))
    assert torch.equal(torch.get_rng_state(), before)
