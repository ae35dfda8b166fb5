"""Losses of weight training by name, each a per-token loss and a weighting of samples, and its metrics.

The weights are computed once, over the whole batch, so the loss is a plain sum that does not depend
on how the batch is divided into micro-batches::

    weights = sample_weights(variant, lengths, longest)  # of the whole batch
    loss = (per_token_loss(settings, logps, old, advantages, mask) * mask * weights[:, None]).sum()

Tensors have shape (B, T): samples by sampled tokens, padded where ``mask`` is 0. Values in the
padding are ignored. A KL term is added per token, ``+ beta * kl(logps, reference)``, with the same
weights.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from compound.core.errors import DeclarationError
from compound.optimization.settings.base import OneOf, Settings, or_name
from compound.optimizers.weights.learner.samples import Sample
from compound.optimizers.weights.learner.updates import all_reduce, rank_and_world_size

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class ImitationLoss(Settings):
    """Maximum likelihood: imitates samples and ignores advantages."""


class ClippedLoss(Settings):
    """PPO's clipped surrogate loss (mmGRPO, equation 1)."""

    beta: float = Field(default=0.0, ge=0)
    """Coefficient of the KL divergence from the base model."""
    entropy: float = Field(default=0.0, ge=0)
    """Coefficient of the entropy bonus."""
    correction: float | None = Field(default=2.0, gt=0)
    """Cap of the importance weight that corrects for differences between the probabilities of sampler and
    trainer; `null` disables the correction."""
    clip: float = Field(default=0.2, gt=0, lt=1)
    """Clipping range: how far the probability ratio may deviate from 1 before it is clipped."""
    clip_high: float | None = Field(default=None, gt=0)
    """Upper clipping range, if it differs from `clip`; DAPO uses 0.28."""

    @property
    def bounds(self) -> tuple[float, float]:
        """The limits of the trust region."""
        return 1 - self.clip, 1 + (self.clip if self.clip_high is None else self.clip_high)


class PolicyObjective(OneOf):
    """A clipped loss, under the names that TRL uses; `grpo` by default."""

    grpo: ClippedLoss | None = None  # mmGRPO, equation 5; MHGPO, equation 6
    """The mean over samples of the mean over their tokens."""
    dr_grpo: ClippedLoss | None = None
    """The sum over tokens divided by the maximum length, averaged over samples."""
    dapo: ClippedLoss | None = None  # also PPO's policy loss
    """The mean over all tokens."""

    REMOVED: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("bnpo", "cispo", "vespo"), "dapo"),
        **dict.fromkeys(("sapo", "gspo", "luspo", "reinforce"), "grpo"),
    }

    @property
    def settings(self) -> ClippedLoss:
        """The settings of the selected loss."""
        return getattr(self, self.name) or ClippedLoss()


class ImitationObjective(OneOf):
    """A loss that imitates samples; `sft` by default."""

    sft: ImitationLoss | None = None
    """Negative log-likelihood: the mean over all tokens."""
    sft_sum: ImitationLoss | None = None
    """Negative log-likelihood: the mean over samples of the sum over tokens, as printed in the MyGO paper."""

    @property
    def settings(self) -> ImitationLoss:
        """The settings of the selected loss, which has none."""
        return ImitationLoss()


Objective = PolicyObjective | ImitationObjective
if TYPE_CHECKING:
    PolicyObjectiveField = PolicyObjective
    ImitationObjectiveField = ImitationObjective
else:
    PolicyObjectiveField = or_name(PolicyObjective)
    ImitationObjectiveField = or_name(ImitationObjective)


