"""Division of a system's parameters into jobs."""

from __future__ import annotations

import itertools

from compound.graph.configuration import component_of
from compound.graph.space import Demos, Space, Text, Weights
from compound.graph.system import System
from compound.optimization.method import Job


def keys_of(system: System, *kinds: type[Space]) -> tuple[str, ...]:
    """Return the keys of all parameters of the given kinds."""
    return tuple(key for key, space in system.parameters.items() if isinstance(space, kinds))


def by_component(system: System, texts: str, numbers: str) -> list[Job]:
    """Return two jobs per component: one for texts and demonstrations, one for choices and numbers.

    Args:
        system: the system.
        texts: the optimizer of texts and demonstrations.
        numbers: the optimizer of choices and numbers.
    """
    groups: dict[tuple[str, bool], list[str]] = {}
    for key, space in system.parameters.items():
        if not isinstance(space, Weights):
            groups.setdefault((component_of(key), isinstance(space, Text | Demos)), []).append(key)
    return [Job(texts if is_text else numbers, tuple(keys)) for (_, is_text), keys in groups.items()]


def text_jobs(optimizer: str, system: System) -> list[Job]:
    """Return one job per component that has texts."""
    groups = itertools.groupby(keys_of(system, Text), component_of)
    return [Job(optimizer, tuple(keys)) for _, keys in groups]
