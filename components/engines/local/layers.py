"""Layer kinds of a model, which determine whether the states in its cache can be shared.

Keys and values of attention layers belong to single tokens: they can be repeated for several rows, truncated
after any token, and placed after padding. The state of a linear attention, convolution or state-space layer
depends on all tokens before it, and chunked attention counts chunks from the first token, so neither can be
shared.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


PER_TOKEN_KINDS = frozenset({"full_attention", "sliding_attention"})
STATELESS = frozenset({"moe", "mlp"})  # some model families list these as layers, too


def layer_kinds(config: PreTrainedConfig) -> frozenset[str]:
    """Return the kinds of layers with a state in the cache, as transformers names them."""
    config = config.get_text_config(decoder=True)
    named = getattr(config, "layer_types", None)
    if named:
        return frozenset(named) - STATELESS
    if getattr(config, "sliding_window", None) is not None:
        return frozenset({"sliding_attention"})
    if getattr(config, "attention_chunk_size", None) is not None:
        return frozenset({"chunked_attention"})
    return frozenset({"full_attention"})


def unshareable_kinds(config: PreTrainedConfig) -> list[str]:
    """Return the kinds of layers whose states prompts with a common prefix cannot share, sorted."""
    return sorted(layer_kinds(config) - PER_TOKEN_KINDS)
