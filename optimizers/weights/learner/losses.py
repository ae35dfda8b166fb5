"""Losses of weight training: variants by name, each a per-token loss and a weighting of samples.

The weights are computed once, over the whole batch, so the loss is a plain sum that does not depend
on how the batch is divided into micro-batches::

    weights = sample_weights(variant, lengths, longest)                # the whole batch loss =
    (per_token_loss(variant, logps, old, advantages, mask, settings) * mask * weights[:,
    None]).sum()

Tensors have shape (B, T): samples by sampled tokens, padded where ``mask`` is 0. Values in the
padding are ignored. A KL term is added per token, ``+ beta * kl(logps, reference)``, with the same
weights.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, Self

from pydantic import Field, model_validator

from compound.core.errors import DeclarationError, suggest_name
from compound.optimization.settings.base import OneOf, Settings, or_name

if TYPE_CHECKING:
    from torch import Tensor

Level = Literal["token", "sequence"]
Bounds = tuple[float, float]


@dataclass(frozen=True)
class LossTerms:
    """Inputs of a per-token loss, (B, T); the ratio has shape (B, 1) at sequence level."""

    logps: Tensor
    ratio: Tensor
    advantages: Tensor


class LossSettings(Settings, ABC):
    """Settings of a loss, with its per-token term."""

    @abstractmethod
    def term(self, terms: LossTerms) -> Tensor:
        """Return the loss of every token."""

    @property
    def bounds(self) -> Bounds:
        """Lower and upper ratio at which answers with negative and positive advantages count as clipped."""
        return 0.0, math.inf


class ImitationLoss(LossSettings):
    """Maximum likelihood: imitates samples and ignores advantages."""

    def term(self, terms: LossTerms) -> Tensor:
        """Return the negative log-likelihood."""
        return -terms.logps


class PolicyLoss(LossSettings):
    """Settings of all losses that weight samples by advantages."""

    beta: float = Field(default=0.0, ge=0)
    """Coefficient of the KL divergence from the base model."""
    entropy: float = Field(default=0.0, ge=0)
    """Coefficient of the entropy bonus."""

    correction: float | None = Field(default=2.0, gt=0)
    """Cap of the importance weight that corrects for differences between the probabilities of sampler and
    trainer; `null` disables the correction."""


class ClippedLoss(PolicyLoss):
    """PPO's clipped surrogate loss (mmGRPO, equation 1)."""

    clip: float = Field(default=0.2, gt=0, lt=1)
    """Clipping range: how far the probability ratio may deviate from 1 before it is clipped."""
    clip_high: float | None = Field(default=None, gt=0)
    """Upper clipping range, if it differs from `clip`; DAPO uses 0.28."""
    clip_delta: float | None = Field(default=None, gt=1)
    """Upper bound of the ratio for negative advantages (two-sided clipping, TRL's `delta`); must be above
    1 + `clip_high`. `null` leaves the ratio unbounded."""

    @model_validator(mode="after")
    def _bounded(self) -> Self:
        """Check that the two-sided bound is outside the trust region."""
        if self.clip_delta is not None and self.clip_delta <= 1 + self.highest:
            raise ValueError(f"clip_delta must be above 1 + clip_high = {1 + self.highest:g}")
        return self

    @property
    def highest(self) -> float:
        """The upper clipping range."""
        return self.clip if self.clip_high is None else self.clip_high

    @property
    def bounds(self) -> Bounds:
        """The limits of the trust region."""
        return 1 - self.clip, 1 + self.highest

    def term(self, terms: LossTerms) -> Tensor:
        """Return the clipped term; ``clip_delta`` bounds the ratio of negative advantages (INTELLECT-2)."""
        bounded = terms.ratio.clamp(1 - self.clip, 1 + self.highest) * terms.advantages
        free = terms.ratio if self.clip_delta is None else terms.ratio.clamp(max=self.clip_delta)
        return -(free * terms.advantages).minimum(bounded)


class CISPOLoss(PolicyLoss):
    """CISPO: the capped, detached ratio weights the gradient, so that no token loses its gradient."""

    cap: float = Field(default=5.0, gt=0)
    """Upper bound of the ratio (TRL's `epsilon_high`)."""

    @property
    def bounds(self) -> Bounds:
        """The cap; there is no lower bound."""
        return 0.0, self.cap

    def term(self, terms: LossTerms) -> Tensor:
        """Return the weighted log-likelihood."""
        return -terms.ratio.clamp(max=self.cap).detach() * terms.advantages * terms.logps


class REINFORCELoss(PolicyLoss):
    """REINFORCE: the plain policy gradient, without a ratio."""

    def term(self, terms: LossTerms) -> Tensor:
        """Return the log-likelihood weighted by advantages."""
        return -terms.advantages * terms.logps


