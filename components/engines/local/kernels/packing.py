"""Linear layers whose weights are stored in the memory layout of the CPU's matrix product.

An ordinary layer rearranges its weights in every product. This is negligible for a long prompt, but takes
most of the time when a batch decodes one token per row, because the weights are larger than the activations.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class PackedLinear(torch.nn.Module):  # type: ignore[misc]  # mypy skips torch
    """Linear layer whose weights are rearranged once, for inference only."""

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
    """Return whether packing applies: on a CPU, in a format for which torch has the kernel."""
    if not (
        model.device.type == "cpu"
        and torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    ):
        return False
    if model.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return bool(model.dtype == torch.float32)


def pack(model: PreTrainedModel) -> PreTrainedModel:
    """Replace the linear layers of a model by `PackedLinear`, and return the model; for inference only."""
    if packable(model):
        linears = [(name, layer) for name, layer in model.named_modules() if type(layer) is torch.nn.Linear]
        for name, layer in linears:
            parent, _, own = name.rpartition(".")
            setattr(model.get_submodule(parent), own, PackedLinear(layer))
    return model
