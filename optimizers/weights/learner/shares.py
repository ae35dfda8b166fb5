"""Division of an update's samples among processes: micro-batches of about equal tokens for each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from compound.optimizers.weights.learner.batching import micro_batches, padded_size, shared_size, size
from compound.optimizers.weights.learner.conversations import conversations, whole
from compound.optimizers.weights.learner.forward import saves_enough
from compound.optimizers.weights.learner.samples import Sample

Batch = list[Sample]
FINER = (1, 2, 4)  # micro-batches per process to try if those of `max_tokens` are too few to balance
TOLERANCE = 1.1  # most tokens of a process, relative to the mean, if micro-batches need not be smaller


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
    samples: Sequence[Sample], max_tokens: int, processes: int, *, share_prompts: bool = True
) -> list[list[Batch]]:
    """Return the micro-batches of each process.

    They are those of one process, dealt so that every process gets about as many tokens. Only if they are too
    few or too unequal for that, they are made smaller.

    Args:
        samples: the samples of one adapter.
        max_tokens: the maximum number of tokens in one forward pass.
        processes: the number of processes.
        share_prompts: whether the model can process equal prompts once.
    """
    whole_batches = micro_batches(samples, max_tokens, share_prompts=share_prompts)
    if processes == 1 or not whole_batches:
        return [whole_batches, *([] for _ in range(processes - 1))]
    total = sum(cost(batch, share_prompts) for batch in whole_batches)
    finer = [-(-total // (number * processes)) for number in FINER]
    limits = [max_tokens, *(limit for limit in finer if limit < max_tokens)]
    divisions = [micro_batches(samples, limit, share_prompts=share_prompts) for limit in limits]
    dealt = [_deal(batches, processes, share_prompts) for batches in divisions]
    loads = [[sum(cost(batch, share_prompts) for batch in own) for own in shares] for shares in dealt]
    balanced = (
        shares
        for shares, tokens in zip(dealt, loads, strict=True)
        if max(tokens) * processes <= TOLERANCE * sum(tokens)
    )
    return next(balanced, dealt[min(range(len(dealt)), key=lambda n: max(loads[n]))])


def cost(batch: Sequence[Sample], share_prompts: bool = True) -> int:
    """Return the tokens that a forward pass over a micro-batch processes, padding included."""
    if share_prompts and saves_enough(batch):
        return shared_size(batch)
    rows = [len(whole(chain)) for chain in conversations(batch)]
    return min(padded_size(batch), len(rows) * max(rows))


def _deal(batches: Sequence[Batch], processes: int, share_prompts: bool) -> list[list[Batch]]:
    """Give each micro-batch, the largest first, to the process with the fewest tokens."""
    costs = [cost(batch, share_prompts) for batch in batches]
    loads, taken = [0] * processes, [[] for _ in range(processes)]  # type: tuple[list[int], list[list[int]]]
    for number in sorted(range(len(batches)), key=lambda n: (-costs[n], n)):
        least = loads.index(min(loads))
        loads[least] += costs[number]
        taken[least].append(number)
    return [[batches[number] for number in sorted(own)] for own in taken]


def in_step(shares: Sequence[Sequence[Batch]], rank: int, *, share_prompts: bool = True) -> Iterator[Pass]:
    """Yield the passes of one process such that all processes run the same layers in the same order.

    Processes that share the weights of the base model gather each layer together. All therefore make the same
    number of passes: first those that run the layers twice, for the prompts and for the answers, then the
    others. A process without a micro-batch repeats a short sample of another one, which does not count.

    Args:
        shares: the micro-batches of each process.
        rank: the process.
        share_prompts: whether the model can process equal prompts once.
    """
    for twice in (True, False):
        kind = [[batch for batch in own if _runs_twice(batch, share_prompts) is twice] for own in shares]
        for turn in range(max(map(len, kind), default=0)):
            if turn < len(kind[rank]):
                yield Pass(kind[rank][turn])
            else:
                others = (s for own in kind if turn < len(own) for s in own[turn])
                yield Pass([min((s for s in others if s.length > twice), key=size)], twice, counts=False)


def _runs_twice(batch: Batch, share_prompts: bool) -> bool:
    """Return whether a pass processes prompts first, and then the answers after their first token."""
    return share_prompts and saves_enough(batch) and max(sample.length for sample in batch) > 1
