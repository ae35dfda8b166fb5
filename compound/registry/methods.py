"""The methods of optimization, by name."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Protocol

from pydantic import BaseModel

BUILT_IN = "compound.optimizers.methods"


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
