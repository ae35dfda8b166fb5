"""Fit one linear head per component on frozen features, by equation 5.

With fixed features, ``-log σ(r⁺ - r⁻)`` is logistic regression on the differences of the features,
without an intercept. The regularization and the scale of the backbone's columns are chosen by
cross-validation with folds by input; margins are those of nested cross-validation. Forward margins
are for tests: each fold is ordered by a head fitted to the folds before it, so that, if the features
tell nothing, each input is ordered right with probability one half.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from compound.core.errors import DataError, MissingExtra
from compound.core.formatting import plural
from compound.core.threads import one_matrix_thread
from compound.execution.rng import generator

Vector = NDArray[np.float64]
Matrix = NDArray[np.float32] | NDArray[np.float64]

STRENGTHS = (1e-2, 1e-1, 1.0)  # inverse regularization, for standardized features
EMPHASES = (0.0, 0.1, 1.0)  # factors of the backbone's columns, of which there are hundreds
FOLDS = 5
MIN_INPUTS = 4  # minimum number of inputs with pairs, so that some can be held out

Role = Literal["fit", "tune", "judge"]
"""Use of a pair: to fit the head, to choose the regularization, or to evaluate the head."""
ROLES: tuple[Role, ...] = ("fit", "tune", "judge")
FIT, TUNE, JUDGE = range(3)


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
    """A head with its held-out results."""

    head: Head
    # the margin `r(chosen) - r(rejected)` of each evaluated pair, by a head whose fit and
    # regularization did not depend on its input
    margins: Vector
    strength: float
    emphasis: float
    # calibration; `σ(slope · margin)` is the probability that the chosen output is better
    slope: float
    # the forward margin of each evaluated pair, `nan` without one; empty if not requested
    forward: Vector


def fit(
    chosen: Matrix,
    rejected: Matrix,
    inputs: Sequence[str],
    *,
    recency: Sequence[float] | None = None,
    roles: Sequence[Role] | None = None,
    soft: Sequence[bool] | None = None,
    tested: bool = False,
    seed: int = 0,
) -> Fit:
    """Fit a head to pairs (OPTIMAS, equation 5).

    Args:
        chosen: the features of the better outputs, one row per pair.
        rejected: the features of the worse outputs.
        inputs: the input of each pair; folds keep the pairs of an input together.
        recency: a weight for each pair, to discount older ones.
        roles: the use of each pair, if the features were trained on those to ``fit``.
        soft: whether each column comes from the backbone, so that `EMPHASES` apply.
        tested: whether to compute the forward margins.
        seed: seeds the folds.

    Raises:
        DataError: there are fewer than `MIN_INPUTS` inputs with pairs, or a number is not finite.
    """
    weights = np.asarray(recency, np.float64) if np.any(recency) else np.ones(len(inputs))
    pairs = _standardized(chosen, rejected, weights / weights.mean(), soft)
    with one_matrix_thread():
        if roles is None:
            folds_ = _Folds(pairs, folds(inputs, seed))
            best, margins = folds_.choose(folds_.all), folds_.nested_margins()
            fitted, judged = folds_.weights(best, folds_.all), pairs.weights
            forward = folds_.forward_margins() if tested else np.zeros(0)
        else:
            _check_inputs({name for name, role in zip(inputs, roles, strict=True) if role == "fit"})
            fold = np.array([ROLES.index(role) for role in roles])
            folds_ = _Folds(pairs, fold)
            best = folds_.choose({FIT}, {TUNE})
            fitted, judged = folds_.weights(best, {FIT}), pairs.weights[fold == JUDGE]
            forward = margins = folds_.margins(best, {FIT}, JUDGE)
    head = Head(fitted, pairs.center, pairs.scale)
    return Fit(head, margins, best.strength, best.emphasis, slope(margins, judged), forward)


def fit_head(chosen: Matrix, rejected: Matrix, weights: Vector, *, soft: Sequence[bool]) -> Head:
    """Fit a head to weighted pairs with the default regularization, without held-out results; see `fit`."""
    pairs = _standardized(chosen, rejected, weights, soft)
    with one_matrix_thread():
        fitted = _Folds(pairs, np.zeros(len(weights), int)).weights(DEFAULT, {0})
    return Head(fitted, pairs.center, pairs.scale)


@dataclass(frozen=True)
class _Pairs:
    """Standardized differences of the features of pairs, and the weight of each pair."""

    differences: Vector
    weights: Vector
    text: NDArray[np.bool_]
    center: Vector
    scale: Vector


def _standardized(
    chosen: Matrix, rejected: Matrix, weights: Vector, soft: Sequence[bool] | None
) -> _Pairs:
    """Return pairs in units of the standard deviations of all outputs, whichever of them is better."""
    both = np.vstack([chosen, rejected]).astype(np.float64)
    if not np.isfinite(both).all():
        raise DataError("the features of some preference pairs are not finite")
    center, scale = both.mean(0), both.std(0)
    scale[scale < 1e-8] = 1.0
    differences = (chosen.astype(np.float64) - rejected) / scale
    text = np.zeros(differences.shape[1], bool) if soft is None else np.asarray(soft, bool)
    return _Pairs(differences, weights, text, center, scale)


@dataclass(frozen=True)
class _Regularization:
    """Inverse strength of the regularization, and the factor of the backbone's columns."""

    strength: float
    emphasis: float


