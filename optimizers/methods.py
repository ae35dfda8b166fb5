"""Methods by name: which optimizers work on which parameters, and who schedules them."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Mapping
from pathlib import Path

from compound.configuration import component_of, components_of, load
from compound.contracts import Engine
from compound.errors import CompoundError, DeclarationError, nearest
from compound.optimization import Job, Method, Optimizer, Scheduler
from compound.optimizers.baselines import RandomSearch
from compound.optimizers.gepa import GEPA
from compound.optimizers.guides import Guide, LearnedRewards
from compound.optimizers.hbc import Cloning
from compound.optimizers.llm_selector import LLMSelector
from compound.optimizers.local import LocalSearch
from compound.optimizers.mipro import Mipro
from compound.optimizers.offline import OfflineRewards
from compound.optimizers.policy.bases import base_model, refuse_reshaped
from compound.optimizers.policy.local import LocalTraining
from compound.optimizers.policy.methods import (
    POLICY_METHODS,
    NothingToTune,
    refuse_alone,
    refuse_imitation,
    refuse_shared,
    refuse_unknown,
)
from compound.optimizers.policy.mmgrpo import MMGRPO
from compound.optimizers.policy.staging import better_together
from compound.optimizers.policy.training import WeightTraining
from compound.optimizers.prompts import PromptSearch
from compound.optimizers.sampling import NumberSearch
from compound.optimizers.scheduler import UCB, Gaps, Thompson, Uniform
from compound.optimizers.textgrad import TextGrad
from compound.settings import OptimizeSettings
from compound.space import Choice, Demos, Float, Int, Space, Text, Weights
from compound.spec.python_code import find_code
from compound.system import System

PROMPTS_WEIGHT = 3.0  # finding demonstrations costs runs before the first candidate is scored


def search(system: System, settings: OptimizeSettings) -> Method:
    """Prompt search for all texts and demonstrations, number search for all the rest."""
    optimizers: Mapping[str, Optimizer] = {
        "prompts": PromptSearch(
            settings.prompts.proposers, settings.prompts.edits_per_candidate, settings.prompts.lm
        ),
        "numbers": NumberSearch(),
    }
    prompts: list[str] = []
    numbers: list[str] = []
    for key, space in system.parameters.items():
        if isinstance(space, Text | Demos):
            prompts.append(key)
        elif isinstance(space, Choice | Int | Float):
            numbers.append(key)
    jobs = [Job("prompts", tuple(prompts), weight=PROMPTS_WEIGHT)] if prompts else []
    jobs += [Job("numbers", tuple(numbers))] if numbers else []
    return Method("search", optimizers, jobs, Uniform())


SCHEDULERS: Mapping[str, Callable[[], Scheduler]] = {
    "gaps": Gaps,
    "uniform": Uniform,
    "ucb": UCB,
    "thompson": Thompson,
}
LEAST = 2.0  # minibatches' runs a job of numbers needs when its local reward does most of the work
LONG = 30.0  # the same for a search whose candidates descend from one another: few long jobs
MEASURING = ("ucb", "thompson")  # they learn from gains on train examples, so every proposal is measured


def optimas(system: System, settings: OptimizeSettings) -> Method:
    """Local rewards: learned offline first, then one component after the other by what suits it (OPTIMAS)."""
    return guided("optimas", system, settings, LearnedRewards())


def hbc(system: System, settings: OptimizeSettings) -> Method:
    """What `optimas` does, but an output's score is its similarity to the preferred one (behaviour cloning).

    Raises:
        DeclarationError: the offline phase, which finds the preferred outputs, has no budget.
    """
    if not settings.rewards.offline:
        raise DeclarationError(
            "method 'hbc' imitates outputs of the offline phase, but optimize.rewards.offline is 0",
            hint="leave it out, or give it a part of the budget such as 0.4",
        )
    return guided("hbc", system, settings, Cloning())


def guided(name: str, system: System, settings: OptimizeSettings, guide: Guide) -> Method:
    """Return the method `optimas` with another guide of its local searches."""
    prompts = PromptSearch(
        settings.prompts.proposers, settings.prompts.edits_per_candidate, settings.prompts.lm
    )
    rewards = settings.rewards
    verify = rewards.scheduler in MEASURING
    optimizers: Mapping[str, Optimizer] = {
        "offline": OfflineRewards(rewards, prompts, guide),
        "local": LocalSearch(rewards, prompts, verify=verify, guide=guide),
        "weights": LocalTraining(settings, guide),
    }
    jobs = _by_component(system, "local", "local")
    trained = _keys(system, Weights)
    if trained:
        refuse_shared(name, trained, settings)
        refuse_imitation(name, settings)
        refuse_unknown([component_of(key) for key in trained], settings)
        if settings.weights.local == "grpo":
            refuse_alone(name, settings)
    jobs += [Job("weights", (key,)) for key in trained]
    everything = tuple(key for job in jobs for key in job.keys)
    opening = Job("offline", everything, weight=rewards.offline) if rewards.offline else None
    texts = [isinstance(system.parameters[job.keys[0]], Text | Demos | Weights) for job in jobs]
    least = sum(Method.least if text else LEAST for text in texts) / max(1, len(texts))
    return Method(name, optimizers, jobs, SCHEDULERS[rewards.scheduler](), opening, least)


def coordinate(system: System, settings: OptimizeSettings) -> Method:
    """Component by component like `optimas`, with the same candidates, but all by the global reward."""
    prompts = PromptSearch(
        settings.prompts.proposers, settings.prompts.edits_per_candidate, settings.prompts.lm
    )
    optimizers: Mapping[str, Optimizer] = {"prompts": prompts, "numbers": NumberSearch()}
    return Method("coordinate", optimizers, _by_component(system, "prompts", "numbers"), Uniform())


def _by_component(system: System, texts: str, numbers: str) -> list[Job]:
    """Return a job for each component's texts and demonstrations, and one for its choices and numbers."""
    found: dict[tuple[str, bool], list[str]] = {}
    for key, space in system.parameters.items():
        if not isinstance(space, Weights):
            found.setdefault((component_of(key), isinstance(space, Text | Demos)), []).append(key)
    return [Job(texts if text else numbers, tuple(keys)) for (_, text), keys in found.items()]


