"""Attention in bfloat16 on a CPU, computed block by block.

On processors without AMX, PyTorch's fused kernel multiplies bfloat16 matrices no faster than float32 ones.
Given a mask it also computes what the mask removes, and for a single query it reads the keys once for each head
that shares them, several times as slowly as in float32. Here each block of queries attends to the keys up to
its end, in ordinary matrix products, which are faster where the processor multiplies bfloat16. Scores are
rounded to bfloat16, as in the ``eager`` attention of transformers.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

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
    """Return causal attention of the last tokens of sequences to all of their tokens.

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
    rows, heads, queries, width = query.shape
    groups, tokens = key.shape[1:3]
    # The heads of a group share keys and values, so their queries are rows of one product.
    grouped = (query * scaling).view(rows, groups, heads // groups, queries, width)
    result = torch.empty_like(grouped)
    together = groups if queries == 1 else 1  # scores of one group at a time stay in the cache
    for start in range(0, queries, BLOCK):
        own = slice(start, min(start + BLOCK, queries))
        count = own.stop - start
        end = tokens - queries + own.stop
        later = torch.ones(count, count, dtype=torch.bool, device=query.device).triu(1)
        for first in range(0, groups, together):
            some = slice(first, first + together)
            # Products of contiguous matrices are faster, by more than the copies take.
            keys, values = key[:, some, :end].contiguous(), value[:, some, :end].contiguous()
            block = grouped[:, some, :, own].reshape(rows, together, -1, width)
            scores = (block @ keys.transpose(-1, -2)).view(rows, together, -1, count, end)
            if mask is None:
                scores[..., end - count :].masked_fill_(later, float("-inf"))
            else:
                # Finite, because a padding token attends to nothing.
                scores.masked_fill_(~mask[:, :, None, own, :end], torch.finfo(scores.dtype).min)
            weights = scores.softmax(-1).view(rows, together, -1, end)
            result[:, some, :, own] = (weights @ values).view(rows, together, -1, count, width)
    return result.view(query.shape)


def use_blocks(model: PreTrainedModel) -> PreTrainedModel:
    """Make a model use `attend` where that is faster on this processor, and return the model.

    This applies to inference of models in bfloat16 on a CPU that would use torch's fused kernel.
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
    return _seconds(blocks) < CLEARLY_FASTER * _seconds(fused)


def _seconds(compute: Callable[[], torch.Tensor]) -> float:
    """Return the shortest time of a few computations."""
    seconds = []
    with torch.inference_mode():
        for _ in range(4):
            start = time.perf_counter()
            compute()
            seconds.append(time.perf_counter() - start)
    return min(seconds)


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
        torch.is_inference_mode_enabled()
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
        query.dtype == key.dtype == torch.bfloat16
        and key.shape == value.shape
        and query.shape[-1] == key.shape[-1]
        and (queries in (1, tokens) if mask is None else mask.dtype == torch.bool and mask.shape[1] == 1)
    )
