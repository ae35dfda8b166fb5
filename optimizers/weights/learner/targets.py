"""Find the linear layers of a model that a LoRA adapter is put on.

An adapter's file names its layers by the ends of their names, which peft and vLLM read. A set of layers is
turned into the shortest ends that fit these layers and no other module.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from compound.errors import DeclarationError
from compound.graph.space import ATTENTION

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedModel

EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")  # how configurations call their number


def resolve(model: PreTrainedModel, targets: str | Sequence[str]) -> list[str]:
    """Return the ends of names of the layers that an adapter is put on.

    Args:
        model: a causal language model.
        targets: ``all-linear``, ``attention``, or ends of names, which are returned as they are.

    Raises:
        DeclarationError: the model has no such layer.
    """
    import torch

    if not isinstance(targets, str):
        return sorted(targets)
    modules = dict(model.named_modules())
    chosen = {
        name
        for name, module in modules.items()
        if isinstance(module, torch.nn.Linear)
        and module is not model.get_output_embeddings()
        and not _is_router(module, model.config)
        and (targets != ATTENTION or _is_attention(name))
    }
    if not chosen:
        raise DeclarationError(
            f"the model has no linear layers that are called {targets!r}",
            hint="name them, the way weights: {lora: {targets: [q_proj, v_proj]}} does",
        )
    return shortest_ends(chosen, modules.keys() - chosen)


def _is_attention(name: str) -> bool:
    """Return whether a layer belongs to attention, by the names of what it is a part of.

    >>> _is_attention("model.layers.0.self_attn.q_proj"), _is_attention("model.layers.0.mlp.up_proj")
    (True, False)
    """
    return any("attn" in part or "attention" in part for part in name.split(".")[:-1])


def _is_router(layer: torch.nn.Linear, config: PreTrainedConfig) -> bool:
    """Return whether a layer chooses experts: servers do not adapt these."""
    return layer.out_features in {getattr(config, name, None) for name in EXPERTS}


def shortest_ends(chosen: Collection[str], others: Collection[str]) -> list[str]:
    """Return the shortest ends of names that fit the chosen ones and none of the others.

    >>> shortest_ends(["0.attn.q", "0.attn.out", "1.attn.q"], ["0.mlp.out", "lm_head"])
    ['attn.out', 'q']
    """
    taken = {end for name in others for end in _ends(name)}
    return sorted({next((end for end in _ends(name) if end not in taken), name) for name in chosen})


def _ends(name: str) -> list[str]:
    """Return a name's ends, the shortest first.

    >>> _ends("0.attn.q")
    ['q', 'attn.q', '0.attn.q']
    """
    parts = name.split(".")
    return [".".join(parts[-count:]) for count in range(1, len(parts) + 1)]