DEFAULT = _Regularization(0.1, 0.1)  # if there are no pairs to choose by, and for `fit_head`


@dataclass
class _Folds:
    """Heads fitted to any set of folds; each is fitted once."""

    pairs: _Pairs
    fold: NDArray[np.int64]
    fitted: dict[tuple[_Regularization, frozenset[int]], Vector] = field(default_factory=dict)

    @property
    def all(self) -> set[int]:
        return set(self.fold.tolist())

    def weights(self, regularization: _Regularization, among: Collection[int]) -> Vector:
        """Return the weights on standardized features of the head fitted to some folds."""
        key = regularization, frozenset(among)
        if key not in self.fitted:
            kept = np.isin(self.fold, list(among))
            factor = np.where(self.pairs.text, regularization.emphasis, 1.0)
            differences = self.pairs.differences[kept] * factor
            found = logistic(differences, self.pairs.weights[kept], regularization.strength)
            self.fitted[key] = factor * found
        return self.fitted[key]

    def margins(self, regularization: _Regularization, among: Collection[int], fold: int) -> Vector:
        """Return the margins of a fold's pairs by the head fitted to other folds."""
        return np.asarray(
            self.pairs.differences[self.fold == fold] @ self.weights(regularization, among)
        )

    def choose(self, among: Collection[int], by: Collection[int] | None = None) -> _Regularization:
        """Return the regularization with the lowest loss of equation 5."""
        tested = sorted(self.all & set(among if by is None else by))
        others = {fold: frozenset(among) - {fold} for fold in tested}
        weights = np.concatenate(
            [self.pairs.weights[self.fold == fold] for fold in (tested or [-1])]
        )
        if not tested or not all(others.values()) or not weights.sum():
            return DEFAULT

        def loss(regularization: _Regularization) -> float:
            margins = np.concatenate([self.margins(regularization, others[f], f) for f in tested])
            return float(np.average(np.logaddexp(0.0, -margins), weights=weights))

        return min(_regularizations(self.pairs.text), key=loss)

    def nested_margins(self) -> Vector:
        """Return the margins of all pairs by heads fitted and regularized on the other folds."""
        found = np.zeros(len(self.fold))
        for fold in self.all:
            others = self.all - {fold}
            found[self.fold == fold] = self.margins(self.choose(others), others, fold)
        return found

    def forward_margins(self) -> Vector:
        """Return the margins of each fold's pairs by a head fitted and regularized on the folds before it.

        The pairs of the first fold have ``nan`` (Dawid 1984, prequential validation).
        """
        found = np.full(len(self.fold), np.nan)
        for fold in range(1, len(self.all)):
            past = set(range(fold))
            found[self.fold == fold] = self.margins(self.choose(past), past, fold)
        return found


def _regularizations(text: NDArray[np.bool_]) -> list[_Regularization]:
    """Return the regularizations that give different fits."""
    emphases = EMPHASES[1:] if text.all() else EMPHASES
    factors = emphases if text.any() else (1.0,)
    return [_Regularization(strength, each) for each in factors for strength in STRENGTHS]


def slope(margins: Vector, weights: Vector | None = None) -> float:
    """Return the factor >= 0 that calibrates held-out margins as log odds (Platt 1999, without an offset)."""
    spread = float(np.abs(margins).mean()) if len(margins) else 0.0
    if not spread:
        return 0.0
    found = logistic(
        margins[:, None] / spread, np.ones(len(margins)) if weights is None else weights, 1e3
    )
    return max(0.0, float(found[0]) / spread)


def folds(inputs: Sequence[str], seed: int) -> NDArray[np.int64]:
    """Return a fold for each pair; the pairs of an input are in the same fold.

    Raises:
        DataError: there are fewer than `MIN_INPUTS` inputs.
    """
    distinct = sorted(set(inputs))
    _check_inputs(distinct)
    order = generator(seed, "folds").permutation(len(distinct))
    fold_of = {distinct[i]: place % min(FOLDS, len(distinct)) for place, i in enumerate(order)}
    return np.array([fold_of[name] for name in inputs])


def _check_inputs(distinct: Collection[str]) -> None:
    if len(distinct) < MIN_INPUTS:
        raise DataError(
            f"preference pairs of {plural(len(distinct), 'input')} are too few to train a reward with "
            "held-out inputs",
            hint=f"at least {MIN_INPUTS} inputs need outputs that lead to different scores",
        )


def logistic(differences: Vector, weights: Vector, strength: float) -> Vector:
    """Return the weights that minimize equation 5 plus an L2 term; every second pair is mirrored."""
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
        warnings.simplefilter(
            "ignore", ConvergenceWarning
        )  # perfectly ordered pairs have no finite optimum
        model.fit(differences * side[:, None], side > 0, weights)
    return np.asarray(model.coef_[0], np.float64)