@dataclass(frozen=True)
class Variant:
    """A loss: its per-token term, the weighting of samples, and the level of the probability ratio.

    Attributes:
        settings: the class of the settings, which computes the per-token term.
        weigh: ``sequence``: the mean over samples of the mean over tokens; ``tokens``: the mean
            over all tokens; ``longest``: the sum over tokens divided by a fixed length, averaged
            over samples; ``sum``: the mean over samples of the sum over tokens.
        level: ``token`` for a ratio per token; ``sequence`` for one ratio per sample, the geometric
            mean over its tokens.
    """

    settings: type[LossSettings]
    weigh: Literal["sequence", "tokens", "longest", "sum"]
    level: Level = "token"

    @property
    def likelihood(self) -> bool:
        """Whether the loss imitates samples and ignores advantages."""
        return self.settings is ImitationLoss


def per_token_loss(
    variant: str,
    logps: Tensor,
    old: Tensor | None,
    advantages: Tensor | None,
    mask: Tensor,
    settings: LossSettings | None = None,
) -> Tensor:
    """Return the loss of every token, (B, T), 0 in the padding.

    Args:
        variant: a name from `VARIANTS`.
        logps: log-probabilities (nats) under the trained policy, (B, T).
        old: log-probabilities under the policy that the ratio is relative to. ``None`` uses the
            current ones, as for the first update on fresh samples: the ratio is 1, and the gradient
            is the plain policy gradient.
        advantages: (B, T) or (B,); ``None`` for maximum likelihood (``sft``).
        mask: 1 for sampled tokens, 0 for padding.
        settings: the settings of the variant; its defaults if omitted.

    Raises:
        DeclarationError: the variant is unknown, or requires advantages and none are given.

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
    ratio = at_level(log_ratio, keep, chosen.level).exp()
    own = settings if settings is not None else chosen.settings()
    return own.term(LossTerms(logps, ratio, advantages)) * keep


def sample_weights(
    variant: str,
    lengths: Sequence[int],
    longest: int | None = None,
    *,
    counts: Sequence[float] | None = None,
    units: Sequence[Hashable] | None = None,
) -> list[float]:
    """Return the weight of each sample of a batch, such that the losses of micro-batches add up.

    Args:
        variant: a name from `VARIANTS`.
        lengths: the number of sampled tokens of every sample of the whole batch; 0 for a masked
            sample, which counts in means over samples but not in means over tokens, as in TRL.
        longest: for ``dr_grpo``, the length to divide by: the maximum length of a completion, the
            same in every step, so that no length is favored.
        counts: the weight of each sample, equal within a unit; 1 by default.
        units: samples with the same unit, such as the turns of a conversation, count as one sample
            in means over samples, and their tokens as one answer in means over tokens. By default
            each sample is a unit.

    Raises:
        DeclarationError: the variant is unknown, or ``longest`` is missing or below the largest
            length.

    Example:
        >>> sample_weights("grpo", [1, 3]), sample_weights("dapo", [1, 3]), sample_weights("sft_sum", [1, 3])
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
        return [
            time / (samples * max(tokens[unit], 1)) for time, unit in zip(times, whose, strict=True)
        ]
    if weigh == "tokens":
        every = math.fsum(time * length for time, length in zip(times, lengths, strict=True))
        return [time / (every or 1.0) for time in times]
    if weigh == "sum":
        return [time / samples for time in times]
    if longest is None or longest < max(lengths, default=1):
        raise DeclarationError(
            f"{variant!r} divides by the largest length a completion may have, but longest is {longest}",
            hint="pass the max_tokens that the samples were drawn with",
        )
    return [time / (samples * longest) for time in times]


