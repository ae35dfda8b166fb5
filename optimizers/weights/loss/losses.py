"""Losses of weight training: a table of variants by name, split so that micro-batches add up exactly.

A variant is a per-token loss and a rule that weighs samples. The weights are computed once, over the whole
batch, so that the loss is a plain sum, however the batch is split into micro-batches::

    weights = sample_weights(variant, lengths, longest)                # the whole batch
    loss = (per_token_loss(variant, logps, old, advantages, mask, settings) * mask * weights[:, None]).sum()

Tensors have shape (B, T): samples by sampled tokens, padded where ``mask`` is 0. What stands in the padding
never matters. A KL term is added per token, ``+ beta * kl(logps, reference)``, and weighed like the rest.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Self

from pydantic import Field, NonNegativeFloat, PositiveFloat, model_validator

from compound.errors import DeclarationError, nearest
from compound.settings.base import Settings

if TYPE_CHECKING:
    from torch import Tensor

Level = Literal["token", "sequence"]
Bounds = tuple[float, float]


@dataclass(frozen=True)
class Terms:
    """What a per-token loss is made of; the ratio has shape (B, 1) at sequence level."""

    logps: Tensor
    log_ratio: Tensor
    ratio: Tensor
    advantages: Tensor
    mask: Tensor


class LossSettings(Settings, ABC):
    """The settings of a loss, with its per-token term."""

    @abstractmethod
    def term(self, terms: Terms) -> Tensor:
        """Return the loss of every token."""

    @property
    def bounds(self) -> Bounds:
        """The ratios below and above which bad and good answers count as clipped."""
        return 0.0, math.inf


class ImitationLoss(LossSettings):
    """Maximum likelihood: it imitates samples, and reads no advantages."""

    def term(self, terms: Terms) -> Tensor:
        """Return the negative log-likelihood."""
        return -terms.logps


class PolicyLoss(LossSettings):
    """What every loss that weighs samples by advantages reads."""

    beta: float = Field(default=0.0, ge=0)
    """The weight of the KL divergence from the base model."""
    entropy: float = Field(default=0.0, ge=0)
    """The weight of the entropy bonus."""

    @property
    def corrected(self) -> bool:
        """Whether it corrects what sampler and trainer compute differently."""
        return True

    @property
    def weight_cap(self) -> float | None:
        """The cap of importance weights that are folded into the advantages; ``None`` for none."""
        return None


class CorrectedLoss(PolicyLoss):
    """A loss whose advantages are corrected by importance weights."""

    correction: float | None = Field(default=2.0, gt=0)
    """The cap of the importance weight that corrects what sampler and trainer compute differently; `null` for
    no correction."""

    @property
    def corrected(self) -> bool:
        """Whether there is a cap."""
        return self.correction is not None

    @property
    def weight_cap(self) -> float | None:
        """The cap."""
        return self.correction


class ClippedLoss(CorrectedLoss):
    """PPO's pessimistic bound (mmGRPO, equation 1)."""

    clip: float = Field(default=0.2, gt=0, lt=1)
    """How far the probability ratio may fall below 1, or rise above it, before it is clipped."""
    clip_high: float | None = Field(default=None, gt=0)
    """How far it may rise, where that differs; DAPO uses 0.28."""
    clip_delta: float | None = Field(default=None, gt=1)
    """Upper bound of the ratio for negative advantages (two-sided clipping, TRL's `delta`); above
    1 + `clip_high`. `null` leaves it unbounded."""

    @model_validator(mode="after")
    def _bounded(self) -> Self:
        """Refuse a two-sided bound inside the trust region."""
        if self.clip_delta is not None and self.clip_delta <= 1 + self.highest:
            raise ValueError(f"clip_delta must be above 1 + clip_high = {1 + self.highest:g}")
        return self

    @property
    def highest(self) -> float:
        """How far the ratio may rise."""
        return self.clip if self.clip_high is None else self.clip_high

    @property
    def bounds(self) -> Bounds:
        """The trust region."""
        return 1 - self.clip, 1 + self.highest

    def term(self, terms: Terms) -> Tensor:
        """Return the clipped term; ``clip_delta`` bounds bad answers from above (INTELLECT-2)."""
        bounded = terms.ratio.clamp(1 - self.clip, 1 + self.highest) * terms.advantages
        free = terms.ratio if self.clip_delta is None else terms.ratio.clamp(max=self.clip_delta)
        return -(free * terms.advantages).minimum(bounded)


