"""Learners of training jobs: their protocol, their settings, and the declaration that opens one."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Literal, Self

from pydantic import Field, model_validator

from compound.core.errors import DeclarationError
from compound.engines.local import devices, loading
from compound.engines.local.devices import (
    Attention,
    DeviceName,
    DType,
    Placement,
    Quantization,
    naming_settings,
)
from compound.engines.vllm.arguments import gpu_name
from compound.optimization.settings.base import Settings
from compound.optimizers.weights.learner.adapters import (
    Adapters,
    FrozenModel,
    Load,
    check_same_tokens,
)
from compound.optimizers.weights.learner.trainer import LearnerSpec, Trainer


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
    about a third more computation."""
    quantization: Quantization | Literal["auto"] = "auto"
    """Quantization of the linear layers by bitsandbytes: `8bit`, `4bit` (NF4), or `none`; needs CUDA and
    the extra `quantized`. `auto` uses that of the engine that samples."""

    def placement(self, dtype: str, quantization: str, section: str) -> Placement:
        """Return the placement of the base, after checking it."""
        placement = Placement(
            self.device,
            self._common("dtype", dtype, section),
            self.attn_implementation,
            self._common("quantization", quantization, section).replace("auto", "none"),
        )
        placement.check(f"{section}.base")
        return placement

    def _common(self, setting: str, sampled: str, section: str) -> str:
        own: str = getattr(self, setting)
        if "auto" not in (own, sampled) and own != sampled:
            raise DeclarationError(
                f"{section}.base.{setting} is {own}, but the components sample with {sampled}: the trainer "
                "would differentiate another distribution than was sampled",
                hint=f"set {section}.base.{setting} to auto, or {setting} of their engine to {own}",
            )
        return sampled if own == "auto" else own


KEY = "COMPOUND_LEARNER_KEY"  # environment variable with the key of signatures of messages
SAME_KEY = "set it to the same random text on all machines; messages are signed with it"
LOWER = "set {section}.base.dtype to bfloat16, {section}.base.quantization to 4bit, or use a smaller model"


class LearnerSettings(Settings):
    """The processes that compute training steps, on this machine and possibly on others."""

    processes: int = Field(default=1, ge=1, le=64)
    """Number of processes of each machine, with one GPU each, among which the samples of every update are
    divided. With 1, and one machine, this process computes the steps itself. Results are equal up to
    rounding for any number."""
    machines: int = Field(default=1, ge=1)
    """Number of machines. On each machine but this one, start `compound.optimizers.weights.distributed.node`
    once; it serves all jobs of the run."""
    address: str | None = Field(default=None, pattern=r"^[^/]+:[0-9]{1,5}$")
    """Host and port of this machine that the other machines connect to."""
    sharding: Literal["data", "fsdp"] = "data"
    """Memory of the base model: `data`, a whole copy in every process; or `fsdp`, the layers are divided
    among the processes and gathered one by one (PyTorch's FSDP2). Adapters and their optimizer states are
    copied in both."""

    @property
    def world(self) -> int:
        """The number of processes of all machines."""
        return self.processes * self.machines

    @model_validator(mode="after")
    def _divided(self) -> Self:
        if self.sharding == "fsdp" and self.world == 1:
            raise ValueError(
                "sharding fsdp divides the base model among processes, but processes is 1; set processes to "
                "2 or more"
            )
        if self.machines > 1 and self.address is None:
            raise ValueError(
                "machines above 1 need an address, the HOST:PORT of this machine that the others connect to"
            )
        return self

    def check(self, placement: Placement, section: str) -> None:
        """Check that this machine has a device for each process; loads no model and starts nothing."""
        if self.world == 1:
            return
        where = f"{section}.learner"
        device = devices.resolve_device(placement.device, f"{section}.base")
        kind = devices.device_type(device)
        if kind not in ("cpu", "cuda"):
            raise DeclarationError(
                f"{where}.processes is {self.processes}, but several processes on {kind} are not supported",
                hint=f"set {where}.processes to 1",
            )
        if ":" in device:
            raise DeclarationError(
                f"{where}.processes is {self.processes}, but {section}.base.device names one device, "
                f"{device}",
                hint=f"set {section}.base.device to {kind}: the processes use {kind}:0 to "
                f"{kind}:{self.processes - 1}; CUDA_VISIBLE_DEVICES selects others",
            )
        if kind == "cuda" and self.processes > (count := devices.device_count("cuda")):
            raise DeclarationError(
                f"{where}.processes is {self.processes}, but PyTorch finds {count} CUDA "
                f"device{'s' * (count > 1)}, and each process needs one",
                hint=f"set {where}.processes to {count}",
            )
        if self.sharding == "fsdp" and placement.quantization != "none":
            raise DeclarationError(
                f"{where}.sharding is fsdp, which does not divide weights quantized to "
                f"{placement.quantization}",
                hint=f"set {where}.sharding to data, or {section}.base.quantization to none",
            )
        if self.machines > 1 and not os.environ.get(KEY):
            raise DeclarationError(
                f"{where}.machines is {self.machines}, but the environment variable {KEY} is not set",
                hint=SAME_KEY,
            )

    def gpus(self, placement: Placement) -> list[str]:
        """Return the GPUs of this machine that compute, by their names in CUDA_VISIBLE_DEVICES."""
        device = devices.resolve_device(placement.device)
        if devices.device_type(device) != "cuda":
            return []
        ranks = range(self.processes) if self.world > 1 else ()
        found = [placed(Placement(device), rank).device for rank in ranks]
        indices = (each.partition(":")[2] for each in found or [devices.indexed_device(device)])
        return [name for index in indices if (name := gpu_name(int(index))) is not None]

    @staticmethod
    def backend_on(kind: str) -> str:
        """Return the communication library on a kind of devices."""
        return "nccl" if kind == "cuda" else "gloo"


def placed(placement: Placement, rank: int) -> Placement:
    """Return where one process loads the base model."""
    if placement.device == "cuda":
        return replace(placement, device=f"cuda:{rank}")
    return placement


def open_trainer(spec: LearnerSpec, *, load: Load | None = None) -> Trainer:
    """Load the base model in this process, and return a trainer of its adapters."""
    with naming_settings(
        f"loading {spec.model!r} for training", LOWER.format(section=spec.section)
    ):
        adapters = Adapters(
            spec.model,
            spec.shapes,
            seed=spec.seed,
            placement=spec.placement,
            checkpointing=spec.checkpointing,
            load=load or loading.load_shared,
        )
        teacher = (
            FrozenModel(spec.teacher, spec.placement, loading.load_shared) if spec.teacher else None
        )
    if spec.teacher:
        check_same_tokens(spec.teacher, spec.model, spec.section)
    return Trainer(adapters, spec, in_step=load is not None, teacher=teacher)
