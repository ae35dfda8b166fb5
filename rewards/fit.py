"""Fit a reward model to a pair buffer: heads on fixed features, or on a LoRA-trained backbone.

Every component's head is refitted to the whole buffer, with lower weights for older pairs. A trained
backbone continues from its last weights, on batches that mix all components; the heads trained with
it are discarded, and fitted to convergence on its features (`compound.rewards.heads`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from compound.engines.local.devices import naming_settings
from compound.execution.rng import fork_torch_rng, generator
from compound.graph.configuration import digest
from compound.graph.system import System
from compound.rewards.alignment import accuracy, evidence
from compound.rewards.backbone import Backbone
from compound.rewards.buffer import PairBuffer, input_key
from compound.rewards.features import Embedder, FeatureMap, Reading, Template
from compound.rewards.heads import MIN_INPUTS, Role, fit
from compound.rewards.model import LocalReward, RewardModel
from compound.rewards.settings import BackboneLoRASettings

if TYPE_CHECKING:
    import torch


RECENCY = 0.8  # decay of a pair's weight per iteration
# If the backbone is trained: shares of the inputs that evaluate it, and that choose its weights
HELD_OUT, TUNED = 0.25, 0.25


@dataclass(frozen=True)
class PairTexts:
    """Pairs of a component in the form that the model reads, in buffer order.

    If the backbone is trained, each pair has a role.
    """

    component: str
    chosen: tuple[Reading, ...]
    rejected: tuple[Reading, ...]
    inputs: tuple[str, ...]
    recency: tuple[float, ...]
    roles: tuple[Role, ...] = ()

    def is_sufficient(self) -> bool:
        """Return whether there are enough pairs to fit and to evaluate a reward."""
        if not self.roles:
            return len(set(self.inputs)) >= MIN_INPUTS
        seen = {name for name, role in zip(self.inputs, self.roles, strict=True) if role == "fit"}
        return len(seen) >= MIN_INPUTS and {"tune", "judge"} <= set(self.roles)

    @property
    def is_judged(self) -> tuple[bool, ...]:
        """Whether each pair is evaluated: all, unless the backbone was trained on some."""
        return tuple(role == "judge" for role in self.roles) or (True,) * len(self.inputs)


@dataclass
class FittedRewards:
    """A reward model, and the reasons why some components have no reward."""

    model: RewardModel
    missing: dict[str, str] = field(default_factory=dict)


def component_pairs(buffer: PairBuffer, template: Template, *, held_out: bool = False) -> PairTexts:
    """Return a component's pairs as rendered by its template.

    With ``held_out``, the same inputs are held out every time: the share `TUNED` to choose the training of
    the backbone, and the share `HELD_OUT` to evaluate it.
    """
    found = buffer.weighted_pairs(template.component)
    latest = max((iteration for _, iteration, _ in found), default=0)
    first: dict[str, str] = {}  # groups equal inputs, and calls of the same example
    groups = tuple(first.setdefault(input_key(pair), pair.example) for pair, _, _ in found)
    return PairTexts(
        template.component,
        tuple(template.read(pair.inputs, pair.chosen) for pair, _, _ in found),
        tuple(template.read(pair.inputs, pair.rejected) for pair, _, _ in found),
        groups,
        tuple(weight * RECENCY ** (latest - iteration) for _, iteration, weight in found),
        tuple(role_of(name) for name in groups) if held_out else (),
    )


def role_of(name: str) -> Role:
    """Return the use of an input's pairs, which depends only on its name and so never changes."""
    drawn = generator("held out", name).random()
    return "judge" if drawn < HELD_OUT else "tune" if drawn < HELD_OUT + TUNED else "fit"


def fit_rewards(
    buffer: PairBuffer,
    system: System,
    components: Sequence[str],
    backbone: Embedder,
    name: str,
    *,
    trained: bool = False,
    tested: bool = False,
    seed: int = 0,
    known: dict[str, LocalReward] | None = None,
) -> FittedRewards:
    """Fit the heads of some components to a buffer (OPTIMAS, section 4.2).

    Args:
        buffer: the draws so far.
        system: the system of the draws.
        components: those to fit; one without enough pairs is missing, with the reason.
        backbone: embeds texts as features.
        name: the name of the backbone, for the checkpoint.
        trained: whether the backbone was trained on these pairs, so that inputs are held out.
        tested: whether to test that each reward is better than chance (`LocalReward.evidence`).
        seed: seeds the folds.
        known: a cache of fits by the digest of their data; updated in place.
    """
    known = {} if known is None else known
    found: dict[str, LocalReward] = {}
    missing: dict[str, str] = {}
    for component in components:
        template = Template.of(system.components[component])
        texts = component_pairs(buffer, template, held_out=trained)
        if not texts.is_sufficient():
            missing[component] = _why(buffer, component, len(set(texts.inputs)))
            continue
        key = digest([asdict(texts), name, backbone.adapter, seed, tested])
        if key not in known:
            features = FeatureMap.of(template, [*texts.chosen, *texts.rejected], backbone.dim)
            rows, n = features.matrix([*texts.chosen, *texts.rejected], backbone), len(texts.chosen)
            fitted = fit(
                rows[:n],
                rows[n:],
                texts.inputs,
                recency=texts.recency,
                roles=texts.roles or None,
                soft=features.soft,
                tested=tested,
                seed=seed,
            )
            judged = [name for name, out in zip(texts.inputs, texts.is_judged, strict=True) if out]
            inputs = tuple(
                sorted({name for entry in buffer.of(component) for name in entry.draw.inputs})
            )
            known[key] = LocalReward(
                features,
                fitted.head,
                fitted.slope or 1.0,
                accuracy(fitted.margins, judged),
                fitted.margins,
                inputs,
                evidence(fitted.forward, judged) if tested else None,
            )
        found[component] = known[key]
    return FittedRewards(RewardModel(name, backbone, found, buffer.digest), missing)


def _why(buffer: PairBuffer, component: str, inputs: int) -> str:
    draws = [entry.draw for entry in buffer.of(component)]
    several = [draw for draw in draws if len(draw.candidates) > 1]
    if not draws:
        return "it was never called"
    if not several:
        return "all draws gave the same output; raise its temperature or give it tunable settings"
    if all(len({reward for c in draw.candidates for reward in c.rewards}) == 1 for draw in several):
        return "all its outputs led to the same score: the metric does not depend on them"
    return f"only {inputs} inputs have outputs with significantly different scores; {MIN_INPUTS} are needed"


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
    backbone: Backbone, texts: Sequence[PairTexts], training: BackboneLoRASettings, *, seed: int
) -> Curve:
    """Train the backbone's adapter, or a new one if it has none, on pairs of several components.

    The weights with the lowest loss on the inputs to tune by, which may be the initial ones, are
    restored at the end. ``seed`` seeds the order and the initial weights.
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
    """Train on the first items until the loss on the second ones stops decreasing."""
    import torch

    seen, apart = items
    adapter = backbone.parameters()
    rates = ((adapter, training.lr), (heads.parameters(), 10 * training.lr))
    groups = [{"params": parameters, "lr": lr} for parameters, lr in rates]
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
