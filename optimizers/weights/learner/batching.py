"""Divide samples into minibatches for updates, micro-batches for forward passes, and shares of processes."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from compound.execution.rng import generator
from compound.optimizers.weights.learner import forward
from compound.optimizers.weights.learner.adapters import FrozenModel
from compound.optimizers.weights.learner.forward import sequences
from compound.optimizers.weights.learner.packing import Forest
from compound.optimizers.weights.learner.samples import Group, Sample
from compound.optimizers.weights.learner.updates import all_reduce, rank_and_world_size

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

Batch = list[Sample]
# micro-batches per process to try if those of `max_tokens` are too few to balance
FINER = (1, 2, 4)
# most tokens of a process, relative to the mean, if micro-batches need not be smaller
TOLERANCE = 1.1


def micro_batches(samples: Sequence[Sample], max_tokens: int, *, share: bool = True) -> list[Batch]:
    """Divide samples into micro-batches in which the model processes at most ``max_tokens`` tokens.

    A longer sample gets a micro-batch of its own. Turns of a conversation stay together. If equal
    beginnings are processed once, samples are divided where they have least in common; otherwise
    those of similar length get together.
    """
    found = sequences(samples)
    rows = list(found) if share else sorted(found, key=len)
    forest = Forest(rows)

    def size(first: int, end: int) -> int:
        return forest.size(first, end) if share else (end - first) * len(rows[end - 1])

    batches, first = [], 0
    while first < len(rows):
        ends = range(first + 1, len(rows) + 1)
        fitting = bisect.bisect_right(ends, max_tokens, key=partial(size, first))
        end = ends[max(0, fitting - 1)]
        if share and end < len(rows):
            end = min(range(end, (first + end) // 2, -1), key=forest.common.__getitem__)
        batches.append([sample for row in rows[first:end] for sample in found[row]])
        first = end
    return batches


def minibatches(samples: Sequence[Sample], count: int, *seed: int | str) -> list[list[Sample]]:
    """Shuffle groups and distribute them over parts of about equal size, without dividing any group."""
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


# -- shares of several processes -----------------------------------------------------------------


def divide(
    samples: Sequence[Sample], max_tokens: int, processes: int, *, share: bool = True
) -> list[list[Batch]]:
    """Return the micro-batches of each process.

    They are those of one process, dealt so that every process gets about as many tokens. Only if
    they are too few or too unequal for that, they are made smaller.
    """
    whole_batches = micro_batches(samples, max_tokens, share=share)
    if processes == 1 or not whole_batches:
        return [whole_batches, *([] for _ in range(processes - 1))]
    total = sum(cost(batch, share) for batch in whole_batches)
    finer = [-(-total // (number * processes)) for number in FINER]
    limits = [max_tokens, *(limit for limit in finer if limit < max_tokens)]
    dealt = [_deal(micro_batches(samples, n, share=share), processes, share) for n in limits]

    def excess(dealing: tuple[list[list[Batch]], list[int]]) -> int:
        most, tokens = max(dealing[1]), sum(dealing[1])
        return most if most * processes > TOLERANCE * tokens else 0

    return min(dealt, key=excess)[0]


def cost(batch: Sequence[Sample], share: bool = True) -> int:
    """Return the tokens that a forward pass over a micro-batch processes, padding included."""
    rows = list(sequences(batch))
    return Forest(rows).size(0, len(rows)) if share else len(rows) * max(map(len, rows))


def _deal(
    batches: Sequence[Batch], processes: int, share: bool
) -> tuple[list[list[Batch]], list[int]]:
    """Give each micro-batch, the largest first, to the process with the fewest tokens; also return these."""
    costs = [cost(batch, share) for batch in batches]
    loads = [0] * processes
    taken: list[list[int]] = [[] for _ in range(processes)]
    for number in sorted(range(len(batches)), key=lambda n: (-costs[n], n)):
        least = loads.index(min(loads))
        loads[least] += costs[number]
        taken[least].append(number)
    return [[batches[number] for number in sorted(own)] for own in taken], loads


def in_step(shares: Sequence[Sequence[Batch]], rank: int) -> Iterator[tuple[Batch, bool]]:
    """Yield the micro-batches of one process such that all processes make as many passes.

    Processes that divide the base model gather each layer together. A process without a micro-batch
    therefore repeats a short sample of another one, which does not count.
    """
    for turn in range(max(map(len, shares), default=0)):
        if turn < len(shares[rank]):
            yield shares[rank][turn], True
        else:
            others = (s for own in shares if turn < len(own) for s in own[turn])
            yield [min(others, key=lambda sample: sample.size)], False


@dataclass(frozen=True)
class Passes:
    """Runs the models of a trainer over samples."""

    adapters: FrozenModel
    adapter_of: Mapping[str, str]
    micro_tokens: int
    temperature: float  # that the samples were drawn at
    constrained: bool  # distributions of constrained answers are those of their sampler
    in_step: bool  # all processes run equally many passes, since they share the base model

    def share(self, samples: Sequence[Sample]) -> Iterator[tuple[Batch, bool]]:
        """Yield this process's micro-batches of the samples of one adapter, and whether each counts."""
        rank, processes = rank_and_world_size()
        packed = not self.adapters.unshared
        shares = divide(samples, self.micro_tokens, processes, share=packed)
        if self.in_step:
            yield from in_step(shares, rank)
        else:
            yield from ((batch, True) for batch in shares[rank])

    def run(
        self, model: PreTrainedModel, batch: Batch, *, temperature: float, **how: bool
    ) -> forward.ForwardPass:
        """Run a model over a micro-batch, packed if the model allows it."""
        constrained = self.constrained and any(sample.tokens.constraint for sample in batch)
        return forward.forward(
            model,
            batch,
            packed=not self.adapters.unshared,
            temperature=temperature,
            constraints=self.adapters.constraints if constrained else None,
            **how,
        )

    def logps(self, samples: Sequence[Sample], *, base: bool) -> dict[int, Tensor]:
        """Return the log-probabilities of sampled tokens, by ``id`` of the sample."""
        table = self.table(samples, lambda ran: ran.logps, base=base)
        return {
            id(sample): row[: sample.length] for sample, row in zip(samples, table, strict=True)
        }

    def table(
        self,
        samples: Sequence[Sample],
        row: Callable[[forward.ForwardPass], Tensor],
        *,
        base: bool = False,
        logps: bool = True,
    ) -> Tensor:
        """Return one number per sampled token, (samples, longest answer), on the device.

        Each process computes its share of the micro-batches. The rows are summed over the
        processes; rows of other processes are 0, so the sum is exact.
        """
        import torch

        place = {id(sample): number for number, sample in enumerate(samples)}
        longest = max((sample.length for sample in samples), default=0)
        table = torch.zeros((len(samples), longest), device=self.adapters.device)
        if not samples:
            return table
        for name, own in by_adapter(samples, self.adapter_of).items():
            with self.adapters.using(None if base else name) as model:
                for batch, counts in self.share(own):
                    ran = self.run(
                        model, batch, temperature=self.temperature, entropy=False, logps=logps
                    )
                    if counts:
                        numbers = row(ran) * ran.mask
                        table[[place[id(s)] for s in batch], : numbers.shape[1]] = numbers
        all_reduce(table)
        return table


def per_token(samples: Sequence[Sample], table: Tensor) -> dict[int, tuple[float, ...]]:
    """Return the numbers of each sample's tokens, by its ``id``; reads them from the device at once."""
    return {id(s): tuple(row[: s.length]) for s, row in zip(samples, table.tolist(), strict=True)}
