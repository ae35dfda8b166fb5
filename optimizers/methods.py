"""Methods by name: which optimizers work on which parameters, and who schedules them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from compound.engine import Engine
from compound.errors import CompoundError, DeclarationError, nearest
from compound.graph.configuration import components_of, load
from compound.graph.space import Choice, Demos, Float, Int, Text, Weights
from compound.graph.system import System
from compound.optimization.method import Job, Method, Optimizer
from compound.optimization.registration import MethodFactory, as_factory
from compound.optimizers.baselines.gepa import GEPA, GEPASettings
from compound.optimizers.baselines.llm_selector import DiagnoserSettings, LLMSelector
from compound.optimizers.baselines.mipro import Mipro, MIPROSettings
from compound.optimizers.baselines.random import RandomSearch
from compound.optimizers.baselines.textgrad import TextGrad, TextGradSettings
from compound.optimizers.better_together import BetterTogetherSettings, better_together
from compound.optimizers.optimas.methods import HBCSettings, OptimasSettings, hbc, optimas
from compound.optimizers.scheduling.jobs import by_component, keys_of, text_jobs
from compound.optimizers.scheduling.scheduler import Uniform
from compound.optimizers.search.prompts import OPROSettings, PromptSearch, PromptSettings
from compound.optimizers.search.sampling import NumberSearch
from compound.optimizers.weights.bases import base_model, check_sampling_engine
from compound.optimizers.weights.methods import LONG_JOB, POLICY_METHODS, NothingToTune
from compound.optimizers.weights.training import WeightTraining
from compound.registry.code import find_code
from compound.registry.methods import installed
from compound.settings.base import NoSettings
from compound.settings.optimize import OptimizeSettings
from compound.settings.references import references

PROMPTS_WEIGHT = 3.0  # finding demonstrations costs runs before the first candidate is scored


def search(system: System, optimize: OptimizeSettings, settings: PromptSettings) -> Method:
    """Prompt search for all texts and demonstrations, number search for all the rest."""
    optimizers: Mapping[str, Optimizer] = {"prompts": PromptSearch.of(settings), "numbers": NumberSearch()}
    prompts, numbers = keys_of(system, Text, Demos), keys_of(system, Choice, Int, Float)
    jobs = [Job("prompts", prompts, weight=PROMPTS_WEIGHT)] if prompts else []
    jobs += [Job("numbers", numbers)] if numbers else []
    return Method("search", optimizers, jobs, Uniform())


def coordinate(system: System, optimize: OptimizeSettings, settings: PromptSettings) -> Method:
    """Component by component like `optimas`, with the same candidates, but all by the global reward."""
    optimizers: Mapping[str, Optimizer] = {"prompts": PromptSearch.of(settings), "numbers": NumberSearch()}
    return Method("coordinate", optimizers, by_component(system, "prompts", "numbers"), Uniform())


def random(system: System, optimize: OptimizeSettings, settings: NoSettings) -> Method:
    """Random configurations, the baseline."""
    keys = tuple(key for key, space in system.parameters.items() if not isinstance(space, Weights))
    jobs = [Job("random", keys)] if keys else []
    return Method("random", {"random": RandomSearch()}, jobs, Uniform())


def opro(system: System, optimize: OptimizeSettings, settings: OPROSettings) -> Method:
    """OPRO on the global reward: one job for each component that has a text."""
    optimizer = PromptSearch(("opro",), lm=settings.lm)
    return Method("opro", {"opro": optimizer}, text_jobs("opro", system), Uniform())


def textgrad(system: System, optimize: OptimizeSettings, settings: TextGradSettings) -> Method:
    """Prompts rewritten from criticism: one job for each component that has a text."""
    optimizer = TextGrad(lm=settings.lm)
    return Method("textgrad", {"textgrad": optimizer}, text_jobs("textgrad", system), Uniform())


def gepa(system: System, optimize: OptimizeSettings, settings: GEPASettings) -> Method:
    """The texts of all components together, by reflection and Pareto selection.

    Raises:
        MissingExtra: the library ``gepa`` is not installed.
    """
    keys = keys_of(system, Text)
    jobs = [Job("gepa", keys)] if keys else []
    return Method("gepa", {"gepa": GEPA(lm=settings.lm)}, jobs, Uniform(), least=LONG_JOB)


def mipro(system: System, optimize: OptimizeSettings, settings: MIPROSettings) -> Method:
    """Instructions and demonstrations of all components together."""
    keys = keys_of(system, Text, Demos)
    jobs = [Job("mipro", keys)] if keys else []
    optimizer = Mipro(settings.proposers, settings.edits_per_candidate, settings.lm)
    return Method("mipro", {"mipro": optimizer}, jobs, Uniform())


def llm_selector(system: System, optimize: OptimizeSettings, settings: NoSettings) -> Method:
    """Choices by the vote of the examples."""
    return _selecting("llm_selector", system, LLMSelector())


def llm_selector_diagnoser(system: System, optimize: OptimizeSettings, settings: DiagnoserSettings) -> Method:
    """Choices by the vote of the examples, with a model that says which component is to blame."""
    return _selecting("llm_selector_diagnoser", system, LLMSelector(alpha=1.0, lm=settings.lm))


def _selecting(name: str, system: System, optimizer: LLMSelector) -> Method:
    keys = keys_of(system, Choice)
    return Method(name, {"llm_selector": optimizer}, [Job("llm_selector", keys)] if keys else [], Uniform())


def staged(
    system: System, optimize: OptimizeSettings, settings: BetterTogetherSettings, folder: Path = Path()
) -> Method:
    """Methods one after the other, each from the best configuration so far."""
    return better_together(system, optimize, settings, partial(_chosen, folder=folder))


METHODS: Mapping[str, MethodFactory] = {
    "search": MethodFactory(search, PromptSettings),
    "optimas": MethodFactory(optimas, OptimasSettings),
    "hbc": MethodFactory(hbc, HBCSettings),
    "coordinate": MethodFactory(coordinate, PromptSettings),
    "random": MethodFactory(random, NoSettings),
    "opro": MethodFactory(opro, OPROSettings),
    "mipro": MethodFactory(mipro, MIPROSettings),
    "llm_selector": MethodFactory(llm_selector, NoSettings),
    "llm_selector_diagnoser": MethodFactory(llm_selector_diagnoser, DiagnoserSettings),
    "textgrad": MethodFactory(textgrad, TextGradSettings),
    "gepa": MethodFactory(gepa, GEPASettings),
    **POLICY_METHODS,
    "better_together": MethodFactory(staged, BetterTogetherSettings),
}


def factory(name: str, folder: Path = Path()) -> MethodFactory:
    """Return what makes a method, and the model of its settings.

    Args:
        name: one of `METHODS`, the name of an installed entry point, or ``module:name``.
        folder: where a module is looked for first.

    Raises:
        DeclarationError: there is no such method.
    """
    if name == "better_together":
        return MethodFactory(partial(staged, folder=folder), BetterTogetherSettings)
    if name in METHODS:
        return METHODS[name]
    if name in installed():
        return as_factory(installed()[name].load(), name)
    if ":" not in name:
        possible = [*METHODS, *installed()]
        raise DeclarationError(f"no method {name!r}", hint=f"{nearest(name, possible)}, or module:function")
    return as_factory(find_code(name, folder), name)


def check_trainable(made: Method, system: System, engine_of: Callable[[str], Engine]) -> None:
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
                check_sampling_engine(system, fixed, engine_of)


def _imitates(optimizer: Optimizer) -> bool:
    return isinstance(optimizer, WeightTraining) and optimizer.recipe.likelihood


def method(name: str, system: System, settings: OptimizeSettings, folder: Path = Path()) -> Method:
    """Return a method for a system.

    Args:
        name: see `factory`.
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
    for section in chosen.sections.values():
        for found in references(section):
            if found.kind == "configuration" and found.name:
                load(folder / found.name)
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
    chosen = factory(name, folder)(system, settings, name)
    if not chosen.jobs:
        raise NothingToTune(
            f"system {system.name!r} has no parameter that method {name!r} can change",
            hint='declare one, for example prompt: {tune: "…"} or k: {choice: [1, 5]}',
        )
    return chosen
