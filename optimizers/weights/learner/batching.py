"""Divide samples into minibatches for updates and micro-batches for forward passes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence

from compound.execution.rng import generator
from compound.optimizers.weights.learner import forward
from compound.optimizers.weights.learner.conversations import conversations
from compound.optimizers.weights.learner.samples import Group, Sample


def size(sample: Sample) -> int:
    """Return the number of tokens of prompt and answer."""
    return len(sample.tokens.prompt) + sample.length


def micro_batches(
    samples: Sequence[Sample], max_tokens: int, *, share_prompts: bool = True
) -> list[list[Sample]]:
    """Divide samples into micro-batches of at most ``max_tokens`` tokens, padding included.

    A longer sample gets a micro-batch of its own. The turns of a conversation stay together, and their tokens
    count once. Other samples with the same prompt stay together as far as they fit; if `forward` processes
    their prompt once, its tokens count once.

    Args:
        samples: in any order.
        max_tokens: the maximum number of tokens in one forward pass.
        share_prompts: whether the model can process equal prompts once.
    """
    chains = conversations(samples)
    long = sorted((chain for chain in chains if len(chain) > 1), key=lambda chain: size(chain[-1]))
    single = [chain[0] for chain in chains if len(chain) == 1]
    return [*_merged(long, max_tokens), *_single(single, max_tokens, share_prompts)]


def _merged(chains: Sequence[list[Sample]], max_tokens: int) -> list[list[Sample]]:
    """Fill batches with conversations, the shortest first."""
    batches: list[list[Sample]] = []
    rows = 0
    for chain in chains:
        if batches and (rows + 1) * size(chain[-1]) <= max_tokens:
            batches[-1] += chain
            rows += 1
        else:
            batches.append(list(chain))
            rows = 1
    return batches


def _single(samples: Sequence[Sample], max_tokens: int, share_prompts: bool) -> list[list[Sample]]:
    """Divide samples that belong to no longer conversation."""
    order = sorted(samples, key=lambda s: (len(s.tokens.prompt), s.tokens.prompt, s.length))
    if not share_prompts:
        return _cut([[sample] for sample in order], max_tokens, padded_size)
    batches: list[list[Sample]] = []
    rest: list[Sample] = []
    groups = [list(own) for _, own in itertools.groupby(order, key=lambda s: s.tokens.prompt)]
    for batch in _cut(groups, max_tokens, shared_size):
        if forward.shared_fraction(batch) <= forward.MAX_SHARED_FRACTION:
            batches.append(batch)
        else:  # `forward` will process every prompt, so prompts count once per sample
            rest += batch
    return batches + _cut([[sample] for sample in rest], max_tokens, padded_size)


def padded_size(batch: Sequence[Sample]) -> int:
    """Return the tokens of a forward pass that processes every prompt, padding included."""
    return len(batch) * max(map(size, batch))


def shared_size(batch: Sequence[Sample]) -> int:
    """Return the tokens of a forward pass that processes each distinct prompt once, padding included."""
    prompts = {sample.tokens.prompt for sample in batch}
    return len(prompts) * max(map(len, prompts)) + len(batch) * max(sample.length for sample in batch)


def _cut(
    groups: Sequence[list[Sample]], max_tokens: int, tokens: Callable[[Sequence[Sample]], int]
) -> list[list[Sample]]:
    """Fill batches with whole groups; divide groups that exceed a batch."""
    batches: list[list[Sample]] = []
    for group in groups:
        units = [group] if tokens(group) <= max_tokens else [[sample] for sample in group]
        for number, unit in enumerate(units):
            starts = number == 0 and len(units) > 1  # a divided group starts with a new batch
            if batches and not starts and tokens([*batches[-1], *unit]) <= max_tokens:
                batches[-1] += unit
            else:
                batches.append(list(unit))
    return batches


def minibatches(samples: Sequence[Sample], count: int, *seed: int | str) -> list[list[Sample]]:
    """Shuffle groups and distribute them over parts of about equal size, without dividing any group.

    >>> from compound.engine import TokenRecord
    >>> record = TokenRecord((1,), (2,), (-0.5,), "stop")
    >>> some = [Sample("a", "e", "a", 0, record, 1.0, group=(i // 2,)) for i in range(6)]
    >>> [len(part) for part in minibatches(some, 2, 0)]
    [4, 2]
    """
    groups: dict[Group, list[Sample]] = {}
    for number, sample in enumerate(samples):
        groups.setdefault(sample.group or ("", number), []).append(sample)
    listed = list(groups.values())
    dealt: list[list[Sample]] = [[] for _ in range(min(count, len(listed)))]
    for i in generator(*seed, "parts").permutation(len(listed)):
        min(dealt, key=len).extend(listed[i])
    return dealt


def by_adapter(samples: Sequence[Sample], adapter_of: Mapping[str, str]) -> dict[str, list[Sample]]:
    """Return the samples of each adapter, sorted by adapter name."""
    groups: dict[str, list[Sample]] = {}
    for sample in samples:
        groups.setdefault(adapter_of[sample.component], []).append(sample)
    return dict(sorted(groups.items()))
