"""Prefill of prompts into one key-value cache, in which shared prefixes are computed once.

The calls of a component share their instruction and demonstrations, and differ in their inputs.
Prompts are therefore grouped by common prefix, each prefix is computed as a single row and
repeated, and the suffixes follow in rectangles of similar length; on the CPU, long ones follow
alone. Recent prefixes are cached for later batches. Keys and values depend on the adapter, so each
cached prefix belongs to the adapter version that computed it.

A sliding window also counts padding, so models with one get no padding between prefix and suffix.
"""

from __future__ import annotations

import bisect
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import pad
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from compound.core.engine import Prefilled
from compound.engines.local.loading import layer_kinds

if TYPE_CHECKING:
    from transformers import PreTrainedModel


Tokens = tuple[int, ...]
Layers = list[tuple[torch.Tensor, torch.Tensor]]  # keys and values: (rows, heads, tokens, width)
# indices of prompts, their cache, and the mask of real tokens
Part = tuple[list[int], Layers, torch.Tensor]

MIN_PREFIX = 32  # minimum number of tokens of a shared prefix
GROWTH = 64  # number of tokens by which a cache grows
# Number of tokens per thread of the CPU from which one prompt uses the threads as well as several.
ALONE = 128


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Return the length of the common prefix of two prompts."""
    length = min(len(a), len(b))
    if a[:length] == b[:length]:
        return length
    return bisect.bisect_left(range(length), True, key=lambda i: a[: i + 1] != b[: i + 1])


def group_by_prefix(
    prompts: Sequence[Tokens], min_length: int = MIN_PREFIX
) -> list[tuple[int, list[int]]]:
    """Group prompts by common prefix as ``(length, indices)``, so that many tokens are saved.

    This is greedy: in lexicographic order, where the best partner is a neighbour, a group takes the
    next prompt unless that lowers ``length * (rows - 1)``, the tokens it saves. A single prompt has
    length 0.

    >>> group_by_prefix([(1, 2, 3, 4), (9, 8), (1, 2, 3, 5)], min_length=2)
    [(3, [0, 2]), (0, [1])]
    """
    groups: list[tuple[int, list[int]]] = []
    for i in sorted(range(len(prompts)), key=lambda i: prompts[i]):
        if groups:
            length, rows = groups[-1]
            # A prompt's last token is never shared: decoding starts from it.
            both = common_prefix(prompts[rows[-1]][:-1], prompts[i][:-1])
            both = min(both, length) if len(rows) > 1 else both
            if both >= min_length and both * len(rows) >= length * (len(rows) - 1):
                groups[-1] = (both, [*rows, i])
                continue
        groups.append((0, [i]))
    return groups


class InPlaceLayer(DynamicLayer):  # type: ignore[misc]  # mypy skips transformers
    """Cache layer that appends keys and values in place; `DynamicLayer` copies all of them at each token."""

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
            self._slabs = [pad(slab, (0, 0, 0, end - start + GROWTH)) for slab in self._slabs]
        for slab, states in zip(self._slabs, (key_states, value_states), strict=True):
            slab[:, :, start:end] = states
        self._show(end)
        return self.keys, self.values

    def batch_select_indices(self, indices: torch.Tensor) -> None:  # noqa: D102
        length = self.keys.shape[-2]
        self._slabs = [slab[indices] for slab in self._slabs]
        self._show(length)


class Prefill:
    """Prefill of all tokens of prompts but the last one, from which decoding starts."""

    def __init__(self, model: PreTrainedModel, capacity: int) -> None:
        self._model = model
        self._windowed = "sliding_attention" in layer_kinds(model.config)
        on_cpu = model.device.type == "cpu"
        self._alone = ALONE * torch.get_num_threads() if on_cpu else float("inf")
        self._capacity = capacity
        self._requested = self._computed = 0  # numbers of prompt tokens so far
        # least recently used first
        self._cached = OrderedDict[tuple[str, Tokens], Layers]()

    def read(
        self, prompts: Sequence[Tokens], version: str = ""
    ) -> tuple[list[int], DynamicCache, torch.Tensor]:
        """Compute the cache of prompts; return their new order, the cache, and the mask of real tokens.

        ``version`` is the version of the adapter that is applied to the model, ``""`` without one.
        """
        self._requested += sum(len(prompt) - 1 for prompt in prompts)
        parts: list[Part] = []
        alone: list[int] = []
        for shared, members in group_by_prefix(prompts):
            tokens = prompts[members[0]][:-1]
            length = shared or self._match(tokens, version)[1]
            if length:
                prefix = self._prefix(tokens[:length], version)
                parts += self._rectangles(prompts, members, prefix, length)
            else:
                alone += members
        parts += self._rectangles(prompts, alone, [], 0)
        if len(prompts) == 1:  # sequential calls: the next prompt may have the same prefix
            self._remember(prompts[0][:-1], version, parts[0][1])
        order = [i for members, _, _ in parts for i in members]
        return order, *_merge(parts)

    def read_padded(
        self, prompts: Sequence[Tokens], width: int
    ) -> tuple[DynamicCache, torch.Tensor]:
        """Compute cache and mask of prompts as one rectangle of a given width, without shared prefixes."""
        self._requested += sum(len(prompt) - 1 for prompt in prompts)
        return _merge([self._rectangle(prompts, list(range(len(prompts))), [], 0, width)])

    @property
    def counts(self) -> Prefilled:
        """Number of prompt tokens so far, and how many of them were reused."""
        return Prefilled(self._requested, self._requested - self._computed)

    def forget(self, version: str) -> None:
        """Drop the cached prefixes of an adapter version."""
        for key in [key for key in self._cached if key[0] == version]:
            del self._cached[key]

    def _rectangles(
        self, prompts: Sequence[Tokens], members: list[int], prefix: Layers, start: int
    ) -> Iterator[Part]:
        """Compute the tokens from ``start`` on in rectangles of similar length; on the CPU, long ones alone.

        A prompt alone needs no padding, and its attention is computed for earlier tokens only.
        """
        rest = sorted(members, key=lambda i: len(prompts[i]))
        while rest:
            shortest = len(prompts[rest[0]]) - start
            # Up to a quarter of padding, plus 16 tokens, costs less than another forward pass.
            longest = shortest if self._windowed and start else 1.25 * shortest + 16
            several = sum(len(prompts[i]) - start <= longest for i in rest)
            count = 1 if shortest > self._alone else several
            width = len(prompts[rest[count - 1]]) - 1 - start
            yield self._rectangle(prompts, rest[:count], prefix, start, max(width, not start))
            rest = rest[count:]

    def _rectangle(
        self, prompts: Sequence[Tokens], members: list[int], prefix: Layers, start: int, width: int
    ) -> Part:
        """Compute prompts from ``start`` on, padded on the left, after a prefix that all share."""
        suffixes = [prompts[i][start:-1] for i in members]
        self._computed += sum(map(len, suffixes))
        ids = [[0] * (width - len(suffix)) + list(suffix) for suffix in suffixes]
        real = [[1] * start + [0] * (width - len(s)) + [1] * len(s) for s in suffixes]
        shape = (len(members), -1, -1, -1)
        repeated = [(keys.expand(shape), values.expand(shape)) for keys, values in prefix]
        mask = torch.tensor(real, device=self._model.device)
        return members, self._forward(torch.tensor(ids, dtype=torch.long), mask, repeated), mask

    def _forward(self, ids: torch.Tensor, mask: torch.Tensor, before: Layers) -> Layers:
        """Return the cache of ``before`` followed by ``ids``; logits are not computed."""
        width = ids.shape[-1]
        if not width:
            return before
        cache = DynamicCache()
        for i, (keys, values) in enumerate(before):
            cache.update(keys, values, i)
        positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, -width:]
        ids = ids.to(self._model.device)
        self._model.base_model(
            input_ids=ids, attention_mask=mask, position_ids=positions, past_key_values=cache
        )
        return [(layer.keys, layer.values) for layer in cache.layers]

    def _match(self, tokens: Tokens, version: str) -> tuple[Tokens, int]:
        """Return the cached prompt with the longest common prefix, and its length, if long enough."""
        own = (cached for owner, cached in self._cached if owner == version)
        lengths = ((common_prefix(cached, tokens), cached) for cached in own)
        length, best = max(lengths, default=(0, ()))
        return (best, length) if length >= MIN_PREFIX else ((), 0)

    def _prefix(self, tokens: Tokens, version: str) -> Layers:
        """Compute a prefix as a single row, continuing a cached one if possible."""
        best, length = self._match(tokens, version)
        before: Layers = []
        if length:
            self._cached.move_to_end((version, best))
            cached = self._cached[version, best]
            before = [(keys[:, :, :length], values[:, :, :length]) for keys, values in cached]
        if length == len(tokens):
            return before
        self._computed += len(tokens) - length
        mask = torch.ones(1, len(tokens), dtype=torch.long, device=self._model.device)
        layers = self._forward(torch.tensor([tokens[length:]]), mask, before)
        self._remember(tokens, version, layers)
        return layers

    def _remember(self, tokens: Tokens, version: str, layers: Layers) -> None:
        """Cache a prefix; drop those that it extends, then the least recently used ones."""
        if len(tokens) < MIN_PREFIX:
            return
        for owner, cached in list(self._cached):
            if owner == version and cached == tokens[: len(cached)]:
                del self._cached[owner, cached]
        self._cached[version, tokens] = layers
        while sum(len(cached) for _, cached in self._cached) > self._capacity:
            self._cached.popitem(last=False)


def _merge(parts: Sequence[Part]) -> tuple[DynamicCache, torch.Tensor]:
    """Concatenate parts of different lengths along the rows, padded on the left, with spare capacity."""
    length = max(mask.shape[1] for _, _, mask in parts)
    cache = DynamicCache()
    for i in range(len(parts[0][1])):
        sides = []
        for side in (0, 1):
            states = [layers[i][side] for _, layers, _ in parts]
            sides.append(torch.cat([pad(s, (0, 0, length - s.shape[-2], GROWTH)) for s in states]))
        cache.layers.append(InPlaceLayer(sides[0], sides[1], length))
    return cache, torch.cat([pad(mask, (length - mask.shape[1], 0)) for _, _, mask in parts])
