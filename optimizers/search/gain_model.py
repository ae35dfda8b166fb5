"""Model of the gains of configurations: a Gaussian process over the values that they share.

The gain of a configuration is modelled as a sum of contributions of single values and of one of
their combination, so that configurations inform each other. The process is conditioned on a gain of
0 for the incumbent. The amplitude and the share of the single values maximize the marginal
likelihood (Rasmussen and Williams 2006, equation 5.8) over a small grid.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from compound.core.threads import one_matrix_thread
from compound.graph.configuration import canonical_json, component_of
from compound.graph.space import Demos, Float, Int, Space, Text
from compound.optimizers.search.proposers.edits import sentences

Vector = NDArray[np.float64]
Values = Mapping[str, object]

LENGTH_SCALE = 0.25  # of numbers, as a share of their range
DIFFERENT_DEMOS = 0.5  # similarity of different demonstrations: whether there are any matters most
AMPLITUDES = (
    0.003,
    0.01,
    0.03,
    0.1,
    0.3,
    1.0,
    3.0,
)  # prior variance of a gain, relative to the noise
SINGLE_SHARES = (0.9, 0.5)  # of the prior variance, due to single values
PRIOR_SAMPLES = 2.0  # weight of the scores' variance in the estimate of the noise
LOCAL_AMPLITUDE, LOCAL_SD = 0.1, 0.5  # median of that of local rewards, and sd of its logarithm
# correlation of the noise of two configurations that differ in free parameters only
SHARED_NOISE = 0.8
JITTER = 1e-9  # relative to the diagonal of a covariance with noise
# of results: the last bits differ between processors, which would break ties differently
DIGITS = 9
# the same for a posterior: configurations that resemble each other have equal gains
SINGULAR = 1e-6


@dataclass(frozen=True)
class Observation:
    """Comparison of a configuration with the incumbent."""

    values: Values
    gain: float
    squares: float = 0.0  # the sum of the squared deviations of the differences from their mean
    rows: tuple[int, ...] = (0,)
    # the component whose local reward the differences are of, in units of the score; `""` for
    # differences of scores
    component: str = ""

    @staticmethod
    def of(
        values: Values, differences: Sequence[float], rows: Sequence[int], component: str = ""
    ) -> Observation:
        """Return the comparison, given its difference on each example."""
        gain = float(np.mean(differences))
        squares = float(((np.array(differences) - gain) ** 2).sum())
        return Observation(values, gain, squares, tuple(rows), component)

    @property
    def n(self) -> int:
        """Number of examples."""
        return len(self.rows)


@dataclass(frozen=True)
class Prior:
    """Variance of a gain, and the share of it that is due to single values."""

    amplitude: float
    single: float

    def covariance(self, single: Vector, joint: Vector) -> Vector:
        """Return the covariance of gains, given those of unit variance."""
        return np.asarray(self.amplitude * (self.single * single + (1 - self.single) * joint))


@dataclass(frozen=True)
class GainModel:
    """Posterior of gains, given some observations."""

    spaces: Mapping[str, Space]
    incumbent: Values
    observations: Sequence[Observation]
    score_variance: float  # variance of the scores of single runs, a prior estimate of the noise
    slopes: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    # parameters that no call of a model depends on: configurations that differ in these only have
    # the same calls, and most of their noise in common
    free: Collection[str] = ()

    @cached_property
    def noise(self) -> float:
        """Variance of the difference of two scores on one example, pooled over the observations."""
        return self._noise_of("")

    def _noise_of(self, component: str) -> float:
        own = [
            observation for observation in self.observations if observation.component == component
        ]
        groups = self._groups(own)
        squares = sum(
            observation.squares / (1 - SHARED_NOISE if group == 0 else 1)
            for observation, group in zip(own, groups, strict=True)
        )
        freedom = sum(observation.n - 1 for observation in own)
        prior = 1.0 if component else 2 * max(self.score_variance, JITTER)  # two independent scores
        return (squares + PRIOR_SAMPLES * prior) / (freedom + PRIOR_SAMPLES)

    @cached_property
    def _priors(self) -> Mapping[str, Prior]:
        """The prior of the gain by each local reward, and of what they do not explain, of name ``""``."""
        found: dict[str, Prior] = {}
        names = dict.fromkeys(sorted(observation.component for observation in self.observations))
        for name in [*filter(None, names), ""]:
            own = [o for o in self.observations if o.component == name or not name]
            gains, noise = np.array([o.gain for o in own]), self._noise_covariance(own)
            known = self._covariance(own, found) if not name else 0.0
            parts = self._similarities(name, [o.values for o in own])
            place = np.array([o.component == name for o in own])
            mask = np.outer(place, place)
            fits: list[tuple[float, Prior]] = []
            for amplitude, single in itertools.product(AMPLITUDES, SINGLE_SHARES):
                prior = Prior(amplitude * self._noise_of(name), single)
                factor = _factor(known + mask * prior.covariance(*parts) + noise, JITTER)
                whitened = _solve(factor, gains)
                likelihood = -0.5 * float(whitened @ whitened) - float(
                    np.log(np.diag(factor)).sum()
                )
                if name:
                    likelihood -= 0.5 * (math.log(amplitude / LOCAL_AMPLITUDE) / LOCAL_SD) ** 2
                fits.append((likelihood, prior))
            found[name] = max(fits, key=lambda fit: fit[0])[1]
        for name in self.slopes:
            found.setdefault(name, Prior(1.0, 0.5))
        return found

    @cached_property
    def _fitted(self) -> tuple[Vector, Vector]:
        gains = np.array([observation.gain for observation in self.observations])
        with one_matrix_thread():
            prior = self._covariance(self.observations, self._priors)
            factor = _factor(prior + self._noise_covariance(self.observations), JITTER)
            return factor, _solve(factor, _solve(factor, gains), transposed=True)

    def _covariance(
        self, observations: Sequence[Observation], priors: Mapping[str, Prior]
    ) -> Vector:
        """Return the prior covariance of gains: the sums of those by local rewards, and of a rest."""
        found = np.zeros((len(observations), len(observations)))
        for name, prior in priors.items():
            place = [i for i, o in enumerate(observations) if o.component in ("", name)]
            parts = self._similarities(name, [observations[i].values for i in place])
            own = prior.covariance(*parts)
            if name:
                slope, variance = self.slopes[name]
                scale = np.array([1.0 if observations[i].component else slope for i in place])
                whole = np.array([not observations[i].component for i in place])
                own = own * (np.outer(scale, scale) + variance * np.outer(whole, whole))
            found[np.ix_(place, place)] += own
        return found

    def _noise_covariance(self, observations: Sequence[Observation]) -> Vector:
        """Return the covariance of the observed gains around the true ones.

        Half of the noise of a difference is the incumbent's, which all differences on an example
        share; `SHARED_NOISE` of each half is that of the calls.
        """
        found = np.zeros((len(observations), len(observations)))
        for name in {observation.component for observation in observations}:
            place = [i for i, o in enumerate(observations) if o.component == name]
            own, noise = [observations[i] for i in place], self._noise_of(name)
            seen = np.zeros((len(own), 1 + max(max(o.rows) for o in own)))
            for weights, observation in zip(seen, own, strict=True):
                weights[list(observation.rows)] = 1 / observation.n
            each = np.array([1 / observation.n for observation in own])
            common, shared = seen @ seen.T, 0.0 if name or not self.free else SHARED_NOISE
            if shared:
                groups = np.array(self._groups(own))
                same, start = groups[:, None] == groups[None, :], (groups == 0).astype(float)
                common = common * (1 + shared * (same - start[:, None] - start[None, :]))
            found[np.ix_(place, place)] = noise / 2 * (common + (1 - shared) * np.diag(each))
        return found

    def _groups(self, observations: Sequence[Observation]) -> list[int]:
        """Return the group of each observation with the same calls; that of the incumbent is 0."""
        if not self.free:
            return [-1] * len(observations)
        found: dict[str, int] = {}
        points = [self.incumbent, *(observation.values for observation in observations)]
        fixed = [{k: x for k, x in point.items() if k not in self.free} for point in points]
        return [found.setdefault(canonical_json(each), len(found)) for each in fixed][1:]

    def predict(self, points: Sequence[Values], component: str = "") -> tuple[Vector, Vector]:
        """Return the means of the gains of some configurations, and their covariance."""
        factor, solution = self._fitted
        size = len(self.observations)
        asked = [Observation(point, 0.0, component=component) for point in points]
        with one_matrix_thread():
            prior = self._covariance([*self.observations, *asked], self._priors)
            across = prior[:size, size:]
            explained = _solve(factor, across)
            return across.T @ solution, prior[size:, size:] - explained.T @ explained

    def means(self, points: Sequence[Values]) -> list[float]:
        """Return the expected gains of some configurations."""
        return [round(float(mean), DIGITS) for mean in self.predict(points)[0]] if points else []

    def draw(
        self, points: Sequence[Values], rng: np.random.Generator, component: str = ""
    ) -> Vector:
        """Draw the gains of some configurations from the posterior."""
        means, covariance = self.predict(points, component)
        with one_matrix_thread():
            drawn = means + _factor(covariance, SINGULAR) @ rng.normal(size=len(means))
        return np.asarray(np.round(drawn, DIGITS))

    def _similarities(self, component: str, points: Sequence[Values]) -> tuple[Vector, Vector]:
        """Return the covariances of gains of unit variance due to single values, and to combinations."""
        keys = [key for key in self.spaces if not component or component_of(key) == component]
        tables = [self._table(key, [self.incumbent, *points]) for key in keys]
        differences = sum(1 - table for table in tables)
        return _relative(np.mean(tables, axis=0)), _relative(np.exp(-differences))

    def _table(self, key: str, points: Sequence[Values]) -> Vector:
        names = [_name(point[key]) for point in points]
        distinct = {name: point[key] for name, point in zip(names, points, strict=True)}
        place = {name: number for number, name in enumerate(distinct)}
        rows = [place[name] for name in names]
        return np.asarray(
            similarities(self.spaces[key], list(distinct.values()))[np.ix_(rows, rows)]
        )


def _name(value: object) -> Hashable:
    """Return a key of a value; encoding thousands of numbers and texts as JSON would take long."""
    return (type(value), value) if isinstance(value, str | int | float) else canonical_json(value)


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
    assert isinstance(value, int | float)  # as checked by the space
    scale = math.log if space.log else float
    low, high = scale(space.low), scale(space.high)
    return (scale(value) - low) / (high - low) if high > low else 0.0


def _relative(similarities: Vector) -> Vector:
    """Return the covariance of ``g(x) - g(incumbent)``, from the similarities with the incumbent first."""
    own = similarities[0, 0]
    return np.asarray(similarities[1:, 1:] - similarities[1:, :1] - similarities[:1, 1:] + own)


def _factor(covariance: Vector, jitter: float) -> Vector:
    raised = jitter * max(float(np.diag(covariance).mean()), JITTER) * np.eye(len(covariance))
    return np.asarray(np.linalg.cholesky((covariance + covariance.T) / 2 + raised))


def _solve(factor: Vector, right: Vector, *, transposed: bool = False) -> Vector:
    from scipy import linalg

    trans = "T" if transposed else "N"
    return np.asarray(
        linalg.solve_triangular(factor, right, lower=True, trans=trans, check_finite=False)
    )
