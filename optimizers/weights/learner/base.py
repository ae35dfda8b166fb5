"""Settings of the frozen base model in the trainer."""

from __future__ import annotations

from typing import Literal

from compound.components.engines.local.devices import Attention, DeviceName, DType, Placement, Quantization
from compound.errors import DeclarationError
from compound.settings.base import Settings


class BaseModelSettings(Settings):
    """Device, number format, kernels and quantization of the frozen base model in the trainer."""

    device: DeviceName = "auto"
    """`auto` (CUDA if available, else the CPU), `cpu`, `cuda`, `cuda:1`, `xpu` or `mps`."""
    dtype: DType = "auto"
    """Number format of the weights; adapters are always in float32. `auto` uses that of the engine that
    samples, or else the fastest one of the device."""
    attn_implementation: Attention = "auto"
    """Attention kernels: `eager`, `sdpa`, or `flash_attention_2`, which needs CUDA and flash-attn; `auto`
    is transformers' choice, or a faster one for bfloat16 on a CPU."""
    gradient_checkpointing: bool = False
    """Recompute the activations of each layer in the backward pass, instead of storing them: less memory,
    about a third more computation, and equal prompts are not processed once."""
    quantization: Quantization | Literal["auto"] = "auto"
    """Quantization of the linear layers by bitsandbytes: `8bit`, `4bit` (NF4), or `none`; needs CUDA and
    the extra `quantized`. `auto` uses that of the engine that samples."""

    def placement(self, dtype: str, quantization: str, section: str) -> Placement:
        """Return the placement of the base, after checking it.

        Args:
            dtype: the number format that the components sample in; ``auto`` if unknown.
            quantization: the quantization that they sample with; ``auto`` if unknown.
            section: the path of the training settings, for messages.

        Raises:
            DeclarationError: the settings differ from those of the engines, or the device does not support
                them.
        """
        placement = Placement(
            self.device,
            self._common("dtype", dtype, section),
            self.attn_implementation,
            self._common("quantization", quantization, section).replace("auto", "none"),
        )
        placement.check(f"{section}.base")
        return placement

    def _common(self, setting: str, sampled: str, section: str) -> str:
        """Return a setting that the trainer shares with the engines."""
        own: str = getattr(self, setting)
        if "auto" not in (own, sampled) and own != sampled:
            raise DeclarationError(
                f"{section}.base.{setting} is {own}, but the components sample with {sampled}: the trainer "
                "would differentiate another distribution than was sampled",
                hint=f"set {section}.base.{setting} to auto, or {setting} of their engine to {own}",
            )
        return sampled if own == "auto" else own
