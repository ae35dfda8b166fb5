"""The methods of optimization, by name: those that are built in, and those of installed packages."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping
from typing import Protocol

from pydantic import BaseModel

from compound.registry.plugins import Plugin, visible

BUILT_IN = "compound.optimizers.methods"
ATTRIBUTE = "__compound_method__"  # of a decorated class: the method that is made of it


class RegisteredMethod(Protocol):
    """A method, as far as its settings are concerned; `compound.optimization.registration` has the rest."""

    @property
    def settings(self) -> type[BaseModel]:
        """The model of its settings."""
        ...


def registered() -> Mapping[str, RegisteredMethod]:
    """Return the methods that are built in; they are imported when they are first asked for."""
    found: Mapping[str, RegisteredMethod] = importlib.import_module(BUILT_IN).METHODS
    return found


def method_of(found: object) -> object:
    """Return the method that a decorated class stands for, or the object itself."""
    return vars(found).get(ATTRIBUTE, found) if inspect.isclass(found) else found


def installed() -> Mapping[str, Plugin]:
    """Return the methods and optimizers of installed packages that no method built in has the name of."""
    return {**visible("optimizers", registered()), **visible("methods", registered())}
