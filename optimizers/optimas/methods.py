"""Methods that optimize one component at a time by a local score: OPTIMAS and its cloning baseline.

`optimas` learns local rewards; `hbc` clones preferred outputs. Both first collect preference pairs in an
offline phase.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

from pydantic import Field

from compound.graph.space import Demos, Text, Weights
from compound.graph.system import System
from compound.optimization.method import Job, Method, Optimizer, Scheduler
from compound.optimizers.optimas.guides import Guide, LearnedRewards
from compound.optimizers.optimas.hbc import Cloning
from compound.optimizers.optimas.local import LocalSearch
from compound.optimizers.optimas.local_scoring import LocalSearchSettings
from compound.optimizers.optimas.offline import OfflineRewards
from compound.optimizers.optimas.weights import LocalTraining, LocalTrainingChoice, LocalTrainingField
from compound.optimizers.scheduling.jobs import by_component, keys_of
from compound.optimizers.scheduling.scheduler import UCB, RewardGapScheduler, Thompson, Uniform
from compound.optimizers.search.prompts import PromptSearch, PromptSettings
from compound.optimizers.weights.methods import check_component_names
from compound.rewards.settings import (
    BackboneSettings,
    FreshPairSettings,
    PairSettings,
    RewardLearning,
    RewardSettings,
)
from compound.settings.base import Settings
from compound.settings.optimize import OptimizeSettings

SCHEDULERS: Mapping[str, Callable[[], Scheduler]] = {
    "gaps": RewardGapScheduler,
    "uniform": Uniform,
    "ucb": UCB,
    "thompson": Thompson,
}
# Minimum share, in minibatches of system runs, of a job of choices and numbers: most of its candidates are
# scored by the local reward, without system runs.
MIN_MINIBATCHES = 2.0
MEASURING = ("ucb", "thompson")  # these learn from gains on train examples, so every proposal is measured


class GuidedSettings(Settings):
    """Settings that `optimas` and `hbc` share."""

    prompts: PromptSettings = PromptSettings()
    """Proposal of candidate prompts and demonstrations."""
    backbone: BackboneSettings = BackboneSettings()
    """The model that computes features of texts."""
    pairs: PairSettings = PairSettings()
    """Collection of preference pairs."""
    search: LocalSearchSettings = LocalSearchSettings()
    """Local search over the parameters of one component."""
    training: LocalTrainingField = LocalTrainingChoice()
    """Training of weights."""
    scheduler: Literal["gaps", "uniform", "ucb", "thompson"] = "gaps"
    """The scheduler that chooses the next component: `gaps` (proportional to the reward gap, as in the
    paper), `uniform`, or a bandit on the gain per system run (`ucb`, `thompson`)."""


class OptimasSettings(GuidedSettings):
    """Settings of `optimas`."""

    pairs: FreshPairSettings = FreshPairSettings()
    """Collection of preference pairs."""
    reward: RewardSettings = RewardSettings()
    """Fitting of local rewards, and the accuracy required to use them."""
    offline: float = Field(default=0.4, ge=0, lt=1)
    """Share of the optimization budget (what remains after reserving the acceptance tests) for the offline
    phase, which collects pairs before the first job."""


class HBCSettings(GuidedSettings):
    """Settings of `hbc`."""

    offline: float = Field(default=0.4, gt=0, lt=1)
    """Share of the optimization budget (what remains after reserving the acceptance tests) for the offline
    phase, which finds the outputs to clone."""


def optimas(system: System, optimize: OptimizeSettings, settings: OptimasSettings) -> Method:
    """OPTIMAS: learns a local reward per component offline, then optimizes one component at a time by it."""
    learning = RewardLearning(settings.pairs, settings.backbone, settings.reward)
    return guided(
        "optimas", system, settings, learning, LearnedRewards(), settings.offline, settings.pairs.fresh
    )


def hbc(system: System, optimize: OptimizeSettings, settings: HBCSettings) -> Method:
    """Hierarchical behaviour cloning: `optimas`, with similarity to preferred outputs as the local score."""
    learning = RewardLearning(settings.pairs, settings.backbone)
    return guided("hbc", system, settings, learning, Cloning(), settings.offline)


def guided(
    name: str,
    system: System,
    settings: GuidedSettings,
    learning: RewardLearning,
    guide: Guide,
    offline: float,
    fresh: int = 0,
) -> Method:
    """Return an OPTIMAS-style method whose local searches use the given guide.

    Args:
        name: the name of the method.
        system: the system to optimize.
        settings: settings of proposals, local search and training.
        learning: settings of pair collection and reward learning.
        guide: scores the calls of a component.
        offline: the share of the budget for the offline phase; 0 for none.
        fresh: the number of inputs that each later job collects pairs from.
    """
    prompts, verify = PromptSearch.of(settings.prompts), settings.scheduler in MEASURING
    training = f"optimize.{name}.training.{settings.training.name}"
    optimizers: Mapping[str, Optimizer] = {
        "offline": OfflineRewards(learning, prompts, guide),
        "local": LocalSearch(learning, settings.search, prompts, verify=verify, guide=guide, fresh=fresh),
        "weights": LocalTraining(learning, settings.training, guide, training),
    }
    jobs = by_component(system, "local", "local")
    trained = keys_of(system, Weights)
    if trained:
        check_component_names(training, trained, settings.training.settings)
    jobs += [Job("weights", (key,)) for key in trained]
    everything = tuple(key for job in jobs for key in job.keys)
    opening = Job("offline", everything, weight=offline) if offline else None
    texts = [isinstance(system.parameters[job.keys[0]], Text | Demos | Weights) for job in jobs]
    least = sum(Method.least if text else MIN_MINIBATCHES for text in texts) / max(1, len(texts))
    return Method(name, optimizers, jobs, SCHEDULERS[settings.scheduler](), opening, least)