def per_token_loss(
    settings: ClippedLoss | ImitationLoss,
    logps: Tensor,
    old: Tensor | None,
    advantages: Tensor | None,
    mask: Tensor,
) -> Tensor:
    """Return the loss of every token, (B, T), 0 in the padding.

    Args:
        settings: the settings of the loss.
        logps: log-probabilities (nats) under the trained policy, (B, T).
        old: log-probabilities under the policy that the ratio is relative to. ``None`` uses the
            current ones, as for the first update on fresh samples: the ratio is 1, and the gradient
            is the plain policy gradient.
        advantages: (B, T) or (B,); unused for imitation.
        mask: 1 for sampled tokens, 0 for padding.

    Example:
        >>> import torch
        >>> logps, old = torch.tensor([[-1.0, -2.0]]), torch.tensor([[-1.0, -3.0]])
        >>> per_token_loss(ClippedLoss(), logps, old, torch.tensor([1.0]), torch.ones(1, 2))
        tensor([[-1.0000, -1.2000]])
    """
    keep = mask.bool()
    logps = logps.masked_fill(~keep, 0.0)
    if isinstance(settings, ImitationLoss):
        return -logps * keep
    assert advantages is not None  # credit is assigned before a policy is trained
    old = logps.detach() if old is None else old.masked_fill(~keep, 0.0)
    rows = advantages.unsqueeze(1) if advantages.dim() == 1 else advantages
    advantages = rows.expand_as(logps).masked_fill(~keep, 0.0)
    ratio = (logps - old).exp()
    return -(ratio * advantages).minimum(ratio.clamp(*settings.bounds) * advantages) * keep


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
        variant: the name of a loss: a field of `PolicyObjective` or `ImitationObjective`.
        lengths: the number of sampled tokens of every sample of the whole batch; 0 for a masked
            sample, which counts in means over samples but not in means over tokens, as in TRL.
        longest: for ``dr_grpo``, the length to divide by: the maximum length of a completion, the
            same in every step, so that no length is favored.
        counts: the weight of each sample, equal within a unit; 1 by default.
        units: samples with the same unit, such as the turns of a conversation, count as one sample
            in means over samples, and their tokens as one answer in means over tokens. By default
            each sample is a unit.

    Raises:
        DeclarationError: ``longest`` is missing or below the largest length.

    Example:
        >>> sample_weights("grpo", [1, 3]), sample_weights("dapo", [1, 3]), sample_weights("sft_sum", [1, 3])
        ([0.5, 0.16666666666666666], [0.25, 0.25], [0.5, 0.5])
        >>> sample_weights("dr_grpo", [1, 3], longest=10)
        [0.05, 0.05]
        >>> sample_weights("grpo", [1, 3, 4], units=["one", "one", "other"])  # two conversations of 4 tokens
        [0.125, 0.125, 0.125]
    """
    times = [1.0] * len(lengths) if counts is None else list(counts)
    whose = list(range(len(lengths))) if units is None else list(units)
    tokens: dict[Hashable, int] = {}
    for unit, length in zip(whose, lengths, strict=True):
        tokens[unit] = tokens.get(unit, 0) + length
    samples = math.fsum(dict(zip(whose, times, strict=True)).values())
    if variant == "grpo":
        return [
            time / (samples * max(tokens[unit], 1)) for time, unit in zip(times, whose, strict=True)
        ]
    if variant in ("dapo", "sft"):
        every = math.fsum(time * length for time, length in zip(times, lengths, strict=True))
        return [time / (every or 1.0) for time in times]
    if variant == "sft_sum":
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


def importance_weights(
    trainer: Tensor, sampler: Tensor, mask: Tensor, *, cap: float = 2.0
) -> Tensor:
    """Return truncated importance weights that correct the sampler-trainer mismatch.

    They are min(exp(trainer - sampler), cap), (B, T), without gradient; 1 in the padding. All
    losses are linear in the magnitude of the advantage, so weights on advantages equal weights on
    the loss of tokens.
    """
    difference = (trainer - sampler).detach().masked_fill(~mask.bool(), 0.0)
    return difference.exp().clamp(max=cap)


# -- metrics -------------------------------------------------------------------------------------

# Over tokens: their number; those with a negative advantage and a ratio below the lower clipping
# bound; those with a positive one and a ratio above the upper bound; ratio - 1 - log ratio, which
# estimates KL(old policy, policy); probability ratios; entropies; KL from the base model.
SUMS = ("tokens", "low", "high", "kl", "ratio", "entropy", "base_kl")


def diagnostic_sums(
    settings: ClippedLoss | ImitationLoss,
    logps: Tensor,
    old: Tensor,
    advantages: Tensor,
    mask: Tensor,
    entropies: Tensor,
    divergence: Tensor | None = None,
) -> Tensor:
    """Return `SUMS` over the tokens of a micro-batch, (7,), on the device; tensors as in `per_token_loss`."""
    import torch

    keep = mask.bool()
    low, high = settings.bounds if isinstance(settings, ClippedLoss) else (0.0, math.inf)
    log_ratio = (logps.detach() - old).masked_fill(~keep, 0.0)
    ratio = log_ratio.exp()
    sums = [
        keep,
        (ratio < low) & (advantages < 0) & keep,
        (ratio > high) & (advantages > 0) & keep,
        ratio - 1 - log_ratio,
        ratio * keep,
        entropies.detach().masked_fill(~keep, 0.0),
        torch.zeros_like(ratio) if divergence is None else divergence.detach() * mask,
    ]
    return torch.stack([values.sum().float() for values in sums])


class Monitor:
    """Accumulates the metrics of the updates of a training step, by component."""

    def __init__(
        self,
        kept: Sequence[Sample],
        *,
        divergence: bool,
        device: torch.device | None = None,
        shown: Sequence[Sample] = (),
    ) -> None:
        import torch

        self._kept, self._divergence, self._device = kept, divergence, device
        self._shown = {id(sample): place for place, sample in enumerate(shown)}
        # (samples, 2, tokens): in the last update of each, and before the step
        longest = max((sample.length for sample in shown), default=0)
        self._logps = torch.zeros((len(shown), 2, longest), device=device)
        self._added: list[tuple[str, Tensor]] = []  # on the device until `facts`
        self._norms: dict[str, list[float]] = defaultdict(list)
        self._skipped = 0

    def add(self, component: str, sums: Tensor) -> None:
        """Add `diagnostic_sums` of a component in a micro-batch, without waiting for the device."""
        self._added.append((component, sums))

    def add_logps(self, batch: Sequence[Sample], logps: Tensor, old: Tensor) -> None:
        """Add the log-probabilities of a micro-batch, of which those of shown samples are kept."""
        for row, sample in enumerate(batch):
            if (place := self._shown.get(id(sample))) is not None:
                for side, values in enumerate((logps.detach(), old)):
                    self._logps[place, side, : sample.length] = values[row, : sample.length]

    def add_norm(self, adapter: str, value: float) -> None:
        """Add the gradient norm of an update; a non-finite norm counts as a skipped update."""
        if math.isfinite(value):
            self._norms[adapter].append(value)
        else:
            self._skipped += 1

    def facts(self) -> dict[str, Any]:
        """Return all metrics as JSON; all processes must call it, since each has accumulated a part."""
        import torch

        names = sorted({s.component for s in self._kept})
        sums = {name: [0.0] * len(SUMS) for name in names}
        # all are read from the device at once
        rows = torch.stack([row for _, row in self._added]).tolist() if self._added else []
        for (component, _), row in zip(self._added, rows, strict=True):
            sums[component] = [a + b for a, b in zip(sums[component], row, strict=True)]
        table = [sums[name] for name in names]
        if names and rank_and_world_size()[1] > 1:
            reduced = torch.tensor(table, dtype=torch.float64, device=self._device)
            all_reduce(reduced)
            table = reduced.tolist()
        if self._shown:
            all_reduce(self._logps)
        return {
            **({"shown_logps": self._logps.tolist()} if self._shown else {}),
            "skipped_updates": self._skipped,
            "norms": {name: fmean(some) for name, some in self._norms.items()},
            "components": {
                name: self._component(name, row) for name, row in zip(names, table, strict=True)
            },
        }

    def _component(self, name: str, sums: Sequence[float]) -> dict[str, float]:
        own = [s for s in self._kept if s.component == name]
        means = [value / max(sums[0], 1.0) for value in sums[1:]]
        metrics: dict[str, float] = {"samples": len(own), "tokens": sum(s.length for s in own)}
        metrics |= dict(zip(SUMS[1:], means, strict=True))
        if not self._divergence:
            del metrics["base_kl"]
        return {name: value for name, value in metrics.items() if math.isfinite(value)}
