"""Devices, number formats, attention kernels and quantization of models in this process.

All of them are checked before a model is loaded, so that a missing GPU or library is reported
before anything is spent. Out-of-memory errors of torch become errors that name the setting to
lower.
"""

from __future__ import annotations

import importlib.util
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from compound.core.errors import CompoundError, DeclarationError, MissingExtra

_DEVICE = re.compile(r"auto|cpu|mps|(cuda|xpu)(:[0-9]+)?")


def _check_name(name: str) -> str:
    if not _DEVICE.fullmatch(name):
        raise ValueError(f"must be auto, cpu, mps, cuda, cuda:N, xpu or xpu:N, but got {name!r}")
    return name


DeviceName = Annotated[
    str, AfterValidator(_check_name), Field(json_schema_extra={"pattern": f"^({_DEVICE.pattern})$"})
]
DType = Literal["auto", "float32", "bfloat16", "float16"]
Attention = Literal["auto", "eager", "sdpa", "flash_attention_2"]
Quantization = Literal["none", "8bit", "4bit"]
REMEDIES = {
    "cuda": "install a build of PyTorch with CUDA and its driver; nvidia-smi lists the GPUs",
    "xpu": "install a build of PyTorch with XPU and its driver",
    "mps": "MPS needs macOS on Apple silicon",
}


@dataclass(frozen=True)
class Placement:
    """Device, number format, attention kernels and quantization of a model.

    Attributes:
        device: ``auto`` (CUDA if available, else the CPU), ``cpu``, ``cuda``, ``cuda:1``, ``xpu``
            or ``mps``.
        dtype: the number format of the weights; ``auto`` selects the fastest one of the device.
        attn_implementation: the attention kernels; ``auto`` leaves the choice to `load_base`.
        quantization: the quantization of linear layers by bitsandbytes.
    """

    device: str = "auto"
    dtype: str = "auto"
    attn_implementation: str = "auto"
    quantization: str = "none"

    def check(self, where: str) -> None:
        """Check that this machine supports the placement; loads no model.

        Defaults are supported everywhere, and are accepted without importing torch. Messages name
        ``where``, the path of the settings, such as ``optimize.mmgrpo.base``.

        Raises:
            DeclarationError: the device does not exist, or does not support a setting.
            MissingExtra: torch or bitsandbytes is missing.
        """
        if self == Placement(dtype=self.dtype) and self.dtype in ("auto", "float32"):
            return
        device = resolve_device(self.device, where)
        if self.dtype == "bfloat16" and not supports_bfloat16(device):
            raise DeclarationError(
                f"{where}.dtype is bfloat16, which {device} does not support",
                hint=f"set {where}.dtype to float32, or to float16 for inference only",
            )
        self._check_attention(where, device)
        self._check_quantization(where, device)

    def _check_attention(self, where: str, device: str) -> None:
        if self.attn_implementation != "flash_attention_2":
            return
        setting = f"{where}.attn_implementation"
        problem, hint = "", f"set {setting} to sdpa"
        if device_type(device) != "cuda":
            problem = f", which needs a CUDA device, but the device is {device}"
        elif self.dtype == "float32":
            problem = ", which does not support float32"
            hint = f"set {where}.dtype to bfloat16, or {setting} to sdpa"
        elif importlib.util.find_spec("flash_attn") is None:  # transformers would download kernels
            problem = ", but flash-attn is not installed"
            hint = f"pip install flash-attn, or {hint}"
        if problem:
            raise DeclarationError(f"{setting} is flash_attention_2{problem}", hint=hint)

    def _check_quantization(self, where: str, device: str) -> None:
        if self.quantization == "none":
            return
        setting = f"{where}.quantization"
        if device_type(device) != "cuda":
            raise DeclarationError(
                f"{setting} is {self.quantization}, which needs a CUDA device, but the device is {device}",
                hint=f"set {setting} to none, or use a smaller model",
            )
        if importlib.util.find_spec("bitsandbytes") is None:
            raise MissingExtra(f"{setting}: {self.quantization}", "bitsandbytes", "quantized")