class CISPOLoss(CorrectedLoss):
    """The capped ratio weighs the gradient and has none itself, so that no token loses its gradient."""

    cap: float = Field(default=5.0, gt=0)
    """Upper bound of the ratio (TRL's `epsilon_high`)."""

    @property
    def bounds(self) -> Bounds:
        """Only good answers are capped."""
        return 0.0, self.cap

    def term(self, terms: Terms) -> Tensor:
        """Return the weighted log-likelihood."""
        return -terms.ratio.clamp(max=self.cap).detach() * terms.advantages * terms.logps


class SAPOLoss(CorrectedLoss):
    """A sigmoid gate instead of a hard clip; at ratio 1 its slope is 1 for every temperature."""

    positive: float = Field(default=1.0, gt=0)
    """Gate temperature for positive advantages (TRL's `sapo_temperature_pos`)."""
    negative: float = Field(default=1.05, gt=0)
    """Gate temperature for other advantages (TRL's `sapo_temperature_neg`)."""

    def term(self, terms: Terms) -> Tensor:
        """Return the gated term."""
        good = (terms.advantages > 0).to(terms.ratio.dtype)
        temperature = good * self.positive + (1 - good) * self.negative
        gate = (temperature * (terms.ratio - 1)).sigmoid() * 4 / temperature
        return -gate * terms.advantages


class VESPOLoss(PolicyLoss):
    """The gradient weighed by w^k exp(lambda (1 - w)), w the product of the sample's token ratios."""

    positive: tuple[NonNegativeFloat, PositiveFloat] = (2.0, 3.0)
    """Exponent k and decay lambda for positive advantages (TRL's `vespo_k_pos` and `vespo_lambda_pos`)."""
    negative: tuple[NonNegativeFloat, PositiveFloat] = (3.0, 2.0)
    """Exponent k and decay lambda for negative advantages (TRL's `vespo_k_neg` and `vespo_lambda_neg`)."""
    correction: bool = True
    """Whether the ratio refers to the sampler's log-probabilities, and so corrects what sampler and trainer
    compute differently."""

    @property
    def corrected(self) -> bool:
        """Whether the ratio refers to the sampler."""
        return self.correction

    def term(self, terms: Terms) -> Tensor:
        """Return the weighted log-likelihood."""
        total = (terms.log_ratio.clamp(-20.0, 20.0) * terms.mask).sum(-1, keepdim=True)
        log_w = total.clamp(math.log(1e-8), 20.0)
        good = (terms.advantages >= 0).to(log_w.dtype)
        k = good * self.positive[0] + (1 - good) * self.negative[0]
        decay = good * self.positive[1] + (1 - good) * self.negative[1]
        weight = (decay + k * log_w - decay * log_w.exp()).exp().detach()
        return -weight * terms.advantages * terms.logps


class REINFORCELoss(CorrectedLoss):
    """The plain policy gradient; it has no ratio."""

    def term(self, terms: Terms) -> Tensor:
        """Return the log-likelihood weighed by advantages."""
        return -terms.advantages * terms.logps


@dataclass(frozen=True)
class Variant:
    """A loss: settings with a per-token term, the level of its ratio, and what its samples are weighed by.

    Attributes:
        settings: the class of its settings.
        weigh: ``sequence``: the mean over samples of the mean over tokens; ``tokens``: the mean over all
            tokens; ``longest``: the sum over tokens by a fixed length, averaged over samples; ``sum``: the
            mean over samples of the sum over tokens.
        level: whether each token has its own ratio or the sample has one, the geometric mean of its tokens'.
        sampler: whether its ratio refers to the sampler's log-probabilities, so that no weights correct it.
    """

    settings: type[LossSettings]
    weigh: Literal["sequence", "tokens", "longest", "sum"]
    level: Level = "token"
    sampler: bool = False

    @property
    def likelihood(self) -> bool:
        """Whether it imitates, and reads no advantages."""
        return self.settings is ImitationLoss


