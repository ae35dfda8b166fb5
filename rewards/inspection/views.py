"""Results of inspecting local rewards: views of a pair, of a head, and of a run."""

from __future__ import annotations

import math
from dataclasses import dataclass

from compound.rewards.alignment import Accuracy, Bin
from compound.rewards.inspection.explain import Explanation, Judged
from compound.rewards.pairs import Pair


@dataclass(frozen=True)
class Point:
    """A candidate: its held-out local reward and its global reward, each less the mean of its call's.

    A local reward says which output of one input is better, not which input is easier, so only differences
    within a call mean something. ``x`` is the output's length in words, its value, or its label's place.
    """

    input: str
    local: float
    global_: float
    x: float


@dataclass(frozen=True)
class Judgement:
    """A pair as the reward saw it before it knew it.

    Attributes:
        pair: the two outputs, and by how much the global reward differs.
        iteration: in which it was made.
        inputs, chosen, rejected: what the reward model read.
        margin: ``r(chosen) - r(rejected)`` in log odds; negative where the reward was wrong.
    """

    pair: Pair
    iteration: int
    inputs: str
    chosen: str
    rejected: str
    margin: float

    @property
    def probability(self) -> float:
        """How likely the reward held the better output to be the better one."""
        return 1 / (1 + math.exp(-max(-700.0, min(700.0, self.margin))))


@dataclass(frozen=True)
class HeadView:
    """One component's reward, as far as the records show it.

    Attributes:
        component: whose.
        accuracy: the share of held-out pairs ordered right.
        pairs: all of them.
        gap: the mean gap between best and worst output, in the latest iteration.
        jobs, steered: in how many jobs of the component rewards were asked, and in how many they steered.
        why: why it did not steer, the last time it did not.
        bins, error: stated against observed probabilities, and their mean difference.
        margins: of the pairs, in log odds.
        points: the candidates.
        correlation: Spearman's, of local with global rewards within a call; ``None`` where nothing differs.
        measure: what the points' ``x`` is: ``words``, ``value`` or ``label``; ``labels`` names the latter.
        explanation: by the named features; ``None`` where they say nothing.
        history: cross-validated accuracy, each time rewards were learned.
        drift: accuracy on each iteration's pairs by earlier ones; ``None`` where texts must be read for it.
    """

    component: str
    accuracy: Accuracy
    pairs: int
    gap: float
    jobs: int
    steered: int
    why: str
    bins: tuple[Bin, ...]
    error: float | None
    margins: tuple[float, ...]
    points: tuple[Point, ...]
    correlation: float | None
    measure: str
    labels: tuple[str, ...]
    explanation: Explanation | None
    history: tuple[Judged, ...]
    drift: tuple[Judged, ...] | None


@dataclass(frozen=True)
class Missing:
    """A component without a reward, and why."""

    component: str
    why: str
    pairs: int
    gap: float


@dataclass(frozen=True)
class Step:
    """The validation score at the start, or after a decision that accepted a change.

    ``at`` is the decision's number, ``components`` those whose settings changed.
    """

    at: int
    mean: float
    low: float | None
    high: float | None
    components: tuple[str, ...]


@dataclass(frozen=True)
class Overview:
    """All that the records show.

    Attributes:
        backbone: what read the texts.
        trained: whether it was trained on the pairs.
        threshold: the accuracy from which a reward may steer.
        heads: components with a reward.
        missing: components without one.
        steps: the global reward over the run.
        decisions: how many were made.
    """

    backbone: str
    trained: bool
    threshold: float
    heads: tuple[HeadView, ...]
    missing: tuple[Missing, ...]
    steps: tuple[Step, ...]
    decisions: int
