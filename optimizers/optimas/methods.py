"""Methods with a local score for each component: OPTIMAS and its cloning baseline."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from pydantic import Field

from compound.graph.configuration import components_of
from compound.graph.space import Choice, Demos, Float, Int, Text, Weights
from compound.graph.system import System
from compound.optimization.method import (
    Job,
    JobPlan,
    Method,
    Optimizer,
    PlannedJob,
    Progress,
    Proposal,
    Scheduler,
    Task,
)
from compound.optimization.prices import estimate_prices
from compound.optimization.settings.base import ModelName
from compound.optimization.settings.optimize import OptimizeSettings
from compound.optimizers.optimas.local import Cloning, LocalSearch, OfflineRewards
from compound.optimizers.scheduling import RewardGapScheduler, Uniform, by_component, keys_of
from compound.optimizers.search.joint import JointSearch
from compound.optimizers.search.local_gains import RewardGuide, describe_savings, savings_of
from compound.optimizers.search.rewarding import RunRewards
from compound.optimizers.search.sources import CandidateSources, SearchSettings
from compound.optimizers.weights.learner.samples import SECTION
from compound.optimizers.weights.methods import LONG_JOB, check_component_names
from compound.optimizers.weights.recipes.local_draws import (
    LocalDraws,
    LocalTrainingChoice,
    LocalTrainingField,
)
from compound.optimizers.weights.recipes.mmgrpo import MMGRPO
from compound.optimizers.weights.recipes.ppo import PPO, PPOSettings
from compound.optimizers.weights.recipes.recipe import PolicyRecipe
from compound.optimizers.weights.training import WeightTraining
from compound.rewards.settings import BackboneSettings, PairSettings, RewardLearning, RewardSettings


@dataclass(frozen=True)
class LocalTraining:
    """Optimizer that trains the weights of one component by its local reward, if that can be trusted.

    Otherwise the component is trained by the global reward.
    """

    requires: ClassVar[tuple[str, ...]] = ("torch", "transformers", "peft")

    learning: RewardLearning
    training: LocalTrainingChoice
    scoring: type[RunRewards] = RunRewards
    section: str = SECTION  # the path of the training settings, for error messages

    def plan(self, job: PlannedJob) -> JobPlan:
        """Return no requests: the job sends none except the calls of the system."""
        return JobPlan()

    async def propose(self, task: Task) -> AsyncIterator[Progress | Proposal]:
        """Train until all steps are made or the job's share of the budget is used up."""
        (component,) = components_of(task.keys)
        guidance = await self.scoring.load(task, self.learning).guidance(component)
        settings = self.training.settings
        counted = sum(c.cacheable for c in task.system.components.values())
        recipe: PolicyRecipe = LocalDraws(settings, guidance.scores, 1 / max(1, counted))
        if guidance.untrusted:
            recipe = PPO(settings) if isinstance(settings, PPOSettings) else MMGRPO(settings)
        facts = {**guidance.facts, "component": component, "steered": not guidance.untrusted}
        facts["why"] = guidance.untrusted
        async for event in WeightTraining(recipe, section=self.section).propose(task):
            yield (
                replace(event, facts={**facts, **event.facts})
                if isinstance(event, Proposal)
                else event
            )


SCHEDULERS: Mapping[str, Callable[[], Scheduler]] = {"gaps": RewardGapScheduler, "uniform": Uniform}
# fewer would divide alpha between more decisions (docs/evidence/acceptance.md)
MIN_MINIBATCHES = 4.0


class RewardMethodSettings(SearchSettings):
    """Settings that `optimas` and `hbc` share."""

    backbone: BackboneSettings = BackboneSettings()
    """The model that computes features of texts."""
    pairs: PairSettings = PairSettings()
    """Collection of preference pairs."""
    training: LocalTrainingField = LocalTrainingChoice()
    """Training of weights."""
    scheduler: Literal["gaps", "uniform"] = "gaps"
    """The scheduler that chooses the next component: `gaps` (proportional to the reward gap, as in the
    paper) or `uniform`."""
    temperature: float = Field(default=0.0, ge=0)
    """Of choices and numbers that the local reward alone selects: they are drawn with probability
    proportional to exp(reward / temperature); 0 selects the best."""


class OptimasSettings(RewardMethodSettings):
    """Settings of `optimas`."""

    form: Literal["joint", "paper"] = "joint"
    """`joint` searches all parameters together, and local rewards make evaluations cheaper as far as global
    ones confirm them; `paper` searches one component after another by its local reward alone, which is
    adapted to the current configuration before."""
    gold: bool = True
    """Whether the local rewards of the joint search read the gold answers of train examples. They then score
    train examples only, and are never part of a configuration."""
    judge: ModelName | None = None
    """A model that rates outputs of components whose local evaluations save runs, in the joint search; none
    by default. It is sent train examples with their expected results. Its ratings count as far as scores
    confirm them."""
    reward: RewardSettings = RewardSettings()
    """Fitting of local rewards, and what is required to train weights by them."""
    offline: float = Field(default=0.2, ge=0, lt=1)
    """Share of the optimization budget (what remains after reserving the acceptance tests) for the offline
    phase, which collects pairs: in the form `paper` of all components, otherwise of those whose weights are
    trained."""