def per_token_loss(
    variant: str,
    logps: Tensor,
    old: Tensor | None,
    advantages: Tensor | None,
    mask: Tensor,
    settings: LossSettings | None = None,
    *,
    level: Level | None = None,
) -> Tensor:
    """Return the loss of every token, (B, T), 0 in the padding.

    Args:
        variant: a name from `VARIANTS`.
        logps: log-probabilities (nats) under the policy that is trained, (B, T).
        old: those under the policy that the ratio refers to. ``None`` takes the present ones, as the first
            step on fresh samples does: the ratio is 1, and the gradient is the plain policy gradient.
        advantages: (B, T) or (B,). Maximum likelihood (``sft``) takes none.
        mask: 1 for sampled tokens, 0 for padding.
        settings: those of the variant; its defaults if left out.
        level: of the ratio, if not the variant's own.

    Raises:
        DeclarationError: the variant is unknown, or needs advantages and got none.

    Example:
        >>> import torch
        >>> logps, old = torch.tensor([[-1.0, -2.0]]), torch.tensor([[-1.0, -3.0]])
        >>> per_token_loss("grpo", logps, old, torch.tensor([1.0]), torch.ones(1, 2))
        tensor([[-1.0000, -1.2000]])
    """
    chosen = variant_of(variant)
    keep = mask.bool()
    logps = logps.masked_fill(~keep, 0.0)
    old = logps.detach() if old is None else old.masked_fill(~keep, 0.0)
    if advantages is not None:
        rows = advantages.unsqueeze(1) if advantages.dim() == 1 else advantages
        advantages = rows.expand_as(logps).masked_fill(~keep, 0.0)
    elif not chosen.likelihood:
        raise DeclarationError(f"the loss {variant!r} needs advantages")
    log_ratio = logps - old
    ratio = at_level(log_ratio, keep, level or chosen.level).exp()
    own = settings if settings is not None else chosen.settings()
    return own.term(Terms(logps, log_ratio, ratio, advantages, keep)) * keep


def sample_weights(
    variant: str,
    lengths: Sequence[int],
    longest: int | None = None,
    *,
    counts: Sequence[float] | None = None,
    units: Sequence[Hashable] | None = None,
) -> list[float]:
    """Return the weight of each sample of a batch, so that losses of micro-batches just add up.

    Args:
        variant: a name from `VARIANTS`.
        lengths: sampled tokens of every sample of the whole batch; 0 for a sample that is masked, which then
            counts in means over samples and not in means over tokens, as in TRL.
        longest: for ``dr_grpo``, the length to divide by: the largest a completion may have, the same in
            every step, so that no length is favoured.
        counts: how often each sample counts, equal within a unit; once by default.
        units: samples of equal units, such as the turns of a conversation, are one sample in means over
            samples, and their tokens one answer in means over a sample's tokens. Each is its own by default.

    Raises:
        DeclarationError: the variant is unknown, or ``longest`` is missing or not the largest.

    Example:
        >>> sample_weights("grpo", [1, 3]), sample_weights("dapo", [1, 3]), sample_weights("luspo", [1, 3])
        ([0.5, 0.16666666666666666], [0.25, 0.25], [0.5, 0.5])
        >>> sample_weights("dr_grpo", [1, 3], longest=10)
        [0.05, 0.05]
        >>> sample_weights("grpo", [1, 3, 4], units=["one", "one", "other"])  # two conversations of 4 tokens
        [0.125, 0.125, 0.125]
    """
    weigh = variant_of(variant).weigh
    times = [1.0] * len(lengths) if counts is None else list(counts)
    whose = list(range(len(lengths))) if units is None else list(units)
    tokens: dict[Hashable, int] = {}
    for unit, length in zip(whose, lengths, strict=True):
        tokens[unit] = tokens.get(unit, 0) + length
    samples = math.fsum(dict(zip(whose, times, strict=True)).values())
    if weigh == "sequence":
        return [time / (samples * max(tokens[unit], 1)) for time, unit in zip(times, whose, strict=True)]
    if weigh == "tokens":
        every = math.fsum(time * length for time, length in zip(times, lengths, strict=True))
        return [time / (every or 1.0) for time in times]
    if weigh == "sum":
        return [time / samples for time in times]
    if longest is None or longest < max(lengths, default=1):
        raise DeclarationError(
            f"{variant!r} divides by the largest length a completion may have, but longest is {longest}",
            hint="give the max_tokens that the samples were made with",
        )
    return [time / (samples * longest) for time in times]


