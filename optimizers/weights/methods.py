"""Built-in methods that train weights, by name: their recipes, jobs and schedules."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from compound.core.errors import DeclarationError, suggest_name
from compound.graph.configuration import component_of, components_of
from compound.graph.space import Weights
from compound.graph.system import System
from compound.optimization.method import Job, Method, Optimizer
from compound.optimization.registration import MethodFactory
from compound.optimization.settings.optimize import OptimizeSettings
from compound.optimizers.scheduling import InOrder, keys_of
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


def train_jointly(
    name: str, system: System, recipe: Recipe, adapters: Sharing, section: str | None = None
) -> Method:
    """Return a method that trains the weights of all components jointly, in one job."""
    return _method(name, recipe, [Job(name, weight_keys(name, system))], adapters, section)


def weight_keys(name: str, system: System) -> tuple[str, ...]:
    """Return the keys of all weights parameters."""
    keys = keys_of(system, Weights)
    if not keys:
        raise NothingToTune(
            f"method {name!r} trains weights, but no component of system {system.name!r} has any",
            hint="add weights: {lora: {rank: 16}} to an llm component",
        )
    return keys


def check_component_names(section: str, keys: Sequence[str], settings: TrainingSettings) -> None:
    """Raise if a setting names a component that is not trained, or no component may be forked."""
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
    steps, evaluation = recipe.settings.steps, recipe.settings.evaluation
    examples, every = recipe.sampling.examples, evaluation.every
    held_out = evaluation.examples if 0 < every < steps else 0
    costs = [recipe.cost(examples, len(components_of(job.keys))) for job in jobs]
    timed = [
        replace(job, step=cost, steps=steps, examples=examples, held_out=held_out, every=every)
        for job, cost in zip(jobs, costs, strict=True)
    ]
    return Method(
        name, optimizers, timed, InOrder(), least=LONG_JOB, decisions=1, jobs_each=len(jobs)
    )


def ppo(system: System, optimize: OptimizeSettings, settings: PPOSettings) -> Method:
    """PPO, one component after another, while the rest of the system is frozen."""
    jobs = [Job("ppo", (key,)) for key in weight_keys("ppo", system)]
    return _method("ppo", PPO(settings), jobs, "each")


JOINT: Mapping[str, tuple[str, Callable[[Any], Recipe], type[TrainingSettings]]] = {
    "mappo": ("PPO for all components jointly, with a shared critic (MAPPO).", PPO, MAPPOSettings),
    "mmgrpo": (
        "Module-level GRPO: every call receives the reward of its run.",
        MMGRPO,
        MMGRPOSettings,
    ),
    "mhgpo_is": (
        "Multi-agent GRPO with rollouts forked at every agent.",
        partial(MHGPO, kind="is"),
        MHGPOSettings,
    ),
    "mhgpo_fof": (
        "Multi-agent GRPO with rollouts forked at the first agent.",
        partial(MHGPO, kind="fof"),
        MHGPOSettings,
    ),
    "mhgpo_rr": (
        "Multi-agent GRPO with rollouts forked at one random agent per example.",
        partial(MHGPO, kind="rr"),
        MHGPORandomSettings,
    ),
    "prompt_r1": (
        "GRPO for an agent in a multi-turn environment, with one reward per conversation.",
        PromptR1,
        PromptR1Settings,
    ),
    "mygo": (
        "Rejection fine-tuning: imitates the attempts whose reward reaches a rising threshold.",
        MyGO,
        MyGOSettings,
    ),
}


def _joint(name: str) -> MethodFactory:
    doc, recipe, settings = JOINT[name]

    def make(system: System, optimize: OptimizeSettings, own: Any) -> Method:  # noqa: ANN401
        return train_jointly(name, system, recipe(own), own.adapters)

    make.__doc__ = doc
    return MethodFactory(make, settings)


def distill(system: System, optimize: OptimizeSettings, settings: DistillSettings) -> Method:
    """On-policy distillation: prompts and demonstrations, a larger model, or feedback teach the weights."""
    keys, recipe, section = weight_keys("distill", system), Distill(settings), "optimize.distill"
    trained = components_of(keys)
    recipe.check(system, trained, section)
    # a stage of another method starts from the configuration that the earlier stages find
    if optimize.method == "distill":
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
    **{name: _joint(name) for name in JOINT},
    "distill": MethodFactory(distill, DistillSettings),
}
