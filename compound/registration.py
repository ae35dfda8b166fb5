"""How a method is registered: what makes it, and the model of its settings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from compound.errors import DeclarationError
from compound.optimization import Method
from compound.settings import NoSettings, OptimizeSettings, S, Settings
from compound.system import System


class MethodFactory:
    """Makes a method for a system, from the common settings and its own.

    Args:
        make: a function of the system, the common settings, and the settings of the method.
        settings: the model of the settings of the method.

    Attributes:
        settings: that model; the section of ``optimize:`` with the name of the method is read by it.
    """

    def __init__(self, make: Callable[[System, OptimizeSettings, S], Method], settings: type[S]) -> None:
        self.settings: type[Settings] = settings
        self.__doc__ = make.__doc__

        def made(system: System, optimize: OptimizeSettings, name: str) -> tuple[Method, Settings]:
            own = optimize.section(name, settings)
            return make(system, optimize, own), own

        self._made = made

    def __call__(self, system: System, optimize: OptimizeSettings, name: str) -> Method:
        """Return the method for a system.

        Args:
            system: what is to be optimized.
            optimize: how; with the section of the method, if there is one.
            name: the name of the method.
        """
        method, own = self._made(system, optimize, name)
        if isinstance(own, NoSettings):
            return method
        return replace(method, sections={section_of(name, optimize): own, **method.sections})


def section_of(name: str, optimize: OptimizeSettings) -> str:
    """Return the section of a method: its name, or the function alone for ``module:function``.

    >>> section_of("mine:anneal", OptimizeSettings()), section_of("mipro", OptimizeSettings())
    ('anneal', 'mipro')
    """
    short = name.rpartition(":")[2]
    reserved = short in type(optimize).model_fields
    return name if name in optimize.sections or reserved else short


def method(
    *, settings: type[S]
) -> Callable[[Callable[[System, OptimizeSettings, S], Method]], MethodFactory]:
    """Register the settings of a method of your own.

    The decorated function takes the system, the common settings, and its own settings. It is chosen by
    ``method: module:function``; its settings stand in the section ``function:``.

    Args:
        settings: a subclass of `Settings`.

    Example:
        >>> from compound.optimizers.baselines import RandomSearch
        >>> from compound.optimizers.scheduler import Uniform
        >>> class AnnealingSettings(Settings):
        ...     temperature: float = 1.0
        >>> @method(settings=AnnealingSettings)
        ... def anneal(system, optimize, settings):
        ...     return Method("anneal", {"random": RandomSearch()}, [], Uniform())
        >>> anneal.settings.__name__
        'AnnealingSettings'
    """

    def register(make: Callable[[System, OptimizeSettings, S], Method]) -> MethodFactory:
        return MethodFactory(make, settings)

    return register


def as_factory(found: object, name: str) -> MethodFactory:
    """Return what ``module:function`` names as a factory; a plain function has no settings.

    Raises:
        DeclarationError: it is no function.
    """
    if isinstance(found, MethodFactory):
        return found
    if not callable(found):
        raise DeclarationError(f"{name} is not a function")
    make: Callable[[System, OptimizeSettings], Method] = found
    return MethodFactory(lambda system, optimize, _: make(system, optimize), NoSettings)
