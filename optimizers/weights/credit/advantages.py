"""Advantages of samples: relative to their group, or estimated from values by a critic.

A group with equal rewards or a single element carries no preference between answers: its samples
are dropped and counted, which also avoids division by zero (mmGRPO, equation 2; MHGPO, equation 5).
`gae` estimates the advantages of the tokens of one sample (Schulman et al. 2016; PPO and MAPPO).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import fmean, pvariance

from compound.core.errors import DeclarationError, suggest_name
from compound.optimizers.weights.learner.samples import Group, Sample

DEVIATION_EPSILON = 1e-4  # added to the standard deviation, as in TRL
VARIANCE_EPSILON = 1e-6  # added to the variance under the root in the population form

Standardize = Callable[[float, Sequence[float]], float]


def advantages(
    samples: Sequence[Sample],
    standardize: str = "trl",
    *,
    references: Mapping[Group, Sequence[float]] | None = None,
) -> tuple[list[Sample], dict[str, float]]:
    """Return the samples with group-relative advantages, the same for all tokens of a sample.

    Args:
        samples: with their groups; a sample with group `()` is compared with no other.
        standardize: a name from `STANDARDIZATIONS`. With ``none`` the advantage is the reward
            itself, and no group is skipped.
        references: by group, the rewards that mean and standard deviation are computed from, if
            they differ from those of the samples, such as one reward per conversation.

    Returns:
        The samples that carry a gradient, in input order; and as JSON, the numbers of groups and
        samples, those of groups without a gradient (``skipped``) and of their samples
        (``dropped``), and the population variance of the rewards, averaged over all groups.

    Raises:
        DeclarationError: the name is unknown, or a reward is not a finite number.

    Example:
        >>> from compound.core.engine import TokenRecord
        >>> tokens = TokenRecord((1,), (2, 3), (-0.1, -0.2), "stop")
        >>> rows = [Sample("a", "e", "a", 0, tokens, reward, ("e", "a", 0)) for reward in (0.0, 1.0)]
        >>> trained, facts = advantages(rows, "center")
        >>> [sample.advantages for sample in trained], facts["skipped"], facts["variance"]
        ([(-0.5, -0.5), (0.5, 0.5)], 0, 0.25)
    """
    if standardize not in STANDARDIZATIONS:
        raise DeclarationError(
            f"unknown standardization {standardize!r}",
            hint=suggest_name(standardize, STANDARDIZATIONS),
        )
    check_rewards(samples)
    compared = {
        key: [sample.reward for sample in members] for key, members in by_group(samples).items()
    }
    compared |= {
        key: list(rewards) for key, rewards in (references or {}).items() if key in compared
    }
    skipped = {key for key in compared if standardize != "none" and is_flat(compared[key])}
    function = STANDARDIZATIONS[standardize]
    kept: list[Sample] = []
    for number, sample in enumerate(samples):
        key = _key(sample, number)
        if key not in skipped:
            kept.append(sample.with_advantage(function(sample.reward, compared[key])))
    spread = sum(variance(rewards) for rewards in compared.values())
    facts = {
        "groups": len(compared),
        "skipped": len(skipped),
        "samples": len(samples),
        "dropped": len(samples) - len(kept),
        "variance": spread / len(compared) if compared else 0.0,
    }
    return kept, facts


def by_group(samples: Iterable[Sample]) -> dict[Group, list[Sample]]:
    """Return the samples by group, in order of first occurrence.

    A sample without a group is a group of its own, with the key ``("", index of the sample)``.
    """
    groups: dict[Group, list[Sample]] = {}
    for number, sample in enumerate(samples):
        groups.setdefault(_key(sample, number), []).append(sample)
    return groups


def check_rewards(samples: Iterable[Sample]) -> None:
    """Check that all rewards are finite."""
    for sample in samples:
        if not math.isfinite(sample.reward):
            raise DeclarationError(
                f"the reward of {sample.component!r} on example {sample.example!r} (call {sample.address!r}, "
                f"rollout {sample.rollout}) must be a finite number, but is {sample.reward}",
                hint="check the values that the metric and the penalties return for this call",
            )


def variance(rewards: Sequence[float]) -> float:
    """Return the population variance."""
    mean = fmean(rewards)
    return math.fsum((reward - mean) ** 2 for reward in rewards) / len(rewards)


def is_flat(rewards: Sequence[float]) -> bool:
    """Return whether all rewards are equal up to rounding."""
    return math.isclose(min(rewards), max(rewards), rel_tol=1e-9, abs_tol=1e-12)


def _key(sample: Sample, number: int) -> Group:
    return sample.group or ("", number)


def _deviation(rewards: Sequence[float]) -> float:
    """Return the sample standard deviation (denominator n - 1)."""
    return math.sqrt(variance(rewards) * len(rewards) / (len(rewards) - 1))


STANDARDIZATIONS: dict[str, Standardize] = {
    "trl": lambda r, every: (r - fmean(every)) / (_deviation(every) + DEVIATION_EPSILON),
    # mmGRPO, equation 2
    "plain": lambda r, every: (r - fmean(every)) / _deviation(every),
    # Prompt-R1
    "population": lambda r, every: (
        (r - fmean(every)) / math.sqrt(variance(every) + VARIANCE_EPSILON)
    ),
    "center": lambda r, every: r - fmean(every),  # Dr. GRPO
    # RLOO
    "leave_one_out": lambda r, every: r - (math.fsum(every) - r) / (len(every) - 1),
    "none": lambda r, every: r,  # plain REINFORCE
}


EPSILON = 1e-8  # added to the variance when advantages are whitened


def gae(
    values: Sequence[float],
    reward: float,
    *,
    gamma: float = 1.0,
    lam: float = 1.0,
    kl: Sequence[float] = (),
    beta: float = 0.0,
) -> tuple[list[float], list[float]]:
    """Return the advantage and the value target of every token.

    With r_t = -beta kl_t, plus the reward at the last token, and V = 0 after it::

        delta_t = r_t + gamma V_{t+1} - V_t
        A_t     = delta_t + gamma lam A_{t+1}
        target  = A_t + V_t

    Example:
        >>> gae([0.5, 0.25, 0.75], 1.0, lam=0.5)
        ([0.0625, 0.625, 0.25], [0.5625, 0.875, 1.0])
    """
    if not (0 <= gamma <= 1 and 0 <= lam <= 1):
        raise DeclarationError(f"gamma and lam must be between 0 and 1, but are {gamma} and {lam}")
    if kl and len(kl) != len(values):
        raise DeclarationError(f"there are {len(values)} values, but {len(kl)} KL estimates")
    if not all(map(math.isfinite, (*values, *kl, reward, beta))):
        raise DeclarationError(
            f"values, KL estimates and the reward ({reward}) must be finite numbers"
        )
    advantages = [0.0] * len(values)
    next_value = next_advantage = 0.0
    r_t = reward
    for t in reversed(range(len(values))):
        if kl:
            r_t -= beta * kl[t]
        delta = r_t + gamma * next_value - values[t]
        next_advantage = advantages[t] = delta + gamma * lam * next_advantage
        next_value, r_t = values[t], 0.0
    return advantages, [
        advantage + value for advantage, value in zip(advantages, values, strict=True)
    ]


def explained_variance(
    values: Sequence[Sequence[float]], returns: Sequence[Sequence[float]]
) -> float | None:
    """Return the explained variance of the returns by the values, over the tokens of all samples.

    1 - Var(returns - values) / Var(returns); ``None`` if the returns have no variance.
    """
    estimates = [value for sample in values for value in sample]
    targets = [value for sample in returns for value in sample]
    spread = pvariance(targets) if targets else 0.0
    if not spread:
        return None
    return 1.0 - pvariance([t - e for e, t in zip(estimates, targets, strict=True)]) / spread


def whiten(batch: Sequence[Sequence[float]]) -> list[list[float]]:
    """Return the advantages of a batch, normalized to mean 0 and variance 1 over all tokens."""
    tokens = [advantage for sample in batch for advantage in sample]
    if not tokens:
        return [[] for _ in batch]
    mean = math.fsum(tokens) / len(tokens)
    scale = math.sqrt(math.fsum((token - mean) ** 2 for token in tokens) / len(tokens) + EPSILON)
    return [[(advantage - mean) / scale for advantage in sample] for sample in batch]
