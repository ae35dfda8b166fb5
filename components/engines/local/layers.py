"""Determine the kinds of layers of a model, and how the states in its cache can be reused.

Keys and values of attention layers belong to single tokens: they can be repeated for several rows, cut after
any token, and put behind padding. The state of a linear attention, convolution or state-space layer belongs
to everything read so far, and chunks of attention are counted from the first token: neither can be shared.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


BY_TOKEN = frozenset({"full_attention", "sliding_attention"})
STATELESS = frozenset({"moe", "mlp"})  # listed by some families among the others


def layer_kinds(config: PreTrainedConfig) -> frozenset[str]:
    """Return the kinds of layers, as transformers names them, that keep something of what was read."""
    config = config.get_text_config(decoder=True)
    named = getattr(config, "layer_types", None)
    if named:
        return frozenset(named) - STATELESS
    if getattr(config, "sliding_window", None) is not None:
        return frozenset({"sliding_attention"})
    if getattr(config, "attention_chunk_size", None) is not None:
        return frozenset({"chunked_attention"})
    return frozenset({"full_attention"})


def unshared_kinds(config: PreTrainedConfig) -> list[str]:
    """Return the kinds of layers whose states cannot be shared by prompts with one beginning, sorted."""
    return sorted(layer_kinds(config) - BY_TOKEN)
