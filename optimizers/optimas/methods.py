"""Methods that search component by component, guided by a score of single outputs: OPTIMAS, and a baseline.

`optimas` learns local rewards; `hbc` clones preferred outputs. Both collect preference pairs in an offline
phase first.
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
LEAST = 2.0  # minibatches' runs a job of numbers needs when its local reward does most of the work
MEASURING = ("ucb", "thompson")  # they learn from gains on train examples, so every proposal is measured


class GuidedSettings(Settings):
    """What both methods read."""

    prompts: PromptSettings = PromptSettings()
    """How candidate prompts and demonstrations are made."""
    backbone: BackboneSettings = BackboneSettings()
    """The model that turns texts into features."""
    pairs: PairSettings = PairSettings()
    """How preference pairs are collected."""
    search: LocalSearchSettings = LocalSearchSettings()
    """How the settings of one component are searched."""
    training: LocalTrainingField = LocalTrainingChoice()
    """How weights are trained."""
    scheduler: Literal["gaps", "uniform", "ucb", "thompson"] = "gaps"
    """Who chooses the next component: `gaps` (the paper's rule), `uniform`, or a bandit on gain per run."""


class OptimasSettings(GuidedSettings):
    """Settings of `optimas`."""

    pairs: FreshPairSettings = FreshPairSettings()
    """How preference pairs are collected."""
    reward: RewardSettings = RewardSettings()
    """How local rewards are fitted, and when they are used."""
    offline: float = Field(default=0.4, ge=0, lt=1)
    """The offline phase's part of the budget that is not needed to decide."""


class HBCSettings(GuidedSettings):
    """Settings of `hbc`."""

    offline: float = Field(default=0.4, gt=0, lt=1)
    """The offline phase's part of the budget that is not needed to decide. It finds the outputs to clone."""


def optimas(system: System, optimize: OptimizeSettings, settings: OptimasSettings) -> Method:
    """Local rewards: learned offline first, then one component after the other by what suits it (OPTIMAS)."""
    learning = RewardLearning(settings.pairs, settings.backbone, settings.reward)
    return guided(
        "optimas", system, settings, learning, LearnedRewards(), settings.offline, settings.pairs.fresh
    )


def hbc(system: System, optimize: OptimizeSettings, settings: HBCSettings) -> Method:
    """What `optimas` does, with the similarity to the preferred output as the score (behaviour cloning)."""
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
    """Return the method `optimas` with another guide of its local searches.

    Args:
        name: of the method.
        system: what is to be optimized.
        settings: how candidates are made, searched and trained.
        learning: how pairs are collected and rewards learned.
        guide: scores the calls of a component.
        offline: the offline phase's part of the budget; 0 for none.
        fresh: inputs that each later job collects pairs from.
    """
    prompts, verify = PromptSearch.of(settings.prompts), settings.scheduler in MEASURING
    optimizers: Mapping[str, Optimizer] = {
        "offline": OfflineRewards(learning, prompts, guide),
        "local": LocalSearch(learning, settings.search, prompts, verify=verify, guide=guide, fresh=fresh),
        "weights": LocalTraining(learning, settings.training, guide),
    }
    jobs = by_component(system, "local", "local")
    trained = keys_of(system, Weights)
    if trained:
        check_component_names(
            f"{name}.training.{settings.training.name}", trained, settings.training.settings
        )
    jobs += [Job("weights", (key,)) for key in trained]
    everything = tuple(key for job in jobs for key in job.keys)
    opening = Job("offline", everything, weight=offline) if offline else None
    texts = [isinstance(system.parameters[job.keys[0]], Text | Demos | Weights) for job in jobs]
    least = sum(Method.least if text else LEAST for text in texts) / max(1, len(texts))
    return Method(name, optimizers, jobs, SCHEDULERS[settings.scheduler](), opening, least)
