"""Attention in bfloat16 on a CPU, computed block by block.

On processors without AMX, PyTorch's fused kernel multiplies bfloat16 matrices no faster than float32 ones.
Given a mask it also computes what the mask removes, and for a single query it reads the keys once for each
head that shares them, several times as slowly as in float32. Here each block of queries attends to the keys
up to its end, in ordinary matrix products, which are faster where the processor multiplies bfloat16. Scores
are rounded to bfloat16, as in the ``eager`` attention of transformers.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from compound.components.engines.local import devices

if TYPE_CHECKING:
    from transformers import PreTrainedModel


NAME = "compound_blocks"  # under which transformers knows this attention
BLOCK = 128  # number of queries in a block; its scores fit the processor's cache
CLEARLY_FASTER = 0.7  # maximum fraction of the fused kernel's time
OTHER_TERMS = ("position_bias", "softcap", "s_aux")  # parts of some models' attention that `attend` lacks
SIZES = (1, 512)  # numbers of queries that are measured: of decoding, and of a prompt


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, scaling: float
) -> torch.Tensor:
    """Return causal attention of the last tokens of sequences to all of their tokens, with gradients.

    Args:
        query: queries of shape (rows, heads, queries, width).
        key: keys of shape (rows, key heads, tokens, width); each serves heads // key heads heads.
        value: values of the shape of ``key``.
        mask: which tokens a query attends to, boolean, of shape (rows, 1, queries, tokens); no later token
            than its own. Without a mask, a query attends to its own and all earlier tokens.
        scaling: factor of the scores.

    Returns:
        Tensor of the shape of ``query``.

    >>> query, key = torch.randn(2, 4, 200, 8), torch.randn(2, 2, 300, 8)
    >>> expected = torch.nn.functional.scaled_dot_product_attention(
    ...     query, key, key, torch.ones(200, 300, dtype=torch.bool).tril(100), enable_gqa=True
    ... )
    >>> torch.allclose(attend(query, key, key, None, 8**-0.5), expected, atol=1e-5)
    True
    """
    result: torch.Tensor = _Attend.apply(query, key, value, mask, scaling)
    return result


class _Attend(torch.autograd.Function):  # type: ignore[misc]  # mypy skips torch
    """`attend` by blocks; the backward pass computes the weights of each block again."""

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        scaling: float,
    ) -> torch.Tensor:
        ctx.save_for_backward(query, key, value, mask)
        ctx.scaling = scaling
        grouped = _grouped(query * scaling, key)
        result = torch.empty_like(grouped)
        for block in _blocks(grouped, key):
            values = block.of_keys(value)
            result[block.queries] = (_weights(block, grouped, key, mask) @ values).view(block.shape)
        return _without_padding(result.view(query.shape), mask)

    @staticmethod
    def backward(
        ctx: torch.autograd.function.FunctionCtx, gradient: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, None, None]:
        query, key, value, mask = ctx.saved_tensors
        grouped, outer = _grouped(query * ctx.scaling, key), _grouped(_without_padding(gradient, mask), key)
        by_query = torch.empty_like(grouped)
        accurate = torch.promote_types(key.dtype, torch.float32)  # sums over blocks
        by_key = torch.zeros(key.shape, dtype=accurate, device=key.device)
        by_value = torch.zeros_like(by_key)
        for block in _blocks(grouped, key):
            weights = _weights(block, grouped, key, mask)
            queries, own = block.of_queries(grouped), block.of_queries(outer)
            by_value[block.keys] += weights.transpose(-1, -2) @ own
            by_weight = own @ block.of_keys(value).transpose(-1, -2)
            by_score = torch.ops.aten._softmax_backward_data(by_weight, weights, -1, weights.dtype)
            by_query[block.queries] = (by_score @ block.of_keys(key)).view(block.shape)
            by_key[block.keys] += by_score.transpose(-1, -2) @ queries
        by_query = by_query.view(query.shape) * ctx.scaling
        return by_query, by_key.to(key.dtype), by_value.to(value.dtype), None, None


@dataclass(frozen=True)
class _Block:
    """Some queries of some key heads, and the keys up to the last of these queries.

    Attributes:
        groups: the key heads.
        rows: the queries' positions among the queries.
        end: the number of keys.
        shape: shape of the queries: (rows, key heads, heads of each, queries, width).
    """

    groups: slice
    rows: slice
    end: int
    shape: tuple[int, int, int, int, int]

    @property
    def queries(self) -> tuple[slice, slice, slice, slice]:
        """Index of the block in queries grouped by key head."""
        return slice(None), self.groups, slice(None), self.rows

    @property
    def keys(self) -> tuple[slice, slice, slice]:
        """Index of the block in keys and values."""
        return slice(None), self.groups, slice(self.end)

    def of_queries(self, grouped: torch.Tensor) -> torch.Tensor:
        """Return queries as a matrix per key head: its heads share the keys and are rows of one product."""
        return grouped[self.queries].reshape(*self.shape[:2], -1, self.shape[-1])

    def of_keys(self, states: torch.Tensor) -> torch.Tensor:
        """Return contiguous keys or values, whose products are faster by more than the copy takes."""
        return states[self.keys].contiguous()


def _grouped(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Return queries as (rows, key heads, heads of each, queries, width)."""
    rows, heads, queries, width = query.shape
    return query.reshape(rows, key.shape[1], heads // key.shape[1], queries, width)


def _without_padding(states: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """Return states of queries, with 0 for those that attend to nothing."""
    return states if mask is None else states.masked_fill(~mask.any(-1)[..., None], 0.0)


def _blocks(grouped: torch.Tensor, key: torch.Tensor) -> Iterator[_Block]:
    rows, groups, each, queries, width = grouped.shape
    together = groups if queries == 1 else 1  # the scores of one key head at a time stay in the cache
    for start in range(0, queries, BLOCK):
        count = min(BLOCK, queries - start)
        for first in range(0, groups, together):
            yield _Block(
                slice(first, first + together),
                slice(start, start + count),
                key.shape[2] - queries + start + count,
                (rows, together, each, count, width),
            )


def _weights(
    block: _Block, grouped: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None
) -> torch.Tensor:
    """Return the attention weights of a block, (rows, key heads, heads of each * queries, keys)."""
    rows, groups, each, count, _ = block.shape
    scores = block.of_queries(grouped) @ block.of_keys(key).transpose(-1, -2)
    apart = scores.view(rows, groups, each, count, block.end)
    if mask is None:
        later = torch.ones(count, count, dtype=torch.bool, device=scores.device).triu(1)
        apart[..., block.end - count :].masked_fill_(later, float("-inf"))
    else:
        # Finite, because a padding token attends to nothing, and NaN would spread.
        apart.masked_fill_(~mask[:, :, None, block.rows, : block.end], torch.finfo(scores.dtype).min)
    return scores.softmax(-1)


def use_blocks(model: PreTrainedModel) -> PreTrainedModel:
    """Make a model use `attend` where that is faster on this processor, and return the model.

    This applies to models in bfloat16 on a CPU that would use torch's fused kernel.
    """
    if (
        model.device.type == "cpu"
        and model.dtype == torch.bfloat16
        and model.config._attn_implementation == "sdpa"
        and any(clearly_faster(queries) for queries in SIZES)
    ):
        from transformers import AttentionInterface, AttentionMaskInterface
        from transformers.masking_utils import sdpa_mask

        AttentionInterface.register(NAME, _forward)
        AttentionMaskInterface.register(NAME, sdpa_mask)
        model.set_attn_implementation(NAME)
    return model


@functools.cache
def clearly_faster(queries: int) -> bool:
    """Return whether `attend` takes clearly less time than torch's fused kernel on this processor.

    The margin is wide so that all processes of a run choose the same.

    Args:
        queries: the number of queries to measure with, one of `SIZES`.
    """
    query = torch.ones(1, 6, queries, 64, dtype=torch.bfloat16)
    key = torch.ones(1, 3, max(SIZES), 64, dtype=torch.bfloat16)
    mask = None if queries == 1 else torch.ones(queries, queries, dtype=torch.bool).tril()[None, None]
    attention = torch.nn.functional.scaled_dot_product_attention
    fused = functools.partial(attention, query, key, key, mask, enable_gqa=True)
    blocks = functools.partial(attend, query, key, key, mask, 64**-0.5)
    with torch.inference_mode():
        ours, theirs = devices.shortest_times(blocks, fused)
    return ours < CLEARLY_FASTER * theirs


def _forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **options: object,
) -> tuple[torch.Tensor, None]:
    """Compute attention as transformers calls it: by blocks if they apply, else by torch's fused kernel."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    causal = options.get("is_causal")
    if (
        not dropout
        and (getattr(module, "is_causal", True) if causal is None else causal)
        and not any(options.get(name) is not None for name in OTHER_TERMS)
        and _suitable(query, key, value, attention_mask)
        and clearly_faster(SIZES[query.shape[2] > 1])
    ):
        factor = query.shape[-1] ** -0.5 if scaling is None else scaling
        return attend(query, key, value, attention_mask, factor).transpose(1, 2).contiguous(), None
    result, _ = sdpa_attention_forward(
        module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **options
    )
    return result, None


def _suitable(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None) -> bool:
    """Return whether `attend` supports tensors of these formats and shapes."""
    queries, tokens = query.shape[2], key.shape[2]
    return bool(
        query.device.type == "cpu"  # a model may be moved after it was loaded
        and query.dtype == key.dtype == torch.bfloat16
        and key.shape == value.shape
        and query.shape[-1] == key.shape[-1]
        and (queries in (1, tokens) if mask is None else mask.dtype == torch.bool and mask.shape[1] == 1)
    )
