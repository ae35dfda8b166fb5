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
from compound.optimizers.weights.learner.adapters import Adapters  # noqa: E402
from compound.optimizers.weights.learner.batching import cost, micro_batches  # noqa: E402
from compound.optimizers.weights.learner.forward import forward, sequences  # noqa: E402
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


def gradients(
    adapters: Adapters, samples: Sequence[Sample], packed: bool, together: bool
) -> tuple[Any, dict[str, Any]]:
    found = []
    with adapters.using("x") as model:
        for number, batch in enumerate([samples] if together else [[each] for each in samples]):
            ran = forward(model, batch, packed=packed)
            weights = torch.arange(number + 1, number + len(batch) + 1)[:, None] / len(samples)
            (ran.logps * weights).sum().backward()
            found += [
                torch.stack([logps[: s.length], entropies[: s.length]])
                for s, logps, entropies in zip(batch, ran.logps, ran.entropies, strict=True)
            ]
    named = {name: tensor.grad.clone() for name, tensor in adapters.parameters("x")}
    for _, tensor in adapters.parameters("x"):
        tensor.grad = None
    return torch.cat(found, 1), named


@pytest.mark.parametrize("packed", [True, False])
def test_merged_turns_have_the_log_probabilities_and_gradients_of_separate_ones(
    adapters: Adapters, packed: bool
) -> None:
    samples = talks(4, 3, random.Random(0))
    assert len(sequences(samples)) < len(samples)
    merged, ours = gradients(adapters, samples, packed, True)
    separate, theirs = gradients(adapters, samples, False, False)
    torch.testing.assert_close(merged, separate, rtol=1e-4, atol=1e-5)
    largest = max(float(tensor.abs().max()) for tensor in theirs.values())
    for name, tensor in theirs.items():
        assert float((ours[name] - tensor).abs().max()) <= CLOSE * largest


def test_only_sampled_tokens_are_targets(adapters: Adapters) -> None:
    """The environment's tokens between two turns contribute nothing: there is a row for each answer only."""
    first, second = sample([1, 2], [3]), sample([1, 2, 3, 9, 9, 9], [4, 5])
    with adapters.using("x") as model:
        ran = forward(model, [first, second])
    assert ran.mask.tolist() == [[1.0, 0.0], [1.0, 1.0]]


@given(st.integers(0, 10_000), st.integers(1, 6), st.integers(1, 5))
@settings(deadline=None, max_examples=50)
def test_a_sequence_contains_the_samples_that_it_begins_with(
    seed: int, count: int, turns: int
) -> None:
    samples = talks(count, turns, random.Random(seed))
    found = sequences(samples)
    assert sorted(id(s) for own in found.values() for s in own) == sorted(map(id, samples))
    assert list(found) == sorted(found)
    for sequence, own in found.items():
        assert len(sequence) == max(sample.size for sample in own) - 1
        for each in own:
            read = (*each.tokens.prompt, *each.tokens.sampled[:-1])
            assert sequence[: len(read)] == read
    for one, other in itertools.pairwise(found):
        assert other[: len(one)] != one


def test_equal_turns_of_several_rollouts_are_processed_once() -> None:
    twice = [sample([1], [2], rollout=r) for r in range(2)] + [
        sample([1, 2, 7], [r, 8], rollout=r) for r in range(2)
    ]
    assert sorted(map(len, sequences(twice).values())) == [1, 3]


def test_a_turn_whose_tokens_do_not_continue_is_separate() -> None:
    retokenized = [sample([1, 2], [3, 4]), sample([1, 2, 5, 9], [6])]
    assert len(sequences(retokenized)) == 2


@given(st.integers(0, 10_000), st.sampled_from([16, 40, 200]), st.booleans())
@settings(deadline=None, max_examples=50)
def test_micro_batches_keep_conversations_together(seed: int, most: int, packed: bool) -> None:
    samples = talks(5, 3, random.Random(seed))
    batches = micro_batches(samples, most, share=packed)
    assert sorted(id(s) for batch in batches for s in batch) == sorted(map(id, samples))
    for own in sequences(samples).values():
        assert sum(any(each is s for s in batch for each in own) for batch in batches) == 1
    for batch in batches:
        assert len(sequences(batch)) == 1 or cost(batch, packed) <= most
