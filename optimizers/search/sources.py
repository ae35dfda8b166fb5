"""Sources of new prompts and demonstrations, and the choice of the sources that a search uses.

The choice follows from the system: a model that can write, if one is at hand, writes prompts;
otherwise a grammar of edits changes them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from compound.core.engine import Capabilities, Engine
from compound.core.errors import CompoundError
from compound.core.example import Example
from compound.execution.rng import generator
from compound.graph.space import Demos, Text
from compound.graph.system import System
from compound.optimization.method import Task
from compound.optimization.settings.base import ModelName, Settings
from compound.optimizers.scheduling import demo_keys, text_keys

SourceName = Literal["describe", "reflect", "demos", "edits"]
WRITTEN: Sequence[SourceName] = ("describe", "reflect", "demos")  # with a model that writes prompts
UNWRITTEN: Sequence[SourceName] = ("demos", "edits")
KINDS: Mapping[str, type] = {"describe": Text, "reflect": Text, "demos": Demos, "edits": Text}


class SearchSettings(Settings):
    """Joint search of prompts, demonstrations, choices and numbers."""

    lm: ModelName | None = None
    """The model that writes prompts; default: the first model of the system that is behind a server."""
    writer: bool | None = None
    """Whether a model writes prompts. Default: yes, if `lm` is set or a model of the system is behind a
    server; models that run in this process are usually too small."""
    sources: tuple[SourceName, ...] | None = None
    """Sources of candidates: `describe` (a model reads rows of the train split and writes prompts),
    `reflect` (a model reads runs of the leading candidate, failing ones first, and rewrites its prompts),
    `demos` (demonstrations from the train split and from successful runs), `edits` (a grammar of edits).
    Default: the first three if a model writes prompts, otherwise the last two."""


@dataclass(frozen=True)
class CandidateSources:
    """Sources of candidates of a search."""

    names: Sequence[SourceName] = UNWRITTEN
    lm: str | None = None
    # the path of the settings, if it is still open whether a model of the system writes prompts
    section: str = field(default="", compare=False)
    unused: str = field(default="", compare=False)

    @classmethod
    def of(cls, settings: SearchSettings, section: str) -> CandidateSources:
        """Return the sources by the settings of a section of ``optimize:``; see `with_writer`."""
        if settings.sources is not None:
            return cls(settings.sources, settings.lm)
        if settings.writer is False:
            return cls(unused=f"optimize.{section}.writer is false")
        if settings.writer or settings.lm is not None:
            return cls(WRITTEN, settings.lm)
        return cls(section=f"optimize.{section}")

    @property
    def writes(self) -> bool:
        """Whether a model writes prompts."""
        return not {"describe", "reflect"}.isdisjoint(self.names)

    def with_writer(self, system: System, engine_of: Callable[[str], Engine]) -> CandidateSources:
        """Return the sources of a system, of which a model writes prompts if one can."""
        if not self.section:
            return self
        reasons = []
        for lm in system.lms:
            if not (reason := reason_not_to_write(lm, engine_of)):
                return CandidateSources(WRITTEN, None if lm == system.lms[0] else lm)
            reasons.append(reason)
        why = ", ".join(reasons) or "the system names no model"
        return replace(self, unused=f"{why}; set {self.section}.lm to a model that writes prompts")

    def describe(self, system: System, keys: Collection[str]) -> str:
        """Return the sources that a search of some parameters uses, and why no model writes prompts."""
        spaces = [system.parameters[key] for key in keys]
        used = [
            name for name in self.names if any(isinstance(space, KINDS[name]) for space in spaces)
        ]
        told = f"sources of new prompts and demonstrations: {', '.join(used) or 'none'}"
        if self.writes and not {"describe", "reflect"}.isdisjoint(used):
            writer = self.lm or next(iter(system.lms), "no model")
            told += (
                f" (prompts by {writer}, which reads train examples with their expected results)"
            )
        elif self.unused and any(isinstance(space, Text) for space in spaces):
            told += f"; no model writes prompts: {self.unused}"
        return told


def reason_not_to_write(lm: str, engine_of: Callable[[str], Engine]) -> str:
    """Return why a model writes no prompts by default, or an empty text if it does."""
    try:
        engine = engine_of(lm)
        declared = Capabilities(engine).writes_prompts
        if engine.remote if declared is None else declared:
            return ""
    except CompoundError as error:
        return error.message
    return f"{lm!r} " + (
        "declares that it writes no prompts" if engine.remote else "runs in this process"
    )


POOL, POOL_WITH_WRITER = 16, 8  # examples that the incumbent is run on for demonstrations
RESERVED = 0.25  # of the train examples, for descriptions, if there are no demonstrations


@dataclass(frozen=True)
class Rows:
    """Division of the train examples; the same in all jobs of a run, so that no example changes its part."""

    # examples that the incumbent is run on for demonstrations and the first reflections
    pool: Sequence[Example]
    # examples that descriptions and labelled demonstrations are made of, including the pool
    read: Sequence[Example]
    scored: Sequence[Example]  # examples that candidates are scored on, in random order

    @property
    def every(self) -> Sequence[Example]:
        """The examples that have scores: those that candidates are scored on, then the pool."""
        return [*self.scored, *self.pool]


def divide(task: Task, sources: CandidateSources) -> Rows:
    """Divide the train examples between the sources of candidates and their scores."""
    ordered = pool_order(task)
    demos = has_demos(task.system)
    reads = "describe" in sources.names and bool(text_keys(task))
    read = len(ordered) // 2 if demos else int(RESERVED * len(ordered)) if reads else 0
    most = POOL_WITH_WRITER if sources.writes else POOL
    uses_pool = demos and (
        ("demos" in sources.names and demo_keys(task)) or "reflect" in sources.names
    )
    count = int(min(read, most, task.scorer.runs_left / 4)) if uses_pool else 0
    return Rows(ordered[:count], ordered[:read], shuffled(task, ordered[read:]))


def pool_order(task: Task) -> list[Example]:
    """Return the train examples in an order that is the same in all jobs of a run."""
    return [task.train[i] for i in generator(task.pool_seed, "pool").permutation(len(task.train))]


def shuffled(task: Task, examples: Sequence[Example]) -> list[Example]:
    """Return examples in an order that depends on the job."""
    order = generator(task.seed, "examples").permutation(len(examples))
    return [examples[i] for i in order]


def has_demos(system: System) -> bool:
    """Return whether a component of a system has demonstrations."""
    return any(isinstance(space, Demos) for space in system.parameters.values())


MAX_POOL = 48  # examples that demonstrations are bootstrapped from
POOL_SHARE = 0.4  # of a job's system runs, for bootstrapping demonstrations


def split(task: Task) -> tuple[Sequence[Example], Sequence[Example]]:
    """Return the pool examples, to bootstrap demonstrations from, and the examples to score candidates on.

    The two are disjoint in all jobs of a run: no candidate is scored on an example that a
    demonstration of the system came from.
    """
    ordered, runs = pool_order(task), task.scorer.runs_left
    count = pool_size(task.system, demo_keys(task), len(ordered), runs, task.minibatch)
    kept = len(ordered) // 2 if has_demos(task.system) else 0
    return ordered[:count], shuffled(task, ordered[kept:])


def pool_size(
    system: System, keys: Collection[str], train: int, runs: float, minibatch: int
) -> int:
    """Return the number of pool examples that `split` takes of ``train`` examples."""
    if not any(isinstance(system.parameters[key], Demos) for key in keys):
        return 0
    most = min(train // 2, MAX_POOL)
    return min(most, max(int(runs * POOL_SHARE), minibatch)) if math.isfinite(runs) else most
