"""Check models before the first call: names, prices and API keys."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress

from compound.engine import Engine
from compound.errors import CompoundError, MissingExtra, SeveralErrors
from compound.evaluation.metrics.models import metric_lms
from compound.execution.schedule import setting_values
from compound.execution.sender import Sender, unpriced
from compound.extras import libraries_of, missing_libraries
from compound.graph.bounds import CallBound
from compound.graph.space import Choice
from compound.graph.system import System
from compound.optimization.allowance import allowance
from compound.optimization.problem import Problem
from compound.optimization.prospects import plan_by_runs
from compound.security.sanitize import sanitize_text
from compound.settings.references import references


def list_models(problem: Problem) -> list[str]:
    """Return the names of the models that a run may call, as given by the system and the settings.

    Requests that a component does not declare (`compound.graph.component.Component.reach`) are unknown.
    """
    own = problem.system.lms[:1]
    plan, free = plan_by_runs(problem)
    allowed = allowance(problem, free, plan.decisions, lms=own)
    requests: list[CallBound] = []
    found: list[str] = []
    for name, use in allowed.survey.uses.items():
        if use.requests is None:
            found += _settings(problem, name)
        requests += use.requests or ()
    found += metric_lms(problem.metric)
    requests += [request for job in allowed.jobs for request in job.requests]
    found += [lm for request in requests if request.calls for lm in request.lms or own]
    if allowed.undeclared:
        named = [found for section in problem.method.sections.values() for found in references(section)]
        found += [each.name for each in named if each.kind == "model" and each.name]
    return sorted(set(found))


def _settings(problem: Problem, component: str) -> Iterator[str]:
    """Yield the models that the ``lm`` setting of a component may name."""
    declared = problem.system.components[component]
    setting = declared.settings.get("lm")
    own = setting_values(declared, problem.system).get("lm")
    values = setting.options if isinstance(setting, Choice) else [own]
    yield from (value for value in values if isinstance(value, str))


def open_engines(problem: Problem) -> dict[str, Engine]:
    """Return the engines of a run by name, except those that cannot be opened (the run reports why).

    No model is loaded.
    """
    sender, found = Sender(problem.engines), {}
    for lm in list_models(problem):
        with suppress(CompoundError):
            found[lm] = sender.engine(lm)
    return found


def engine_names(problem: Problem) -> dict[str, str]:
    """Return `Engine.name` by model name, with API keys removed."""
    found = {}
    for lm, engine in open_engines(problem).items():
        with suppress(CompoundError):  # the name depends on a missing library
            found[lm] = sanitize_text(engine.name)
    return found


def check_prices(problem: Problem) -> None:
    """Reject a cost limit if a model has no known price, as the first call would.

    Raises:
        DeclarationError: a price is unknown; the message names the model.
    """
    if problem.settings.budget.cost is None:
        return
    for lm, engine in open_engines(problem).items():
        if not engine.priced:
            raise unpriced(lm)


def check_libraries(problem: Problem) -> None:
    """Reject a run that needs a library that is not installed, before anything is spent.

    Raises:
        MissingExtra: one is missing.
        SeveralErrors: several are.
    """
    system, method = problem.system, problem.method
    find = problem.engines if callable(problem.engines) else problem.engines.get
    needed: list[tuple[str, Sequence[str]]] = []
    for lm in list_models(problem):
        with suppress(CompoundError):  # the run reports why it cannot be opened
            needed.append((f"the engine of {lm!r}", libraries_of(find(lm))))
    for job in (*method.jobs, *filter(None, [method.opening, method.joint])):
        optimizer = method.optimizers[job.optimizer]
        spaces = [system.parameters[key] for key in job.keys]
        requires_for = getattr(optimizer, "requires_for", lambda _, own=optimizer: libraries_of(own))
        needed.append((f"the method {method.name!r}", requires_for(spaces)))
    missing = missing_libraries([*system_parts(system), *needed])
    if missing:
        raise missing[0] if len(missing) == 1 else SeveralErrors(missing)


def system_parts(system: System) -> Iterator[tuple[str, Sequence[str]]]:
    """Yield the components of a system, and the modules of optional libraries that each needs."""
    for name, component in system.components.items():
        index = getattr(component, "index", None)
        yield f"component {name!r}", [*libraries_of(component), *libraries_of(index)]


def missing_keys(problem: Problem) -> list[str]:
    """Return one line for each model without an API key; its first call would fail."""
    found: dict[str, None] = {}
    for engine in open_engines(problem).values():
        try:
            getattr(engine, "require_key", bool)()
        except MissingExtra:  # not about the key
            continue
        except CompoundError as error:
            found[str(error)] = None
    return list(found)
