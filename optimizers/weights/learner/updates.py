"""AdamW for one set of tensors, with a learning rate that follows the steps, stored without pickle.

Where several processes train together, each adds up its part of the gradient; all take the same step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from compound.errors import CompoundError
from compound.settings.base import Settings

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Schedule = Literal["constant", "cosine"]


class OptimizerSettings(Settings):
    """How AdamW updates the weights."""

    lr: float = Field(default=1e-4, gt=0)
    """Learning rate."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps over which the learning rate rises linearly to `lr`."""
    schedule: Schedule = "constant"
    """Whether the learning rate falls towards 0 at the last step (`cosine`)."""
    epochs: int = Field(default=1, ge=1)
    """Passes over the samples of a step."""
    minibatches: int = Field(default=1, ge=1)
    """Updates of an epoch: the samples are divided into this number of parts."""
    max_norm: float = Field(default=1.0, gt=0)
    """Gradients of an adapter are clipped to this norm."""
    max_skipped: int = Field(default=5, ge=1)
    """Consecutive updates of an adapter with a non-finite gradient after which training stops. Each of them
    is skipped and counted; weights and optimizer state stay as they are."""
    micro_tokens: int = Field(default=4096, ge=64)
    """Tokens that go through the model at once, padding included: lower it when memory does not suffice."""


@dataclass(frozen=True)
class Rate:
    """A learning rate over the steps of a training.

    >>> rate = Rate(1.0, warmup=2, steps=10, schedule="cosine")
    >>> [round(rate.at(step), 2) for step in (0, 1, 2, 6, 10)]
    [0.5, 1.0, 1.0, 0.5, 0.0]
    """

    lr: float
    warmup: int = 0
    steps: int = 1
    schedule: Schedule = "constant"

    @classmethod
    def of(cls, settings: OptimizerSettings, steps: int) -> Rate:
        """Return the learning rate that settings give to a training of some steps."""
        return cls(settings.lr, settings.warmup_steps, steps, settings.schedule)

    def at(self, step: int) -> float:
        """Return the rate of a step, the first being 0."""
        if step < self.warmup:
            return self.lr * (step + 1) / self.warmup
        if self.schedule == "constant":
            return self.lr
        done = (step - self.warmup) / max(1, self.steps - self.warmup)
        return self.lr * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))


class Updater:
    """Takes AdamW steps on named tensors.

    Args:
        parameters: names and tensors.
        rate: the learning rate.
        max_norm: gradients are clipped to it.
        whose: for messages.
        max_skipped: updates in a row whose gradient is not finite, after which to give up.

    Attributes:
        skipped: how many of the last updates in a row were skipped.
    """

    def __init__(
        self,
        parameters: Sequence[tuple[str, Tensor]],
        rate: Rate,
        max_norm: float,
        whose: str,
        max_skipped: int = 5,
    ) -> None:
        import torch

        self.rate, self.max_norm, self.whose = rate, max_norm, whose
        self.parameters = list(parameters)
        self.max_skipped, self.skipped = max_skipped, 0
        self._adam = torch.optim.AdamW([p for _, p in self.parameters], lr=rate.lr, weight_decay=0.0)

    def update(self, step: int) -> float:
        """Take one step along the gradients that were added up; return their norm before clipping.

        Where the norm is not finite, the step is skipped: tensors and optimizer state stay as they are.

        Raises:
            CompoundError: that many updates in a row were skipped.
        """
        import torch

        tensors = [p for _, p in self.parameters]
        for tensor in tensors:
            if tensor.grad is None:
                tensor.grad = torch.zeros_like(tensor)
            tensor.grad = tensor.grad.contiguous()
        add_up([tensor.grad for tensor in tensors])
        norm = float(torch.nn.utils.clip_grad_norm_(tensors, self.max_norm))
        if not math.isfinite(norm):
            self._adam.zero_grad()
            self.skipped += 1
            if self.skipped >= self.max_skipped:
                raise CompoundError(
                    f"the gradient of {self.whose} was not finite in {self.skipped} updates in a row",
                    hint="none of them changed the weights; begin a new run (--new) with a lower "
                    "learning rate (optimizer.lr), or raise optimizer.max_skipped",
                )
            return norm
        self.skipped = 0
        for group in self._adam.param_groups:
            group["lr"] = self.rate.at(step)
        self._adam.step()
        self._adam.zero_grad()
        return norm

    def state(self) -> dict[str, Tensor]:
        """Return moments and step counts as tensors by name."""
        found = {}
        for name, tensor in self.parameters:
            for part, value in self._adam.state.get(tensor, {}).items():
                found[f"{name}|{part}"] = value.detach().cpu().clone()
        return found

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Go on from what `state` returned."""
        for name, tensor in self.parameters:
            parts = {key.rpartition("|")[2]: key for key in state if key.rpartition("|")[0] == name}
            if parts:
                self._adam.state[tensor] = {
                    part: state[key].clone().to(tensor.device if part != "step" else "cpu")
                    for part, key in parts.items()
                }


def add_up(tensors: Sequence[Tensor]) -> None:
    """Add tensors in place over the processes that train together, if there are several.

    The only collective of a training. Some backends reduce tensors of one device only (NCCL those of a GPU),
    so a tensor must be on the device of the gradients, and contiguous.
    """
    if share()[1] == 1:
        return
    from torch import distributed

    for tensor in tensors:
        distributed.all_reduce(tensor)


def added(rows: Sequence[Sequence[float]], device: torch.device | None) -> list[list[float]]:
    """Return numbers added over the processes that train together.

    Args:
        rows: as many in every process.
        device: that of the gradients.
    """
    import torch

    if not rows or share()[1] == 1:
        return [list(row) for row in rows]
    table = torch.tensor(rows, dtype=torch.float64, device=device)
    add_up([table])
    found: list[list[float]] = table.tolist()
    return found


def share() -> tuple[int, int]:
    """Return this process's number among those that train together, and how many there are."""
    from torch import distributed

    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    return 0, 1
