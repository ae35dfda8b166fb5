"""Division of the base model's layers among processes, by PyTorch's FSDP2."""

from __future__ import annotations

from typing import TYPE_CHECKING

from compound.errors import CompoundError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def shard_layers(model: PreTrainedModel, device: str) -> None:
    """Divide the layers of a frozen model among the processes, and move the rest of it to a device.

    A layer's weights are gathered before it runs, and freed afterwards. Embeddings, norms outside of layers
    and the output layer are copied to every process. Adapters that are added later are not divided. All
    processes must then run the same forward and backward passes.

    Args:
        model: the model, loaded on the CPU, so that a device holds one whole layer at a time.
        device: the device of this process, such as ``cuda:1`` or ``cpu``.

    Raises:
        CompoundError: the model has no layers that can be told apart.
    """
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers = [layer for layer in model.modules() if isinstance(layer, GradientCheckpointingLayer)]
    if not layers:
        raise CompoundError(
            f"{model.name_or_path!r} cannot be divided among processes: its layers are not marked",
            hint="set learner.sharding to data",
        )
    mesh = init_device_mesh(torch.device(device).type, (torch.distributed.get_world_size(),))
    for layer in layers:
        # every layer is a root of its own, whose weights FSDP would keep by default
        fully_shard(layer, mesh=mesh, reshard_after_forward=True)
    model.to(device)
