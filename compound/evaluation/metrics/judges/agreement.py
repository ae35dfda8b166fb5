"""Agreement of a judge with human labels: Cohen's kappa with a confidence interval."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from compound.errors import DataError, DeclarationError
from compound.evaluation.statistics import UNIT, mean_interval

Weights = Literal["quadratic", "none"]


@dataclass(frozen=True)
class Agreement:
    """Cohen's kappa of a judge and human labels, with its 95 % confidence interval.

    Attributes:
        kappa: 1 for perfect agreement, 0 for that of independent labels; NaN if both always give one label.
        low, high: limits of the confidence interval.
        observed: mean agreement of the two, from 0 to 1.
        expected: mean agreement of independent labels with the same frequencies.
        n: number of labelled outputs.
        failed: number of labelled outputs that the judge could not score; they are left out.
        consistent: share of outputs on which a judge agreed with itself in both orders; ``None`` for judges
            that are not asked twice.

    >>> print(agreement_of([1, 1, 0, 0], [1, 1, 0, 1]))
    kappa 0.50 [-0.61, 0.99] on 4 labels, agreement 0.75 (0.50 by chance)
    """

    kappa: float
    low: float
    high: float
    observed: float
    expected: float
    n: int
    failed: int = 0
    consistent: float | None = None

    def __str__(self) -> str:
        failed = f", {self.failed} not scored" if self.failed else ""
        same = "" if self.consistent is None else f", the same in both orders on {self.consistent:.0%}"
        kappa = "undefined (one label only)" if math.isnan(self.kappa) else self._kappa
        return (
            f"kappa {kappa} on {self.n} labels, agreement {self.observed:.2f} "
            f"({self.expected:.2f} by chance){failed}{same}"
        )

    @property
    def _kappa(self) -> str:
        return f"{self.kappa:.2f} [{self.low:.2f}, {self.high:.2f}]"


def agreement_of(
    judged: Sequence[float],
    human: Sequence[float],
    weights: Weights = "quadratic",
    *,
    failed: int = 0,
    consistent: float | None = None,
) -> Agreement:
    """Return the agreement of scores with human labels on the same scale from 0 to 1.

    The interval is that of the mean agreement, which holds for every distribution, with the agreement by
    chance taken as known.

    Args:
        judged: scores from 0 to 1.
        human: labels from 0 to 1.
        weights: ``quadratic`` counts a difference d as agreement 1 - d²; ``none`` counts equal labels only,
            with each score rounded to the nearest label.
        failed: see `Agreement`.
        consistent: see `Agreement`.

    Raises:
        DataError: there are no labels, their numbers differ, or one is outside 0 to 1.
    """
    scores, labels = np.asarray(judged, dtype=np.float64), np.asarray(human, dtype=np.float64)
    if weights not in ("quadratic", "none"):
        raise DeclarationError(f"weights must be 'quadratic' or 'none', got {weights!r}")
    if not len(scores) or len(scores) != len(labels):
        raise DataError(f"agreement needs as many scores as labels, got {len(scores)} and {len(labels)}")
    for values in (scores, labels):
        if not np.all((values >= 0) & (values <= 1)):
            raise DataError("scores and labels must be from 0 to 1", hint="pass the scale of the labels")
    if weights == "none":
        levels = np.unique(labels)
        scores = levels[np.argmin(np.abs(scores[:, None] - levels[None, :]), axis=1)]
        pairs = (scores[:, None] == labels[None, :]).astype(np.float64)
    else:
        pairs = 1 - (scores[:, None] - labels[None, :]) ** 2
    agreed, expected = np.diag(pairs), float(pairs.mean())
    found = mean_interval(agreed.tolist(), bounds=UNIT)

    def kappa(observed: float) -> float:
        return math.nan if expected >= 1 else (observed - expected) / (1 - expected)

    low, high = max(-1.0, kappa(found.low)), kappa(found.high)
    return Agreement(kappa(found.mean), low, high, found.mean, expected, len(labels), failed, consistent)
