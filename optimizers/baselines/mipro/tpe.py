"""Multivariate tree-structured Parzen estimator as a function of the trials so far (Bergstra et al. 2011).

The estimator models all parameters jointly, since the best value of one often depends on another: a
univariate estimator does not learn that two choices must agree.

Optuna is used as a stateless sampler: each suggestion rebuilds the study from the optimizer's progress, with
a sampler seeded by the number of the trial, so a resumed search makes the same suggestions.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence

from compound.errors import MissingExtra
from compound.execution.rng import derive_seed

RANDOM = 10  # random trials before the first suggestion of TPE, Optuna's default, as in DSPy


def next_point(
    sizes: Mapping[str, int], trials: Sequence[tuple[Mapping[str, int], float]], seed: int
) -> dict[str, int]:
    """Return the next suggestion of TPE.

    Args:
        sizes: the number of values of each parameter.
        trials: scored points, as pairs of the numbers of values and score.
        seed: the seed of the search, from which that of each trial is derived.

    Raises:
        MissingExtra: Optuna is not installed.
    """
    try:
        import optuna
    except ImportError:
        raise MissingExtra("mipro", "optuna", "search") from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)  # of `multivariate`
        sampler = optuna.samplers.TPESampler(
            seed=derive_seed(seed, "trial", len(trials)) % 2**32, n_startup_trials=RANDOM, multivariate=True
        )
    study = optuna.create_study(direction="maximize", sampler=sampler)
    options = {
        name: optuna.distributions.CategoricalDistribution(range(size)) for name, size in sizes.items()
    }
    for point, score in trials:
        study.add_trial(optuna.trial.create_trial(params=dict(point), distributions=options, value=score))
    trial = study.ask(options)
    return {name: trial.params[name] for name in sizes}
