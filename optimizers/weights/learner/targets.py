"""Resolve the target modules of a LoRA adapter to linear layers of a model.

Adapter files identify target modules by suffixes of their names, which peft and vLLM read. A named
set of layers is converted to the shortest suffixes that match these layers and no other module.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from compound.core.errors import DeclarationError, suggest_name
from compound.graph.space import ALL_LINEAR, ATTENTION

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

# configuration keys for the number of experts
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


def resolve(model: PreTrainedModel, targets: str | Sequence[str]) -> list[str]:
    """Return the name suffixes of the layers that an adapter applies to."""
    import torch

    if not isinstance(targets, str):
        return sorted(targets)
    modules = dict(model.named_modules())
    # routers send tokens to experts, and inference servers do not apply adapters to them
    experts = {getattr(model.config, name, None) for name in EXPERTS}
    chosen = {
        name
        for name, module in modules.items()
        if isinstance(module, torch.nn.Linear)
        and module is not model.get_output_embeddings()
        and module.out_features not in experts
        # a layer of an attention block, judging by the names of its parent modules
        and (targets != ATTENTION or re.search(r"(attn|attention)[^.]*\.", name))
    }
    if not chosen:
        raise DeclarationError(
            f"the model has no linear layers in the set {targets!r}",
            hint="list the layers by name, for example weights: {lora: {targets: [q_proj, v_proj]}}",
        )
    return shortest_suffixes(chosen, modules.keys() - chosen)


def check_targets(model: PreTrainedModel, targets: str | Sequence[str]) -> None:
    """Check that an adapter applies to the layers that its targets name.

    The experts of a mixture are fused in tensors, to which an adapter of linear layers does not
    apply. Targets that include them are an error; with others, a warning states their share of the
    parameters.
    """
    import torch

    if share := _share_of_experts(model):
        left = (
            f"{share:.0%} of the parameters in the layers of {model.config.model_type}, its experts"
        )
        if targets == ALL_LINEAR:
            raise DeclarationError(
                f"weights.lora.targets is {ALL_LINEAR}, but adapters do not apply to {left}, which are "
                "fused in tensors",
                hint=f"set weights.lora.targets to {ATTENTION}, or list the linear layers to adapt: the "
                "experts are then left as they are",
            )
        warnings.warn(f"adapters leave {left}, as they are", stacklevel=2)
    if isinstance(targets, str):
        return
    # fused experts are no layers, and neither are blocks of layers
    layers = [
        n for n, part in model.named_modules() if not [*part.children()] and not _is_fused(part)
    ]
    known = {suffix for name in layers for suffix in _suffixes(name)}
    for target in targets:
        if target not in known:
            linear = (
                name for name, layer in model.named_modules() if isinstance(layer, torch.nn.Linear)
            )
            raise DeclarationError(
                f"weights.lora.targets names {target!r}, but the model has no such layer",
                hint=suggest_name(target, {name.rpartition(".")[2] for name in linear}),
            )


def _is_fused(module: torch.nn.Module) -> bool:
    """Return whether a module has a tensor of several matrices, and is no convolution."""
    from torch.nn.modules.conv import _ConvNd

    return not isinstance(module, _ConvNd) and any(
        p.dim() > 2 for p in module.parameters(recurse=False)
    )


def _share_of_experts(model: PreTrainedModel) -> float:
    """Return the share of the experts' fused tensors in the parameters of the model's layers."""
    import torch
    from torch.nn.modules.conv import _ConvNd

    experts = layers = 0
    for name, module in model.named_modules():
        if not any(map(str.isdecimal, name.split("."))):
            continue  # outside of the layers, which are numbered
        for parameter in module.parameters(recurse=False):
            layers += parameter.numel()
            if isinstance(module, torch.nn.Linear | torch.nn.Embedding | _ConvNd):
                continue
            if min(parameter.shape, default=0) < 2:
                continue
            # (experts, …), or all experts one below the other
            if parameter.dim() > 2 or (
                parameter.dim() == 2 and "expert" in type(module).__name__.lower()
            ):
                experts += parameter.numel()
    return experts / layers if experts else 0.0


def shortest_suffixes(chosen: Collection[str], others: Collection[str]) -> list[str]:
    """Return the shortest name suffixes that match all chosen modules and no other module."""
    taken = {suffix for name in others for suffix in _suffixes(name)}
    return sorted({next((s for s in _suffixes(name) if s not in taken), name) for name in chosen})


def _suffixes(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[-count:]) for count in range(1, len(parts) + 1)]
