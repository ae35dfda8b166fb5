"""The ways of training weights by name: which recipe, on which components, in which order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from compound.errors import DeclarationError, nearest
from compound.graph.configuration import component_of, components_of
from compound.graph.space import Weights
from compound.graph.system import System
from compound.optimization.method import Job, JobRecord, Method, Optimizer
from compound.optimization.registration import MethodFactory
from compound.optimizers.scheduling.jobs import keys_of
from compound.optimizers.weights.learner.adapters import partition
from compound.optimizers.weights.recipes.mhgpo import MHGPO, MHGPORandomSettings, MHGPOSettings
from compound.optimizers.weights.recipes.mmgrpo import MMGRPO, MMGRPOSettings
from compound.optimizers.weights.recipes.mygo import MyGO, MyGOSettings
from compound.optimizers.weights.recipes.ppo import PPO, MAPPOSettings, PPOSettings
from compound.optimizers.weights.recipes.prompt_r1 import PromptR1, PromptR1Settings
from compound.optimizers.weights.recipes.recipe import Recipe, Sharing, TrainingSettings
from compound.optimizers.weights.training import WeightTraining
from compound.settings.optimize import OptimizeSettings

LONG = 30.0  # minibatches' runs that a job of training should at least be given: few long jobs


class NothingToTune(DeclarationError):
    """A system has no parameter that a method can change."""


@dataclass(frozen=True)
class InOrder:
    """A scheduler that goes through the jobs in their order, again and again."""

    def choose(self, jobs: Sequence[Job], history: Sequence[JobRecord], seed: int) -> Job:
        """Return the job whose turn it is."""
        return jobs[len(history) % len(jobs)]


def together(name: str, system: System, recipe: Recipe, adapters: Sharing) -> Method:
    """Return a method that trains the weights of all components in one job."""
    return _method(name, recipe, [Job(name, required(name, system))], adapters)


def apart(name: str, system: System, recipe: Recipe) -> Method:
    """Return a method that trains the weights of one component after the other."""
    return _method(name, recipe, [Job(name, (key,)) for key in required(name, system)], "each")


def required(name: str, system: System) -> tuple[str, ...]:
    """Return the keys of all weights.

    Raises:
        NothingToTune: there are none.
    """
    keys = keys_of(system, Weights)
    if not keys:
        raise NothingToTune(
            f"method {name!r} trains weights, but no component of system {system.name!r} has any",
            hint="give an llm component weights: {lora: {rank: 16}}",
        )
    return keys


def check_component_names(section: str, keys: Sequence[str], settings: TrainingSettings) -> None:
    """Raise where a setting names a component that is not trained, or nothing may be forked."""
    trained = tuple(dict.fromkeys(map(component_of, keys)))
    for setting in ("penalties", "forks"):
        for component in getattr(settings, setting, ()):
            if component not in trained:
                raise DeclarationError(
                    f"optimize.{section}.{setting} names {component!r}, which is not trained",
                    hint=nearest(component, trained),
                )
    forks = settings.forks if isinstance(settings, MHGPORandomSettings) else {}
    if not sum(forks.get(component, 1.0) for component in trained):
        raise DeclarationError(
            f"optimize.{section}.forks is 0 for every component", hint="give one a share above 0"
        )


def _method(name: str, recipe: Recipe, jobs: Sequence[Job], adapters: Sharing) -> Method:
    keys = [key for job in jobs for key in job.keys]
    check_component_names(name, keys, recipe.settings)
    partition(components_of(keys), adapters)
    optimizers: Mapping[str, Optimizer] = {name: WeightTraining(recipe, adapters)}
    timed = [_timed(job, recipe) for job in jobs]
    return Method(name, optimizers, timed, InOrder(), least=LONG, decisions=1, jobs_each=len(jobs))


def _timed(job: Job, recipe: Recipe) -> Job:
    """Return a job that knows what its steps take."""
    steps, evaluation, examples = recipe.settings.steps, recipe.settings.evaluation, recipe.sampling.examples
    step = recipe.cost(examples, len(components_of(job.keys)))
    compared = evaluation.examples if 0 < evaluation.every < steps else 0
    return replace(job, step=step, steps=steps, examples=examples, held_out=compared, every=evaluation.every)


def ppo(system: System, optimize: OptimizeSettings, settings: PPOSettings) -> Method:
    """PPO, one component after the other: the rest of the system stays as it is."""
    return apart("ppo", system, PPO(settings))


def mappo(system: System, optimize: OptimizeSettings, settings: MAPPOSettings) -> Method:
    """PPO for all components together, with one critic."""
    return together("mappo", system, PPO(settings), settings.adapters)


def mmgrpo(system: System, optimize: OptimizeSettings, settings: MMGRPOSettings) -> Method:
    """Module-level GRPO: every call earns its run's reward."""
    return together("mmgrpo", system, MMGRPO(settings), settings.adapters)


def mhgpo_is(system: System, optimize: OptimizeSettings, settings: MHGPOSettings) -> Method:
    """Multi-agent GRPO with forks at every agent."""
    return together("mhgpo_is", system, MHGPO(settings, "is"), settings.adapters)


def mhgpo_fof(system: System, optimize: OptimizeSettings, settings: MHGPOSettings) -> Method:
    """Multi-agent GRPO with forks at the first agent."""
    return together("mhgpo_fof", system, MHGPO(settings, "fof"), settings.adapters)


def mhgpo_rr(system: System, optimize: OptimizeSettings, settings: MHGPORandomSettings) -> Method:
    """Multi-agent GRPO with a fork at one agent drawn for each example."""
    return together("mhgpo_rr", system, MHGPO(settings, "rr"), settings.adapters)


def prompt_r1(system: System, optimize: OptimizeSettings, settings: PromptR1Settings) -> Method:
    """An agent that talks to an environment, rewarded for whole conversations."""
    return together("prompt_r1", system, PromptR1(settings), settings.adapters)


def mygo(system: System, optimize: OptimizeSettings, settings: MyGOSettings) -> Method:
    """Imitation of the attempts that are good enough, with a rising threshold."""
    return together("mygo", system, MyGO(settings), settings.adapters)


POLICY_METHODS: Mapping[str, MethodFactory] = {
    "ppo": MethodFactory(ppo, PPOSettings),
    "mappo": MethodFactory(mappo, MAPPOSettings),
    "mmgrpo": MethodFactory(mmgrpo, MMGRPOSettings),
    "mhgpo_is": MethodFactory(mhgpo_is, MHGPOSettings),
    "mhgpo_fof": MethodFactory(mhgpo_fof, MHGPOSettings),
    "mhgpo_rr": MethodFactory(mhgpo_rr, MHGPORandomSettings),
    "prompt_r1": MethodFactory(prompt_r1, PromptR1Settings),
    "mygo": MethodFactory(mygo, MyGOSettings),
}
