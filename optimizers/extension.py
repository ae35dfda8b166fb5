"""Decorators that register an optimizer class or a training recipe as a method."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar, overload

from compound.core.formatting import short_repr
from compound.graph.configuration import component_of
from compound.graph.registry.plugins import ATTRIBUTE
from compound.graph.registry.user_code import UserCodeError, check_signature, definition
from compound.graph.space import Space
from compound.graph.system import System
from compound.optimization.method import Job, Method, Optimizer
from compound.optimization.registration import MethodFactory, check_settings
from compound.optimization.settings.base import NoSettings, Settings
from compound.optimization.settings.optimize import OptimizeSettings
from compound.optimizers.scheduling import TUNED, Uniform, keys_of
from compound.optimizers.weights.learner.samples import SECTION
from compound.optimizers.weights.methods import train_jointly
from compound.optimizers.weights.recipes.recipe import Recipe, TrainingSettings

O = TypeVar("O", bound=type[Optimizer])  # noqa: E741
R = TypeVar("R", bound=type[Recipe])


@overload
def optimizer(cls: O, /) -> O: ...
@overload
def optimizer(
    *,
    settings: type[Settings] = NoSettings,
    tunes: type[Space] | tuple[type[Space], ...] = TUNED,
    by_component: bool = False,
) -> Callable[[O], O]: ...
def optimizer(
    cls: O | None = None,
    /,
    *,
    settings: type[Settings] = NoSettings,
    tunes: type[Space] | tuple[type[Space], ...] = TUNED,
    by_component: bool = False,
) -> O | Callable[[O], O]:
    """Register an optimizer class as a method.

    Select the method in ``optimize.method`` as ``module:Class``, or by the name of an entry point
    in the group ``compound.optimizers``. To combine several optimizers or use another scheduler,
    see `method`.

    Args:
        cls: the class, if the decorator is written without parentheses.
        settings: the settings model, a subclass of `Settings`. The class is instantiated with an
            instance of it, or without arguments if no model is given.
        tunes: the kinds of parameters that the optimizer can change.
        by_component: whether to create one job per component; otherwise one job changes all
            parameters.

    Example:
        >>> import compound as cp
        >>> from compound.optimization.method import Proposal
        >>> class ShrinkSettings(cp.ext.Settings):
        ...     factor: float = 0.5
        >>> @optimizer(settings=ShrinkSettings, tunes=cp.Float)
        ... class Shrink:
        ...     def __init__(self, settings):
        ...         self.settings = settings
        ...     async def propose(self, task):
        ...         yield Proposal({})
    """

    def decorate(cls: O) -> O:
        if not isinstance(cls, type) or not callable(getattr(cls, "propose", None)):
            raise UserCodeError(
                f"@cp.ext.optimizer decorates {short_repr(cls)} at {definition(cls)}, which has no method "
                "propose",
                hint="define async def propose(self, task) that yields Progress any number of times and one "
                "Proposal at the end",
            )
        name = _name(cls)
        check_settings(settings, Settings, f"optimizer {name!r} at {definition(cls)}")
        with _declared(settings):
            check_signature(
                cls, f"optimizer {name!r}", *([] if settings is NoSettings else ["settings"])
            )

        def make(system: System, optimize: OptimizeSettings, own: Settings) -> Method:
            made = cls() if settings is NoSettings else cls(own)  # type: ignore[call-arg]  # checked above
            keys = keys_of(system, *(tunes if isinstance(tunes, tuple) else (tunes,)))
            parts: dict[str, list[str]] = {}
            for key in keys:
                parts.setdefault(component_of(key) if by_component else "", []).append(key)
            jobs = [Job(name, tuple(part)) for part in parts.values()]
            return Method(name, {name: made}, jobs, Uniform())

        make.__doc__ = cls.__doc__
        setattr(cls, ATTRIBUTE, MethodFactory(make, settings))
        return cls

    return decorate if cls is None else decorate(cls)


def recipe(*, settings: type[TrainingSettings]) -> Callable[[R], R]:
    """Register a training recipe as a method that trains the weights of all components jointly.

    Select the method in ``optimize.method`` as ``module:Class``, or by the name of an entry point
    in the group ``compound.methods``.

    Args:
        settings: the settings model, a subclass of `TrainingSettings`. The class is instantiated
            with an instance of it. If the model has a field ``adapters``, that field defines which
            components share an adapter.

    Example:
        >>> from compound.optimizers.weights.recipes.mmgrpo import MMGRPO, MMGRPOSettings
        >>> class LongRunsSettings(MMGRPOSettings):
        ...     bonus: float = 0.1
        >>> @recipe(settings=LongRunsSettings)
        ... class LongRuns(MMGRPO):
        ...     settings: LongRunsSettings
    """

    def decorate(cls: R) -> R:
        if not (isinstance(cls, type) and issubclass(cls, Recipe)):
            raise UserCodeError(
                f"@cp.ext.recipe decorates {short_repr(cls)} at {definition(cls)}, "
                "which is not a subclass of Recipe",
                hint="derive the class from cp.ext.Recipe",
            )
        name = _name(cls)
        check_settings(settings, TrainingSettings, f"recipe {name!r} at {definition(cls)}")
        check_signature(cls, f"recipe {name!r}", "settings")

        def make(system: System, optimize: OptimizeSettings, own: TrainingSettings) -> Method:
            # the section is named after the class or the entry point, which is not known here
            return train_jointly(name, system, cls(own), getattr(own, "adapters", "each"), SECTION)

        make.__doc__ = cls.__doc__
        setattr(cls, ATTRIBUTE, MethodFactory(make, settings))
        return cls

    return decorate


@contextmanager
def _declared(settings: type[Settings]) -> Iterator[None]:
    """Say how settings are declared, where a constructor takes some and there are none."""
    try:
        yield
    except UserCodeError as error:
        if settings is not NoSettings:
            raise
        fix = "; if it has settings, declare them: @cp.ext.optimizer(settings=MySettings)"
        raise UserCodeError(error.message, hint=f"{error.hint}{fix}") from None


def _name(cls: type) -> str:
    """Return the name of a class in snake case.

    >>> class HillClimb: ...
    >>> _name(HillClimb)
    'hill_climb'
    """
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", cls.__name__).lower()