def random(system: System, settings: OptimizeSettings) -> Method:
    """Random configurations, the baseline."""
    keys = tuple(key for key, space in system.parameters.items() if not isinstance(space, Weights))
    jobs = [Job("random", keys)] if keys else []
    return Method("random", {"random": RandomSearch()}, jobs, Uniform())


def opro(system: System, settings: OptimizeSettings) -> Method:
    """OPRO on the global reward: one job for each component that has a text."""
    optimizer = PromptSearch(("opro",), lm=settings.prompts.lm)
    return Method("opro", {"opro": optimizer}, _text_jobs("opro", system), Uniform())


def textgrad(system: System, settings: OptimizeSettings) -> Method:
    """Prompts rewritten from criticism: one job for each component that has a text."""
    optimizer = TextGrad(lm=settings.prompts.lm)
    return Method("textgrad", {"textgrad": optimizer}, _text_jobs("textgrad", system), Uniform())


def gepa(system: System, settings: OptimizeSettings) -> Method:
    """The texts of all components together, by reflection and Pareto selection.

    Raises:
        MissingExtra: the library ``gepa`` is not installed.
    """
    keys = _keys(system, Text)
    jobs = [Job("gepa", keys)] if keys else []
    return Method("gepa", {"gepa": GEPA(lm=settings.prompts.lm)}, jobs, Uniform(), least=LONG)


def mipro(system: System, settings: OptimizeSettings) -> Method:
    """Instructions and demonstrations of all components together."""
    prompts = settings.prompts
    writers = tuple(name for name in prompts.proposers if name != "demos")
    keys = _keys(system, Text, Demos)
    jobs = [Job("mipro", keys)] if keys else []
    optimizer = Mipro(writers, prompts.edits_per_candidate, prompts.lm)
    return Method("mipro", {"mipro": optimizer}, jobs, Uniform())


def llm_selector(system: System, settings: OptimizeSettings) -> Method:
    """Choices by the vote of the examples."""
    return _selecting("llm_selector", system, LLMSelector())


def llm_selector_diagnoser(system: System, settings: OptimizeSettings) -> Method:
    """Choices by the vote of the examples, with a model that says which component is to blame."""
    return _selecting("llm_selector_diagnoser", system, LLMSelector(alpha=1.0, lm=settings.prompts.lm))


def _selecting(name: str, system: System, optimizer: LLMSelector) -> Method:
    keys = _keys(system, Choice)
    return Method(name, {"llm_selector": optimizer}, [Job("llm_selector", keys)] if keys else [], Uniform())


