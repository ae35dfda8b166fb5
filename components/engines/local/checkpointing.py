"""Gradient checkpointing: layers store only their inputs, and are computed again in the backward pass."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

from compound.errors import CompoundError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def checkpoint_layers(model: PreTrainedModel, name: str, setting: str) -> None:
    """Recompute the activations of each layer in the backward pass, also in evaluation mode.

    Args:
        model: the model, with adapters or without.
        name: its name, for messages.
        setting: the setting that asks for it, for messages.

    Raises:
        CompoundError: the model does not support it.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers = [layer for layer in model.modules() if isinstance(layer, GradientCheckpointingLayer)]
    if not model.supports_gradient_checkpointing or not layers:
        raise CompoundError(
            f"{name!r} does not support gradient checkpointing", hint=f"set {setting} to false"
        )
    with warnings.catch_warnings():  # transformers is renaming the method
        warnings.filterwarnings("ignore", "`(is_)?gradient_checkpointing", FutureWarning)
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for layer in layers:  # which read the flag; the dropout layers in them keep their own
        layer.training = True
