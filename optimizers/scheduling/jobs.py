"""Parameters of a system or a job by kind, and their division into jobs."""

from __future__ import annotations

import itertools

from compound.graph.configuration import component_of
from compound.graph.space import Demos, Space, Text, Weights
from compound.graph.system import System
from compound.optimization.method import Job, Task


def keys_of(system: System, *kinds: type[Space]) -> tuple[str, ...]:
    """Return the keys of all parameters of the given kinds."""
    return tuple(key for key, space in system.parameters.items() if isinstance(space, kinds))


def demo_keys(task: Task) -> list[str]:
    """Return the job's keys of demonstrations."""
    spaces = task.system.parameters
    return [key for key in task.keys if isinstance(space := spaces[key], Demos) and space.max]


def text_keys(task: Task) -> list[str]:
    """Return the job's keys of texts."""
    return [key for key in task.keys if isinstance(task.system.parameters[key], Text)]


def by_component(optimizer: str, system: System) -> list[Job]:
    """Return two jobs per component: one for texts and demonstrations, one for choices and numbers."""
    groups: dict[tuple[str, bool], list[str]] = {}
    for key, space in system.parameters.items():
        if not isinstance(space, Weights):
            groups.setdefault((component_of(key), isinstance(space, Text | Demos)), []).append(key)
    return [Job(optimizer, tuple(keys)) for keys in groups.values()]


def text_jobs(optimizer: str, system: System) -> list[Job]:
    """Return one job per component that has texts."""
    groups = itertools.groupby(keys_of(system, Text), component_of)
    return [Job(optimizer, tuple(keys)) for _, keys in groups]
