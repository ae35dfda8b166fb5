"""Fit one linear head per component on frozen features, by equation 5.

With fixed features, ``-log σ(r⁺ - r⁻)`` is logistic regression on the differences of the features, without an
intercept. It has a unique minimum and is fitted to convergence. The strength of the regularization and the
scale of the backbone's columns relative to the named ones are chosen by cross-validation with folds by input.
The reported accuracy is that of the same folds, where no head was fitted to the inputs of its test pairs.
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
EMPHASES = (0.0, 0.1, 1.0)  # factors of the backbone's columns, of which there are hundreds
FOLDS = 5
MIN_INPUTS = 4  # minimum number of inputs with pairs, so that some can be held out


@dataclass(frozen=True)
class Head:
    """``r(x, y) = weights · (φ(x, y) - center) / scale``, up to a constant for each input."""

    weights: Vector
    center: Vector
    scale: Vector

    def rewards(self, features: Matrix) -> Vector:
        """Return the local rewards of rows of features."""
        return np.asarray(((features - self.center) / self.scale) @ self.weights)


@dataclass(frozen=True)
class Fit:
    """A head with its held-out results.

    Attributes:
        head: the head, fitted to all pairs.
        margins: the margin ``r(chosen) - r(rejected)`` of each pair, by a head not fitted to its input.
        strength: the selected inverse regularization.
        emphasis: the selected factor of the backbone's columns.
        slope: calibration; ``σ(slope · margin)`` is the probability that the chosen output is better.
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
        chosen: the features of the better outputs, one row per pair.
        rejected: the features of the worse outputs.
        inputs: the input of each pair; folds keep the pairs of an input together.
        gaps: global reward gaps, for the margin-weighted variant: each pair is weighted by its gap relative
            to the mean gap.
        recency: a weight for each pair, to discount older ones.
        held_out: whether the features were not trained on each pair. If given, only these pairs are used for
            evaluation and model selection, and the head is fitted to the others; otherwise all pairs are
            cross-validated.
        soft: whether each column comes from the backbone, so that `EMPHASES` apply.
        seed: seeds the folds.

    Raises:
        DataError: there are fewer than `MIN_INPUTS` inputs with pairs, or a number is not finite.
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
        best = min(tried, key=lambda result: result.loss(judged))
        emphasized = np.where(text, best.emphasis, 1.0)
        fitted = _logistic(data.differences * emphasized, data.weights, best.strength)
    head = Head(emphasized * fitted, center, scale)
    return Fit(head, best.margins, best.strength, best.emphasis, slope(best.margins, judged))


def fit_head(
    chosen: Matrix,
    rejected: Matrix,
    weights: Vector,
    *,
    soft: Sequence[bool],
    strength: float = 0.1,
    emphasis: float = 0.1,
) -> Head:
    """Fit a head to pairs with given regularization, without held-out results.

    Args:
        chosen: the features of the better outputs, one row per pair.
        rejected: the features of the worse outputs.
        weights: the weight of each pair.
        soft: whether each column comes from the backbone.
        strength: inverse regularization, for standardized features.
        emphasis: factor of the backbone's columns.
    """
    both = np.vstack([chosen, rejected]).astype(np.float64)
    center, scale = both.mean(0), both.std(0)
    scale[scale < 1e-8] = 1.0
    emphasized = np.where(np.asarray(soft, bool), emphasis, 1.0)
    differences = (chosen.astype(np.float64) - rejected) / scale * emphasized
    with _one_thread():
        fitted = _logistic(differences, weights, strength)
    return Head(emphasized * fitted, center, scale)


@dataclass(frozen=True)
class _Data:
    """Pairs for fitting, in folds, and held-out pairs."""

    differences: Vector
    weights: Vector
    fold: NDArray[np.int64]
    apart: Vector


@dataclass(frozen=True)
class _Tried:
    """Held-out margins for a choice of strength and emphasis."""

    margins: Vector
    strength: float
    emphasis: float

    def loss(self, weights: Vector) -> float:
        """Return the loss of equation 5 on the pairs."""
        return float(np.average(np.logaddexp(0.0, -self.margins), weights=weights))


def _try(data: _Data, strength: float, emphasized: Vector, emphasis: float) -> _Tried:
    """Return the margins of the held-out pairs if there are any, otherwise the cross-validated ones.

    Pairs that the backbone was trained on are not used for selection, because it overfits them.
    """
    differences = data.differences * emphasized
    if len(data.apart):
        margins = data.apart * emphasized @ _logistic(differences, data.weights, strength)
    else:
        margins = _held_out(differences, data.weights, data.fold, strength)
    return _Tried(margins, strength, emphasis)


def _emphases(text: NDArray[np.bool_]) -> tuple[float, ...]:
    """Return the emphases that give different fits."""
    if not text.any():
        return (1.0,)
    return EMPHASES[1:] if text.all() else EMPHASES


def slope(margins: Vector, weights: Vector | None = None) -> float:
    """Return the factor >= 0 that calibrates held-out margins as log odds (Platt 1999, without an offset)."""
    spread = float(np.abs(margins).mean()) if len(margins) else 0.0
    if not spread:
        return 0.0
    found = _logistic(margins[:, None] / spread, np.ones(len(margins)) if weights is None else weights, 1e3)
    return max(0.0, float(found[0]) / spread)


def _weights(n: int, gaps: Sequence[float] | None, recency: Sequence[float] | None) -> Vector:
    """Return a weight for each pair, with mean 1."""
    weights = np.ones(n)
    for factors in (gaps, recency):
        if factors is not None and np.any(factors):
            weights = weights * np.asarray(factors, np.float64)
    return np.asarray(weights / weights.mean())


def folds(inputs: Sequence[str], seed: int) -> NDArray[np.int64]:
    """Return a fold for each pair; the pairs of an input are in the same fold.

    Raises:
        DataError: there are fewer than `MIN_INPUTS` inputs.
    """
    distinct = sorted(set(inputs))
    if len(distinct) < MIN_INPUTS:
        raise DataError(
            f"preference pairs of {plural(len(distinct), 'input')} are too few to train a reward with "
            "held-out inputs",
            hint=f"at least {MIN_INPUTS} inputs need outputs that lead to different scores",
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
    """Limit matrix products to one thread, which is faster because the matrices are small."""
    try:
        from threadpoolctl import threadpool_limits
    except ImportError:  # part of scikit-learn, whose absence `_logistic` reports
        yield
        return
    with threadpool_limits(1):
        yield


def _logistic(differences: Vector, weights: Vector, strength: float) -> Vector:
    """Return the weights that minimize equation 5 plus an L2 term.

    Without an intercept, a pair and its mirror image are equivalent. Every second pair is mirrored, because
    scikit-learn needs two classes.
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