class HBCSettings(RewardMethodSettings):
    """Settings of `hbc`."""

    offline: float = Field(default=0.4, gt=0, lt=1)
    """Share of the optimization budget (what remains after reserving the acceptance tests) for the offline
    phase, which finds the outputs to clone."""


def optimas(
    system: System, optimize: OptimizeSettings, settings: OptimasSettings, *, trains: bool = True
) -> Method:
    """OPTIMAS: `search` with local rewards, which are learned from its candidates and train weights."""
    learning = RewardLearning(settings.pairs, settings.backbone, settings.reward)
    if settings.form == "paper":
        return _by_component(
            "optimas", system, settings, learning, RunRewards, settings.offline, trains=trains
        )
    guided = RewardGuide(learning, settings.gold, settings.judge)
    trained, weights = _training("optimas", system, settings, learning, RunRewards, trains=trains)
    optimizers: Mapping[str, Optimizer] = {
        "offline": OfflineRewards(learning, CandidateSources(())),
        "joint": JointSearch(CandidateSources.of(settings, "optimas"), guided),
        "weights": weights,
    }
    keys = keys_of(system, Text, Demos, Choice, Int, Float)
    jobs = [*([Job("joint", keys)] if keys else []), *(Job("weights", (key,)) for key in trained)]
    judged = (
        f"{settings.judge} rates outputs: it is sent train examples with their expected results"
    )
    notes = [*_savings(system), *([judged] if settings.judge is not None else [])]
    if not trained:
        return Method(
            "optimas", optimizers, jobs, Uniform(), least=LONG_JOB, decisions=1, notes=notes
        )
    opening = Job("offline", trained, weight=settings.offline) if settings.offline else None
    scheduler = SCHEDULERS[settings.scheduler]()
    return Method(
        "optimas", optimizers, jobs, scheduler, opening, _least(system, jobs), notes=notes
    )


def hbc(system: System, optimize: OptimizeSettings, settings: HBCSettings) -> Method:
    """Hierarchical behaviour cloning: components imitate outputs that led to high scores."""
    learning = RewardLearning(settings.pairs, settings.backbone)
    return _by_component("hbc", system, settings, learning, Cloning, settings.offline)


def _by_component(
    name: str,
    system: System,
    settings: RewardMethodSettings,
    learning: RewardLearning,
    scoring: type[RunRewards],
    offline: float,
    *,
    trains: bool = True,
) -> Method:
    """Return a method that searches one component after another by its local score alone."""
    sources = CandidateSources.of(settings, name)
    trained, weights = _training(name, system, settings, learning, scoring, trains=trains)
    optimizers: Mapping[str, Optimizer] = {
        "offline": OfflineRewards(learning, sources, scoring),
        "local": LocalSearch(learning, sources, scoring, settings.temperature),
        "weights": weights,
    }
    jobs = [*by_component("local", system), *(Job("weights", (key,)) for key in trained)]
    everything = tuple(key for job in jobs for key in job.keys)
    opening = Job("offline", everything, weight=offline) if offline else None
    scheduler = SCHEDULERS[settings.scheduler]()
    least, notes = _least(system, jobs), _savings(system)
    return Method(name, optimizers, jobs, scheduler, opening, least, notes=notes)


def _savings(system: System) -> list[str]:
    prices, keys = estimate_prices(system), keys_of(system, Text, Demos, Choice, Int, Float)
    found = [savings_of(system, name, prices) for name in components_of(keys)]
    return [describe_savings(found)] if found else []


def _training(
    name: str,
    system: System,
    settings: RewardMethodSettings,
    learning: RewardLearning,
    scoring: type[RunRewards],
    *,
    trains: bool,
) -> tuple[tuple[str, ...], LocalTraining]:
    section = f"optimize.{name}.training.{settings.training.name}"
    trained = keys_of(system, Weights) if trains else ()
    if trained:
        check_component_names(section, trained, settings.training.settings)
    return trained, LocalTraining(learning, settings.training, scoring, section)


def _least(system: System, jobs: Sequence[Job]) -> float:
    """Return the minimum share of a job, in minibatches of system runs; see `Method.least`."""
    texts = [isinstance(system.parameters[job.keys[0]], Text | Demos | Weights) for job in jobs]
    return sum(Method.least if text else MIN_MINIBATCHES for text in texts) / max(1, len(texts))
