"""Linear layers whose weights lie in memory as the CPU's matrix product reads them.

An ordinary layer rearranges its weights at every product. That is lost in a long prompt, but when a batch
decodes one token for each row, the weights outnumber the rows, and rearranging takes most of the time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class PackedLinear(torch.nn.Module):  # type: ignore[misc]  # torch's types are not read
    """Computes what a linear layer computes, with its weights rearranged once. For inference only."""

    def __init__(self, linear: torch.nn.Linear) -> None:
        super().__init__()
        self.bias = linear.bias
        self.in_features, self.out_features = linear.in_features, linear.out_features
        with torch.inference_mode(False), torch.no_grad():
            self._packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), None)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Return ``states`` times the weights, plus the bias."""
        return torch.ops.mkldnn._linear_pointwise(states, self._packed, self.bias, "none", [], "")


def packable(model: PreTrainedModel) -> bool:
    """Return whether packing helps: 32-bit weights on a CPU that this build of torch has the kernel for."""
    return bool(
        model.device.type == "cpu"
        and model.dtype == torch.float32
        and torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )


def pack(model: PreTrainedModel) -> PreTrainedModel:
    """Replace every linear layer of a model that is only read from now on; returns the model."""
    if packable(model):
        linears = [(name, layer) for name, layer in model.named_modules() if type(layer) is torch.nn.Linear]
        for name, layer in linears:
            parent, _, own = name.rpartition(".")
            setattr(model.get_submodule(parent), own, PackedLinear(layer))
    return model
