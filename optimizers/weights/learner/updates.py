"""AdamW updates of adapters and of the value head, with their states stored without pickle.

Gradients of micro-batches are summed in float64, in distributed training also over the processes.
The order of the sum then has no visible effect, so any number of processes takes the same update.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from compound.core.errors import CompoundError
from compound.optimization.settings.base import Settings

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

MAX_SKIPPED = 5  # consecutive updates without a finite gradient, after which training stops
VALUE, HEAD = "|value", "|head:"  # prefixes of the value head's optimizer state and weights


class OptimizerSettings(Settings):
    """Settings of AdamW, which updates the weights."""

    lr: float = Field(default=1e-4, gt=0)
    """Learning rate."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps over which the learning rate rises linearly to `lr`."""
    schedule: Literal["constant", "cosine"] = "constant"
    """Learning rate after the warmup: `constant`, or `cosine`, which decays to 0 after the last step."""
    epochs: int = Field(default=1, ge=1)
    """Passes over the samples of a step."""
    minibatches: int = Field(default=1, ge=1)
    """Updates per epoch: the samples are divided into this number of minibatches."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Weight decay of the adapters (AdamW): every update shrinks their matrices by this times `lr`."""
    max_norm: float = Field(default=1.0, gt=0)
    """Maximum gradient norm of an adapter; larger gradients are clipped."""
    micro_tokens: int = Field(default=4096, ge=64)
    """Maximum number of tokens in one forward pass, padding included; a sample that is longer is processed by
    itself. Lower it if memory runs out, and `rollouts.max_length` if samples are longer."""

    def rate(self, step: int, steps: int) -> float:
        """Return the learning rate of a step, counted from 0, in a training of ``steps`` steps.

        >>> settings = OptimizerSettings(lr=1.0, warmup_steps=2, schedule="cosine")
        >>> [round(settings.rate(step, 10), 2) for step in (0, 1, 2, 6, 10)]
        [0.5, 1.0, 1.0, 0.5, 0.0]
        """
        if step < self.warmup_steps:
            return self.lr * (step + 1) / self.warmup_steps
        if self.schedule == "constant":
            return self.lr
        done = (step - self.warmup_steps) / max(1, steps - self.warmup_steps)
        return self.lr * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))


class CriticSettings(Settings):
    """The value head, and the estimation of advantages from its values."""

    gamma: float = Field(default=1.0, ge=0, le=1)
    """Discount factor per token."""
    lam: float = Field(default=1.0, ge=0, le=1)
    """The λ of generalized advantage estimation. Below 1, early tokens of long answers get little of the
    reward, as long as the values are near 0: with 0.95, the first of 100 tokens gets 0.6 % of it."""
    lr: float = Field(default=1e-3, gt=0)
    """Learning rate of the value head."""
    clip: float | None = Field(default=0.2, gt=0)
    """Clipping range of value updates: how far a value may move in a step; `null` disables clipping."""
    kl_reward: float = Field(default=0.0, ge=0)
    """Coefficient of the KL penalty in the per-token reward: the log-ratio of the policy to the base model,
    adapter off (TRL's PPO used 0.05). The `beta` of a loss adds a KL term to the loss instead."""


