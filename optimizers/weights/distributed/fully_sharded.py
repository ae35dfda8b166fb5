"""Division of the base model's layers among processes, by PyTorch's FSDP2.

Only the first process reads the weights; the others build the model without any and receive them
layer by layer, so that this machine's memory holds the whole model once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from compound.core.errors import CompoundError
from compound.engines import model_folder
from compound.engines.local import loading
from compound.engines.local.devices import Placement

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def load_divided(
    folder: Path, placement: Placement
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a frozen model whose layers are divided among the processes of the group, and its tokenizer.

    All processes must call it, and must then run the same forward and backward passes. Where a
    model built from its configuration has other weights than the loaded one, such as some in
    another number format, every process loads the model.

    Args:
        folder: the folder of the model.
        placement: how the model is loaded, and the device of this process.

    Raises:
        CompoundError: the model has no layers that can be identified.
    """
    import torch

    on_host, first = replace(placement, device="cpu"), torch.distributed.get_rank() == 0
    if first:
        model, tokenizer = loading.load_base(folder, on_host)
    else:
        model, tokenizer = _empty(folder, placement), model_folder.load_tokenizer(folder)
    received = _is_same_everywhere(model, placement.device)
    if not received and not first:
        model, tokenizer = loading.load_base(folder, on_host)
    model.requires_grad_(False)
    _divide(model, placement.device, received=received)
    return model, tokenizer


def _empty(folder: Path, placement: Placement) -> PreTrainedModel:
    """Return the model without weights."""
    return model_folder.load_empty(
        folder, dtype=loading.dtype_of(placement), attention=placement.attn_implementation
    )


def _is_same_everywhere(model: PreTrainedModel, device: str) -> bool:
    """Return whether the weights and buffers have equal names, shapes and formats in all processes."""
    import torch

    tensors = [*model.named_parameters(), *model.named_buffers()]
    outline = [(name, tuple(tensor.shape), str(tensor.dtype)) for name, tensor in tensors]
    number = int.from_bytes(hashlib.sha256(repr(outline).encode()).digest()[:7])
    bounds = torch.tensor([number, -number], device=device)
    torch.distributed.all_reduce(bounds, torch.distributed.ReduceOp.MAX)
    return int(bounds[0]) == -int(bounds[1])


def _divide(model: PreTrainedModel, device: str, *, received: bool) -> None:
    """Divide the layers of a frozen model among the processes, and move the rest of it to a device.

    A layer's weights are gathered before it runs, and freed afterwards. Embeddings, norms outside
    of layers and the output layer are copied to every process. Adapters that are added later are
    not divided.

    Args:
        model: the model on the CPU, so that a device holds one whole layer at a time.
        device: the device of this process, such as ``cuda:1`` or ``cpu``.
        received: whether only the first process has weights, which the others receive.

    Raises:
        CompoundError: the model has no layers that can be identified.
    """
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers = [layer for layer in model.modules() if isinstance(layer, GradientCheckpointingLayer)]
    if not layers:
        raise CompoundError(
            f"{model.name_or_path!r} cannot be divided among processes: none of its layers is a "
            "GradientCheckpointingLayer of transformers",
            hint="set learner.sharding to data",
        )
    mesh = init_device_mesh(torch.device(device).type, (torch.distributed.get_world_size(),))
    inside = {part for layer in layers for part in layer.modules()}
    for layer in layers:
        if received:
            _receive(layer.modules(), device)
        # every layer is a root of its own, whose weights FSDP would keep by default
        fully_shard(layer, mesh=mesh, reshard_after_forward=True)
    if received:
        _receive((part for part in model.modules() if part not in inside), device)
    model.to(device)


def _receive(modules: Iterable[torch.nn.Module], device: str) -> None:
    """Send the weights and buffers of modules from the first process to the others, which have empty ones."""
    import torch

    first = torch.distributed.get_rank() == 0
    known: dict[Tensor, Tensor] = {}  # a tensor hashes by identity; several modules may share one
    for module in modules:
        for name, tensor in [
            *module.named_parameters(recurse=False),
            *module.named_buffers(recurse=False),
        ]:
            if tensor not in known:
                own = (
                    tensor.detach().to(device).contiguous()
                    if first
                    else torch.empty_like(tensor, device=device)
                )
                torch.distributed.broadcast(own, src=0)
                is_weight = isinstance(tensor, torch.nn.Parameter)
                known[tensor] = torch.nn.Parameter(own, requires_grad=False) if is_weight else own
            if not first:
                setattr(module, name, known[tensor])
