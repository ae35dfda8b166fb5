"""The turns of a conversation as one token sequence: equal log-probabilities and gradients."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
pytest.importorskip("peft")

from compound.core.engine import TokenRecord  # noqa: E402
from compound.graph.space import LoRA  # noqa: E402
from compound.optimizers.weights.learner import forward as forward_module  # noqa: E402
from compound.optimizers.weights.learner.adapters import Adapters  # noqa: E402
from compound.optimizers.weights.learner.batching import micro_batches  # noqa: E402
from compound.optimizers.weights.learner.forward import (  # noqa: E402  # noqa: E402
    conversations,
    forward,
    whole,
)
from compound.optimizers.weights.learner.samples import Sample  # noqa: E402

CLOSE = 1e-4  # of gradients in float32, relative to the largest


def sample(prompt: Sequence[int], answer: Sequence[int], **given: Any) -> Sample:
    record = TokenRecord(tuple(prompt), tuple(answer), (-1.0,) * len(answer), "stop")
    return Sample("x", "e", "x", 0, record, 0.0, **given).with_advantage(1.0)


def talks(count: int, turns: int, rng: random.Random) -> list[Sample]:
    found: list[Sample] = []
    first = [rng.randrange(24) for _ in range(5)]
    for talk in range(count):
        said = list(first)
        for turn in range(1 + (talk + turns) % turns):
            answer = [rng.randrange(24) for _ in range(1 + rng.randrange(4))]
            found.append(sample(said, answer, rollout=talk))
            said += [*answer, *(rng.randrange(24) for _ in range(3 + turn))]
    rng.shuffle(found)
    return found


@pytest.fixture(scope="module")
def adapters(toy_model: Path) -> Adapters:
    found = Adapters(str(toy_model), {"x": LoRA(rank=4)}, dtype="float32")
    with torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(1)
        for _, tensor in found.parameters("x"):
            tensor.normal_(std=0.2)
    return found


def gradients(adapters: Adapters, samples: Sequence[Sample]) -> tuple[Any, dict[str, Any]]:
    with adapters.using("x") as model:
        ran = forward(model, samples, shared=False)
        weights = torch.arange(1, len(samples) + 1)[:, None] / len(samples)
        (ran.logps * weights).sum().backward()
    found = {name: tensor.grad.clone() for name, tensor in adapters.parameters("x")}
    for _, tensor in adapters.parameters("x"):
        tensor.grad = None
    return ran, found


def test_merged_turns_have_the_log_probabilities_and_gradients_of_separate_ones(
    adapters: Adapters, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples = talks(4, 3, random.Random(0))
    assert len(conversations(samples)) == 4 < len(samples)
    merged, ours = gradients(adapters, samples)
    monkeypatch.setattr(forward_module, "conversations", lambda given: [[each] for each in given])
    separate, theirs = gradients(adapters, samples)
    torch.testing.assert_close(merged.logps, separate.logps, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(merged.entropies, separate.entropies, rtol=1e-4, atol=1e-5)
    largest = max(float(tensor.abs().max()) for tensor in theirs.values())
    for name, tensor in theirs.items():
        assert float((ours[name] - tensor).abs().max()) <= CLOSE * largest


def test_only_sampled_tokens_are_targets(adapters: Adapters) -> None:
    """The environment's tokens between two turns contribute nothing: there is a row for each answer only."""
    first, second = sample([1, 2], [3]), sample([1, 2, 3, 9, 9, 9], [4, 5])
    with adapters.using("x") as model:
        ran = forward(model, [first, second], shared=False)
    assert ran.mask.tolist() == [[1.0, 0.0], [1.0, 1.0]]


@given(st.integers(0, 10_000), st.integers(1, 6), st.integers(1, 5))
@settings(deadline=None, max_examples=50)
def test_conversations_divide_the_samples_into_chains_of_prefixes(
    seed: int, count: int, turns: int
) -> None:
    samples = talks(count, turns, random.Random(seed))
    chains = conversations(samples)
    assert sorted(id(s) for chain in chains for s in chain) == sorted(map(id, samples))
    for chain in chains:
        for one, other in itertools.pairwise(chain):
            end = (*one.tokens.prompt, *one.tokens.sampled)
            assert other.tokens.prompt[: len(end)] == end
        assert len(whole(chain)) == max(sample.size for sample in chain) - 1


def test_equal_turns_of_several_rollouts_each_continue_once() -> None:
    twice = [sample([1], [2], rollout=r) for r in range(2)] + [
        sample([1, 2, 7], [r], rollout=r) for r in range(2)
    ]
    assert sorted(len(chain) for chain in conversations(twice)) == [2, 2]


def test_a_turn_whose_tokens_do_not_continue_is_separate() -> None:
    retokenized = [sample([1, 2], [3, 4]), sample([1, 2, 5, 9], [6])]
    assert len(conversations(retokenized)) == 2


@given(st.integers(0, 10_000), st.sampled_from([16, 40, 200]), st.booleans())
@settings(deadline=None, max_examples=50)
def test_micro_batches_keep_conversations_together(seed: int, most: int, shared: bool) -> None:
    samples = talks(5, 3, random.Random(seed))
    batches = micro_batches(samples, most, share=shared)
    assert sorted(id(s) for batch in batches for s in batch) == sorted(map(id, samples))
    for chain in conversations(samples):
        if len(chain) > 1:
            assert sum(any(each is s for s in batch for each in chain) for batch in batches) == 1
    for batch in batches:
        chains = conversations(batch)
        if any(len(chain) > 1 for chain in chains):
            assert len(chains) == 1 or len(chains) * max(sample.size for sample in batch) <= most
