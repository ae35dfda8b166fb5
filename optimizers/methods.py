"""Methods by name: which optimizers work on which parameters, and who schedules them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from compound.errors import DeclarationError, nearest
from compound.optimization import Job, Method, Optimizer
from compound.optimizers.baselines import RandomSearch
from compound.optimizers.prompts import PromptSearch
from compound.optimizers.sampling import NumberSearch
from compound.optimizers.scheduler import Uniform
from compound.settings import OptimizeSettings
from compound.space import Choice, Demos, Float, Int, Text, Weights
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


def random(system: System, settings: OptimizeSettings) -> Method:
    """Random configurations, the baseline."""
    keys = tuple(key for key, space in system.parameters.items() if not isinstance(space, Weights))
    jobs = [Job("random", keys)] if keys else []
    return Method("random", {"random": RandomSearch()}, jobs, Uniform())


MakeMethod = Callable[[System, OptimizeSettings], Method]
METHODS: Mapping[str, MakeMethod] = {"search": search, "random": random}


def method(name: str, system: System, settings: OptimizeSettings) -> Method:
    """Return a method for a system.

    Args:
        name: one of `METHODS`, or ``module:function`` for one of your own.
        system: what is to be optimized.
        settings: how.

    Raises:
        DeclarationError: there is no such method, or the system has nothing it could change.
    """
    if name not in METHODS and ":" not in name:
        raise DeclarationError(f"no method {name!r}", hint=f"{nearest(name, METHODS)}, or module:function")
    make: MakeMethod = METHODS[name] if name in METHODS else find_code(name, Path())
    chosen = make(system, settings)
    if not chosen.jobs:
        raise DeclarationError(
            f"system {system.name!r} has no parameter that method {name!r} can change",
            hint='declare one, for example prompt: {tune: "…"} or k: {choice: [1, 5]}',
        )
    return chosen
