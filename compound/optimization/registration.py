"""Register methods, run optimizers and schedulers, and validate what code of users returns."""

from __future__ import annotations

import functools
import inspect
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from compound.core.errors import CompoundError, DeclarationError, suggest_name
from compound.core.formatting import short_repr
from compound.graph.registry.plugins import method_of
from compound.graph.registry.user_code import UserCodeError, check_signature, definition, reported
from compound.graph.system import System
from compound.optimization.method import Job, JobRecord, Method, Optimizer, Progress, Proposal, Task
from compound.optimization.settings.base import NoSettings, S, Settings
from compound.optimization.settings.optimize import OptimizeSettings


class MethodFactory:
    """Creates a method from a system, the common settings, and its own section of ``optimize:``."""

    def __init__(
        self, make: Callable[[System, OptimizeSettings, S], Method], settings: type[S]
    ) -> None:
        self.settings: type[Settings] = settings
        self.__doc__ = make.__doc__

        def create(
            system: System, optimize: OptimizeSettings, name: str
        ) -> tuple[Method, Settings]:
            own = optimize.section(name, settings)
            with reported(f"method {name!r}", make):
                found = make(system, optimize, own)
            _check(found, name, definition(make), system)
            return found, own

        self._made = create

    def __call__(self, system: System, optimize: OptimizeSettings, name: str) -> Method:
        """Create the method of a name for a system."""
        method, own = self._made(system, optimize, name)
        if isinstance(own, NoSettings):
            return method
        return replace(method, sections={section_of(name, optimize): own, **method.sections})


def section_of(name: str, optimize: OptimizeSettings) -> str:
    """Return the section of a method: its name, or only the function of ``module:function``.

    >>> section_of("mine:anneal", OptimizeSettings()), section_of("mipro", OptimizeSettings())
    ('anneal', 'mipro')
    """
    short = name.rpartition(":")[2]
    reserved = short in type(optimize).model_fields
    return name if name in optimize.sections or reserved else short


def method(
    *, settings: type[S]
) -> Callable[[Callable[[System, OptimizeSettings, S], Method]], MethodFactory]:
    """Register the settings of a user-defined method.

    The decorated function takes the system, the common settings, and its own settings. Select it by
    ``method: module:function``; its section is named ``function``.

    Args:
        settings: a subclass of `Settings`.

    Example:
        >>> from compound.optimizers.baselines.random import RandomSearch
        >>> from compound.optimizers.scheduling import Uniform
        >>> class AnnealingSettings(Settings):
        ...     temperature: float = 1.0
        >>> @method(settings=AnnealingSettings)
        ... def anneal(system, optimize, settings):
        ...     return Method("anneal", {"random": RandomSearch()}, [], Uniform())
        >>> anneal.settings.__name__
        'AnnealingSettings'
    """

    def register(make: Callable[[System, OptimizeSettings, S], Method]) -> MethodFactory:
        check_signature(make, "a method", "system", "optimize", "settings")
        check_settings(settings, Settings, f"method {definition(make)}")
        return MethodFactory(make, settings)

    return register


def check_settings(settings: object, base: type[Settings], role: str) -> None:
    """Reject a settings model of another type.

    Raises:
        UserCodeError: it is not a subclass of ``base``.
    """
    if not (inspect.isclass(settings) and issubclass(settings, base)):
        place = "cp.ext.Settings" if base is Settings else f"{base.__module__}.{base.__name__}"
        raise UserCodeError(
            f"the settings of {role} are {short_repr(settings)}, which is not a subclass of {base.__name__}",
            hint=f"write class MySettings({place})",
        )