class Updater:
    """Applies AdamW updates to named tensors."""

    def __init__(
        self,
        parameters: Sequence[tuple[str, Tensor]],
        settings: OptimizerSettings,
        whose: str,
        section: str,
        steps: int = 1,
    ) -> None:
        import torch

        self.settings, self.whose, self.section = settings, whose, section
        self.parameters, self.steps = list(parameters), steps
        self.skipped = 0  # updates since the last applied one
        self._sum: Tensor | None = None
        tensors = [p for _, p in self.parameters]
        self._adam = torch.optim.AdamW(tensors, lr=settings.lr, weight_decay=settings.weight_decay)

    def accumulate(self) -> None:
        """Add the gradients of a micro-batch to the sum of the update, and clear them.

        They are concatenated first: on a GPU, one addition takes less time than one for each
        tensor.
        """
        import torch

        tensors = [tensor for _, tensor in self.parameters]
        found = [tensor.grad for tensor in tensors]
        if any(gradient is not None for gradient in found):
            given = [
                torch.zeros_like(tensor) if gradient is None else gradient
                for tensor, gradient in zip(tensors, found, strict=True)
            ]
            self._gradients().add_(torch.cat([gradient.flatten() for gradient in given]))
        for tensor in tensors:
            tensor.grad = None

    def reduce(self) -> None:
        """Set the gradients to their sums over the micro-batches of all processes."""
        self.accumulate()
        total = self._gradients()
        all_reduce(total)
        tensors = [tensor for _, tensor in self.parameters]
        parts = total.to(tensors[0].dtype).split([tensor.numel() for tensor in tensors])
        for tensor, part in zip(tensors, parts, strict=True):
            tensor.grad = part.view_as(tensor)
        self._sum = None

    def _gradients(self) -> Tensor:
        """Return the sum of the gradients of all tensors, one after the other."""
        import torch

        if self._sum is None:
            device = self.parameters[0][1].device
            dtype = torch.float32 if device.type == "mps" else torch.float64  # which MPS lacks
            size = sum(tensor.numel() for _, tensor in self.parameters)
            self._sum = torch.zeros(size, dtype=dtype, device=device)
        return self._sum

    def update(self, step: int) -> float:
        """Apply one update with the accumulated gradients, and return their norm before clipping.

        If the norm is not finite, the update is skipped: tensors and optimizer state do not change.
        """
        import torch

        self.reduce()
        tensors = [p for _, p in self.parameters]
        norm = float(torch.nn.utils.clip_grad_norm_(tensors, self.settings.max_norm))
        if not math.isfinite(norm):
            self._adam.zero_grad()
            self.skipped += 1
            if self.skipped >= MAX_SKIPPED:
                raise CompoundError(
                    f"the gradient of {self.whose} was not finite in {self.skipped} updates in a row",
                    hint="the skipped updates did not change the weights; start a new run (--new) with a "
                    f"lower {self.section}.optimizer.lr",
                )
            return norm
        self.skipped = 0
        for group in self._adam.param_groups:
            group["lr"] = self.settings.rate(step, self.steps)
        self._adam.step()
        self._adam.zero_grad()
        return norm

    def state(self) -> dict[str, Tensor]:
        """Return moments and step counts as tensors by name."""
        found = {}
        for name, tensor in self.parameters:
            for part, value in self._adam.state.get(tensor, {}).items():
                found[f"{name}|{part}"] = value.detach().cpu()
        return found

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Restore the optimizer state that `state` returned."""
        for name, tensor in self.parameters:
            parts = {key.rpartition("|")[2]: key for key in state if key.rpartition("|")[0] == name}
            if parts:
                self._adam.state[tensor] = {
                    part: state[key].clone().to(tensor.device if part != "step" else "cpu")
                    for part, key in parts.items()
                }


class ValueCritic:
    """Critic of PPO: one value head for all components, a linear probe of the policy's hidden states.

    The states are detached, so that learning values does not change the policy. The head initially
    returns 0. Its weights are stored with the optimizer states.
    """

    def __init__(
        self,
        settings: CriticSettings,
        optimizer: OptimizerSettings,
        base: PreTrainedModel,
        section: str,
    ) -> None:
        import torch

        width = base.config.hidden_size
        self.settings = settings
        self.head = torch.nn.Sequential(torch.nn.LayerNorm(width), torch.nn.Linear(width, 1))
        for parameter in self.head[1].parameters():
            torch.nn.init.zeros_(parameter)
        self.head.to(base.device)
        own = {"lr": settings.lr, "warmup_steps": 0, "schedule": "constant", "weight_decay": 0.0}
        named = list(self.head.named_parameters())
        self.updater = Updater(named, optimizer.model_copy(update=own), "the value head", section)

    def estimates(self, states: Tensor) -> Tensor:
        """Return the value before each token; the states get no gradient."""
        return self.head(states.detach().float())[..., 0]

    def state(self) -> dict[str, Tensor]:
        """Return all weights by name, to be stored with the optimizer states."""
        found = self.head.state_dict().items()
        return {f"{HEAD}{key}": tensor.detach().cpu() for key, tensor in found}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Restore the weights that `state` returned."""
        found = {key: tensor for key, tensor in state.items() if key.startswith(HEAD)}
        self.head.load_state_dict({key.removeprefix(HEAD): found[key] for key in found})


def all_reduce(tensor: Tensor) -> None:
    """Sum a tensor in place over the processes of a distributed training; does nothing with one process.

    This is the only collective of a training. Some backends reduce tensors of one device only
    (NCCL: GPU tensors), so the tensor must be contiguous and on the device of the gradients.
    """
    from torch import distributed

    if rank_and_world_size()[1] > 1:
        distributed.all_reduce(tensor)


def rank_and_world_size() -> tuple[int, int]:
    """Return the rank of this process and the number of processes of a distributed training."""
    from torch import distributed

    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    return 0, 1
