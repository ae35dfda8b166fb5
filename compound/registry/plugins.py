"""Extensions that other packages install as entry points.

A package declares them in its ``pyproject.toml``::

    [project.entry-points."compound.optimizers"]
    hill_climb = "my_package.hill_climb:HillClimb"

Only the metadata is read at first; a package is imported when one of its names is used.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Literal

from compound.errors import CompoundError, DeclarationError
from compound.registry.code import import_hint, message_of
from compound.registry.user_code import place_of_error

Group = Literal["components", "engines", "methods", "metrics", "optimizers"]
HIDDEN = "its name is built in, or a key that all entries have; rename its entry point"
GROUPS: tuple[Group, ...] = ("components", "engines", "methods", "metrics", "optimizers")


@dataclass(frozen=True)
class Plugin:
    """One entry point.

    Attributes:
        group: what it adds.
        name: how files refer to it.
        value: what it names, as ``module:name``.
        distribution: the package that installs it.
    """

    group: Group
    name: str
    value: str
    distribution: str
    _entry_point: EntryPoint

    def load(self) -> object:
        """Import the module and return what the entry point names.

        Raises:
            DeclarationError: importing it failed, or there is no such name.
        """
        try:
            found: object = self._entry_point.load()
        except (Exception, SystemExit) as error:  # a package may raise anything
            package = self._entry_point.module.partition(".")[0]
            if isinstance(error, CompoundError):  # of a decorator, for example, which has named the place
                raise DeclarationError(
                    f"{self} cannot be loaded: {error.message}", hint=error.hint
                ) from error
            hint = "" if getattr(error, "name", None) == package else import_hint(error)
            raise DeclarationError(
                f"{self} cannot be loaded: {message_of(error)}{place_of_error(error, package)}",
                hint=hint or f"reinstall or remove the package {self.distribution}",
            ) from error
        return found

    def __str__(self) -> str:
        return f"{self.name!r} ({self.value}, from {self.distribution})"


@functools.cache
def plugins(group: Group) -> Mapping[str, Plugin]:
    """Return the installed extensions of a group, by name. Nothing is imported.

    Raises:
        DeclarationError: two packages use the same name.
    """
    found: dict[str, Plugin] = {}
    for entry in entry_points(group=f"compound.{group}"):
        distribution = "an unknown package" if entry.dist is None else entry.dist.name
        plugin = Plugin(group, entry.name, entry.value, distribution, entry)
        known = found.setdefault(entry.name, plugin)
        if known.value != plugin.value:
            raise DeclarationError(
                f"two packages add {entry.name!r} to compound.{group}: "
                f"{known.distribution} and {distribution}",
                hint="uninstall one of them",
            )
    return found


def visible(group: Group, built_in: Collection[str]) -> Mapping[str, Plugin]:
    """Return the installed extensions of a group whose names are not built in.

    Args:
        group: the group.
        built_in: the names that are.
    """
    return {name: plugin for name, plugin in plugins(group).items() if name not in built_in}


@functools.cache
def warn_if_hidden(group: Group, name: str) -> None:
    """Log, once, that a built-in name is used which an installed extension has, too.

    Args:
        group: the group of the extension.
        name: the name that is built in.
    """
    if name in plugins(group):
        logging.getLogger("compound").warning("%s is not used: %s", plugins(group)[name], HIDDEN)