def as_factory(found: object, name: str) -> MethodFactory:
    """Return the factory for a method, an optimizer, a recipe, or a plain function.

    A plain function has no settings. Classes must be decorated by `optimizer` or `recipe` of
    `compound.optimizers.extension`.

    Raises:
        DeclarationError: the object is none of these.
    """
    found = method_of(found)
    if isinstance(found, MethodFactory):
        return found
    if inspect.isclass(found):
        raise UserCodeError(
            f"{name} at {definition(found)} is a class, but a method is a function",
            hint="decorate an optimizer with @cp.ext.optimizer, or a recipe with @cp.ext.recipe",
        )
    if not callable(found):
        raise DeclarationError(f"{name} is not a function")
    check_signature(found, f"method {name!r}", "system", "optimize")
    make: Callable[[System, OptimizeSettings], Method] = found

    @functools.wraps(make)
    def without_settings(system: System, optimize: OptimizeSettings, _: NoSettings) -> Method:
        return make(system, optimize)

    return MethodFactory(without_settings, NoSettings)


def _check(found: object, name: str, place: str, system: System) -> None:
    def problem(what: str, hint: str) -> UserCodeError:
        return UserCodeError(f"method {name!r} at {place}{what}", hint=hint)

    if not isinstance(found, Method):
        raise problem(f" returned {short_repr(found)}", "it must return a cp.ext.Method")
    for part, value, kind in (
        ("optimizers", found.optimizers, Mapping),
        ("jobs", found.jobs, Sequence),
    ):
        if not isinstance(value, kind):
            hint = "write Method(name, {optimizer: Optimizer()}, [Job(optimizer, keys)], scheduler)"
            raise problem(f": {part} of its Method are {short_repr(value)}", hint)
    if inspect.isclass(found.scheduler) or not callable(getattr(found.scheduler, "choose", None)):
        what = f": the scheduler of its Method is {short_repr(found.scheduler)}"
        hint = "give an object with a method choose, such as Uniform()"
        raise problem(f"{what}, which is not a scheduler", hint)
    for job in (*([found.opening] if found.opening else []), *found.jobs):
        if job.optimizer not in found.optimizers:
            what = (
                f": a job names the optimizer {job.optimizer!r}, which is not one of its optimizers"
            )
            raise problem(what, suggest_name(job.optimizer, found.optimizers))
        keys: object = job.keys
        if isinstance(keys, str):
            raise problem(f": the keys of a job are the text {keys!r}", f"write ({keys!r},)")
        for key in job.keys:
            if key not in system.parameters:
                what = f": a job names {key!r}, which is not a parameter of system {system.name!r}"
                raise problem(what, suggest_name(key, system.parameters))


