"""AdamW for one set of tensors, with a learning rate that follows the steps, stored without pickle.

Where several processes train together, each adds up its part of the gradient; all take the same step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from compound.errors import CompoundError


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
    schedule: str = "constant"

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
    """

    def __init__(
        self, parameters: Sequence[tuple[str, Any]], rate: Rate, max_norm: float, whose: str
    ) -> None:
        import torch

        self.rate, self.max_norm, self.whose = rate, max_norm, whose
        self.parameters = list(parameters)
        self._adam = torch.optim.AdamW([p for _, p in self.parameters], lr=rate.lr, weight_decay=0.0)

    def update(self, step: int) -> float:
        """Take one step along the gradients that were added up; return their norm before clipping.

        Raises:
            CompoundError: the gradient is not finite; nothing was changed.
        """
        import torch

        tensors = [p for _, p in self.parameters]
        for tensor in tensors:
            if tensor.grad is None:
                tensor.grad = torch.zeros_like(tensor)
        _add_up([tensor.grad for tensor in tensors])
        norm = float(torch.nn.utils.clip_grad_norm_(tensors, self.max_norm))
        if not math.isfinite(norm):
            self._adam.zero_grad()
            raise CompoundError(
                f"the gradient of {self.whose} is not finite",
                hint="the weights are as they were; begin a new run (--new) with a lower optimize.weights.lr",
            )
        for group in self._adam.param_groups:
            group["lr"] = self.rate.at(step)
        self._adam.step()
        self._adam.zero_grad()
        return norm

    def state(self) -> dict[str, Any]:
        """Return moments and step counts as tensors by name."""
        found = {}
        for name, tensor in self.parameters:
            for part, value in self._adam.state.get(tensor, {}).items():
                found[f"{name}|{part}"] = value.detach().cpu().clone()
        return found

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` returned."""
        for name, tensor in self.parameters:
            parts = {key.rpartition("|")[2]: key for key in state if key.rpartition("|")[0] == name}
            if parts:
                self._adam.state[tensor] = {
                    part: state[key].clone().to(tensor.device if part != "step" else "cpu")
                    for part, key in parts.items()
                }


def _add_up(gradients: Sequence[Any]) -> None:
    """Add gradients over the processes that train together, if there are several."""
    from torch import distributed

    if distributed.is_available() and distributed.is_initialized():
        for gradient in gradients:
            distributed.all_reduce(gradient)


def added(rows: Sequence[Sequence[float]]) -> list[list[float]]:
    """Return numbers added over the processes that train together."""
    import torch

    if not rows or share()[1] == 1:
        return [list(row) for row in rows]
    table = torch.tensor(rows, dtype=torch.float64)
    _add_up([table])
    found: list[list[float]] = table.tolist()
    return found


def share() -> tuple[int, int]:
    """Return this process's number among those that train together, and how many there are."""
    from torch import distributed

    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    return 0, 1
