"""Methods that optimize one component at a time by a local score: OPTIMAS and its cloning baseline.

`optimas` learns local rewards; `hbc` clones preferred outputs. Both first collect preference pairs in an
offline phase.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Literal

from pydantic import Field

from compound.graph.configuration import components_of
from compound.graph.space import Choice, Demos, Float, Int, Text, Weights
from compound.graph.system import System
from compound.optimization.method import Job, Method, Optimizer, Scheduler
from compound.optimization.prices import estimate_prices
from compound.optimizers.optimas.guided import GuidedSearch, savings_of
from compound.optimizers.optimas.guides import LearnedRewards
from compound.optimizers.optimas.hbc import Cloning
from compound.optimizers.optimas.local import LocalSearch
from compound.optimizers.optimas.local_scoring import LocalSearchSettings
from compound.optimizers.optimas.offline import OfflineRewards
from compound.optimizers.optimas.part import segments
from compound.optimizers.optimas.segment_search import SegmentSearch
from compound.optimizers.optimas.weights import LocalTraining, LocalTrainingChoice, LocalTrainingField
from compound.optimizers.scheduling.jobs import by_component, keys_of
from compound.optimizers.scheduling.scheduler import UCB, RewardGapScheduler, Thompson, Uniform
from compound.optimizers.search.joint import JointSearch
from compound.optimizers.search.prompts import PromptSearch, PromptSettings
from compound.optimizers.weights.methods import check_component_names
from compound.rewards.gains.estimates import EstimateGains, estimate_gains, estimate_unbiased
from compound.rewards.settings import (
    BackboneSettings,
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
ESTIMATES: Mapping[str, EstimateGains] = {
    "shrinkage": estimate_gains,
    "control_variate": estimate_unbiased,
}
MIN_MINIBATCHES = 4.0  # fewer would divide alpha between more decisions (docs/evidence/acceptance.md)


class BaseOptimasSettings(Settings):
    """Settings that `optimas` and `hbc` share."""

    prompts: PromptSettings = PromptSettings()
    """Proposal of candidate prompts and demonstrations."""
    backbone: BackboneSettings = BackboneSettings()
    """The model that computes features of texts."""
    pairs: PairSettings = PairSettings()
    """Collection of preference pairs."""
    training: LocalTrainingField = LocalTrainingChoice()
    """Training of weights."""
    scheduler: Literal["gaps", "uniform", "ucb", "thompson"] = "gaps"
    """The scheduler that chooses the next component: `gaps` (proportional to the reward gap, as in the
    paper), `uniform`, or a bandit on the gain per system run (`ucb`, `thompson`)."""


class GuidedSearchSettings(Settings):
    """Search over the parameters of a component, guided by its local reward."""

    rounds: int = Field(default=2, ge=1)
    """Maximum number of rounds of candidates per job; each starts from the best of the previous one."""
    segments: bool = True
    """Whether the choices and numbers of components between which no model is called are searched together,
    by one local reward of their outputs."""
    gold: bool = True
    """Whether the local reward reads the gold answers of train examples. It then scores train examples only,
    and is never part of a configuration."""
    estimator: Literal["shrinkage", "control_variate"] = "shrinkage"
    """Estimate of a candidate's gain: `control_variate` corrects the local gain in full, so that a misleading
    local reward adds no bias; `shrinkage` weighs the correction by what the local reward leaves unexplained
    (Fay and Herriot 1979)."""


class OptimasSettings(BaseOptimasSettings):
    """Settings of `optimas`."""

    search: GuidedSearchSettings = GuidedSearchSettings()
    """Search over the parameters of one component."""
    reward: RewardSettings = RewardSettings()
    """Fitting of local rewards, and what is required to train weights by them."""
    offline: float = Field(default=0.2, ge=0, lt=1)
    """Share of the optimization budget (what remains after reserving the acceptance tests) for the offline
    phase, which collects pairs of components whose weights are trained. The rewards of other parameters are
    learned from the evaluations of their candidates."""


class HBCSettings(BaseOptimasSettings):
    """Settings of `hbc`."""

    search: LocalSearchSettings = LocalSearchSettings()
    """Local search over the parameters of one component."""
    offline: float = Field(default=0.4, gt=0, lt=1)
    """Share of the optimization budget (what remains after reserving the acceptance tests) for the offline
    phase, which finds the outputs to clone."""


def optimas(system: System, optimize: OptimizeSettings, settings: OptimasSettings) -> Method:
    """OPTIMAS: optimizes one component at a time, guided by a local reward learned from its candidates."""
    learning = RewardLearning(settings.pairs, settings.backbone, settings.reward)
    prompts = PromptSearch.of(settings.prompts, "optimas.prompts")
    search = GuidedSearch(
        learning, prompts, settings.search.rounds, settings.search.gold,
        estimate=ESTIMATES[settings.search.estimator],
    )  # fmt: skip
    training = f"optimize.optimas.training.{settings.training.name}"
    guide = LearnedRewards()
    optimizers: Mapping[str, Optimizer] = {
        "offline": OfflineRewards(learning, prompts, guide),
        "local": search,
        "segment": SegmentSearch(learning, settings.search.gold),
        "joint": JointSearch(prompts),
        "weights": LocalTraining(learning, settings.training, guide, training),
    }
    single, trained = _jobs(system, training, settings.training)
    jobs = by_segment(system, single) if settings.search.segments else single
    opening = Job("offline", trained, weight=settings.offline) if trained and settings.offline else None
    scheduler = SCHEDULERS[settings.scheduler]()
    searched = tuple(key for job in jobs if job.optimizer != "weights" for key in job.keys)
    joint = Job("joint", searched) if searched else None
    return Method("optimas", optimizers, jobs, scheduler, opening, _least(system, jobs), joint=joint)


def hbc(system: System, optimize: OptimizeSettings, settings: HBCSettings) -> Method:
    """Hierarchical behaviour cloning: `optimas`, with similarity to preferred outputs as the local score."""
    learning, guide = RewardLearning(settings.pairs, settings.backbone), Cloning()
    prompts, training = (
        PromptSearch.of(settings.prompts, "hbc.prompts"),
        f"optimize.hbc.training.{settings.training.name}",
    )
    optimizers: Mapping[str, Optimizer] = {
        "offline": OfflineRewards(learning, prompts, guide),
        "local": LocalSearch(learning, settings.search, prompts, guide),
        "weights": LocalTraining(learning, settings.training, guide, training),
    }
    jobs, _ = _jobs(system, training, settings.training)
    everything = tuple(key for job in jobs for key in job.keys)
    opening = Job("offline", everything, weight=settings.offline)
    return Method("hbc", optimizers, jobs, SCHEDULERS[settings.scheduler](), opening, _least(system, jobs))


def _jobs(system: System, section: str, training: LocalTrainingChoice) -> tuple[list[Job], tuple[str, ...]]:
    """Return the jobs of each component, and the keys of trained weights.

    Args:
        system: the system to optimize.
        section: the path of the training settings, for messages.
        training: the training settings.
    """
    trained = keys_of(system, Weights)
    if trained:
        check_component_names(section, trained, training.settings)
    jobs = [*by_component(system, "local", "local"), *(Job("weights", (key,)) for key in trained)]
    return jobs, trained


def by_segment(system: System, jobs: Sequence[Job]) -> list[Job]:
    """Merge the jobs of choices and numbers whose components form a segment in which local rewards may save.

    Args:
        system: the system to optimize.
        jobs: the jobs of single components.
    """
    prices = estimate_prices(system)
    merged = [group for group in segments(system) if not savings_of(system, group, prices).unused_reason]
    place = {name: number for number, group in enumerate(merged) for name in group}
    found: dict[object, Job] = {}
    for number, job in enumerate(jobs):
        (component,) = components_of(job.keys)
        is_numeric = isinstance(system.parameters[job.keys[0]], Choice | Int | Float)
        segment = place.get(component, f"job {number}") if is_numeric else f"job {number}"
        known = found.get(segment)
        found[segment] = replace(known, optimizer="segment", keys=(*known.keys, *job.keys)) if known else job
    return list(found.values())


def _least(system: System, jobs: Sequence[Job]) -> float:
    """Return the minimum share of a job, in minibatches of system runs; see `Method.least`."""
    texts = [isinstance(system.parameters[job.keys[0]], Text | Demos | Weights) for job in jobs]
    return sum(Method.least if text else MIN_MINIBATCHES for text in texts) / max(1, len(texts))
