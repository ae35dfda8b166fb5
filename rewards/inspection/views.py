"""Results of inspecting local rewards: views of a pair, a head and a run."""

from __future__ import annotations

import math
from dataclasses import dataclass

from compound.rewards.alignment import Accuracy, Bin
from compound.rewards.inspection.explain import Explanation, Judged
from compound.rewards.pairs import Pair


@dataclass(frozen=True)
class Point:
    """A candidate: its held-out local reward and its global reward, each minus the mean of its call.

    Local rewards compare outputs for the same input, not inputs, so only differences within a call are
    meaningful. ``x`` is the output's length in words, its value, or the index of its label.
    """

    input: str
    local: float
    global_: float
    x: float


@dataclass(frozen=True)
class LocalUse:
    """Use of a local reward in a joint search; see `compound.runs.events.LocalFacts`."""

    trust: float
    slope: float
    evaluations: int
    price: float
    global_price: float

    @property
    def saved(self) -> float:
        """System runs that as many global evaluations would have cost in addition."""
        return self.evaluations * (self.global_price - self.price)


@dataclass(frozen=True)
class Judgement:
    """A held-out pair with the reward's margin.

    Attributes:
        pair: the two outputs, and the difference of their global rewards.
        iteration: the iteration of the pair.
        inputs, chosen, rejected: the texts that the reward model read.
        margin: ``r(chosen) - r(rejected)`` in log odds; negative if the ranking is wrong.
    """

    pair: Pair
    iteration: int
    inputs: str
    chosen: str
    rejected: str
    margin: float

    @property
    def probability(self) -> float:
        """Predicted probability that the better output is the better one."""
        return 1 / (1 + math.exp(-max(-700.0, min(700.0, self.margin))))


@dataclass(frozen=True)
class HeadView:
    """Recorded facts on a component's reward.

    Attributes:
        component: the name of the component.
        accuracy: the share of held-out pairs that are ordered correctly.
        pairs: the number of all pairs.
        gap: the mean gap between two outputs in the latest draws, if known.
        jobs, steered: the number of the component's jobs that requested rewards, and that used them.
        why: the latest reason for not using the reward.
        bins, error: predicted against observed probabilities, and their mean difference.
        margins: the held-out margins in log odds.
        points: the candidates.
        correlation: Spearman's correlation of local with global rewards within a call; ``None`` if all are
            equal.
        measure: the meaning of ``x`` of the points: ``words``, ``value`` or ``label`` (an index into
            ``labels``).
        explanation: the explanation by named features; ``None`` if they do not differ.
        history: the cross-validated accuracy each time the rewards were fitted.
        drift: the accuracy on each iteration's pairs of a head fitted to earlier ones; ``None`` if it would
            need the backbone.
        local: the use of the reward in the last joint search.
    """

    component: str
    accuracy: Accuracy
    pairs: int
    gap: float | None
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
    local: LocalUse | None = None


@dataclass(frozen=True)
class Missing:
    """A component without a reward, and the reason."""

    component: str
    why: str
    pairs: int
    gap: float | None


@dataclass(frozen=True)
class Step:
    """Validation score at the start, or after a decision that accepted a change.

    ``at`` is the number of the decision, ``components`` are the changed components.
    """

    at: int
    mean: float
    low: float | None
    high: float | None
    components: tuple[str, ...]


@dataclass(frozen=True)
class Overview:
    """Recorded facts on all local rewards of a run.

    Attributes:
        backbone: the name of the backbone.
        trained: whether the backbone was trained on the pairs.
        heads: the components with a reward.
        missing: the components without a reward.
        steps: the global reward over the run.
        decisions: the number of decisions.
    """

    backbone: str
    trained: bool
    heads: tuple[HeadView, ...]
    missing: tuple[Missing, ...]
    steps: tuple[Step, ...]
    decisions: int
