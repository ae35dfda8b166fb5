"""Register methods together with their settings models."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from compound.core.errors import DeclarationError, suggest_name
from compound.core.formatting import short_repr
from compound.graph.registry.plugins import method_of
from compound.graph.registry.user_code import UserCodeError, check_signature, definition, reported
from compound.graph.system import System
from compound.optimization.method import Method
from compound.optimization.settings.base import NoSettings, S, Settings
from compound.optimization.settings.optimize import OptimizeSettings


class MethodFactory:
    """Creates a method for a system from the common settings and the method's settings.

    Args:
        make: function of the system, the common settings, and the settings of the method.
        settings: model of the method's settings.

    Attributes:
        settings: model of the section of ``optimize:`` named after the method.
    """

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
        """Create the method for a system.

        Args:
            system: the system to optimize.
            optimize: the settings, including the method's section if there is one.
            name: name of the method.
        """
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
    """Validate the return value of a method's function."""
    role = f"method {name!r} at {place}"
    if not isinstance(found, Method):
        raise UserCodeError(
            f"{role} returned {short_repr(found)}", hint="it must return a cp.ext.Method"
        )
    for part, value, kind in (
        ("optimizers", found.optimizers, Mapping),
        ("jobs", found.jobs, Sequence),
    ):
        if not isinstance(value, kind):
            raise UserCodeError(
                f"{role}: {part} of its Method are {short_repr(value)}",
                hint="write Method(name, {optimizer: Optimizer()}, [Job(optimizer, keys)], scheduler)",
            )
    if inspect.isclass(found.scheduler) or not callable(getattr(found.scheduler, "choose", None)):
        raise UserCodeError(
            f"{role}: the scheduler of its Method is {short_repr(found.scheduler)}, which is not a scheduler",
            hint="give an object with a method choose, such as Uniform()",
        )
    for job in (*([found.opening] if found.opening else []), *found.jobs):
        if job.optimizer not in found.optimizers:
            raise UserCodeError(
                f"{role}: a job names the optimizer {job.optimizer!r}, which is not one of its optimizers",
                hint=suggest_name(job.optimizer, found.optimizers),
            )
        keys: object = job.keys
        if isinstance(keys, str):
            raise UserCodeError(
                f"{role}: the keys of a job are the text {keys!r}", hint=f"write ({keys!r},)"
            )
        for key in job.keys:
            if key not in system.parameters:
                raise UserCodeError(
                    f"{role}: a job names {key!r}, which is not a parameter of system {system.name!r}",
                    hint=suggest_name(key, system.parameters),
                )