def kl(logps: Tensor, reference: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return an estimate of KL(policy, reference) per token: exp(d) - d - 1 with d = reference - logps.

    The estimate is non-negative, and unbiased for tokens sampled from the policy.

    >>> import torch
    >>> kl(torch.tensor([-1.0, -1.0]), torch.tensor([-1.0, -2.0]))
    tensor([0.0000, 0.3679])
    """
    d = reference - logps
    if mask is not None:
        d = d.masked_fill(~mask.bool(), 0.0)
    return d.exp() - d - 1


def value_loss(values: Tensor, old: Tensor, targets: Tensor, clip: float | None = 0.2) -> Tensor:
    """Return PPO's value loss per token: half the maximum of the unclipped and the clipped squared error.

    Args:
        values: the current estimates of the value head, (B, T).
        old: the estimates when the advantages were computed.
        targets: the returns.
        clip: the range around ``old`` that estimates are clipped to; ``None`` disables clipping.

    Example:
        >>> import torch
        >>> value_loss(torch.tensor([1.0]), torch.tensor([0.0]), torch.tensor([1.0]))  # moved 1, may move 0.2
        tensor([0.3200])
    """
    unclipped = (values - targets) ** 2
    if clip is None:
        return 0.5 * unclipped
    bounded = old + (values - old).clamp(-clip, clip)
    return 0.5 * unclipped.maximum((bounded - targets) ** 2)


def at_level(log_ratio: Tensor, keep: Tensor, level: Level) -> Tensor:
    """Return log ratios at token level, (B, T), or their mean over the tokens of each sample, (B, 1)."""
    if level == "token":
        return log_ratio
    return (log_ratio * keep).sum(-1, keepdim=True) / keep.sum(-1, keepdim=True).clamp(min=1)


def variant_of(name: str) -> Variant:
    """Return a variant by its name.

    Raises:
        DeclarationError: there is no such loss.
    """
    if name not in VARIANTS:
        raise DeclarationError(f"unknown loss {name!r}", hint=suggest_name(name, VARIANTS))
    return VARIANTS[name]


VARIANTS: Mapping[str, Variant] = {
    "grpo": Variant(ClippedLoss, "sequence"),  # mmGRPO, equation 5; MHGPO, equation 6
    "dr_grpo": Variant(ClippedLoss, "longest"),
    "dapo": Variant(ClippedLoss, "tokens"),  # also PPO's policy loss
    "cispo": Variant(CISPOLoss, "tokens"),
    "gspo": Variant(ClippedLoss, "sequence", "sequence"),
    "reinforce": Variant(REINFORCELoss, "sum"),
    "sft": Variant(ImitationLoss, "tokens"),  # MyGO: the mean over tokens
    "sft_sum": Variant(ImitationLoss, "sum"),  # MyGO as printed: the sum over a trajectory's tokens
}


class PolicyObjective(OneOf):
    """A loss that weights samples by advantages, under the names that TRL uses; `grpo` by default."""

    grpo: ClippedLoss | None = None
    """Clipped loss: the mean over samples of the mean over their tokens."""
    dr_grpo: ClippedLoss | None = None
    """Clipped loss: the sum over tokens divided by the maximum length, averaged over samples."""
    dapo: ClippedLoss | None = None
    """Clipped loss: the mean over all tokens."""
    gspo: ClippedLoss | None = None
    """Like `grpo`, with one probability ratio per sample."""
    cispo: CISPOLoss | None = None
    """A capped ratio weights the gradient."""
    reinforce: REINFORCELoss | None = None
    """The plain policy gradient, without a ratio."""

    REMOVED: ClassVar[Mapping[str, str]] = {
        "bnpo": "dapo",
        "sapo": "grpo",
        "vespo": "cispo",
        "luspo": "gspo",
    }

    @property
    def settings(self) -> PolicyLoss:
        """The settings of the selected loss."""
        found: PolicyLoss | None = getattr(self, self.name)
        return ClippedLoss() if found is None else found


class ImitationObjective(OneOf):
    """A loss that imitates samples; `sft` by default."""

    sft: ImitationLoss | None = None
    """Negative log-likelihood: the mean over all tokens."""
    sft_sum: ImitationLoss | None = None
    """Negative log-likelihood: the mean over samples of the sum over tokens, as printed in the MyGO paper."""

    @property
    def settings(self) -> ImitationLoss:
        """The settings of the selected loss."""
        found: ImitationLoss | None = getattr(self, self.name)
        return ImitationLoss() if found is None else found


Objective = PolicyObjective | ImitationObjective
if TYPE_CHECKING:
    PolicyObjectiveField = PolicyObjective
    ImitationObjectiveField = ImitationObjective
else:
    PolicyObjectiveField = or_name(PolicyObjective)
    ImitationObjectiveField = or_name(ImitationObjective)


def importance_weights(
    trainer: Tensor, sampler: Tensor, mask: Tensor, *, cap: float = 2.0
) -> Tensor:
    """Return truncated importance weights that correct the sampler-trainer mismatch.

    Args:
        trainer: the trainer's log-probabilities under the sampling weights, (B, T).
        sampler: the sampler's log-probabilities, (B, T).
        mask: 1 for sampled tokens, 0 for padding.
        cap: the maximum weight.

    Returns:
        min(exp(trainer - sampler), cap), (B, T), without gradient; 1 in the padding. All losses are
        linear in the magnitude of the advantage, so weights on advantages equal weights on the loss
        of tokens.
    """
    difference = (trainer - sampler).detach().masked_fill(~mask.bool(), 0.0)
    return difference.exp().clamp(max=cap)
