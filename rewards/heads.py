"""One linear head per component on frozen features, fitted by equation 5.

With fixed features, ``-log σ(r⁺ - r⁻)`` is logistic regression on the differences of the features, without an
intercept: it has one minimum, which is found to convergence. How strongly it is regularized, and how much the
backbone's columns count against the few named ones, is chosen on folds by input, and the accuracy reported is
that of the same folds: no pair is judged by a head that saw its input.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from compound.errors import DataError, MissingExtra
from compound.execution.rng import generator
from compound.formatting import plural

Vector = NDArray[np.float64]
Matrix = NDArray[np.float32] | NDArray[np.float64]

STRENGTHS = (1e-2, 1e-1, 1.0)  # inverse regularization, for standardized features
EMPHASES = (0.0, 0.1, 1.0)  # what the backbone's columns are multiplied by: there are hundreds of them
FOLDS = 5
LEAST_INPUTS = 4  # inputs with pairs: with fewer, nothing can be held out


@dataclass(frozen=True)
class Head:
    """``r(x, y) = weights · (φ(x, y) - center) / scale``, up to what all outputs of one input share."""

    weights: Vector
    center: Vector
    scale: Vector

    def rewards(self, features: Matrix) -> Vector:
        """Return the local rewards of rows of features."""
        return np.asarray(((features - self.center) / self.scale) @ self.weights)


@dataclass(frozen=True)
class Fit:
    """A head with what it was worth on inputs it had not seen.

    Attributes:
        head: fitted on all pairs.
        margins: ``r(chosen) - r(rejected)`` of each pair, by a head that did not see the pair's input.
        strength: the chosen inverse regularization.
        emphasis: what the backbone's columns were multiplied by.
        slope: calibrates margins: ``σ(slope · margin)`` is how likely the chosen output is better.
    """

    head: Head
    margins: Vector
    strength: float
    emphasis: float
    slope: float


def fit(
    chosen: Matrix,
    rejected: Matrix,
    inputs: Sequence[str],
    *,
    gaps: Sequence[float] | None = None,
    recency: Sequence[float] | None = None,
    held_out: Sequence[bool] | None = None,
    soft: Sequence[bool] | None = None,
    seed: int = 0,
) -> Fit:
    """Fit a head to pairs (OPTIMAS, equation 5).

    Args:
        chosen: features of the better outputs, one row for each pair.
        rejected: features of the worse ones.
        inputs: which input each pair belongs to; folds keep an input's pairs together.
        gaps: global reward gaps, for the margin-weighted variant: a pair then weighs its share of the mean
            gap. Gaps that are all equal weigh the same.
        recency: a weight for each pair, for rehearsal of older ones.
        held_out: pairs that the features were not trained on: they alone are judged and choose how strongly
            the head is regularized, and it is fitted to the others. Without any, all are judged in turn.
        soft: columns that come from the backbone, which `EMPHASES` apply to.
        seed: names the folds.

    Raises:
        DataError: there are pairs of fewer than `LEAST_INPUTS` inputs, or a number is not finite.
    """
    both = np.vstack([chosen, rejected]).astype(np.float64)
    if not np.isfinite(both).all():
        raise DataError("the features of some preference pairs are not finite")
    center, scale = both.mean(0), both.std(0)
    scale[scale < 1e-8] = 1.0
    differences = (chosen.astype(np.float64) - rejected) / scale
    weights = _weights(len(differences), gaps, recency)
    apart = np.zeros(len(differences), bool) if held_out is None else np.asarray(held_out, bool)
    fold = folds([name for name, out in zip(inputs, apart, strict=True) if not out], seed)
    text = np.zeros(differences.shape[1], bool) if soft is None else np.asarray(soft, bool)
    data = _Data(differences[~apart], weights[~apart], fold, differences[apart])
    with _one_thread():
        tried = [
            _try(data, strength, np.where(text, emphasis, 1.0), emphasis)
            for emphasis in _emphases(text) for strength in STRENGTHS
        ]  # fmt: skip
        judged = weights[apart] if apart.any() else data.weights
        best = min(tried, key=lambda one: one.loss(judged))
        emphasized = np.where(text, best.emphasis, 1.0)
        fitted = _logistic(data.differences * emphasized, data.weights, best.strength)
    head = Head(emphasized * fitted, center, scale)
    return Fit(head, best.margins, best.strength, best.emphasis, slope(best.margins, judged))


@dataclass(frozen=True)
class _Data:
    """Pairs to fit to, in folds, and those held apart."""

    differences: Vector
    weights: Vector
    fold: NDArray[np.int64]
    apart: Vector


@dataclass(frozen=True)
class _Tried:
    """What a choice of strength and emphasis makes of pairs that its heads did not see."""

    margins: Vector
    strength: float
    emphasis: float

    def loss(self, weights: Vector) -> float:
        """Return equation 5 on the pairs."""
        return float(np.average(np.logaddexp(0.0, -self.margins), weights=weights))


def _try(data: _Data, strength: float, emphasized: Vector, emphasis: float) -> _Tried:
    """Return the margins of the pairs held apart, or else those of each fold by the others.

    Pairs that the backbone was trained on cannot choose: it orders them too well.
    """
    differences = data.differences * emphasized
    if len(data.apart):
        margins = data.apart * emphasized @ _logistic(differences, data.weights, strength)
    else:
        margins = _held_out(differences, data.weights, data.fold, strength)
    return _Tried(margins, strength, emphasis)


def _emphases(text: NDArray[np.bool_]) -> tuple[float, ...]:
    """Return the emphases that make a difference."""
    if not text.any():
        return (1.0,)
    return EMPHASES[1:] if text.all() else EMPHASES


def slope(margins: Vector, weights: Vector | None = None) -> float:
    """Return the factor that makes held-out margins log odds (Platt 1999, without an offset); at least 0."""
    spread = float(np.abs(margins).mean()) if len(margins) else 0.0
    if not spread:
        return 0.0
    found = _logistic(margins[:, None] / spread, np.ones(len(margins)) if weights is None else weights, 1e3)
    return max(0.0, float(found[0]) / spread)


def _weights(n: int, gaps: Sequence[float] | None, recency: Sequence[float] | None) -> Vector:
    """Return a weight for each pair, 1 on average."""
    weights = np.ones(n)
    if gaps is not None:
        given = np.asarray(gaps, np.float64)
        mean = given.mean()
        weights = weights * (given / mean if mean > 0 else 1.0)
    if recency is not None:
        weights = weights * np.asarray(recency, np.float64)
    weights /= weights.mean()
    return weights


def folds(inputs: Sequence[str], seed: int) -> NDArray[np.int64]:
    """Return a fold for each pair; an input's pairs are in one.

    Raises:
        DataError: there are fewer than `LEAST_INPUTS` inputs.
    """
    distinct = sorted(set(inputs))
    if len(distinct) < LEAST_INPUTS:
        raise DataError(
            f"preference pairs of {plural(len(distinct), 'input')} cannot train a reward: "
            "none could be held out",
            hint=f"at least {LEAST_INPUTS} inputs need outputs that lead to different scores",
        )
    order = generator(seed, "folds").permutation(len(distinct))
    fold_of = {distinct[i]: place % min(FOLDS, len(distinct)) for place, i in enumerate(order)}
    return np.array([fold_of[name] for name in inputs])


def _held_out(differences: Vector, weights: Vector, fold: NDArray[np.int64], strength: float) -> Vector:
    margins = np.zeros(len(differences))
    for number in np.unique(fold):
        out = fold == number
        margins[out] = differences[out] @ _logistic(differences[~out], weights[~out], strength)
    return margins


@contextmanager
def _one_thread() -> Iterator[None]:
    """Keep matrix products in one thread: the matrices are small, and threads would only wait."""
    try:
        from threadpoolctl import threadpool_limits
    except ImportError:  # it comes with scikit-learn, whose absence is told there
        yield
        return
    with threadpool_limits(1):
        yield


def _logistic(differences: Vector, weights: Vector, strength: float) -> Vector:
    """Return the weights that minimize equation 5 plus an L2 term.

    Without an intercept a pair weighs the same from either side; every second one is turned around, since the
    library wants two classes.
    """
    try:
        from sklearn.exceptions import ConvergenceWarning
        from sklearn.linear_model import LogisticRegression
    except ImportError:
        raise MissingExtra("local rewards", "scikit-learn", "rewards") from None
    if len(differences) == 1:
        differences, weights = np.repeat(differences, 2, axis=0), np.repeat(weights, 2)
    side = np.resize([1.0, -1.0], len(differences))
    model = LogisticRegression(C=strength, fit_intercept=False, max_iter=200)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # perfectly ordered pairs have no finite optimum
        model.fit(differences * side[:, None], side > 0, weights)
    return np.asarray(model.coef_[0], np.float64)
