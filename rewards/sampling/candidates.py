"""Candidates: outputs of a call with their rewards, and whether the order of two of them is decided."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from compound.rewards.sampling.significance import can_become_significant, is_significant


@dataclass(frozen=True)
class Sampling:
    """Number of candidates per call, and the significance required to order them.

    Attributes:
        samples: the additional draws of a call.
        rollouts: the minimum number of downstream runs for each candidate.
        max_rollouts: the number of downstream runs after which two candidates are compared. Fewer run for a
            candidate whose order no further runs could make significant.
        level: the significance level: the maximum probability that two candidates with equal expected
            rewards make a pair; 1 accepts any difference, even of one run each.
        pairs: the maximum number of pairs per call, those with the largest gaps.
    """

    samples: int = 3
    rollouts: int = 2
    max_rollouts: int = 4
    level: float = 0.1
    pairs: int = 6


@dataclass(frozen=True)
class Candidate:
    """An output of a call, with the global reward of each downstream sample.

    Attributes:
        outputs: the outputs.
        rewards: the global reward of each downstream sample.
        settings: the settings of the draw that differ from those of the component.
        certain: whether the downstream components were deterministic, so that every run would give the same
            reward.
        signals: named features of the outputs that only train examples have; see
            `compound.rewards.gains.gold`.
    """

    outputs: Mapping[str, object]
    rewards: tuple[float, ...] = ()
    settings: Mapping[str, object] = field(default_factory=dict)
    certain: bool = False
    signals: Mapping[str, float] = field(default_factory=dict)

    @property
    def value(self) -> float:
        """Mean reward: a Monte Carlo estimate of the expectation in equation 4."""
        return sum(self.rewards) / len(self.rewards)


def differences(a: Candidate, b: Candidate) -> list[float]:
    """Return the differences of two candidates' rewards, paired by downstream sample.

    A certain candidate has the same reward in every sample.
    """
    n = min((len(c.rewards) for c in (a, b) if not c.certain), default=1)
    ours, theirs = (c.rewards[:1] * n if c.certain else c.rewards[:n] for c in (a, b))
    return [one - other for one, other in zip(ours, theirs, strict=True)]


def is_decided(a: Candidate, b: Candidate, level: float) -> bool:
    """Return whether two candidates differ by more than their downstream randomness explains.

    If both are certain, any difference decides.

    >>> is_decided(Candidate({}, (0.7, 0.8, 0.9)), Candidate({}, (0.1, 0.1, 0.2)), level=0.1)
    True
    >>> is_decided(Candidate({}, (1.0, 0.0, 1.0)), Candidate({}, (0.0, 0.9, 0.0)), level=0.1)
    False
    >>> is_decided(Candidate({}, (1.0,), certain=True), Candidate({}, (0.9,), certain=True), level=0.1)
    True
    """
    found = differences(a, b)
    return is_significant(found, 1.0 if a.certain and b.certain else level)


def is_comparable(a: Candidate, b: Candidate, level: float) -> bool:
    """Return whether the rewards of two candidates say anything about their order.

    One run each does not, if the downstream components are random.
    """
    return (a.certain and b.certain) or level >= 1 or len(differences(a, b)) > 1


def could_be_decided(a: Candidate, b: Candidate, sampling: Sampling) -> bool:
    """Return whether further downstream runs could decide the order of two candidates."""
    found = differences(a, b)
    further = sampling.max_rollouts - len(found)
    if (a.certain and b.certain) or further <= 0:
        return False
    return len(found) < sampling.rollouts or can_become_significant(found, further, sampling.level)
