"""The ways of training weights by name: which recipe, on which components, in which order."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from compound.configuration import component_of, components_of
from compound.errors import DeclarationError, nearest
from compound.optimization import Job, JobRecord, Method, Optimizer
from compound.optimizers.policy.adapters import partition
from compound.optimizers.policy.losses import variant_of
from compound.optimizers.policy.mhgpo import MHGPO
from compound.optimizers.policy.mmgrpo import MMGRPO
from compound.optimizers.policy.mygo import MyGO
from compound.optimizers.policy.ppo import PPO
from compound.optimizers.policy.prompt_r1 import PromptR1
from compound.optimizers.policy.recipe import Recipe
from compound.optimizers.policy.training import WeightTraining
from compound.settings import OptimizeSettings, WeightSettings
from compound.space import Weights
from compound.system import System

LONG = 30.0  # minibatches' runs that a job of training should at least be given: few long jobs


class NothingToTune(DeclarationError):
    """A system has no parameter that a method can change."""


@dataclass(frozen=True)
class InOrder:
    """A scheduler that goes through the jobs in their order, again and again."""

    def choose(self, jobs: Sequence[Job], history: Sequence[JobRecord], seed: int) -> Job:
        """Return the job whose turn it is."""
        return jobs[len(history) % len(jobs)]


def together(name: str, system: System, settings: OptimizeSettings, recipe: Recipe) -> Method:
    """Return a method that trains the weights of all components in one job."""
    keys = required(name, system)
    return _method(name, settings, recipe, [Job(name, keys)])


def apart(name: str, system: System, settings: OptimizeSettings, recipe: Recipe) -> Method:
    """Return a method that trains the weights of one component after the other."""
    keys = required(name, system)
    refuse_shared(name, keys, settings)
    return _method(name, settings, recipe, [Job(name, (key,)) for key in keys])


def required(name: str, system: System) -> tuple[str, ...]:
    """Return the keys of all weights.

    Raises:
        NothingToTune: there are none.
    """
    keys = tuple(key for key, space in system.parameters.items() if isinstance(space, Weights))
    if not keys:
        raise NothingToTune(
            f"method {name!r} trains weights, but no component of system {system.name!r} has any",
            hint="give an llm component weights: {lora: {rank: 16}}",
        )
    return keys


def refuse_shared(name: str, keys: Sequence[str], settings: OptimizeSettings) -> None:
    """Raise where a method that trains one component at a time is asked to let several share an adapter."""
    if settings.weights.adapters != "each" and len(keys) > 1:
        raise DeclarationError(
            f"method {name!r} trains one component after the other: they cannot share adapters",
            hint="leave out optimize.weights.adapters, or take a method that trains all of them together",
        )


def refuse_imitation(name: str, settings: OptimizeSettings) -> None:
    """Raise where a loss that imitates would be given samples good and bad."""
    if variant_of(settings.weights.loss).likelihood:
        raise DeclarationError(
            f"method {name!r} weighs samples by advantages, which the loss {settings.weights.loss!r} ignores",
            hint="leave out optimize.weights.loss; method 'mygo' is the one that imitates",
        )


def refuse_alone(name: str, settings: OptimizeSettings) -> None:
    """Raise where a method that compares the runs of an example would have nothing to compare."""
    if settings.weights.runs < 2 and settings.weights.scale != "none":
        raise DeclarationError(
            f"method {name!r} compares the runs of an example, but optimize.weights.runs is "
            f"{settings.weights.runs}",
            hint="8 are a good start; or take ppo, or scale: none, which compares nothing",
        )


def refuse_unknown(trained: Sequence[str], settings: OptimizeSettings) -> None:
    """Raise where a setting names a component that is not trained, or nothing may be forked."""
    for setting in ("penalties", "forks"):
        for component in getattr(settings.weights, setting):
            if component not in trained:
                raise DeclarationError(
                    f"optimize.weights.{setting} names {component!r}, which is not trained",
                    hint=nearest(component, trained),
                )
    if not sum(settings.weights.forks.get(component, 1.0) for component in trained):
        raise DeclarationError(
            "optimize.weights.forks is 0 for every component", hint="give one a share above 0"
        )


NOT_READ: Mapping[str, Sequence[str]] = {
    "group": ("ppo", "mappo", "mhgpo_is", "mhgpo_fof", "prompt_r1", "mygo"),
    "padding": ("ppo", "mappo", "mhgpo_is", "mhgpo_fof", "mhgpo_rr", "prompt_r1", "mygo"),
    "penalties": ("mmgrpo", "prompt_r1", "mygo"),
    "forks": ("ppo", "mappo", "mmgrpo", "mhgpo_is", "mhgpo_fof", "prompt_r1", "mygo"),
    "teachers": ("ppo", "mappo", "mhgpo_is", "mhgpo_fof", "mhgpo_rr", "prompt_r1", "mygo"),
    "scale": ("ppo", "mappo", "mygo"),
    **dict.fromkeys(("runs", "clip", "clip_high", "beta", "entropy"), ("mygo",)),
    **dict.fromkeys(
        ("gamma", "lam", "value_lr", "value_clip", "kl_reward"),
        ("mmgrpo", "mhgpo_is", "mhgpo_fof", "mhgpo_rr", "prompt_r1", "mygo"),
    ),
    **dict.fromkeys(
        ("attempts", "keep", "threshold", "best", "rule", "pace", "online", "warm_up"),
        ("ppo", "mappo", "mmgrpo", "mhgpo_is", "mhgpo_fof", "mhgpo_rr", "prompt_r1"),
    ),
}  # by setting, the methods that it says nothing to


CLIPPED = ("grpo", "bnpo", "dr_grpo", "dapo", "gspo", "luspo")
READ_BY_LOSS: Mapping[str, Sequence[str]] = {
    **dict.fromkeys(("clip", "clip_high", "clip_delta"), CLIPPED),
    "cispo_cap": ("cispo",),
    **dict.fromkeys(("sapo_positive", "sapo_negative"), ("sapo",)),
    **dict.fromkeys(("vespo_positive", "vespo_negative"), ("vespo",)),
}  # by setting, the losses that it says something to


def unread(name: str, settings: WeightSettings) -> list[str]:
    """Return the settings that were given and that a method, or its loss, does not read.

    >>> unread("mmgrpo", WeightSettings(runs=4, penalties={"writer": "rules:dear"}, cispo_cap=2.0))
    ['penalties', 'cispo_cap']
    """
    given = settings.model_fields_set
    by_method = [setting for setting in NOT_READ if setting in given and name in NOT_READ[setting]]
    loss = "sft" if name == "mygo" else settings.loss
    by_loss = [setting for setting, losses in READ_BY_LOSS.items() if setting in given and loss not in losses]
    return list(dict.fromkeys([*by_method, *by_loss]))


def _method(name: str, settings: OptimizeSettings, recipe: Recipe, jobs: Sequence[Job]) -> Method:
    trained = tuple(dict.fromkeys(component_of(key) for job in jobs for key in job.keys))
    refuse_unknown(trained, settings)
    partition(trained, settings.weights.adapters)
    if not recipe.likelihood:
        refuse_imitation(name, settings)
    if recipe.compares:
        refuse_alone(name, settings)
    optimizers: Mapping[str, Optimizer] = {name: WeightTraining(recipe, settings.weights)}
    timed = [_timed(job, settings.weights, recipe) for job in jobs]
    how = name if recipe.likelihood else f"{name} with loss {settings.weights.loss}"
    notes = [f"{how} does not read optimize.weights.{setting}" for setting in unread(name, settings.weights)]
    return Method(
        name, optimizers, timed, InOrder(), least=LONG, decisions=1, jobs_each=len(jobs), notes=notes
    )


def _timed(job: Job, settings: WeightSettings, recipe: Recipe) -> Job:
    """Return a job that knows what its steps take."""
    step = recipe.cost(settings.examples, len(components_of(job.keys)), settings)
    compared = settings.eval_examples if 0 < settings.eval_every < settings.steps else 0
    return replace(
        job, step=step, steps=settings.steps, examples=settings.examples,
        held_out=compared, every=settings.eval_every,
    )  # fmt: skip


def ppo(system: System, settings: OptimizeSettings) -> Method:
    """PPO, one component after the other: the rest of the system stays as it is."""
    return apart("ppo", system, settings, PPO())


def mappo(system: System, settings: OptimizeSettings) -> Method:
    """PPO for all components together, with one critic."""
    return together("mappo", system, settings, PPO())


def mmgrpo(system: System, settings: OptimizeSettings) -> Method:
    """Module-level GRPO: every call earns its run's reward."""
    return together("mmgrpo", system, settings, MMGRPO())


