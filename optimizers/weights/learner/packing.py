"""Rows of packed sequences, in which tokens that several sequences begin with occur once.

The sequences form trees, whose branches stand one after the other in the row. A token attends to
the tokens before it in its own sequence: those of its branch, and of the branches that lead there.
On a CPU, attention is computed for one branch at a time, and for several short ones together. On a
GPU, where each call costs time, PyTorch's attention for sequences of variable length computes all
branches at once; the keys and values before each branch are copied for it.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from transformers import PreTrainedModel

    States = Sequence[Tensor]  # queries, keys and values, (1, heads, tokens, width)

Tokens = tuple[int, ...]
MIN_SHARED = 16  # minimum number of tokens that sequences share
SUFFIX = "_packed"  # of the names under which transformers knows the attention of packed rows


class Forest:
    """Trees of sequences in lexicographic order, of which none is a prefix of another.

    >>> rows = [(*range(20), 1, 2), (*range(20), 3), (7, 8)]
    >>> list(Forest(rows).branches(0, 3))
    [(0, 2, 0, 20), (0, 1, 20, 22), (1, 2, 20, 21), (2, 3, 0, 2)]
    """

    def __init__(self, rows: Sequence[Tokens]) -> None:
        from compound.engines.local.prefill import common_prefix

        self.lengths = [len(row) for row in rows]
        self.common = [0, *map(common_prefix, rows, rows[1:])]  # with the sequence before

    def branches(self, first: int, end: int, start: int = 0) -> Iterator[tuple[int, int, int, int]]:
        """Yield each branch of some sequences: the first of its sequences, their end, its place in them."""
        for after in range(first + 1, end + 1):
            if after == end or self.common[after] < start + MIN_SHARED:
                stop = min(self.common[first + 1 : after], default=self.lengths[first])
                yield first, after, start, stop
                if after - first > 1:
                    yield from self.branches(first, after, stop)
                first = after

    def size(self, first: int, end: int) -> int:
        """Return the number of tokens of some sequences in a packed row."""
        return sum(stop - start for _, _, start, stop in self.branches(first, end))


class Pack:
    """A row of packed sequences.

    Attributes:
        ids: the tokens, (tokens,).
        places: the place of each token in its sequences, (tokens,).
        indices: of the tokens of each sequence in the row.
        sizes: of the blocks whose attention is computed at once: branches, or consecutive last
            branches of sequences that begin with the same branches, with at most as many tokens.
        before: the blocks before each.
    """

    def __init__(self, rows: Sequence[Tokens], device: torch.device) -> None:
        import torch

        ids: list[int] = []
        places: list[int] = []
        paths: list[list[int]] = [[] for _ in rows]
        read: list[int] = []  # the tokens of each branch and before it
        ends: list[tuple[int, int]] = [(0, 0)]  # of the branches in the row, and among these
        self.sizes: list[int] = []
        self.before: list[list[int]] = []
        leads: dict[int, int] = {}  # blocks before the current one, by their end in its sequences
        joinable = -1  # the start of the branches of the last block, if another may join it
        for first, end, start, stop in Forest(rows).branches(0, len(rows)):
            for row in range(first, end):
                paths[row] += range(len(ids), len(ids) + stop - start)
            ids += rows[first][start:stop]
            places += range(start, stop)
            read += paths[first]
            ends.append((len(ids), len(read)))
            if joinable == start and end - first == 1 and self.sizes[-1] + stop - start <= start:
                self.sizes[-1] += stop - start
                continue
            leads = {place: block for place, block in leads.items() if place <= start}
            self.before.append(list(leads.values()))
            leads[stop] = len(self.sizes)
            self.sizes.append(stop - start)
            joinable = start if start and end - first == 1 else -1
        self.ids, self.places = (torch.tensor(each, device=device) for each in (ids, places))
        self.indices = [torch.tensor(path) for path in paths]
        self.read, self.ends = (torch.tensor(each, device=device).int() for each in (read, ends))
        self.longest = [max(map(operator.sub, each[1:], each)) for each in zip(*ends, strict=True)]
        self._masks: dict[int | None, list[Tensor | None]] = {}

    def masks(self, window: int | None) -> list[Tensor | None]:
        """Return which tokens each block attends to; ``None`` if each token to all before it."""
        import torch

        if window not in self._masks:
            blocks, found = torch.arange(len(self.ids)).split(self.sizes), []
            for own, before in zip(blocks, self.before, strict=True):
                keys, most = torch.cat([*(blocks[n] for n in before), own]), window or len(self.ids)
                gap = self.places[own][:, None] - self.places[keys]
                # in another branch of the block, the gap in the row is larger
                mask = ((keys < own[0]) | (own[:, None] - keys == gap)) & (gap >= 0) & (gap < most)
                found.append(mask if before or len(own) > most else None)
            self._masks[window] = found
        return self._masks[window]


def use_packed_attention(model: PreTrainedModel) -> None:
    """Make a model accept packed rows, by an argument ``pack`` of its forward pass."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    from compound.engines.local.kernels import OTHER_TERMS

    name = model.config._attn_implementation
    if name.endswith(SUFFIX):
        return
    unpacked = ALL_ATTENTION_FUNCTIONS[name]

    def attend(module: object, *states: Any, pack: Pack | None = None, **options: Any) -> Any:  # noqa: ANN401
        if pack is None:
            return unpacked(module, *states, **options)
        if options.get("dropout") or any(options.get(term) is not None for term in OTHER_TERMS):
            raise ValueError("attention with dropout or other terms")
        how = by_blocks if states[0].device.type == "cpu" else by_length
        return how(states[:3], pack, options.get("sliding_window"), options.get("scaling")), None

    ALL_ATTENTION_FUNCTIONS.register(name + SUFFIX, attend)
    ALL_MASK_ATTENTION_FUNCTIONS.register(name + SUFFIX, ALL_MASK_ATTENTION_FUNCTIONS[name])
    model.set_attn_implementation(name + SUFFIX)


def by_blocks(states: States, pack: Pack, window: int | None, scaling: float | None) -> Tensor:
    """Return the attention of queries, keys and values, (1, tokens, heads, width), block by block."""
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    queries, *others = (each.split(pack.sizes, 2) for each in states)
    results = []
    for own, (before, mask) in enumerate(zip(pack.before, pack.masks(window), strict=True)):
        read = [*before, own]
        k, v = (torch.cat([x[n] for n in read], 2) if before else x[own] for x in others)
        how: Any = {"attn_mask": mask, "is_causal": mask is None, "scale": scaling}
        results.append(scaled_dot_product_attention(queries[own], k, v, enable_gqa=True, **how))
    return torch.cat(results, 2).transpose(1, 2)


def by_length(states: States, pack: Pack, window: int | None, scaling: float | None) -> Tensor:
    """Return the attention of a packed row like `by_blocks`, in one call for all branches."""
    from torch.nn.attention.varlen import varlen_attn

    query, *others = (each[0].transpose(0, 1) for each in states)
    if len(pack.read) > len(query):  # some sequences share tokens
        others = [each.index_select(0, pack.read) for each in others]
    visible = (-1 if window is None else window - 1, 0)
    how = {"scale": scaling, "window_size": visible, "enable_gqa": True}
    result: Tensor = varlen_attn(query, *others, *pack.ends.T.contiguous(), *pack.longest, **how)
    return result[None]
