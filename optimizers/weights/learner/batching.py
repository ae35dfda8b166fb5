"""Divide samples into micro-batches for the model and minibatches for updates."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence

from compound.execution.rng import generator
from compound.optimizers.weights.learner import forward
from compound.optimizers.weights.learner.samples import Group, Sample


def size(sample: Sample) -> int:
    """Return the tokens of prompt and answer."""
    return len(sample.tokens.prompt) + sample.length


def micro_batches(samples: Sequence[Sample], most: int, *, once: bool = True) -> list[list[Sample]]:
    """Cut samples into batches of at most ``most`` tokens, padding included; a longer one goes alone.

    Samples of one prompt stay together as far as they fit. Where reading their prompt once is worth it, its
    tokens count once.

    Args:
        samples: in any order.
        most: how many tokens may go through the model at once.
        once: whether the model can read a prompt once for all of its samples.
    """
    order = sorted(samples, key=lambda s: (len(s.tokens.prompt), s.tokens.prompt, s.length))
    if not once:
        return _cut([[sample] for sample in order], most, padded_size)
    found: list[list[Sample]] = []
    rest: list[Sample] = []
    groups = [list(own) for _, own in itertools.groupby(order, key=lambda s: s.tokens.prompt)]
    for batch in _cut(groups, most, shared_size):
        if forward.saving(batch) <= forward.WORTH:
            found.append(batch)
        else:  # `forward` will read every prompt
            rest += batch
    return found + _cut([[sample] for sample in rest], most, padded_size)


def padded_size(batch: Sequence[Sample]) -> int:
    """Return the tokens that go through the model where every prompt is read, padding included."""
    return len(batch) * max(map(size, batch))


def shared_size(batch: Sequence[Sample]) -> int:
    """Return the tokens that go through the model where each prompt is read once, padding included."""
    prompts = {sample.tokens.prompt for sample in batch}
    return len(prompts) * max(map(len, prompts)) + len(batch) * max(sample.length for sample in batch)


def _cut(
    groups: Sequence[list[Sample]], most: int, tokens: Callable[[Sequence[Sample]], int]
) -> list[list[Sample]]:
    """Fill batches with whole groups; a group that does not fit into one alone is cut."""
    batches: list[list[Sample]] = []
    for group in groups:
        units = [group] if tokens(group) <= most else [[sample] for sample in group]
        for number, unit in enumerate(units):
            begins = number == 0 and len(units) > 1  # a group that is cut shares its batches with no other
            if batches and not begins and tokens([*batches[-1], *unit]) <= most:
                batches[-1] += unit
            else:
                batches.append(list(unit))
    return batches


def minibatches(samples: Sequence[Sample], count: int, *seed: int | str) -> list[list[Sample]]:
    """Shuffle groups and deal them into parts of about equal size; a group is never torn apart.

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
    """Return the samples of each adapter, adapters in order of their names."""
    found: dict[str, list[Sample]] = {}
    for sample in samples:
        found.setdefault(adapter_of[sample.component], []).append(sample)
    return dict(sorted(found.items()))
