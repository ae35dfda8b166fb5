"""Advantages: what a sample earned beyond what its group earned, by the name of the standardization.

A group whose rewards are all equal, or that has one element, says nothing about which answer is better:
its samples are dropped and counted, never divided by zero (mmGRPO, equation 2; MHGPO, equation 5).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from compound.errors import DeclarationError, nearest
from compound.optimizers.weights.learner.samples import Group, Sample

SMALL = 1e-4  # what TRL adds to the standard deviation
EPSILON = 1e-6  # what the population form adds to the variance, under the root

Standardize = Callable[[float, Sequence[float]], float]


@dataclass(frozen=True)
class GroupFacts:
    """What became of the groups of a batch.

    Attributes:
        groups: how many there were; a sample without a group counts as a group of its own.
        skipped: how many gave no gradient: equal rewards, or a single element.
        samples: how many samples there were, copies included.
        dropped: how many of them are in skipped groups.
        variance: the mean over all groups of the population variance of the rewards, skipped groups included.
    """

    groups: int
    skipped: int
    samples: int
    dropped: int
    variance: float

    @property
    def share_skipped(self) -> float:
        """Share of the groups that gave no gradient; 0 without groups."""
        return self.skipped / self.groups if self.groups else 0.0


def advantages(
    samples: Sequence[Sample],
    standardize: str = "trl",
    *,
    references: Mapping[Group, Sequence[float]] | None = None,
    drop: bool = True,
) -> tuple[list[Sample], GroupFacts]:
    """Give every sample the advantage of its reward within its group, the same for all of its tokens.

    Args:
        samples: with their groups; `()` belongs to none and is compared with nobody.
        standardize: a name from `STANDARDIZATIONS`. With ``none`` the advantage is the reward itself; groups
            do not matter and nothing is skipped.
        references: by group, the rewards that mean and standard deviation are taken from, where they are not
            those of the samples: the rewards before duplication (see
            `compound.optimizers.weights.credit.grouping`).
        drop: leave out the samples of groups that give no gradient. Otherwise they stay with advantage 0,
            as in TRL, where they count in the denominators of the loss and in the KL term.

    Returns:
        The samples that carry a gradient, in their order, and what became of the groups.

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
            f"no standardization is called {standardize!r}", hint=nearest(standardize, STANDARDIZATIONS)
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
        elif not drop:
            kept.append(sample.with_advantage(0.0))
    dropped = sum(_key(sample, number) in skipped for number, sample in enumerate(samples))
    spread = sum(variance(rewards) for rewards in compared.values())
    facts = GroupFacts(
        len(compared), len(skipped), len(samples), dropped, spread / len(compared) if compared else 0.0
    )
    return kept, facts


def by_group(samples: Iterable[Sample]) -> dict[Group, list[Sample]]:
    """Return the samples by group, in the order in which groups first occur.

    A sample that belongs to none is a group of its own; its key is ``("", its place among the samples)``.
    """
    groups: dict[Group, list[Sample]] = {}
    for number, sample in enumerate(samples):
        groups.setdefault(_key(sample, number), []).append(sample)
    return groups


def check_rewards(samples: Iterable[Sample]) -> None:
    """Refuse rewards that cannot be compared.

    Raises:
        DeclarationError: a reward is not a finite number; the message names the component and the example.
    """
    for sample in samples:
        if not math.isfinite(sample.reward):
            raise DeclarationError(
                f"the reward of {sample.component!r} on example {sample.example!r} (call {sample.address!r}, "
                f"rollout {sample.rollout}) must be a finite number, but is {sample.reward}",
                hint="look at what the metric and the penalties return there",
            )


def variance(rewards: Sequence[float]) -> float:
    """Return the population variance.

    >>> variance([0.0, 1.0, 1.0, 0.0])
    0.25
    """
    mean = math.fsum(rewards) / len(rewards)
    return math.fsum((reward - mean) ** 2 for reward in rewards) / len(rewards)


def is_flat(rewards: Sequence[float]) -> bool:
    """Return whether rewards are equal up to rounding, or there is only one.

    >>> is_flat([0.1 + 0.2, 0.3]), is_flat([1.0]), is_flat([0.0, 1e-3])
    (True, True, False)
    """
    return math.isclose(min(rewards), max(rewards), rel_tol=1e-9, abs_tol=1e-12)


def _key(sample: Sample, number: int) -> Group:
    return sample.group or ("", number)


def _mean(rewards: Sequence[float]) -> float:
    return math.fsum(rewards) / len(rewards)


def _deviation(rewards: Sequence[float]) -> float:
    """Return the sample standard deviation (the sum is divided by n - 1)."""
    return math.sqrt(variance(rewards) * len(rewards) / (len(rewards) - 1))


def _trl(reward: float, rewards: Sequence[float]) -> float:
    return (reward - _mean(rewards)) / (_deviation(rewards) + SMALL)


def _plain(reward: float, rewards: Sequence[float]) -> float:
    return (reward - _mean(rewards)) / _deviation(rewards)


def _population(reward: float, rewards: Sequence[float]) -> float:
    return (reward - _mean(rewards)) / math.sqrt(variance(rewards) + EPSILON)


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