def _keys(system: System, *kinds: type[Space]) -> tuple[str, ...]:
    return tuple(key for key, space in system.parameters.items() if isinstance(space, kinds))


def _text_jobs(optimizer: str, system: System) -> list[Job]:
    by_component = itertools.groupby(_keys(system, Text), component_of)
    return [Job(optimizer, tuple(keys)) for _, keys in by_component]


def staged(system: System, settings: OptimizeSettings, folder: Path = Path()) -> Method:
    """Methods one after the other, each from the best configuration so far."""
    return better_together(system, settings, functools.partial(_chosen, folder=folder))


MakeMethod = Callable[[System, OptimizeSettings], Method]
METHODS: Mapping[str, MakeMethod] = {
    "search": search,
    "optimas": optimas,
    "hbc": hbc,
    "coordinate": coordinate,
    "random": random,
    "opro": opro,
    "mipro": mipro,
    "llm_selector": llm_selector,
    "llm_selector_diagnoser": llm_selector_diagnoser,
    "textgrad": textgrad,
    "gepa": gepa,
    **POLICY_METHODS,
    "better_together": staged,
}


def maker(name: str, folder: Path = Path()) -> MakeMethod:
    """Return what makes a method.

    Args:
        name: one of `METHODS`, or ``module:function`` for one of your own.
        folder: where that is looked for first.

    Raises:
        DeclarationError: there is no such method.
    """
    if name == "better_together":
        return functools.partial(staged, folder=folder)
    if name in METHODS:
        return METHODS[name]
    if ":" not in name:
        raise DeclarationError(f"no method {name!r}", hint=f"{nearest(name, METHODS)}, or module:function")
    found: MakeMethod = find_code(name, folder)
    return found


def _has_teachers(optimizer: Optimizer) -> bool:
    return isinstance(optimizer, LocalTraining) or (
        isinstance(optimizer, WeightTraining) and isinstance(optimizer.recipe, MMGRPO)
    )


def refuse_untrainable(made: Method, system: System, engine_of: Callable[[str], Engine]) -> None:
    """Raise where weights are to be trained of a model that cannot be; nothing is loaded or started.

    Raises:
        DeclarationError: a model is behind an API, a job trains components of different models, or an engine
            samples in a way that cannot be trained, or takes no adapters of their rank.
    """
    for job in made.jobs:
        weights = components_of(key for key in job.keys if isinstance(system.parameters[key], Weights))
        fixed = [component for component in weights if f"{component}.lm" not in system.parameters]
        if fixed:  # a model that is chosen may be another one when it is trained
            base_model(system, fixed, engine_of)
            if not _imitates(made.optimizers[job.optimizer]):
                refuse_reshaped(system, fixed, engine_of)


def _imitates(optimizer: Optimizer) -> bool:
    return isinstance(optimizer, WeightTraining) and optimizer.recipe.likelihood


def method(name: str, system: System, settings: OptimizeSettings, folder: Path = Path()) -> Method:
    """Return a method for a system.

    Args:
        name: see `maker`.
        system: what is to be optimized.
        settings: how.
        folder: where a method of your own is looked for first.

    Raises:
        DeclarationError: there is no such method.
        NothingToTune: the system has nothing it could change; the hint names the methods that fit.
        ConfigurationError: a teacher's file is missing or broken.
    """
    try:
        chosen = _chosen(name, system, settings, folder)
    except NothingToTune as error:
        fit = fitting(system, settings, folder)
        hint = f"methods that fit this system: {', '.join(fit)}" if fit else error.hint
        raise NothingToTune(error.message, hint=hint) from None
    if any(map(_has_teachers, chosen.optimizers.values())):
        for path in settings.weights.teachers:
            load(folder / path)
    return chosen


def fitting(system: System, settings: OptimizeSettings, folder: Path = Path()) -> list[str]:
    """Return the names of the methods that have something to change in a system."""
    found = []
    for name in METHODS:
        with contextlib.suppress(CompoundError):
            _chosen(name, system, settings, folder)
            found.append(name)
    return found


def _chosen(name: str, system: System, settings: OptimizeSettings, folder: Path) -> Method:
    chosen = maker(name, folder)(system, settings)
    if not chosen.jobs:
        raise NothingToTune(
            f"system {system.name!r} has no parameter that method {name!r} can change",
            hint='declare one, for example prompt: {tune: "…"} or k: {choice: [1, 5]}',
        )
    return chosen
