"""Reading prompts into one key-value cache, where a beginning that prompts share is read once.

Systems ask one model the same instruction and demonstrations with another question each time. So prompts
are grouped by common beginning, each beginning is read as a single row and repeated, and the rest of the
prompts follows in rectangles of similar length. The last few beginnings are kept for later batches. What a
model makes of a prompt depends on its adapter, so each beginning belongs to the version that has read it.

A sliding window counts padding, too: in a model that has one, nothing is padded between beginning and rest.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import pad
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from compound.components.engines.local.layers import layer_kinds
from compound.components.engines.prefilled import Prefilled

if TYPE_CHECKING:
    from transformers import PreTrainedModel


Tokens = tuple[int, ...]
Layers = list[tuple[torch.Tensor, torch.Tensor]]  # keys and values: (rows, heads, tokens, width)
Part = tuple[list[int], Layers, torch.Tensor]  # which prompts, their cache, and which of its tokens are real

WORTH = 32  # tokens that a shared beginning must have
ROOM = 64  # tokens by which a cache grows


def common(a: Sequence[int], b: Sequence[int]) -> int:
    """Return how many tokens two prompts share at their beginning.

    >>> common((1, 2, 3), (1, 2, 4, 5))
    2
    """
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def share(prompts: Sequence[Tokens], worth: int = WORTH) -> list[tuple[int, list[int]]]:
    """Group prompts by common beginning: ``(length, indices)``, so that many tokens are saved.

    Prompts are walked in lexicographic order, where the best partner is a neighbour; a group takes the
    next prompt unless that lowers ``length * (rows - 1)``, the tokens it saves. Alone, a prompt has length 0.

    >>> share([(1, 2, 3, 4), (9, 8), (1, 2, 3, 5)], worth=2)
    [(3, [0, 2]), (0, [1])]
    """
    groups: list[tuple[int, list[int]]] = []
    for i in sorted(range(len(prompts)), key=lambda i: prompts[i]):
        if groups:
            length, rows = groups[-1]
            # A prompt's last token is never shared: decoding starts from it.
            both = common(prompts[rows[-1]][:-1], prompts[i][:-1])
            both = min(both, length) if len(rows) > 1 else both
            if both >= worth and both * len(rows) >= length * (len(rows) - 1):
                groups[-1] = (both, [*rows, i])
                continue
        groups.append((0, [i]))
    return groups


class Slab(DynamicLayer):  # type: ignore[misc]  # transformers' types are not read
    """One layer's keys and values, written in place; `DynamicLayer` copies all of them at each token."""

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, length: int) -> None:
        super().__init__()
        self.dtype, self.device, self.is_initialized = keys.dtype, keys.device, True
        self._slabs = [keys, values]
        self._show(length)

    def _show(self, length: int) -> None:
        self.keys, self.values = (slab[:, :, :length] for slab in self._slabs)

    def update(  # noqa: D102
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: object, **__: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        start = self.keys.shape[-2]
        end = start + key_states.shape[-2]
        if end > self._slabs[0].shape[-2]:
            self._slabs = [pad(slab, (0, 0, 0, end - start + ROOM)) for slab in self._slabs]
        for slab, states in zip(self._slabs, (key_states, value_states), strict=True):
            slab[:, :, start:end] = states
        self._show(end)
        return self.keys, self.values

    def batch_select_indices(self, indices: torch.Tensor) -> None:  # noqa: D102
        length = self.keys.shape[-2]
        self._slabs = [slab[indices] for slab in self._slabs]
        self._show(length)


class Prefill:
    """Reads every token of some prompts but the last one, from which decoding starts.

    Args:
        model: a causal language model whose layers are attention (full or sliding).
        keep: how many tokens of beginnings are kept for later, those of all versions together.
    """

    def __init__(self, model: PreTrainedModel, keep: int) -> None:
        self._model = model
        self._windowed = "sliding_attention" in layer_kinds(model.config)
        self._keep = keep
        self._asked = self._computed = 0  # tokens of prompts so far
        self._kept: OrderedDict[tuple[str, Tokens], Layers] = OrderedDict()  # the last one used comes last

    def read(
        self, prompts: Sequence[Tokens], version: str = ""
    ) -> tuple[list[int], DynamicCache, torch.Tensor]:
        """Return the prompts' new order, their cache, and the mask of its real tokens.

        ``version`` is that of the adapter that the model computes with at the moment, ``""`` without one.
        """
        self._asked += sum(len(prompt) - 1 for prompt in prompts)
        parts: list[Part] = []
        alone: list[int] = []
        for shared, members in share(prompts):
            tokens = prompts[members[0]][:-1]
            length = shared or self._match(tokens, version)[1]
            if length:
                begin = self._beginning(tokens[:length], version)
                parts += self._rectangles(prompts, members, begin, length)
            else:
                alone += members
        parts += self._rectangles(prompts, alone, [], 0)
        if len(prompts) == 1:  # calls come one after the other: the next one may begin like this one
            self._remember(prompts[0][:-1], version, parts[0][1])
        order = [i for members, _, _ in parts for i in members]
        return order, *_merge(parts)

    def read_padded(self, prompts: Sequence[Tokens], width: int) -> tuple[DynamicCache, torch.Tensor]:
        """Read prompts as one rectangle of a given width, sharing nothing: cache and mask."""
        self._asked += sum(len(prompt) - 1 for prompt in prompts)
        return _merge([self._rectangle(prompts, list(range(len(prompts))), [], 0, width)])

    @property
    def done(self) -> Prefilled:
        """How many tokens there were to read so far, and how many of them were not computed anew."""
        return Prefilled(self._asked, self._asked - self._computed)

    def forget(self, version: str) -> None:
        """Drop the beginnings that an adapter has read."""
        for key in [key for key in self._kept if key[0] == version]:
            del self._kept[key]

    def _rectangles(
        self, prompts: Sequence[Tokens], members: list[int], begin: Layers, start: int
    ) -> Iterator[Part]:
        """Read what follows ``start`` in rectangles of similar length."""
        rest = sorted(members, key=lambda i: len(prompts[i]))
        while rest:
            shortest = len(prompts[rest[0]]) - start
            most = shortest if self._windowed and start else 1.25 * shortest + 16
            count = sum(len(prompts[i]) - start <= most for i in rest)
            width = len(prompts[rest[count - 1]]) - 1 - start
            yield self._rectangle(prompts, rest[:count], begin, start, max(width, not start))
            rest = rest[count:]

    def _rectangle(
        self, prompts: Sequence[Tokens], members: list[int], begin: Layers, start: int, width: int
    ) -> Part:
        """Read some prompts from ``start`` on, padded on the left, behind a beginning that all share."""
        suffixes = [prompts[i][start:-1] for i in members]
        self._computed += sum(map(len, suffixes))
        ids = [[0] * (width - len(suffix)) + list(suffix) for suffix in suffixes]
        real = [[1] * start + [0] * (width - len(suffix)) + [1] * len(suffix) for suffix in suffixes]
        shape = (len(members), -1, -1, -1)
        repeated = [(keys.expand(shape), values.expand(shape)) for keys, values in begin]
        mask = torch.tensor(real, device=self._model.device)
        return members, self._forward(torch.tensor(ids, dtype=torch.long), mask, repeated), mask

    def _forward(self, ids: torch.Tensor, mask: torch.Tensor, before: Layers) -> Layers:
        """Return the cache after reading ``ids`` behind ``before``; logits are not computed."""
        width = ids.shape[-1]
        if not width:
            return before
        cache = DynamicCache()
        for i, (keys, values) in enumerate(before):
            cache.update(keys, values, i)
        places = (mask.cumsum(-1) - 1).clamp(min=0)[:, -width:]
        ids = ids.to(self._model.device)
        self._model.base_model(input_ids=ids, attention_mask=mask, position_ids=places, past_key_values=cache)
        return [(layer.keys, layer.values) for layer in cache.layers]

    def _match(self, tokens: Tokens, version: str) -> tuple[Tokens, int]:
        """Return the kept beginning that shares most with ``tokens``, and how much, if worth it."""
        own = (kept for of, kept in self._kept if of == version)
        length, best = max(((common(kept, tokens), kept) for kept in own), default=(0, ()))
        return (best, length) if length >= WORTH else ((), 0)

    def _beginning(self, tokens: Tokens, version: str) -> Layers:
        """Read a beginning as a single row, from where a kept one ends."""
        best, length = self._match(tokens, version)
        before: Layers = []
        if length:
            self._kept.move_to_end((version, best))
            kept = self._kept[version, best]
            before = [(keys[:, :, :length], values[:, :, :length]) for keys, values in kept]
        if length == len(tokens):
            return before
        ids = torch.tensor([tokens[length:]])
        self._computed += len(tokens) - length
        layers = self._forward(
            ids, torch.ones(1, len(tokens), dtype=torch.long, device=self._model.device), before
        )
        self._remember(tokens, version, layers)
        return layers

    def _remember(self, tokens: Tokens, version: str, layers: Layers) -> None:
        """Keep a beginning, forgetting the ones it contains and then the ones used longest ago."""
        if len(tokens) < WORTH:
            return
        for key in [(of, kept) for of, kept in self._kept if of == version and kept == tokens[: len(kept)]]:
            del self._kept[key]
        self._kept[version, tokens] = layers
        while sum(len(kept) for _, kept in self._kept) > self._keep:
            self._kept.popitem(last=False)


def _merge(parts: Sequence[Part]) -> tuple[DynamicCache, torch.Tensor]:
    """Put parts of different lengths below one another, padded on the left, with room to grow."""
    length = max(mask.shape[1] for _, _, mask in parts)
    cache = DynamicCache()
    for i in range(len(parts[0][1])):
        sides = []
        for side in (0, 1):
            states = [layers[i][side] for _, layers, _ in parts]
            sides.append(torch.cat([pad(s, (0, 0, length - s.shape[-2], ROOM)) for s in states]))
        cache.layers.append(Slab(sides[0], sides[1], length))
    return cache, torch.cat([pad(mask, (length - mask.shape[1], 0)) for _, _, mask in parts])
