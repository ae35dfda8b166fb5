"""Check models before the first call: names, prices and API keys."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import get_args

from compound.components.agents.agent import Agent
from compound.components.agents.turn import AgentTurn
from compound.components.flow import Loop, Map
from compound.components.llm import LLM
from compound.core.engine import NO_USAGE, Capabilities, Engine, Usage
from compound.core.errors import (
    CompoundError,
    DeclarationError,
    MissingExtra,
    SeveralErrors,
    libraries_of,
    missing_libraries,
)
from compound.core.example import Example
from compound.core.formatting import plural
from compound.core.loops import run_blocking
from compound.core.security.sanitize import sanitize_text
from compound.evaluation.metrics.scoring import metric_lms
from compound.execution.schedule import setting_values
from compound.execution.sender import Sender, unpriced
from compound.execution.tool_text import to_text
from compound.graph.component import Body, Input, Value
from compound.graph.registry.engines import worst_case
from compound.graph.space import Choice
from compound.graph.system import System
from compound.graph.types import as_declared
from compound.optimization.budget_plan import baseline_runs, plan_jobs, runs_needed
from compound.optimization.method import Problem
from compound.optimization.prospects import plan_by_runs
from compound.optimization.settings.base import references


def list_models(problem: Problem) -> list[str]:
    """Return the names of the models that a run may call, as given by the system and the settings."""
    found = [*system_models(problem.system), *metric_lms(problem.metric)]
    plan, free = plan_by_runs(problem)
    jobs = plan_jobs(problem, free, plan.decisions)
    for each in jobs:
        for request in each.plan.requests if each.plan else ():
            if request.count:
                found += [request.lm] if request.lm else problem.system.lms[:1]
    if any(each.plan is None for each in jobs):
        named = (r for section in problem.method.sections.values() for r in references(section))
        found += [each.name for each in named if each.kind == "model" and each.name]
    return sorted(set(found))


def system_models(system: System) -> list[str]:
    """Return the names of the models that a run of a system may call, as far as settings name them."""
    return list(dict.fromkeys(lm for name in system.components for lm in models_of(system, name)))


def models_of(system: System, name: str) -> list[str]:
    """Return the names of the models that a component may call; none if it has no setting ``lm``."""
    found: dict[str, None] = {}
    for node in system.all_nodes():
        component = node.component
        if component.name != name or "lm" not in component.settings:
            continue
        setting = component.settings["lm"]
        if "lm" in node.wires:
            values: Iterable[object] = get_args(node.wires["lm"].type)
        elif isinstance(setting, Choice):
            values = setting.options
        else:
            values = [setting_values(component, system).get("lm")]
        found |= {value: None for value in values if isinstance(value, str)}
    return list(found)


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
    """Reject a limit of dollars if a model has no known price: for a budget, as the first call would.

    A limit of dollars per run needs the prices of the system's own models.

    Raises:
        DeclarationError: a price is unknown; the message names the model.
    """
    settings, limited = problem.settings, dict[str, str]()
    if settings.objective.limits.usd_per_run is not None:
        limited |= dict.fromkeys(system_models(problem.system), "objective.limits.usd_per_run")
    for lm, engine in (
        open_engines(problem).items() if limited or settings.budget.cost is not None else ()
    ):
        if not engine.priced and (lm in limited or settings.budget.cost is not None):
            raise unpriced(lm, limited.get(lm, "budget.cost"))


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
    for job in (*method.jobs, *filter(None, [method.opening])):
        optimizer = method.optimizers[job.optimizer]
        spaces = [system.parameters[key] for key in job.keys]
        requires_for = getattr(
            optimizer, "requires_for", lambda _, own=optimizer: libraries_of(own)
        )
        learning = libraries_of(getattr(optimizer, "learning", None))
        needed.append((f"the method {method.name!r}", [*requires_for(spaces), *learning]))
    missing = missing_libraries([*system_parts(system), *needed])
    if missing:
        raise missing[0] if len(missing) == 1 else SeveralErrors(missing)


def system_parts(system: System) -> Iterator[tuple[str, Sequence[str]]]:
    """Yield the components of a system, and the modules of optional libraries that each needs."""
    for name, component in system.components.items():
        index = getattr(component, "index", None)
        yield f"component {name!r}", [*libraries_of(component), *libraries_of(index)]


def check_spending(problem: Problem) -> None:
    """Reject a limit of calls, tokens or cost that is too small to try anything.

    Tokens and cost must cover what the initial evaluation reserves, calls also a decision and the
    smallest job. Only requests that are known in advance count: those of LLM components and of
    first turns of agents, loops and maps, outside of conditions and with settings that no node
    decides, each without the outputs of others among its inputs.

    Raises:
        DeclarationError: a limit is too small; the hint states one that suffices for these
            requests.
    """
    budget, n = problem.settings.budget, len(problem.valid)
    if budget.calls is budget.tokens is budget.cost is None:
        return
    least = run_blocking(_initial_reservations(problem))
    times = runs_needed(problem) / baseline_runs(problem)
    for name, form in (("calls", "{:,}"), ("tokens", "{:,}"), ("cost", "${:.3g}")):
        limit, share, initial = (
            getattr(budget, name),
            getattr(budget.search(), name),
            getattr(least, name),
        )
        whole = initial * times if name == "cost" else math.ceil(initial * times)
        needed = whole if name == "calls" else initial
        if limit is not None and share < needed:
            enough = whole / (1 - budget.test_share)
            unit = (
                10 ** (math.floor(math.log10(enough)) - 2) if name == "cost" else 1
            )  # three digits
            others = (
                f", a decision and the smallest job {needed - initial:,}"
                if needed > initial
                else ""
            )
            raise DeclarationError(
                f"optimize.budget.{name}={limit:g} is too small to try anything: the initial evaluation of "
                f"{plural(n, 'validation example')} reserves {form.format(initial)}{others}, but the search "
                f"has {form.format(share)} (optimize.budget.test_share is for the test split)",
                hint=f"set at least {math.ceil(enough / unit) * unit:.10g}, with a decision and a job, or "
                "lower optimize.valid_size or max_tokens",
            )


async def _initial_reservations(problem: Problem) -> Usage:
    """Return what the known requests of the initial evaluation reserve; equal ones count once."""
    system, settings, sender = problem.system, problem.settings, Sender(problem.engines)
    found: dict[str, Usage] = {}

    async def visit(body: Body, example: Example, inputs: Mapping[str, object]) -> None:
        for node in body.nodes.values():
            component, values = node.component, setting_values(node.component, system)
            known = {
                port: inputs[source.name]
                for port, source in node.wires.items()
                if isinstance(source, Input) and source.name in inputs
            }
            if node.when is not None or node.wires.keys() & component.settings.keys():
                continue
            with suppress(CompoundError):  # reported by the run
                if isinstance(component, LLM | AgentTurn):
                    engine = sender.engine(str(values["lm"]))
                    request = component.request(known, values)
                    if request.uses_tools and not Capabilities(engine).native_tools:
                        request = to_text(request)
                    samples: Iterable[object] = [""]
                    if not component.deterministic(values):
                        samples = ((example.id, sample) for sample in range(settings.repeats))
                    for sample in samples:
                        found.setdefault(
                            f"{values['lm']} {sample} {request}", worst_case(engine, request)
                        )
                elif isinstance(component, Agent | Loop | Map) and len(known) == len(node.wires):
                    given = {port: Value(value) for port, value in known.items()}
                    await component.drive(
                        given, values, partial(visit_turn, component.body, example)
                    )

    async def visit_turn(
        body: Body, example: Example, _turn: int, given: Mapping[str, Value]
    ) -> None:
        await visit(body, example, {name: value.data for name, value in given.items()})

    for example in problem.valid:
        inputs = {
            name: as_declared(kind, example.inputs[name]) for name, kind in system.inputs.items()
        }
        await visit(system, example, inputs)
    return sum(found.values(), NO_USAGE)


def missing_keys(problem: Problem) -> list[str]:
    """Return one line for each model without an API key; its first call would fail."""
    found: dict[str, None] = {}
    for engine in open_engines(problem).values():
        try:
            Capabilities(engine).require_key()
        except MissingExtra:  # not about the key
            continue
        except CompoundError as error:
            found[str(error)] = None
    return list(found)
