"""The jobs that the parameters of a system are divided into."""

from __future__ import annotations

import itertools

from compound.graph.configuration import component_of
from compound.graph.space import Demos, Space, Text, Weights
from compound.graph.system import System
from compound.optimization.method import Job


def keys_of(system: System, *kinds: type[Space]) -> tuple[str, ...]:
    """Return the keys of all parameters of some kinds."""
    return tuple(key for key, space in system.parameters.items() if isinstance(space, kinds))


def by_component(system: System, texts: str, numbers: str) -> list[Job]:
    """Return a job for each component's texts and demonstrations, and one for its choices and numbers."""
    found: dict[tuple[str, bool], list[str]] = {}
    for key, space in system.parameters.items():
        if not isinstance(space, Weights):
            found.setdefault((component_of(key), isinstance(space, Text | Demos)), []).append(key)
    return [Job(texts if text else numbers, tuple(keys)) for (_, text), keys in found.items()]


def text_jobs(optimizer: str, system: System) -> list[Job]:
    """Return a job for each component that has a text."""
    groups = itertools.groupby(keys_of(system, Text), component_of)
    return [Job(optimizer, tuple(keys)) for _, keys in groups]
