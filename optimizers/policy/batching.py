"""Which samples go through the model together, and which make up an update."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from compound.optimizers.policy.samples import Group, Sample
from compound.streams import generator


def size(sample: Sample) -> int:
    """Return the tokens of prompt and answer."""
    return len(sample.tokens.prompt) + sample.length


def micro_batches(samples: Sequence[Sample], most: int) -> list[list[Sample]]:
    """Cut samples into batches of at most ``most`` tokens, padding included; a longer one goes alone.

    Samples of one prompt stay together, since a prompt they share can be read once.
    """
    order = sorted(samples, key=lambda s: (len(s.tokens.prompt), s.tokens.prompt, s.length))
    batches: list[list[Sample]] = []
    for sample in order:
        if batches:
            widest = max(size(sample), *(size(other) for other in batches[-1]))
            if widest * (len(batches[-1]) + 1) <= most:
                batches[-1].append(sample)
                continue
        batches.append([sample])
    return batches


def parts(samples: Sequence[Sample], count: int, *seed: int | str) -> list[list[Sample]]:
    """Shuffle groups and deal them into parts of about equal size; a group is never torn apart.

    >>> from compound.contracts import TokenRecord
    >>> record = TokenRecord((1,), (2,), (-0.5,), "stop")
    >>> some = [Sample("a", "e", "a", 0, record, 1.0, group=(i // 2,)) for i in range(6)]
    >>> [len(part) for part in parts(some, 2, 0)]
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
