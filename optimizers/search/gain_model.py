"""Model of the gains of configurations: a Gaussian process over the values that they share.

A search compares many configurations on few examples each. Configurations that share values inform each
other: the gain of a configuration is modelled as a sum of contributions of single values and of one of their
combination, so that an estimate uses all evaluations, and configurations that were never run have one, too.

The process is conditioned on a gain of 0 for the incumbent. The amplitude and the share of the single values
maximize the marginal likelihood (Rasmussen and Williams 2006, equation 5.8) over a small grid.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from compound.concurrency.matrix_threads import one_matrix_thread
from compound.graph.configuration import canonical_json
from compound.graph.space import Demos, Float, Int, Space, Text
from compound.optimizers.search.proposers.edits import sentences

__all__ = ["GainModel", "Observation", "similarities"]

Vector = NDArray[np.float64]
Values = Mapping[str, object]

LENGTH_SCALE = 0.25  # of numbers, as a share of their range
DIFFERENT_DEMOS = 0.5  # similarity of different demonstrations: whether there are any matters most
AMPLITUDES = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0)  # prior variance of a gain, relative to the noise
SINGLE_SHARES = (0.9, 0.5)  # of the prior variance, due to single values
PRIOR_SAMPLES = 2.0  # weight of the scores' variance in the estimate of the noise
JITTER = 1e-9  # relative to the diagonal of a covariance with noise
DIGITS = 9  # of results: the last bits differ between processors, which would break ties differently
SINGULAR = 1e-6  # the same for a posterior: configurations that resemble each other have equal gains


@dataclass(frozen=True)
class Observation:
    """Comparison of a configuration with the incumbent.

    Attributes:
        values: the values of all parameters of the search.
        gain: the mean difference of the scores.
        squares: the sum of the squared deviations of the differences from their mean.
        n: the number of examples, which are the first ones of the search.
        variance: the variance of the gain, if it is an estimate of another kind than the mean over n
            examples; ``None`` for the pooled variance divided by n.
    """

    values: Values
    gain: float
    squares: float = 0.0
    n: int = 1
    variance: float | None = None


@dataclass(frozen=True)
class Hyperparameters:
    """Prior variance of a gain, and the share of it that is due to single values."""

    amplitude: float
    single: float


@dataclass(frozen=True)
class GainModel:
    """Posterior of gains, given some observations.

    Attributes:
        spaces: the parameters of the search.
        incumbent: their current values, whose gain is 0.
        observations: at least one.
        score_variance: variance of the scores of single runs, a prior estimate of the noise.
    """

    spaces: Mapping[str, Space]
    incumbent: Values
    observations: Sequence[Observation]
    score_variance: float

    @cached_property
    def noise(self) -> float:
        """Variance of the difference of two scores on one example, pooled over the observations."""
        squares = sum(observation.squares for observation in self.observations)
        freedom = sum(observation.n - 1 for observation in self.observations)
        prior = 2 * max(self.score_variance, JITTER)  # two independent scores
        return (squares + PRIOR_SAMPLES * prior) / (freedom + PRIOR_SAMPLES)

    @cached_property
    def _fitted(self) -> tuple[Hyperparameters, Vector, Vector]:
        """The hyperparameters, the Cholesky factor of the observations' covariance, and its solution."""
        grid = [Hyperparameters(a * self.noise, s) for a in AMPLITUDES for s in SINGLE_SHARES]
        gains = np.array([observation.gain for observation in self.observations])
        points, noise = [observation.values for observation in self.observations], self._noise_covariance()
        single, joint = self._similarities(points)
        fits: list[tuple[float, Hyperparameters, Vector, Vector]] = []
        with one_matrix_thread():
            for candidate in grid:
                factor = _factor(candidate.amplitude * _mix(candidate.single, single, joint) + noise, JITTER)
                whitened = _solve(factor, gains)
                likelihood = -0.5 * float(whitened @ whitened) - float(np.log(np.diag(factor)).sum())
                fits.append((likelihood, candidate, factor, whitened))
            _, best, factor, whitened = max(fits, key=lambda fit: fit[0])
            return best, factor, _solve(factor, whitened, transposed=True)

    def _noise_covariance(self) -> Vector:
        """Return the covariance of the observed gains around the true ones.

        Half of the noise of a difference is the incumbent's, which all differences on an example share.
        """
        own = np.array([self.noise / o.n if o.variance is None else o.variance for o in self.observations])
        return np.asarray(np.minimum(own[:, None], own[None, :]) / 2 + np.diag(own / 2))

    def predict(self, points: Sequence[Values]) -> tuple[Vector, Vector]:
        """Return the means of the gains of some configurations, and their covariance."""
        hyper, factor, solution = self._fitted
        known = [observation.values for observation in self.observations]
        single, joint = self._similarities([*known, *points])
        prior = hyper.amplitude * _mix(hyper.single, single, joint)
        size = len(known)
        across = prior[:size, size:]
        with one_matrix_thread():
            explained = _solve(factor, across)
            return across.T @ solution, prior[size:, size:] - explained.T @ explained

    def means(self, points: Sequence[Values]) -> list[float]:
        """Return the expected gains of some configurations."""
        return [round(float(mean), DIGITS) for mean in self.predict(points)[0]] if points else []

    def draw(self, points: Sequence[Values], rng: np.random.Generator) -> Vector:
        """Draw the gains of some configurations from the posterior."""
        means, covariance = self.predict(points)
        with one_matrix_thread():
            drawn = means + _factor(covariance, SINGULAR) @ rng.normal(size=len(means))
        return np.asarray(np.round(drawn, DIGITS))

    def _similarities(self, points: Sequence[Values]) -> tuple[Vector, Vector]:
        """Return the covariances of gains of unit variance due to single values, and to combinations."""
        tables = [self._table(key, [self.incumbent, *points]) for key in self.spaces]
        differences = sum(1 - table for table in tables)
        return _relative(np.mean(tables, axis=0)), _relative(np.exp(-differences))

    def _table(self, key: str, points: Sequence[Values]) -> Vector:
        """Return the similarity of each pair of points in one parameter."""
        names = [canonical_json(point[key]) for point in points]
        distinct = {name: point[key] for name, point in zip(names, points, strict=True)}
        place = {name: number for number, name in enumerate(distinct)}
        rows = [place[name] for name in names]
        return np.asarray(similarities(self.spaces[key], list(distinct.values()))[np.ix_(rows, rows)])


