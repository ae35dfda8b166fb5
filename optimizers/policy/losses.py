"""Losses of weight training: a table of variants by name, split so that micro-batches add up exactly.

A variant is a per-token loss and a rule that weighs samples. The weights are computed once, over the whole
batch, so that the loss is a plain sum, however the batch is split into micro-batches::

    weights = sample_weights(variant, lengths, longest)                # the whole batch
    loss = (per_token_loss(variant, logps, old, advantages, mask, clip) * mask * weights[:, None]).sum()

Tensors have shape (B, T): samples by sampled tokens, padded where ``mask`` is 0. What stands in the padding
never matters. A KL term is added per token, ``+ beta * kl(logps, reference)``, and weighed like the rest.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from compound.errors import DeclarationError, nearest
from compound.settings import WeightSettings

Level = Literal["token", "sequence"]


@dataclass(frozen=True)
class Clip:
    """How far a policy may move from the one that sampled before it gains nothing from moving on.

    Attributes:
        low: ratios below 1 - low are cut for bad answers.
        high: ratios above 1 + high are cut for good answers; DAPO takes 0.28.
        delta: the largest ratio for bad answers (two-sided clipping); ``None`` leaves it open.
        cispo: the largest ratio in CISPO, where it only weighs the gradient.
        sapo_positive, sapo_negative: temperatures of SAPO's gate for good and for other answers.
        vespo_positive, vespo_negative: VESPO's k and lambda for good and for bad answers.
    """

    low: float = 0.2
    high: float = 0.2
    delta: float | None = None
    cispo: float = 5.0
    sapo_positive: float = 1.0
    sapo_negative: float = 1.05
    vespo_positive: tuple[float, float] = (2.0, 3.0)
    vespo_negative: tuple[float, float] = (3.0, 2.0)

    @classmethod
    def of(cls, settings: WeightSettings) -> Clip:
        """Return the constants that settings give."""
        return cls(
            low=settings.clip, high=settings.highest, delta=settings.clip_delta, cispo=settings.cispo_cap,
            sapo_positive=settings.sapo_positive, sapo_negative=settings.sapo_negative,
            vespo_positive=settings.vespo_positive, vespo_negative=settings.vespo_negative,
        )  # fmt: skip

    def __post_init__(self) -> None:
        if not 0 < self.low <= 1 or self.high <= 0:
            raise DeclarationError(f"0 < low <= 1 and high > 0 must hold, but got {self.low} and {self.high}")
        if self.delta is not None and self.delta <= 1 + self.high:
            raise DeclarationError(f"delta must be above 1 + high = {1 + self.high}, but is {self.delta}")
        rates = (self.sapo_positive, self.sapo_negative, self.vespo_positive[1], self.vespo_negative[1])
        if min(self.cispo, *rates) <= 0:
            raise DeclarationError(f"caps, temperatures and lambdas must be positive, but got {self}")


@dataclass(frozen=True)
class Terms:
    """What a per-token loss is made of; the ratio has shape (B, 1) at sequence level."""

    logps: Any
    log_ratio: Any
    ratio: Any
    advantages: Any
    mask: Any


@dataclass(frozen=True)
class Variant:
    """A loss: its per-token term, the level of its ratio, and what its samples are weighed by.

    Attributes:
        term: the per-token loss.
        weigh: ``sequence``: the mean over samples of the mean over tokens; ``tokens``: the mean over all
            tokens; ``longest``: the sum over tokens by a fixed length, averaged over samples; ``sum``: the
            mean over samples of the sum over tokens.
        level: whether each token has its own ratio or the sample has one, the geometric mean of its tokens'.
        bounds: the ratios below and above which bad and good answers count as cut.
        sampler: whether its ratio refers to what the sampler said, and corrects by itself what that computes
            differently.
    """

    term: Callable[[Terms, Clip], Any]
    weigh: Literal["sequence", "tokens", "longest", "sum"]
    level: Level = "token"
    bounds: Callable[[Clip], tuple[float, float]] = lambda clip: (0.0, math.inf)
    sampler: bool = False

    @property
    def likelihood(self) -> bool:
        """Whether it imitates, and knows no advantages."""
        return self.term is _likelihood


def per_token_loss(
    variant: str,
    logps: Any,
    old: Any | None,
    advantages: Any | None,
    mask: Any,
    clip: Clip | None = None,
    *,
    level: Level | None = None,
) -> Any:
    """Return the loss of every token, (B, T), 0 in the padding.

    Args:
        variant: a name from `VARIANTS`.
        logps: log-probabilities (nats) under the policy that is trained, (B, T).
        old: those under the policy that the ratio refers to. ``None`` takes the present ones, as the first
            step on fresh samples does: the ratio is 1, and the gradient is the plain policy gradient.
        advantages: (B, T) or (B,). Maximum likelihood (``sft``) takes none.
        mask: 1 for sampled tokens, 0 for padding.
        clip: the settings of clipping.
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
    return chosen.term(Terms(logps, log_ratio, ratio, advantages, keep), clip or Clip()) * keep


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


