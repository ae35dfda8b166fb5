"""Built-in methods that train weights, by name: their recipes, jobs and schedules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from compound.core.errors import DeclarationError, suggest_name
from compound.graph.configuration import component_of, components_of
from compound.graph.space import Weights
from compound.graph.system import System
from compound.optimization.method import Job, JobRecord, Method, Optimizer
from compound.optimization.registration import MethodFactory
from compound.optimization.settings.optimize import OptimizeSettings
from compound.optimizers.scheduling import keys_of
from compound.optimizers.weights.learner.adapters import partition
from compound.optimizers.weights.recipes.distill import Distill, DistillSettings
from compound.optimizers.weights.recipes.mhgpo import MHGPO, MHGPORandomSettings, MHGPOSettings
from compound.optimizers.weights.recipes.mmgrpo import (
    MMGRPO,
    MMGRPOSettings,
    PromptR1,
    PromptR1Settings,
)
from compound.optimizers.weights.recipes.mygo import MyGO, MyGOSettings
from compound.optimizers.weights.recipes.ppo import PPO, MAPPOSettings, PPOSettings
from compound.optimizers.weights.recipes.recipe import Recipe, Sharing, TrainingSettings
from compound.optimizers.weights.training import WeightTraining

# Minimum share of a job, in minibatches of system runs: long searches and trainings gain more from
# few long jobs than from many short ones.
LONG_JOB = 30.0


class NothingToTune(DeclarationError):
    """A system has no parameter that a method can change."""


@dataclass(frozen=True)
class InOrder:
    """Scheduler that cycles through the jobs in the given order."""

    def choose(self, jobs: Sequence[Job], history: Sequence[JobRecord], seed: int) -> Job:
        """Return the next job of the cycle."""
        return jobs[len(history) % len(jobs)]


def train_jointly(
    name: str, system: System, recipe: Recipe, adapters: Sharing, section: str | None = None
) -> Method:
    """Return a method that trains the weights of all components jointly, in one job.

    Args:
        name: the name of the method.
        system: the system to optimize.
        recipe: the training recipe.
        adapters: which components share an adapter.
        section: the path of the settings, for error messages; ``optimize.<name>`` by default.
    """
    return _method(name, recipe, [Job(name, weight_keys(name, system))], adapters, section)


def train_separately(name: str, system: System, recipe: Recipe) -> Method:
    """Return a method that trains the weights of the components separately, one job after the other."""
    return _method(name, recipe, [Job(name, (key,)) for key in weight_keys(name, system)], "each")


def weight_keys(name: str, system: System) -> tuple[str, ...]:
    """Return the keys of all weights parameters.

    Raises:
        NothingToTune: the system has none.
    """
    keys = keys_of(system, Weights)
    if not keys:
        raise NothingToTune(
            f"method {name!r} trains weights, but no component of system {system.name!r} has any",
            hint="add weights: {lora: {rank: 16}} to an llm component",
        )
    return keys


def check_component_names(section: str, keys: Sequence[str], settings: TrainingSettings) -> None:
    """Raise if a setting names a component that is not trained, or no component may be forked.

    Args:
        section: the path of the settings, for the message.
        keys: the weights to train.
        settings: the settings to check.
    """
    trained = tuple(dict.fromkeys(map(component_of, keys)))
    for setting in ("penalties", "forks"):
        for component in getattr(settings, setting, ()):
            if component not in trained:
                raise DeclarationError(
                    f"{section}.{setting} names {component!r}, which is not trained",
                    hint=suggest_name(component, trained),
                )
    forks = settings.forks if isinstance(settings, MHGPORandomSettings) else {}
    if not sum(forks.get(component, 1.0) for component in trained):
        raise DeclarationError(
            f"{section}.forks is 0 for every component",
            hint=f"set {section}.forks of at least one component above 0",
        )


def _method(
    name: str, recipe: Recipe, jobs: Sequence[Job], adapters: Sharing, section: str | None = None
) -> Method:
    keys = [key for job in jobs for key in job.keys]
    section = section or f"optimize.{name}"
    check_component_names(section, keys, recipe.settings)
    partition(components_of(keys), adapters, section)
    optimizers: Mapping[str, Optimizer] = {name: WeightTraining(recipe, adapters, section)}
    timed = [_with_step_costs(job, recipe) for job in jobs]
    return Method(
        name, optimizers, timed, InOrder(), least=LONG_JOB, decisions=1, jobs_each=len(jobs)
    )


def _with_step_costs(job: Job, recipe: Recipe) -> Job:
    """Return a job with the number of its steps and their costs."""
    steps, evaluation = recipe.settings.steps, recipe.settings.evaluation
    examples = recipe.sampling.max_examples
    step = recipe.cost(examples, len(components_of(job.keys)))
    compared = evaluation.examples if 0 < evaluation.every < steps else 0
    return replace(
        job, step=step, steps=steps, examples=examples, held_out=compared, every=evaluation.every
    )


def ppo(system: System, optimize: OptimizeSettings, settings: PPOSettings) -> Method:
    """PPO, one component after another, while the rest of the system is frozen."""
    return train_separately("ppo", system, PPO(settings))


def mappo(system: System, optimize: OptimizeSettings, settings: MAPPOSettings) -> Method:
    """PPO for all components jointly, with a shared critic (MAPPO)."""
    return train_jointly("mappo", system, PPO(settings), settings.adapters)


def mmgrpo(system: System, optimize: OptimizeSettings, settings: MMGRPOSettings) -> Method:
    """Module-level GRPO: every call receives the reward of its run."""
    return train_jointly("mmgrpo", system, MMGRPO(settings), settings.adapters)


def mhgpo_is(system: System, optimize: OptimizeSettings, settings: MHGPOSettings) -> Method:
    """Multi-agent GRPO with rollouts forked at every agent."""
    return train_jointly("mhgpo_is", system, MHGPO(settings, "is"), settings.adapters)


def mhgpo_fof(system: System, optimize: OptimizeSettings, settings: MHGPOSettings) -> Method:
    """Multi-agent GRPO with rollouts forked at the first agent."""
    return train_jointly("mhgpo_fof", system, MHGPO(settings, "fof"), settings.adapters)


def mhgpo_rr(system: System, optimize: OptimizeSettings, settings: MHGPORandomSettings) -> Method:
    """Multi-agent GRPO with rollouts forked at one random agent per example."""
    return train_jointly("mhgpo_rr", system, MHGPO(settings, "rr"), settings.adapters)


def prompt_r1(system: System, optimize: OptimizeSettings, settings: PromptR1Settings) -> Method:
    """GRPO for an agent in a multi-turn environment, with one reward per conversation."""
    return train_jointly("prompt_r1", system, PromptR1(settings), settings.adapters)


def mygo(system: System, optimize: OptimizeSettings, settings: MyGOSettings) -> Method:
    """Rejection fine-tuning: imitates the attempts whose reward reaches a rising threshold."""
    return train_jointly("mygo", system, MyGO(settings), settings.adapters)


def distill(system: System, optimize: OptimizeSettings, settings: DistillSettings) -> Method:
    """On-policy distillation: prompts and demonstrations, a larger model, or feedback teach the weights."""
    keys, recipe, section = weight_keys("distill", system), Distill(settings), "optimize.distill"
    trained = components_of(keys)
    recipe.check(system, trained, section)
    # a stage of another method starts from the configuration that the earlier stages find
    if "distill" in (optimize.method, *optimize.baselines):
        useful = [name for name in trained if not recipe.obstacle(system, [name])]
        if not useful:
            raise DeclarationError(
                f"nothing to distill: {recipe.obstacle(system, trained)}",
                hint="start from an optimized configuration (--config runs/NAME/best.json), or give the "
                f"short prompts in {section}.prompts",
            )
        trained, keys = useful, tuple(key for key in keys if component_of(key) in useful)
    job = Job("distill", (*keys, *recipe.values(system, trained)), margin=settings.margin)
    return _method("distill", recipe, [job], settings.adapters)


POLICY_METHODS: Mapping[str, MethodFactory] = {
    "ppo": MethodFactory(ppo, PPOSettings),
    "mappo": MethodFactory(mappo, MAPPOSettings),
    "mmgrpo": MethodFactory(mmgrpo, MMGRPOSettings),
    "mhgpo_is": MethodFactory(mhgpo_is, MHGPOSettings),
    "mhgpo_fof": MethodFactory(mhgpo_fof, MHGPOSettings),
    "mhgpo_rr": MethodFactory(mhgpo_rr, MHGPORandomSettings),
    "prompt_r1": MethodFactory(prompt_r1, PromptR1Settings),
    "mygo": MethodFactory(mygo, MyGOSettings),
    "distill": MethodFactory(distill, DistillSettings),
}
