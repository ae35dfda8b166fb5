"""Settings of the processes that compute training steps, and their checks before a run."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal, Self

from pydantic import Field, model_validator

from compound.components.engines.local import devices
from compound.components.engines.local.devices import Placement
from compound.errors import DeclarationError
from compound.settings.base import Settings

Backend = Literal["gloo", "nccl"]


class LearnerSettings(Settings):
    """The processes that compute training steps, all on this machine."""

    processes: int = Field(default=1, ge=1, le=64)
    """Number of processes, with one GPU each, among which the samples of every update are divided. With 1,
    this process computes the steps itself. Results are equal up to rounding for any number."""
    backend: Literal["auto"] | Backend = "auto"
    """Communication library of the processes: `nccl` (GPUs), or `gloo`. `auto` is `nccl` on GPUs, else
    `gloo`."""
    sharding: Literal["data", "fsdp"] = "data"
    """Memory of the base model: `data`, a whole copy in every process; or `fsdp`, the layers are divided
    among the processes and gathered one by one (PyTorch's FSDP2). Adapters and their optimizer states are
    copied in both."""

    @model_validator(mode="after")
    def _divided(self) -> Self:
        """Check that there are processes to divide the base model among."""
        if self.sharding == "fsdp" and self.processes == 1:
            raise ValueError(
                "sharding fsdp divides the base model among processes, but processes is 1; set processes to "
                "2 or more"
            )
        return self

    def check(self, placement: Placement, section: str) -> None:
        """Check that this machine has a device for each process; loads no model and starts nothing.

        Args:
            placement: where and how the base model is loaded.
            section: the path of the training settings, for messages.

        Raises:
            DeclarationError: there are too few devices, or a setting does not fit them.
        """
        if self.processes == 1:
            return
        where, device = f"{section}.learner", devices.resolve_device(placement.device, f"{section}.base")
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
        self._check_backend(kind, where)
        if self.sharding == "fsdp" and self.backend_on(kind) == "gloo" and kind != "cpu":
            raise DeclarationError(
                f"{where}.sharding is fsdp, which needs nccl on GPUs, but {where}.backend is gloo",
                hint=f"set {where}.backend to auto, or {where}.sharding to data",
            )
        if self.sharding == "fsdp" and placement.quantization != "none":
            raise DeclarationError(
                f"{where}.sharding is fsdp, which does not divide weights quantized to "
                f"{placement.quantization}",
                hint=f"set {where}.sharding to data, or {section}.base.quantization to none",
            )

    def _check_backend(self, kind: str, where: str) -> None:
        if kind == "cpu" and self.backend == "nccl":
            raise DeclarationError(
                f"{where}.backend is nccl, which needs CUDA devices, but the base model is on the CPU",
                hint=f"set {where}.backend to auto",
            )
        from torch import distributed

        backend = self.backend_on(kind)
        if not (distributed.is_available() and distributed.is_backend_available(backend)):
            raise DeclarationError(
                f"{where}.processes is {self.processes}, but this build of PyTorch has no {backend}",
                hint=f"install another build, or set {where}.processes to 1",
            )

    def backend_on(self, kind: str) -> Backend:
        """Return the communication library on a kind of devices."""
        if self.backend == "auto":
            return "nccl" if kind == "cuda" else "gloo"
        return self.backend


def place(placement: Placement, rank: int) -> Placement:
    """Return where one process loads the base model.

    >>> place(Placement("cuda"), 1).device, place(Placement("cpu"), 1).device
    ('cuda:1', 'cpu')
    """
    if placement.device == "cuda":
        return replace(placement, device=f"cuda:{rank}")
    return placement
