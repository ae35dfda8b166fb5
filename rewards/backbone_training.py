"""Train a LoRA adapter of the backbone by equation 5, on batches that mix the components.

The heads trained here are discarded: those of the reward model are fitted to convergence on the
trained features (`compound.rewards.heads`). Pairs are tokenized per batch, which bounds the memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from compound.engines.local.devices import naming_settings
from compound.execution.rng import fork_torch_rng, generator
from compound.rewards.backbone import Backbone
from compound.rewards.fit import PairTexts
from compound.rewards.heads import Role
from compound.rewards.settings import BackboneLoRASettings

if TYPE_CHECKING:
    import torch


LOWER = "lower reward.lora.batch or backbone.max_length, or set reward.lora.gradient_checkpointing"
BUCKET = 8  # batches per bucket; pairs are sorted by length within a bucket


@dataclass(frozen=True)
class Curve:
    """Losses on the inputs to tune by, by step (the first before training), and the selected step."""

    losses: tuple[tuple[int, float], ...]
    kept: int


@dataclass(frozen=True, slots=True)
class _Item:
    head: int
    inputs: str
    chosen: str
    rejected: str
    weight: float


def pairwise_loss(
    chosen: torch.Tensor, rejected: torch.Tensor, weights: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the mean or weighted mean of ``-log σ(r⁺ - r⁻)`` over pairs (OPTIMAS, equation 5).

    >>> import torch
    >>> round(float(pairwise_loss(torch.tensor([1.0, 0.0]), torch.tensor([0.0, 0.0]))), 4)
    0.5032
    """
    import torch

    losses = -torch.nn.functional.logsigmoid(chosen.float() - rejected.float())
    return losses.mean() if weights is None else (losses * weights).sum() / weights.sum()


def train(
    backbone: Backbone,
    texts: Sequence[PairTexts],
    training: BackboneLoRASettings,
    *,
    seed: int,
) -> Curve:
    """Train the backbone's adapter, or a new one if it has none, on pairs of several components.

    The weights with the lowest loss on the inputs to tune by are restored at the end, which may be
    the initial ones. The inputs to judge by are not read.

    Args:
        backbone: the backbone, changed in place.
        texts: the pairs of each component, with some inputs held out.
        training: the hyperparameters.
        seed: seeds the order and the initial weights.
    """
    import torch

    if not backbone.adapter:
        backbone.add_adapter(training.rank, training.alpha, seed)
    if training.gradient_checkpointing:
        backbone.checkpoint_layers()
    seen, apart = _items(texts, "fit"), _items(texts, "tune")
    # the random streams seed the weights of the heads, and dropout
    with naming_settings("training the backbone", LOWER), fork_torch_rng(seed, "training"):
        heads = torch.nn.Linear(backbone.dim, len(texts), bias=False).to(backbone.model.device)
        return _descend(backbone, heads, (seen, apart), training, seed)


def _descend(
    backbone: Backbone,
    heads: torch.nn.Linear,
    items: tuple[Sequence[_Item], Sequence[_Item]],
    training: BackboneLoRASettings,
    seed: int,
) -> Curve:
    """Train on the first items until the loss on the second ones stops decreasing.

    The learning rate of the heads is ten times that of the adapter.
    """
    import torch

    seen, apart = items
    adapter = backbone.parameters()
    groups = [
        {"params": adapter, "lr": training.lr},
        {"params": heads.parameters(), "lr": 10 * training.lr},
    ]
    optimizer = torch.optim.AdamW(groups, weight_decay=0.01)
    best, kept, step = _state(backbone), 0, 0
    losses = [(0, _held_out_loss(backbone, heads, apart, training.batch))]
    for epoch in range(training.epochs):
        backbone.model.train()
        for batch in _batches(seen, training.batch, generator(seed, "order", epoch)):
            optimizer.zero_grad()
            _loss(backbone, heads, batch).backward()
            torch.nn.utils.clip_grad_norm_([*adapter, *heads.parameters()], 1.0)
            optimizer.step()
            step += 1
        backbone.model.eval()
        losses.append((step, _held_out_loss(backbone, heads, apart, training.batch)))
        if losses[-1][1] < min(loss for _, loss in losses[:-1]):
            best, kept = _state(backbone), step
        if step - kept >= training.patience:
            break
    for parameter, value in zip(adapter, best, strict=True):
        parameter.data.copy_(value)
    backbone.model.eval()
    backbone.name_adapter()
    return Curve(tuple(losses), kept)


def _items(texts: Sequence[PairTexts], role: Role) -> list[_Item]:
    """Return the pairs of all components with a role, with labels as part of the outputs."""
    return [
        _Item(head, chosen.texts[0], chosen.written, rejected.written, weight)
        for head, component in enumerate(texts)
        for chosen, rejected, weight, own in zip(
            component.chosen, component.rejected, component.recency, component.roles, strict=True
        )
        if own == role
    ]


def _batches(items: Sequence[_Item], size: int, rng: np.random.Generator) -> Iterator[list[_Item]]:
    """Yield shuffled batches whose pairs have similar lengths."""
    order = [items[i] for i in rng.permutation(len(items))]
    for start in range(0, len(order), size * BUCKET):
        bucket = sorted(order[start : start + size * BUCKET], key=lambda item: len(item.inputs))
        found = [bucket[i : i + size] for i in range(0, len(bucket), size)]
        for i in rng.permutation(len(found)):
            yield found[i]


def _loss(backbone: Backbone, heads: torch.nn.Linear, batch: Sequence[_Item]) -> torch.Tensor:
    import torch

    pairs = [(item.inputs, item.chosen) for item in batch] + [
        (item.inputs, item.rejected) for item in batch
    ]
    features = backbone.forward(backbone.tokenize(pairs)).float()
    head = torch.tensor([item.head for item in batch] * 2, device=features.device)
    rewards = heads(features)[torch.arange(len(pairs)), head]
    weights = torch.tensor([item.weight for item in batch], device=features.device)
    return pairwise_loss(rewards[: len(batch)], rewards[len(batch) :], weights)


def _held_out_loss(
    backbone: Backbone, heads: torch.nn.Linear, items: Sequence[_Item], size: int
) -> float:
    import torch

    if not items:
        return float("inf")
    ordered = sorted(items, key=lambda item: len(item.inputs))
    with torch.inference_mode():
        parts = [(ordered[i : i + size]) for i in range(0, len(ordered), size)]
        return sum(float(_loss(backbone, heads, part)) * len(part) for part in parts) / len(ordered)


def _state(backbone: Backbone) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in backbone.parameters()]
