"""Methods by name: combine optimizers, jobs and a scheduler for the parameters of a system."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial, wraps
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

from pydantic import field_validator

from compound.core.engine import Engine
from compound.core.errors import CompoundError, DeclarationError, suggest_name
from compound.core.formatting import plural
from compound.engines.local.devices import device_count
from compound.execution.executor import Executor
from compound.graph.configuration import components_of, load
from compound.graph.registry.code import find_code
from compound.graph.registry.engines import Engines, find_engine
from compound.graph.registry.plugins import installed, warn_if_hidden
from compound.graph.space import Choice, Demos, Float, Int, Space, Text, Weights
from compound.graph.system import System
from compound.optimization.method import Job, Method, Optimizer
from compound.optimization.prices import estimate_prices
from compound.optimization.registration import MethodFactory, as_factory
from compound.optimization.settings.base import MethodName, NoSettings, S, Settings, references
from compound.optimization.settings.optimize import OptimizeSettings
from compound.optimizers.baselines.gepa import GEPA, GEPASettings
from compound.optimizers.baselines.llm_selector import DiagnoserSettings, LLMSelector
from compound.optimizers.baselines.mipro import Mipro, MIPROSettings
from compound.optimizers.baselines.opro import OPRO, OPROSettings
from compound.optimizers.baselines.random import RandomSearch
from compound.optimizers.baselines.textgrad import TextGrad, TextGradSettings
from compound.optimizers.optimas.methods import HBCSettings, OptimasSettings, hbc, optimas
from compound.optimizers.scheduling import TUNED, InOrder, Uniform, keys_of, text_jobs
from compound.optimizers.search.joint import JointSearch
from compound.optimizers.search.local_gains import savings_of, total_savings
from compound.optimizers.search.sources import CandidateSources, SearchSettings, reason_not_to_write
from compound.optimizers.weights.methods import LONG_JOB, POLICY_METHODS, NothingToTune

Make = Callable[[str, System, OptimizeSettings], Method]


def _in_one_job(
    name: str,
    optimizer: Optimizer,
    keys: tuple[str, ...],
    label: str = "",
    least: float = Method.least,
    decisions: int | None = None,
) -> Method:
    """Return a method that changes all keys in one job; without keys, it has none."""
    label = label or name
    jobs = [Job(label, keys)] if keys else []
    return Method(name, {label: optimizer}, jobs, Uniform(), least=least, decisions=decisions)


def search(system: System, optimize: OptimizeSettings, settings: SearchSettings) -> Method:
    """Joint search of all parameters except weights: texts, demonstrations, choices and numbers."""
    joint = JointSearch(CandidateSources.of(settings, "search"))
    return _in_one_job(
        "search", joint, keys_of(system, *TUNED), "joint", least=LONG_JOB, decisions=1
    )


def random(system: System, optimize: OptimizeSettings, settings: NoSettings) -> Method:
    """Random search over configurations, the simplest baseline."""
    keys = tuple(key for key, space in system.parameters.items() if not isinstance(space, Weights))
    return _in_one_job("random", RandomSearch(), keys)


def opro(system: System, optimize: OptimizeSettings, settings: OPROSettings) -> Method:
    """OPRO, which writes generations of prompts: one job per component that has texts."""
    return Method("opro", {"opro": OPRO(settings.lm)}, text_jobs("opro", system), Uniform())


def textgrad(system: System, optimize: OptimizeSettings, settings: TextGradSettings) -> Method:
    """TextGrad, which rewrites prompts based on criticism of the runs, propagated backwards.

    There is one job per component that has texts, or one job for all of them.
    """
    if settings.joint:
        return _in_one_job("textgrad", TextGrad(settings), keys_of(system, Text))
    jobs = text_jobs("textgrad", system)
    return Method("textgrad", {"textgrad": TextGrad(settings)}, jobs, Uniform())


def gepa(system: System, optimize: OptimizeSettings, settings: GEPASettings) -> Method:
    """GEPA, which evolves the texts of all components jointly, by reflection and Pareto selection.

    Raises:
        MissingExtra: the library ``gepa`` is not installed.
    """
    return _in_one_job("gepa", GEPA(settings), keys_of(system, Text), least=LONG_JOB)


def mipro(system: System, optimize: OptimizeSettings, settings: MIPROSettings) -> Method:
    """MIPROv2, which searches the instructions and demonstrations of all components jointly."""
    # a search is not divided: the first job may use the whole budget, and further jobs what it
    # leaves
    keys = keys_of(system, Text, Demos)
    return _in_one_job("mipro", Mipro(settings), keys, least=LONG_JOB, decisions=1)


def llm_selector(system: System, optimize: OptimizeSettings, settings: NoSettings) -> Method:
    """LLMSelector, which searches choices by a vote of the examples."""
    return _in_one_job("llm_selector", LLMSelector(), keys_of(system, Choice))


def llm_selector_diagnoser(
    system: System, optimize: OptimizeSettings, settings: DiagnoserSettings
) -> Method:
    """LLMSelector with a model that diagnoses which component is responsible for a failure."""
    selector, keys = LLMSelector(alpha=1.0, lm=settings.lm), keys_of(system, Choice)
    return _in_one_job("llm_selector_diagnoser", selector, keys, "llm_selector")


class BetterTogetherSettings(Settings):
    """Settings of `better_together`. The settings of a stage are those in the section of its method."""

    stages: tuple[MethodName, ...] = ("mipro", "mmgrpo")
    """The methods to run, in order."""

    @field_validator("stages")
    @classmethod
    def _others(cls, stages: tuple[str, ...]) -> tuple[str, ...]:
        if not stages or "better_together" in stages:
            raise ValueError(
                f"must name other methods, for example [mipro, mmgrpo], but is {list(stages)}"
            )
        return stages


def better_together(
    system: System, optimize: OptimizeSettings, settings: BetterTogetherSettings, make: Make
) -> Method:
    """BetterTogether: several methods in sequence, each starting from the best configuration so far.

    A stage changes only its own kind of parameters: prompts are frozen while weights are trained.
    Every job of a stage is followed by an acceptance test.
    """
    optimizers: dict[str, Optimizer] = {}
    jobs: list[Job] = []
    notes: dict[str, None] = {}
    sections: dict[str, Settings] = {}
    least = 0.0
    for number, stage in enumerate(settings.stages, 1):
        made, label = make(stage, system, optimize), f"{number} {stage}"
        optimizers |= {f"{label}/{name}": optimizer for name, optimizer in made.optimizers.items()}
        own = [*made.jobs]
        if made.opening:
            own.insert(0, replace(made.opening, weight=made.opening.weight * len(own)))
        jobs += [replace(job, optimizer=f"{label}/{job.optimizer}") for job in own]
        least = max(least, made.least)
        notes |= dict.fromkeys(made.notes)
        sections |= made.sections
    return Method(
        "better_together",
        optimizers,
        jobs,
        InOrder(),
        least=least,
        decisions=len(jobs),
        jobs_each=1,
        notes=list(notes),
        sections=sections,
    )


# Factor by which local rewards must be able to make a search cheaper; 2 gained nothing on Atlas.
LEAST_SAVING = 3.0
TRAINED_BY = "mmgrpo"
LEAST_STEPS = 20  # of a training, in half of the budget
NO_BACKBONE: Mapping[str, object] = {"model": "none"}  # rewards read numbers, labels, gold answers


def auto(system: System, optimize: OptimizeSettings, settings: NoSettings, make: Make) -> Method:
    """Choose by system and budget: a joint search, local rewards where they pay, and training of weights."""
    stages, notes = list[str](), list[str]()
    if keys_of(system, *TUNED):
        stage, reason, optimize = _search(system, optimize)
        stages.append(stage)
        notes.append(f"method auto: {stage}, since {reason}")
    if keys_of(system, Weights):
        trains, reason = _training(system, optimize, make, alone=not stages)
        stages += [TRAINED_BY] * trains
        notes.append(f"method auto: {reason}")

    def stage_of(name: str, system: System, optimize: OptimizeSettings) -> Method:
        if name != "optimas":
            return make(name, system, optimize)
        settings = optimize.section(name, OptimasSettings)
        return replace(optimas(system, optimize, settings, trains=False), sections={name: settings})

    if len(stages) > 1:
        made = better_together(
            system, optimize, BetterTogetherSettings(stages=tuple(stages)), stage_of
        )
    else:
        made = stage_of(stages[0] if stages else "search", system, optimize)
    return replace(made, name="auto", notes=[*notes, *made.notes])


def _search(system: System, optimize: OptimizeSettings) -> tuple[str, str, OptimizeSettings]:
    """Return the method that searches all parameters except weights, the reason for it, and its settings.

    The settings of `search` and of `optimas` count for either; a model to embed texts must be
    named.
    """
    tuned = components_of(keys_of(system, *TUNED))
    prices = estimate_prices(system)
    savings = [savings_of(system, name, prices) for name in tuned]
    saved = total_savings(savings)
    given: dict[str, object] = {"backbone": NO_BACKBONE}
    for section in (
        optimize.section("search", SearchSettings),
        optimize.section("optimas", OptimasSettings),
    ):
        given |= section.model_dump(exclude_unset=True)
    cheap = ", ".join(each.component for each in savings if not each.unused_reason)
    factor = f"at most {saved:.3g} times" if math.isfinite(saved) else "much"
    if saved < LEAST_SAVING:
        chosen, reason = "search", "evaluating single components would save little"
    elif find_spec("sklearn") is None:
        chosen, reason = "search", "local rewards need the extra 'rewards'"
    else:
        chosen, reason = "optimas", f"evaluating {cheap} alone can make it {factor} cheaper"
        reason += ", as far as scores confirm local rewards"
    if chosen == "search":
        given = {
            name: value for name, value in given.items() if name in SearchSettings.model_fields
        }
    return chosen, reason, OptimizeSettings.model_validate({**optimize.given, chosen: given})


def _training(
    system: System, optimize: OptimizeSettings, make: Make, *, alone: bool
) -> tuple[bool, str]:
    names = ", ".join(components_of(keys_of(system, Weights)))
    runs, step = optimize.budget.system_runs, make(TRAINED_BY, system, optimize).jobs[0].step
    steps = math.inf if runs is None or not step else runs / 2 // step
    if alone:
        return True, f"{TRAINED_BY}, since only the weights of {names} can change"
    if find_spec("torch") is None or not device_count("cuda"):
        why = "there is no GPU"
    elif steps < LEAST_STEPS:
        covered = plural(int(steps), "step")
        why = f"half of the budget covers {covered} of {TRAINED_BY}, and a training takes {LEAST_STEPS}"
    else:
        return True, f"then {TRAINED_BY} for the weights of {names}"
    return (
        False,
        f"the weights of {names} stay, since {why}; method: better_together trains them anyway",
    )


def _combining(
    build: Callable[[System, OptimizeSettings, S, Make], Method],
    settings: type[S],
    folder: Path = Path(),
) -> MethodFactory:
    """Return the factory of a method that combines others, which may be code in a folder."""

    @wraps(build)
    def made(system: System, optimize: OptimizeSettings, own: S) -> Method:
        return build(system, optimize, own, partial(_make_method, folder=folder))

    return MethodFactory(made, settings)


METHODS: Mapping[str, MethodFactory] = {
    "auto": _combining(auto, NoSettings),
    "search": MethodFactory(search, SearchSettings),
    "optimas": MethodFactory(optimas, OptimasSettings),
    "hbc": MethodFactory(hbc, HBCSettings),
    "random": MethodFactory(random, NoSettings),
    "opro": MethodFactory(opro, OPROSettings),
    "mipro": MethodFactory(mipro, MIPROSettings),
    "llm_selector": MethodFactory(llm_selector, NoSettings),
    "llm_selector_diagnoser": MethodFactory(llm_selector_diagnoser, DiagnoserSettings),
    "textgrad": MethodFactory(textgrad, TextGradSettings),
    "gepa": MethodFactory(gepa, GEPASettings),
    **POLICY_METHODS,
    "better_together": _combining(better_together, BetterTogetherSettings),
}


def factory(name: str, folder: Path = Path()) -> MethodFactory:
    """Return the factory of a method.

    Raises:
        DeclarationError: there is no such method.
    """
    if name in METHODS:
        warn_if_hidden("methods", name)
        warn_if_hidden("optimizers", name)
    if name == "auto":
        return _combining(auto, NoSettings, folder)
    if name == "better_together":
        return _combining(better_together, BetterTogetherSettings, folder)
    if name in METHODS:
        return METHODS[name]
    if name in installed():
        return as_factory(installed()[name].load(), name)
    if ":" not in name:
        possible = [*METHODS, *installed()]
        raise DeclarationError(
            f"no method {name!r}",
            hint=f"{suggest_name(name, possible)}; write a method of your own as module:function",
        )
    return as_factory(find_code(name, folder), name)


def method(
    name: str,
    system: System,
    settings: OptimizeSettings,
    folder: Path = Path(),
    engines: Engines = find_engine,
) -> Method:
    """Return a method for a system.

    Args:
        name: see `factory`.
        system: the system to optimize.
        settings: the settings of the optimization.
        folder: the folder to search for user-defined methods first.
        engines: engines by model name, of which searches ask one for new prompts if it writes any.

    Raises:
        DeclarationError: there is no such method.
        NothingToTune: the system has no parameter that the method can change; the hint lists the
            methods that can change some.
        ConfigurationError: the configuration file of a teacher is missing or broken.
    """
    try:
        made = _make_method(name, system, settings, folder)
    except NothingToTune as error:
        fit = applicable_methods(system, settings, folder)
        hint = f"methods that fit this system: {', '.join(fit)}" if fit else error.hint
        if agents := agents_without_prompts(system):
            hint = f"find the prompts of agent {agents[0]!r} by `compound init FILE`"
        raise NothingToTune(error.message, hint=hint) from None
    for section in made.sections.values():
        for found in references(section):
            if found.kind == "configuration" and found.name:
                load(folder / found.name)
    return _with_writer(made, system, Executor(engines).engine)


def _with_writer(made: Method, system: System, engine_of: Callable[[str], Engine]) -> Method:
    """Return a method whose searches ask a model of the system for new prompts, if one writes prompts."""
    tuned = (key for job in made.jobs for key in job.keys)
    keys = [key for key in tuned if isinstance(system.parameters[key], Text | Demos)]
    optimizers, told = dict(made.optimizers), dict[str, None]()
    for name, optimizer in made.optimizers.items():
        sources = getattr(optimizer, "sources", None)
        if keys and isinstance(sources, CandidateSources):
            found = sources.with_writer(system, engine_of)
            optimizers[name] = replace(cast("Any", optimizer), sources=found)
            if found.names:
                told[found.describe(system, keys)] = None
    for name, section in made.sections.items() if keys else ():
        other = not isinstance(section, SearchSettings | DiagnoserSettings)
        if other and hasattr(section, "lm") and "llm" in getattr(section, "proposers", ["llm"]):
            told[_describe_writer(name, section.lm, system, engine_of)] = None
    return replace(made, optimizers=optimizers, proposers=list(told))


def _describe_writer(
    name: str, given: str | None, system: System, engine_of: Callable[[str], Engine]
) -> str:
    """Return the model that a method asks for new prompts, and why searches would not ask it by default."""
    lm = given or next(iter(system.lms), None)
    told = f"sources of new prompts: {name} (prompts by {lm or 'no model'})"
    reason = (
        "" if given else reason_not_to_write(lm, engine_of) if lm else "the system names no model"
    )
    hint = f", although {reason}; set optimize.{name}.lm to a model that writes prompts"
    return told + hint if reason else told


def agents_without_prompts(system: System) -> list[str]:
    """Return the external agents of a system whose prompts were not declared yet."""
    agents = (found for found in system.components.values() if found.kind == "external_agent")
    return [agent.name for agent in agents if not getattr(agent, "prompts", ())]


def applicable_methods(
    system: System, settings: OptimizeSettings, folder: Path = Path()
) -> list[str]:
    """Return the names of the built-in methods that can change some parameter of a system."""
    names = []
    for name in METHODS:
        with contextlib.suppress(CompoundError):
            _make_method(name, system, settings, folder)
            names.append(name)
    return names


def _make_method(name: str, system: System, settings: OptimizeSettings, folder: Path) -> Method:
    made = factory(name, folder)(system, settings, name)
    if all(_has_one_value(system.parameters[key]) for job in made.jobs for key in job.keys):
        raise NothingToTune(
            f"system {system.name!r} has no parameter that method {name!r} can change",
            hint='declare one, for example prompt: {tune: "…"} or k: {choice: [1, 5]}',
        )
    return made


def _has_one_value(space: Space) -> bool:
    if isinstance(space, Choice):
        return len(space.options) == 1
    return isinstance(space, Int | Float) and space.low == space.high