def kl(logps: Tensor, reference: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return the estimate of KL(policy, reference) of every token: exp(d) - d - 1 with d = reference - logps.

    It is never negative, and unbiased for tokens sampled from the policy.

    >>> import torch
    >>> kl(torch.tensor([-1.0, -1.0]), torch.tensor([-1.0, -2.0]))
    tensor([0.0000, 0.3679])
    """
    d = reference - logps
    if mask is not None:
        d = d.masked_fill(~mask.bool(), 0.0)
    return d.exp() - d - 1


def value_loss(values: Tensor, old: Tensor, targets: Tensor, clip: float | None = 0.2) -> Tensor:
    """Return PPO's loss of every token's value: half the squared error, the larger of free and clipped.

    Args:
        values: what the value head says now, (B, T).
        old: what it said when the advantages were computed.
        targets: what it should say.
        clip: how far it may move from ``old`` before it gains nothing from moving on; ``None`` does not clip.

    Example:
        >>> import torch
        >>> value_loss(torch.tensor([1.0]), torch.tensor([0.0]), torch.tensor([1.0]))  # moved 1, may move 0.2
        tensor([0.3200])
    """
    free = (values - targets) ** 2
    if clip is None:
        return 0.5 * free
    bound = old + (values - old).clamp(-clip, clip)
    return 0.5 * free.maximum((bound - targets) ** 2)


def at_level(log_ratio: Tensor, keep: Tensor, level: Level) -> Tensor:
    """Return log ratios (B, T) as they are, or each sample's mean over its tokens, (B, 1)."""
    if level == "token":
        return log_ratio
    return (log_ratio * keep).sum(-1, keepdim=True) / keep.sum(-1, keepdim=True).clamp(min=1)


def variant_of(name: str) -> Variant:
    """Return a variant by its name.

    Raises:
        DeclarationError: there is none of that name.
    """
    if name not in VARIANTS:
        raise DeclarationError(f"no loss is called {name!r}", hint=nearest(name, VARIANTS))
    return VARIANTS[name]


VARIANTS: Mapping[str, Variant] = {
    "grpo": Variant(ClippedLoss, "sequence"),  # mmGRPO, equation 5; MHGPO, equation 6
    "bnpo": Variant(ClippedLoss, "tokens"),  # the batch is the whole one, so: dapo
    "dr_grpo": Variant(ClippedLoss, "longest"),
    "dapo": Variant(ClippedLoss, "tokens"),  # also PPO's policy loss
    "cispo": Variant(CISPOLoss, "tokens"),
    "sapo": Variant(SAPOLoss, "sequence"),
    "gspo": Variant(ClippedLoss, "sequence", "sequence"),
    "luspo": Variant(ClippedLoss, "sum", "sequence"),
    "vespo": Variant(VESPOLoss, "tokens", sampler=True),
    "reinforce": Variant(REINFORCELoss, "sum"),
    "sft": Variant(ImitationLoss, "tokens"),  # MyGO: the mean over tokens
    "sft_sum": Variant(ImitationLoss, "sum"),  # MyGO as printed: the sum over a trajectory's tokens
}