@dataclass(frozen=True)
class RunningOptimizer:
    """An optimizer in execution."""

    name: str
    optimizer: Optimizer

    def _problem(self, what: str, hint: str) -> UserCodeError:
        place = definition(self.optimizer)
        return UserCodeError(f"optimizer {self.name!r} at {place}{what}", hint=hint)

    async def events(self, task: Task) -> AsyncIterator[Progress | Proposal]:
        """Yield the events of the optimizer, validated.

        Raises:
            UserCodeError: the optimizer raised an error, is not an async generator, or yielded
                another type.
        """
        given: object = self.optimizer
        if inspect.isclass(given):
            name = given.__name__
            raise self._problem(f" is the class {name}", f"create an instance: {name}(…)")
        propose = getattr(self.optimizer, "propose", None)
        if not callable(propose):
            raise self._problem(" has no method propose", _ASYNC_GENERATOR)
        check_signature(propose, f"propose of optimizer {self.name!r}", "task")
        with reported(f"optimizer {self.name!r}", self.optimizer):
            events = propose(task)
        if not hasattr(events, "__aiter__"):
            if inspect.iscoroutine(events):
                events.close()
            kind = type(events).__name__
            problem = f": propose returned {kind}, which is not an async generator"
            raise self._problem(problem, _ASYNC_GENERATOR)
        with reported(f"optimizer {self.name!r}", self.optimizer):
            async for event in events:
                yield self._check_event(event)

    def _check_event(self, event: object) -> Progress | Proposal:
        if isinstance(event, Progress):
            self._check_fields("Progress", event.note, step=event.step, of=event.of)
            for name, value in (("state", event.state), ("facts", event.facts)):
                self._check_json(f"the {name} of Progress", value)
        elif isinstance(event, Proposal):
            self._check_fields("Proposal", event.note, tried=event.tried)
            self._check_json("the facts of Proposal", event.facts)
            for name, score in (("before", event.before), ("after", event.after)):
                if not isinstance(score, int | float | None):
                    raise self._problem(
                        f": {name} of Proposal is {short_repr(score)}, which is not a number",
                        "give the mean score, such as evaluation.mean",
                    )
        else:
            raise self._problem(f" yielded {short_repr(event)}", _ASYNC_GENERATOR)
        return event

    def _check_fields(self, event: str, note: object, **counts: object) -> None:
        if not isinstance(note, str):
            problem = f": note of {event} is {short_repr(note)}, which is not a string"
            raise self._problem(problem, "give one line")
        for name, count in counts.items():
            if not isinstance(count, int | None):
                problem = f": {name} of {event} is {short_repr(count)}, which is not an integer"
                raise self._problem(problem, f"give a number of type int, or omit {name}")

    def _check_json(self, what: str, value: object) -> None:
        if not isinstance(value, Mapping):
            problem = f": {what} must be a dictionary, but is {short_repr(value)}"
            raise self._problem(problem, _JSON)
        if problem := json_problem(value):
            raise self._problem(f": {what} must be JSON, but {problem}", _JSON)

    def validate(self, proposal: Proposal | None, working: System) -> Proposal:
        """Return the proposal if the system can be bound to it.

        Raises:
            UserCodeError: there is no proposal, or it has an unknown parameter or an invalid value.
        """
        if proposal is None:
            hint = "yield Proposal({}) if nothing better was found"
            raise self._problem(" ended without a Proposal", hint)
        values: object = proposal.values
        if not isinstance(values, Mapping):
            hint = "yield Proposal({key: value}), or Proposal({}) if nothing better was found"
            problem = f" proposed {short_repr(values)}, which is not a dictionary of values"
            raise self._problem(problem, hint)
        for key in values:
            if key not in working.parameters:
                hint = suggest_name(str(key), working.parameters)
                problem = f" proposed {key!r}, which is not a parameter of the system"
                raise self._problem(problem, hint)
        try:
            working.bind({**working.configuration, **values})
        except CompoundError as error:
            hint = error.hint or "propose a value of the parameter's space"
            raise self._problem(f": {error.message}", hint) from error
        return proposal


def json_problem(value: object, place: str = "") -> str:
    """Return what in a value is not JSON, or ``""``.

    >>> json_problem({"a": [1, None]}), json_problem({"a": [{2}]}), json_problem({"a": {1: 2}})
    ('', 'a.0 is {2}', 'a has the key 1, which is not a string')
    """
    if isinstance(value, Mapping):
        for key, item in value.items():
            if not isinstance(key, str):
                return f"{place or 'it'} has the key {key!r}, which is not a string"
            if problem := json_problem(item, f"{place}.{key}".removeprefix(".")):
                return problem
        return ""
    if isinstance(value, list | tuple):
        problems = (
            json_problem(item, f"{place}.{i}".removeprefix(".")) for i, item in enumerate(value)
        )
        return next(filter(None, problems), "")
    if value is None or isinstance(value, str | int | float | bool):
        return ""
    return f"{place or 'it'} is {short_repr(value)}"


def choose_job(method: Method, history: Sequence[JobRecord], seed: int) -> Job:
    """Return the job chosen by the scheduler of a method.

    Raises:
        UserCodeError: the scheduler raised an error, or did not return one of the jobs.
    """
    with reported(f"scheduler of method {method.name!r}", method.scheduler):
        job = method.scheduler.choose(method.jobs, history, seed)
    known = [(each.optimizer, each.keys) for each in method.jobs]
    if not isinstance(job, Job) or (job.optimizer, job.keys) not in known:
        raise UserCodeError(
            f"the scheduler at {definition(method.scheduler)} chose {short_repr(job)}",
            hint="choose must return one of the given jobs",
        )
    return job


_ASYNC_GENERATOR = (
    "propose must be an async generator: async def propose(self, task), which yields Progress any number of "
    "times and one Proposal at the end"
)
_JSON = "store numbers, texts, lists and dictionaries, as cp.ext.State.to_json does"
