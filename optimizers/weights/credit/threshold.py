"""MyGO's progressive threshold: which sampled trajectories are good enough to be imitated.

Each iteration raises the threshold with what the policy earns at its first attempts. A question is tried
until it has m accepted trajectories, or has used up its attempts (MyGO, section 3.3 and appendix D.1).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from compound.errors import DeclarationError, nearest


@dataclass(frozen=True)
class Rule:
    """How the threshold is raised, and what passes it.

    Attributes:
        raised: (previous threshold, mean first-pass reward, largest possible reward) -> threshold.
        accepts: (reward, threshold) -> whether the trajectory is good enough.
    """

    raised: Callable[[float, float, float], float]
    accepts: Callable[[float, float], bool]


@dataclass(frozen=True)
class Selection:
    """What some attempts have brought.

    Attributes:
        kept: by question, the numbers of the attempts whose trajectories are kept, in order.
        wanting: the questions that have too few and attempts left, in order.
    """

    kept: Mapping[str, tuple[int, ...]]
    wanting: tuple[str, ...]


def raise_threshold(
    previous: float, first_pass: Sequence[float], *, supremum: float = 1.0, rule: str = "halved"
) -> float:
    """Return the threshold of an iteration.

    Args:
        previous: the one of the iteration before, K'.
        first_pass: the reward of the first attempt at each question of the batch; those of failed runs count.
        supremum: the largest reward there is, above 0.
        rule: a name from `RULES`. ``halved`` is max(K', (mean + supremum) / 2): half way from what the policy
            earns to the best, never decreasing, never above the supremum. ``fixed`` stays where it is, for
            offline sampling. ``paper`` is max(K', (mean / supremum + 1) supremum), as printed: without
            negative rewards that is the supremum at least, and since the paper asks for rewards above the
            threshold, it selects nothing. It is here for the record.

    Raises:
        DeclarationError: the rule is unknown, there is no reward, or one is above the supremum or not finite,
            or ``previous`` is above it.

    Example:
        >>> raise_threshold(0.5, [0.0, 1.0, 0.2]), raise_threshold(0.5, [0.0, 1.0, 0.2], rule="paper")
        (0.7, 1.4)
        >>> raise_threshold(0.9, [0.0, 1.0, 0.2])
        0.9
    """
    chosen = _rule(rule)
    if not (math.isfinite(supremum) and supremum > 0):
        raise DeclarationError(f"the largest reward must be above 0, but is {supremum}")
    if not first_pass:
        raise DeclarationError("the threshold is raised by the rewards of a batch, but there are none")
    for reward in (*first_pass, *([previous] if rule != "paper" else [])):
        if not reward <= supremum or not math.isfinite(reward):
            raise DeclarationError(
                f"rewards and thresholds are at most {supremum}, but one is {reward}",
                hint="set max_reward of method mygo to the highest score that the metric gives",
            )
    return chosen.raised(previous, math.fsum(first_pass) / len(first_pass), supremum)


def select(
    attempts: Mapping[str, Sequence[float]],
    threshold: float,
    *,
    keep: int = 3,
    most: int = 16,
    rule: str = "halved",
) -> Selection:
    """Return which attempts are kept, and which questions need more of them.

    Args:
        attempts: by question, the rewards of the attempts so far, in the order they were made.
        threshold: what they must reach.
        keep: m, how many are kept of a question: the first that are good enough.
        most: how often a question is tried.
        rule: a name from `RULES`; says what passes the threshold.

    Raises:
        DeclarationError: the rule is unknown, ``keep`` or ``most`` is below 1, or a question was tried more
            than ``most`` times.

    Example:
        >>> select({"q1": [0.2, 1.0], "q2": [0.8, 0.7, 0.9, 1.0]}, 0.7)
        Selection(kept={'q1': (1,), 'q2': (0, 1, 2)}, wanting=('q1',))
    """
    chosen = _rule(rule)
    if keep < 1 or most < 1:
        raise DeclarationError(f"keep and most must be >= 1, but are {keep} and {most}")
    kept: dict[str, tuple[int, ...]] = {}
    for question, rewards in attempts.items():
        if len(rewards) > most:
            raise DeclarationError(
                f"question {question!r} was tried {len(rewards)} times, but most is {most}"
            )
        good = [number for number, reward in enumerate(rewards) if chosen.accepts(reward, threshold)]
        kept[question] = tuple(good[:keep])
    wanting = [q for q, rewards in attempts.items() if len(kept[q]) < keep and len(rewards) < most]
    return Selection(kept, tuple(wanting))


def _halved(previous: float, mean: float, supremum: float) -> float:
    return min(max(previous, (mean + supremum) / 2), supremum)


def _paper(previous: float, mean: float, supremum: float) -> float:
    return max(previous, (mean / supremum + 1) * supremum)


def _fixed(previous: float, mean: float, supremum: float) -> float:
    return previous


def _at_least(reward: float, threshold: float) -> bool:
    return reward >= threshold


def _above(reward: float, threshold: float) -> bool:
    return reward > threshold


RULES = {
    "halved": Rule(_halved, _at_least),
    "fixed": Rule(_fixed, _at_least),
    "paper": Rule(_paper, _above),
}


def _rule(name: str) -> Rule:
    if name not in RULES:
        raise DeclarationError(f"no threshold is called {name!r}", hint=nearest(name, RULES))
    return RULES[name]
