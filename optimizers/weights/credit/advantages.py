"""Group-relative advantages: standardize the reward of a sample within its group.

A group with equal rewards or a single element carries no preference between answers: its samples are dropped
and counted, which also avoids division by zero (mmGRPO, equation 2; MHGPO, equation 5).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from compound.errors import DeclarationError, suggest_name
from compound.optimizers.weights.learner.samples import Group, Sample

DEVIATION_EPSILON = 1e-4  # added to the standard deviation, as in TRL
VARIANCE_EPSILON = 1e-6  # added to the variance under the root in the population form

Standardize = Callable[[float, Sequence[float]], float]


@dataclass(frozen=True)
class GroupFacts:
    """Statistics of the groups of a batch.

    Attributes:
        groups: the number of groups; a sample without a group counts as a group of its own.
        skipped: the number of groups without a gradient: equal rewards, or a single element.
        samples: the number of samples, copies included.
        dropped: the number of samples in skipped groups.
        variance: the population variance of the rewards, averaged over all groups, skipped ones included.
    """

    groups: int
    skipped: int
    samples: int
    dropped: int
    variance: float

    @property
    def share_skipped(self) -> float:
        """Share of the groups without a gradient; 0 without groups."""
        return self.skipped / self.groups if self.groups else 0.0


def advantages(
    samples: Sequence[Sample],
    standardize: str = "trl",
    *,
    references: Mapping[Group, Sequence[float]] | None = None,
) -> tuple[list[Sample], GroupFacts]:
    """Return the samples with group-relative advantages, the same for all tokens of a sample.

    Args:
        samples: with their groups; a sample with group `()` is compared with no other.
        standardize: a name from `STANDARDIZATIONS`. With ``none`` the advantage is the reward itself, and no
            group is skipped.
        references: by group, the rewards that mean and standard deviation are computed from, if they differ
            from those of the samples: the rewards before duplication (see
            `compound.optimizers.weights.credit.grouping`).

    Returns:
        The samples that carry a gradient, in input order, and the statistics of the groups.

    Raises:
        DeclarationError: the name is unknown, or a reward is not a finite number.

    Example:
        >>> from compound.engine import TokenRecord
        >>> tokens = TokenRecord((1,), (2, 3), (-0.1, -0.2), "stop")
        >>> rows = [Sample("a", "e", "a", 0, tokens, reward, ("e", "a", 0)) for reward in (0.0, 1.0)]
        >>> trained, facts = advantages(rows, "center")
        >>> [sample.advantages for sample in trained], facts.skipped, facts.variance
        ([(-0.5, -0.5), (0.5, 0.5)], 0, 0.25)
    """
    if standardize not in STANDARDIZATIONS:
        raise DeclarationError(
            f"unknown standardization {standardize!r}", hint=suggest_name(standardize, STANDARDIZATIONS)
        )
    check_rewards(samples)
    compared = {key: [sample.reward for sample in members] for key, members in by_group(samples).items()}
    compared |= {key: list(rewards) for key, rewards in (references or {}).items() if key in compared}
    skipped = set() if standardize == "none" else {key for key in compared if is_flat(compared[key])}
    function = STANDARDIZATIONS[standardize]
    kept: list[Sample] = []
    for number, sample in enumerate(samples):
        key = _key(sample, number)
        if key not in skipped:
            kept.append(sample.with_advantage(function(sample.reward, compared[key])))
    dropped = sum(_key(sample, number) in skipped for number, sample in enumerate(samples))
    spread = sum(variance(rewards) for rewards in compared.values())
    facts = GroupFacts(
        len(compared), len(skipped), len(samples), dropped, spread / len(compared) if compared else 0.0
    )
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
    """Check that all rewards are finite.

    Raises:
        DeclarationError: a reward is not a finite number; the message names the component and the example.
    """
    for sample in samples:
        if not math.isfinite(sample.reward):
            raise DeclarationError(
                f"the reward of {sample.component!r} on example {sample.example!r} (call {sample.address!r}, "
                f"rollout {sample.rollout}) must be a finite number, but is {sample.reward}",
                hint="check the values that the metric and the penalties return for this call",
            )


def variance(rewards: Sequence[float]) -> float:
    """Return the population variance.

    >>> variance([0.0, 1.0, 1.0, 0.0])
    0.25
    """
    mean = math.fsum(rewards) / len(rewards)
    return math.fsum((reward - mean) ** 2 for reward in rewards) / len(rewards)


def is_flat(rewards: Sequence[float]) -> bool:
    """Return whether all rewards are equal up to rounding.

    >>> is_flat([0.1 + 0.2, 0.3]), is_flat([1.0]), is_flat([0.0, 1e-3])
    (True, True, False)
    """
    return math.isclose(min(rewards), max(rewards), rel_tol=1e-9, abs_tol=1e-12)


def _key(sample: Sample, number: int) -> Group:
    return sample.group or ("", number)


def _mean(rewards: Sequence[float]) -> float:
    return math.fsum(rewards) / len(rewards)


def _deviation(rewards: Sequence[float]) -> float:
    """Return the sample standard deviation (denominator n - 1)."""
    return math.sqrt(variance(rewards) * len(rewards) / (len(rewards) - 1))


def _trl(reward: float, rewards: Sequence[float]) -> float:
    return (reward - _mean(rewards)) / (_deviation(rewards) + DEVIATION_EPSILON)


def _plain(reward: float, rewards: Sequence[float]) -> float:
    return (reward - _mean(rewards)) / _deviation(rewards)


def _population(reward: float, rewards: Sequence[float]) -> float:
    return (reward - _mean(rewards)) / math.sqrt(variance(rewards) + VARIANCE_EPSILON)


def _center(reward: float, rewards: Sequence[float]) -> float:
    return reward - _mean(rewards)


def _leave_one_out(reward: float, rewards: Sequence[float]) -> float:
    return reward - (math.fsum(rewards) - reward) / (len(rewards) - 1)


def _none(reward: float, rewards: Sequence[float]) -> float:
    return reward


STANDARDIZATIONS: dict[str, Standardize] = {
    "trl": _trl,  # (r - mean) / (sample standard deviation + 1e-4)
    "plain": _plain,  # (r - mean) / sample standard deviation: mmGRPO, equation 2
    "population": _population,  # (r - mean) / sqrt(population variance + 1e-6): Prompt-R1
    "center": _center,  # r - mean: Dr. GRPO
    "leave_one_out": _leave_one_out,  # r - mean of the others: RLOO
    "none": _none,  # r: plain REINFORCE
}
