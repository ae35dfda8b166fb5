"""MyGO's progressive threshold: select the sampled trajectories to imitate.

Each iteration raises the threshold based on the rewards of first attempts. A question is attempted until it
has m accepted trajectories or has used up its attempts (MyGO, section 3.3 and appendix D.1).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from compound.errors import DeclarationError, suggest_name


@dataclass(frozen=True)
class Rule:
    """A rule for raising the threshold and for accepting trajectories.

    Attributes:
        raised: (previous threshold, mean reward of first attempts, maximum reward) -> threshold.
        accepts: (reward, threshold) -> whether the trajectory is accepted.
    """

    raised: Callable[[float, float, float], float]
    accepts: Callable[[float, float], bool]


@dataclass(frozen=True)
class Selection:
    """The attempts selected for imitation.

    Attributes:
        kept: by question, the indices of the accepted attempts, in order.
        unfinished: the questions with too few accepted attempts and attempts left, in order.
    """

    kept: Mapping[str, tuple[int, ...]]
    unfinished: tuple[str, ...]


def raise_threshold(
    previous: float, first_pass: Sequence[float], *, supremum: float = 1.0, rule: str = "halved"
) -> float:
    """Return the threshold of an iteration.

    Args:
        previous: the threshold of the previous iteration, K'.
        first_pass: the reward of the first attempt at each question of the batch, including failed runs.
        supremum: the maximum possible reward, above 0.
        rule: a name from `RULES`. ``halved`` is max(K', (mean + supremum) / 2): half way from the mean reward
            to the maximum, never decreasing and never above the maximum. ``fixed`` keeps the threshold, for
            offline sampling. ``paper`` is max(K', (mean / supremum + 1) supremum), as printed: if no reward
            is negative, this is at least the supremum, and since the paper requires rewards above the
            threshold, it accepts nothing. It is included for reference only.

    Raises:
        DeclarationError: the rule is unknown, there are no rewards, or a reward or ``previous`` is not finite
            or above the supremum by more than a rounding error.

    Example:
        >>> raise_threshold(0.5, [0.0, 1.0, 0.2]), raise_threshold(0.5, [0.0, 1.0, 0.2], rule="paper")
        (0.7, 1.4)
        >>> raise_threshold(0.9, [0.0, 1.0, 0.2])
        0.9
    """
    chosen = _rule(rule)
    if not (math.isfinite(supremum) and supremum > 0):
        raise DeclarationError(f"the maximum reward must be above 0, but is {supremum}")
    if not first_pass:
        raise DeclarationError("raising the threshold requires rewards of first attempts, but there are none")
    for reward in (*first_pass, *([previous] if rule != "paper" else [])):
        if not math.isfinite(reward) or (reward > supremum and not math.isclose(reward, supremum)):
            raise DeclarationError(
                f"rewards and thresholds are at most {supremum}, but one is {reward}",
                hint="set optimize.mygo.max_reward to the highest score that the metric can return",
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
    """Return the accepted attempts, and the questions that need more attempts.

    Args:
        attempts: by question, the rewards of the attempts so far, in order.
        threshold: the threshold of the rewards.
        keep: m, the number of accepted attempts to keep per question; the first ones are kept.
        most: the maximum number of attempts per question.
        rule: a name from `RULES`, which defines what is accepted.

    Raises:
        DeclarationError: the rule is unknown, ``keep`` or ``most`` is below 1, or a question was attempted
            more than ``most`` times.

    Example:
        >>> select({"q1": [0.2, 1.0], "q2": [0.8, 0.7, 0.9, 1.0]}, 0.7)
        Selection(kept={'q1': (1,), 'q2': (0, 1, 2)}, unfinished=('q1',))
    """
    chosen = _rule(rule)
    if keep < 1 or most < 1:
        raise DeclarationError(f"keep and most must be >= 1, but are {keep} and {most}")
    kept: dict[str, tuple[int, ...]] = {}
    for question, rewards in attempts.items():
        if len(rewards) > most:
            raise DeclarationError(
                f"question {question!r} was attempted {len(rewards)} times, but most is {most}"
            )
        good = [number for number, reward in enumerate(rewards) if chosen.accepts(reward, threshold)]
        kept[question] = tuple(good[:keep])
    unfinished = [q for q, rewards in attempts.items() if len(kept[q]) < keep and len(rewards) < most]
    return Selection(kept, tuple(unfinished))


def _halved(previous: float, mean: float, supremum: float) -> float:
    return min(max(previous, (mean + supremum) / 2), supremum)


def _paper(previous: float, mean: float, supremum: float) -> float:
    return max(previous, (mean / supremum + 1) * supremum)


def _fixed(previous: float, mean: float, supremum: float) -> float:
    return previous


def _at_least(reward: float, threshold: float) -> bool:
    # rewards are often sums of floats: 0.7 + 0.2 + 0.1 is less than 1.0
    return reward >= threshold or math.isclose(reward, threshold)


def _above(reward: float, threshold: float) -> bool:
    return reward > threshold


RULES = {
    "halved": Rule(_halved, _at_least),
    "fixed": Rule(_fixed, _at_least),
    "paper": Rule(_paper, _above),
}


def _rule(name: str) -> Rule:
    if name not in RULES:
        raise DeclarationError(f"unknown threshold rule {name!r}", hint=suggest_name(name, RULES))
    return RULES[name]