def device_type(device: str) -> str:
    """Return the kind of a device, without its index: ``cuda`` for ``cuda:1``."""
    return device.partition(":")[0]


def resolve_device(name: str = "auto", where: str = "device") -> str:
    """Return the device of a name, which must be available; ``auto`` is CUDA if available, else the CPU.

    Raises:
        DeclarationError: there is no such device on this machine; the message lists those that
            exist.
        MissingExtra: torch is missing.
    """
    torch = torch_module()
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    kind, _, index = name.partition(":")
    if kind == "cpu":
        return "cpu"
    count = device_count(kind)
    if count == 0:
        raise DeclarationError(
            f"{where}.device is {name}, but PyTorch finds no {kind.upper()} device",
            hint=f"set {where}.device to auto or cpu, or {REMEDIES[kind]}",
        )
    if index and int(index) >= count:
        names = ", ".join(f"{kind}:{number}" for number in range(count))
        raise DeclarationError(
            f"{where}.device is {name}, but PyTorch finds {count} {kind.upper()} "
            f"device{'s' * (count > 1)}: {names}",
            hint=f"set {where}.device to one of them"
            + "; CUDA_VISIBLE_DEVICES hides devices" * (kind == "cuda"),
        )
    return name


def indexed_device(device: str) -> str:
    """Return the name of an available device with its index, so that equal devices have equal names.

    ``cuda`` and ``xpu`` are the current device of PyTorch; other names are returned unchanged.
    """
    if device not in ("cuda", "xpu"):
        return device
    return f"{device}:{getattr(torch_module(), device).current_device()}"


def device_count(kind: str) -> int:
    """Return the number of usable devices of a kind: ``cuda``, ``xpu`` or ``mps``."""
    torch = torch_module()
    if kind == "mps":
        return int(torch.backends.mps.is_available())
    module = getattr(torch, kind)
    return int(module.device_count()) if module.is_available() else 0


def supports_bfloat16(device: str) -> bool:
    """Return whether a device computes in bfloat16; every CPU does, though not always fast."""
    torch, kind = torch_module(), device_type(device)
    if kind == "cuda":
        with torch.cuda.device(device):
            return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    if kind == "xpu":
        return bool(torch.xpu.is_bf16_supported(including_emulation=False))
    if kind == "mps":
        return bool(torch.backends.mps.is_macos_or_newer(14, 0))
    return True


def torch_module() -> ModuleType:
    """Return torch.

    Raises:
        MissingExtra: it is not installed.
    """
    try:
        import torch
    except ImportError:
        raise MissingExtra("a model in this process", "torch", "local") from None
    module: ModuleType = torch
    return module


def shortest_times(*computations: Callable[[], object], rounds: int = 12) -> list[float]:
    """Return the shortest time of each computation, in seconds.

    They alternate, and there are enough rounds for one without interruption on a busy machine.
    """
    seconds = [float("inf")] * len(computations)
    for _ in range(rounds):
        for i, compute in enumerate(computations):
            start = time.perf_counter()
            compute()
            seconds[i] = min(seconds[i], time.perf_counter() - start)
    return seconds


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error means that memory ran out, on any device.

    ``torch.OutOfMemoryError`` is a ``RuntimeError``; allocators without an error class of their own
    raise ``RuntimeError`` with a message about memory.

    >>> is_out_of_memory(RuntimeError("CUDA out of memory")), is_out_of_memory(RuntimeError("shape mismatch"))
    (True, False)
    """
    if isinstance(error, CompoundError):
        return False
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and "memory" in str(error)
    )


@contextmanager
def naming_settings(what: str, hint: str) -> Iterator[None]:
    """Raise `CompoundError` with the settings to lower if memory runs out in a block or a function.

    >>> with naming_settings("a training step", "lower micro_tokens"):
    ...     raise MemoryError("1 GiB")
    Traceback (most recent call last):
    compound.core.errors.CompoundError: a training step ran out of memory: 1 GiB; lower micro_tokens
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise CompoundError(f"{what} ran out of memory: {error}", hint=hint) from error
