"""Multivariate tree-structured Parzen estimator as a function of the trials so far (Bergstra et al. 2011).

The estimator models all parameters jointly, since the best value of one often depends on another: a
univariate estimator does not learn that two choices must agree.

Optuna is used as a stateless sampler: each suggestion rebuilds the study from the optimizer's progress, with
a sampler seeded by the number of the trial, so a resumed search makes the same suggestions.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from compound.errors import MissingExtra
from compound.execution.rng import derive_seed
from compound.graph.space import Choice, Float, Int, Space

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution

STARTUP = 4  # random trials before the first suggestion of TPE, by default


def next_point(
    spaces: Mapping[str, Space],
    trials: Sequence[tuple[Mapping[str, object], float]],
    pending: Sequence[Mapping[str, object]],
    seed: int,
    feature: str,
    startup: int = STARTUP,
) -> dict[str, object]:
    """Return the next suggestion of TPE.

    Args:
        spaces: `Choice`, `Int` and `Float` spaces by name.
        trials: scored points, as pairs of values and score.
        pending: points without a score yet; they count as bad ("constant liar"), which spreads out a round.
        seed: the seed of the search, from which that of each trial is derived.
        feature: the feature that requires Optuna, for the message if it is not installed.
        startup: random trials before the first suggestion of TPE.

    Raises:
        MissingExtra: Optuna is not installed.
    """
    try:
        import optuna
    except ImportError:
        raise MissingExtra(feature, "optuna", "search") from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    distributions = {name: _distribution(space) for name, space in spaces.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)  # of `multivariate`
        sampler = optuna.samplers.TPESampler(
            seed=derive_seed(seed, "trial", len(trials) + len(pending)) % 2**32,
            n_startup_trials=startup,
            multivariate=True,
            constant_liar=True,
        )
    study = optuna.create_study(direction="maximize", sampler=sampler)
    create = optuna.trial.create_trial
    for values, score in trials:
        study.add_trial(create(params=dict(values), distributions=distributions, value=score))
    running = optuna.trial.TrialState.RUNNING
    for values in pending:
        study.add_trial(create(state=running, params=dict(values), distributions=distributions))
    trial = study.ask(distributions)
    return {name: trial.params[name] for name in spaces}


def _distribution(space: Space) -> BaseDistribution:
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if isinstance(space, Choice):
        return CategoricalDistribution(space.options)
    if isinstance(space, Int):
        return IntDistribution(space.low, space.high, log=space.log)
    assert isinstance(space, Float)  # callers pass no other kinds
    return FloatDistribution(space.low, space.high, log=space.log)
