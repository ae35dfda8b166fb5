"""The tree-structured Parzen estimator, as a function of what was tried so far (Bergstra et al. 2011).

Optuna is a sampler here, not a second record: the study is rebuilt from our own progress, and each
trial's sampler is seeded by the trial's number, so that a resumed search continues the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from compound.errors import MissingExtra
from compound.execution.rng import derive_seed
from compound.graph.space import Choice, Float, Int, Space

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution

STARTUP = 4  # trials drawn at random before TPE has something to learn from


def next_point(
    spaces: Mapping[str, Space],
    trials: Sequence[tuple[Mapping[str, object], float]],
    pending: Sequence[Mapping[str, object]],
    seed: int,
    feature: str,
) -> dict[str, object]:
    """Return what TPE would try next.

    Args:
        spaces: `Choice`, `Int` and `Float` spaces by name.
        trials: the values of each point that has a score, and the score.
        pending: points whose score is still to come; they count as bad, so that a round is spread out.
        seed: the search's random stream; trials draw from it by their number.
        feature: what needs Optuna, for the message when it is missing.
    """
    try:
        import optuna
    except ImportError:
        raise MissingExtra(feature, "optuna", "search") from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    distributions = {name: _distribution(space) for name, space in spaces.items()}
    sampler = optuna.samplers.TPESampler(
        seed=derive_seed(seed, "trial", len(trials) + len(pending)) % 2**32,
        n_startup_trials=STARTUP,
        constant_liar=True,
    )
    study = optuna.create_study(direction="maximize", sampler=sampler)
    made = optuna.trial.create_trial
    for values, score in trials:
        study.add_trial(made(params=dict(values), distributions=distributions, value=score))
    running = optuna.trial.TrialState.RUNNING
    for values in pending:
        study.add_trial(made(state=running, params=dict(values), distributions=distributions))
    trial = study.ask(distributions)
    return {name: trial.params[name] for name in spaces}


def _distribution(space: Space) -> BaseDistribution:
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if isinstance(space, Choice):
        return CategoricalDistribution(space.options)
    if isinstance(space, Int):
        return IntDistribution(space.low, space.high, log=space.log)
    assert isinstance(space, Float)  # the methods give no other kind to TPE
    return FloatDistribution(space.low, space.high, log=space.log)