def mhgpo_is(system: System, settings: OptimizeSettings) -> Method:
    """Multi-agent GRPO with forks at every agent."""
    return together("mhgpo_is", system, settings, MHGPO("is"))


def mhgpo_fof(system: System, settings: OptimizeSettings) -> Method:
    """Multi-agent GRPO with forks at the first agent."""
    return together("mhgpo_fof", system, settings, MHGPO("fof"))


def mhgpo_rr(system: System, settings: OptimizeSettings) -> Method:
    """Multi-agent GRPO with a fork at one agent drawn for each example."""
    return together("mhgpo_rr", system, settings, MHGPO("rr"))


def prompt_r1(system: System, settings: OptimizeSettings) -> Method:
    """An agent that talks to an environment, rewarded for whole conversations."""
    return together("prompt_r1", system, settings, PromptR1())


def mygo(system: System, settings: OptimizeSettings) -> Method:
    """Imitation of the attempts that are good enough, with a rising threshold."""
    return together("mygo", system, settings, MyGO())


POLICY_METHODS: Mapping[str, Callable[[System, OptimizeSettings], Method]] = {
    made.__name__: made for made in (ppo, mappo, mmgrpo, mhgpo_is, mhgpo_fof, mhgpo_rr, prompt_r1, mygo)
}