def similarities(space: Space, values: Sequence[object]) -> Vector:
    """Return the prior correlations of the contributions of different values of a parameter, pairwise.

    >>> from compound.graph.space import Choice
    >>> similarities(Choice("a", "b"), ["a", "b"])
    array([[1., 0.],
           [0., 1.]])
    >>> similarities(Float(0.0, 1.0), [0.25, 0.5])[0, 1].item()
    0.6065306597126334
    >>> similarities(Text("Answer."), ["Answer. Be brief.", "Answer."])[0, 1].item()
    0.5
    """
    if isinstance(space, Int | Float):
        positions = np.array([_position(space, value) for value in values])
        distances = positions[:, None] - positions[None, :]
        return np.asarray(np.exp(-0.5 * (distances / LENGTH_SCALE) ** 2))
    found = np.eye(len(values))
    if isinstance(space, Text):
        parts = [set(sentences(str(value))) for value in values]
        for i, j in itertools.combinations(range(len(values)), 2):
            shared, union = len(parts[i] & parts[j]), len(parts[i] | parts[j])
            found[i, j] = found[j, i] = shared / max(1, union)
    elif isinstance(space, Demos):
        given = np.array([float(bool(value)) for value in values])
        found = np.maximum(found, DIFFERENT_DEMOS * np.outer(given, given))
    return found


def _position(space: Int | Float, value: object) -> float:
    """Return the position of a number in its range, from 0 to 1."""
    assert isinstance(value, int | float)  # as checked by the space
    scale = math.log if space.log else float
    low, high = scale(space.low), scale(space.high)
    return (scale(value) - low) / (high - low) if high > low else 0.0


def _relative(similarities: Vector) -> Vector:
    """Return the covariance of ``g(x) - g(incumbent)``, from the similarities with the incumbent first."""
    own = similarities[0, 0]
    return np.asarray(similarities[1:, 1:] - similarities[1:, :1] - similarities[:1, 1:] + own)


def _factor(covariance: Vector, jitter: float) -> Vector:
    """Return the Cholesky factor of a covariance, whose diagonal is raised slightly."""
    raised = jitter * max(float(np.diag(covariance).mean()), JITTER) * np.eye(len(covariance))
    return np.asarray(np.linalg.cholesky((covariance + covariance.T) / 2 + raised))


def _mix(share: float, single: Vector, joint: Vector) -> Vector:
    return share * single + (1 - share) * joint


def _solve(factor: Vector, right: Vector, *, transposed: bool = False) -> Vector:
    """Solve a linear system of a Cholesky factor, or of its transpose."""
    from scipy import linalg

    trans = "T" if transposed else "N"
    return np.asarray(linalg.solve_triangular(factor, right, lower=True, trans=trans, check_finite=False))
