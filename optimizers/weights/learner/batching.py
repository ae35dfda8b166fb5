"""Divide samples into minibatches for updates, micro-batches for forward passes, and shares of processes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from compound.execution.rng import generator
from compound.optimizers.weights.learner import forward
from compound.optimizers.weights.learner.conversations import conversations, whole
from compound.optimizers.weights.learner.forward import WHERE_FEWER_TOKENS, Sharing
from compound.optimizers.weights.learner.samples import Group, Sample

Batch = list[Sample]
FINER = (1, 2, 4)  # micro-batches per process to try if those of `max_tokens` are too few to balance
TOLERANCE = 1.1  # most tokens of a process, relative to the mean, if micro-batches need not be smaller


def micro_batches(
    samples: Sequence[Sample], max_tokens: int, *, sharing: Sharing = WHERE_FEWER_TOKENS
) -> list[list[Sample]]:
    """Divide samples into micro-batches of at most ``max_tokens`` tokens, padding included.

    A longer sample gets a micro-batch of its own. The turns of a conversation stay together, and their tokens
    count once. Other samples with the same prompt stay together as far as they fit; if `forward` processes
    their prompt once, its tokens count once.

    Args:
        samples: in any order.
        max_tokens: the maximum number of tokens in one forward pass.
        sharing: when equal prompts are processed once.
    """
    chains = conversations(samples)
    long = sorted((chain for chain in chains if len(chain) > 1), key=lambda chain: chain[-1].size)
    single = [chain[0] for chain in chains if len(chain) == 1]
    return [*_merged(long, max_tokens), *_single(single, max_tokens, sharing)]


def _merged(chains: Sequence[list[Sample]], max_tokens: int) -> list[list[Sample]]:
    """Fill batches with conversations, the shortest first."""
    batches: list[list[Sample]] = []
    rows = 0
    for chain in chains:
        if batches and (rows + 1) * chain[-1].size <= max_tokens:
            batches[-1] += chain
            rows += 1
        else:
            batches.append(list(chain))
            rows = 1
    return batches


def _single(samples: Sequence[Sample], max_tokens: int, sharing: Sharing) -> list[list[Sample]]:
    """Divide samples that belong to no longer conversation."""
    order = sorted(samples, key=lambda s: (len(s.tokens.prompt), s.tokens.prompt, s.length))
    if sharing.second_pass == math.inf:
        return _cut([[sample] for sample in order], max_tokens, padded_size)
    batches: list[list[Sample]] = []
    rest: list[Sample] = []
    groups = [list(own) for _, own in itertools.groupby(order, key=lambda s: s.tokens.prompt)]
    for batch in _cut(groups, max_tokens, shared_size):
        if sharing.pays(batch):
            batches.append(batch)
        else:  # `forward` will process every prompt, so prompts count once per sample
            rest += batch
    return batches + _cut([[sample] for sample in rest], max_tokens, padded_size)


def padded_size(batch: Sequence[Sample]) -> int:
    """Return the tokens of a forward pass that processes every prompt, padding included."""
    return len(batch) * max(sample.size for sample in batch)


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


# -- shares of several processes ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Pass:
    """One forward pass of a process.

    Attributes:
        samples: the micro-batch.
        shared: whether equal prompts are processed once; by default, if that saves enough.
        counts: whether its results count; otherwise it only keeps the process in step with the others.
    """

    samples: Batch
    shared: bool | None = None
    counts: bool = True


def divide(
    samples: Sequence[Sample], max_tokens: int, processes: int, *, sharing: Sharing = WHERE_FEWER_TOKENS
) -> list[list[Batch]]:
    """Return the micro-batches of each process.

    They are those of one process, dealt so that every process gets about as many tokens. Only if they are too
    few or too unequal for that, they are made smaller.

    Args:
        samples: the samples of one adapter.
        max_tokens: the maximum number of tokens in one forward pass.
        processes: the number of processes.
        sharing: when equal prompts are processed once.
    """
    whole_batches = micro_batches(samples, max_tokens, sharing=sharing)
    if processes == 1 or not whole_batches:
        return [whole_batches, *([] for _ in range(processes - 1))]
    total = sum(cost(batch, sharing) for batch in whole_batches)
    finer = [-(-total // (number * processes)) for number in FINER]
    limits = [max_tokens, *(limit for limit in finer if limit < max_tokens)]
    divisions = [micro_batches(samples, limit, sharing=sharing) for limit in limits]
    dealt = [_deal(batches, processes, sharing) for batches in divisions]
    loads = [[sum(cost(batch, sharing) for batch in own) for own in shares] for shares in dealt]
    balanced = (
        shares
        for shares, tokens in zip(dealt, loads, strict=True)
        if max(tokens) * processes <= TOLERANCE * sum(tokens)
    )
    return next(balanced, dealt[min(range(len(dealt)), key=lambda n: max(loads[n]))])


def cost(batch: Sequence[Sample], sharing: Sharing = WHERE_FEWER_TOKENS) -> int:
    """Return the tokens that a forward pass over a micro-batch processes, padding included."""
    if forward.saves_enough(batch, sharing):
        return shared_size(batch)
    rows = [len(whole(chain)) for chain in conversations(batch)]
    return min(padded_size(batch), len(rows) * max(rows))


def _deal(batches: Sequence[Batch], processes: int, sharing: Sharing) -> list[list[Batch]]:
    """Give each micro-batch, the largest first, to the process with the fewest tokens."""
    costs = [cost(batch, sharing) for batch in batches]
    loads, taken = [0] * processes, [[] for _ in range(processes)]  # type: tuple[list[int], list[list[int]]]
    for number in sorted(range(len(batches)), key=lambda n: (-costs[n], n)):
        least = loads.index(min(loads))
        loads[least] += costs[number]
        taken[least].append(number)
    return [[batches[number] for number in sorted(own)] for own in taken]


def in_step(
    shares: Sequence[Sequence[Batch]], rank: int, *, sharing: Sharing = WHERE_FEWER_TOKENS
) -> Iterator[Pass]:
    """Yield the passes of one process such that all processes run the same layers in the same order.

    Processes that share the weights of the base model gather each layer together. All therefore make the same
    number of passes: first those that run the layers twice, for the prompts and for the answers, then the
    others. A process without a micro-batch repeats a short sample of another one, which does not count.

    Args:
        shares: the micro-batches of each process.
        rank: the process.
        sharing: when equal prompts are processed once.
    """
    for twice in (True, False):
        kind = [[batch for batch in own if _runs_twice(batch, sharing) is twice] for own in shares]
        for turn in range(max(map(len, kind), default=0)):
            if turn < len(kind[rank]):
                yield Pass(kind[rank][turn])
            else:
                others = (s for own in kind if turn < len(own) for s in own[turn])
                found = min((s for s in others if s.length > twice), key=lambda sample: sample.size)
                yield Pass([found], twice, counts=False)


def _runs_twice(batch: Batch, sharing: Sharing) -> bool:
    """Return whether a pass processes prompts first, and then the answers after their first token."""
    return forward.saves_enough(batch, sharing) and max(sample.length for sample in batch) > 1