def kl(logps: Any, reference: Any, mask: Any | None = None) -> Any:
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


def value_loss(values: Any, old: Any, targets: Any, clip: float | None = 0.2) -> Any:
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


def at_level(log_ratio: Any, keep: Any, level: Level) -> Any:
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


def _clipped(terms: Terms, clip: Clip) -> Any:
    """PPO's pessimistic bound (mmGRPO, equation 1); ``delta`` bounds bad answers from above (INTELLECT-2)."""
    bounded = terms.ratio.clamp(1 - clip.low, 1 + clip.high) * terms.advantages
    free = terms.ratio if clip.delta is None else terms.ratio.clamp(max=clip.delta)
    return -(free * terms.advantages).minimum(bounded)


def _cispo(terms: Terms, clip: Clip) -> Any:
    """The capped ratio weighs the gradient and has none itself, so that no token loses its gradient."""
    return -terms.ratio.clamp(max=clip.cispo).detach() * terms.advantages * terms.logps


def _sapo(terms: Terms, clip: Clip) -> Any:
    """A sigmoid gate instead of a hard cut; at ratio 1 its slope is 1 for every temperature."""
    good = (terms.advantages > 0).to(terms.ratio.dtype)
    temperature = good * clip.sapo_positive + (1 - good) * clip.sapo_negative
    gate = (temperature * (terms.ratio - 1)).sigmoid() * 4 / temperature
    return -gate * terms.advantages


def _vespo(terms: Terms, clip: Clip) -> Any:
    """The gradient weighed by w^k exp(lambda (1 - w)), w the product of the sample's token ratios."""
    total = (terms.log_ratio.clamp(-20.0, 20.0) * terms.mask).sum(-1, keepdim=True)
    log_w = total.clamp(math.log(1e-8), 20.0)
    good = (terms.advantages >= 0).to(log_w.dtype)
    k = good * clip.vespo_positive[0] + (1 - good) * clip.vespo_negative[0]
    decay = good * clip.vespo_positive[1] + (1 - good) * clip.vespo_negative[1]
    weight = (decay + k * log_w - decay * log_w.exp()).exp().detach()
    return -weight * terms.advantages * terms.logps


def _reinforce(terms: Terms, clip: Clip) -> Any:
    return -terms.advantages * terms.logps


def _likelihood(terms: Terms, clip: Clip) -> Any:
    return -terms.logps


def _trust_region(clip: Clip) -> tuple[float, float]:
    return 1 - clip.low, 1 + clip.high


def _cap(clip: Clip) -> tuple[float, float]:
    return 0.0, clip.cispo


VARIANTS: dict[str, Variant] = {
    "grpo": Variant(_clipped, "sequence", bounds=_trust_region),  # mmGRPO, equation 5; MHGPO, equation 6
    "bnpo": Variant(_clipped, "tokens", bounds=_trust_region),  # the batch is the whole one, so: dapo
    "dr_grpo": Variant(_clipped, "longest", bounds=_trust_region),
    "dapo": Variant(_clipped, "tokens", bounds=_trust_region),  # also PPO's policy loss
    "cispo": Variant(_cispo, "tokens", bounds=_cap),
    "sapo": Variant(_sapo, "sequence"),
    "gspo": Variant(_clipped, "sequence", "sequence", _trust_region),
    "luspo": Variant(_clipped, "sum", "sequence", _trust_region),
    "vespo": Variant(_vespo, "tokens", sampler=True),
    "reinforce": Variant(_reinforce, "sum"),
    "sft": Variant(_likelihood, "tokens"),  # MyGO: the mean over tokens
    "sft_sum": Variant(_likelihood, "sum"),  # MyGO as printed: the sum over a trajectory's tokens
}
