"""Sources of new prompts and demonstrations, and the rows of the data that they may read.

A source reads rows that no candidate is scored on, or runs of the leading candidate. Which sources a search
uses follows from the system: a model that can write, if one is at hand, writes prompts; otherwise a grammar
of edits changes them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from compound.engine import Engine
from compound.example import Example
from compound.execution.rng import generator
from compound.graph.configuration import component_of
from compound.graph.space import Demos, Text
from compound.graph.system import System
from compound.optimization.method import Task
from compound.optimizers.search.prompts import (
    bootstrap_pools,
    demo_keys,
    pool_order,
    reason_not_to_write,
    text_keys,
)
from compound.optimizers.search.proposers.demos import WeightedDemo, labelled_demos
from compound.settings.base import Settings
from compound.settings.references import ModelName

SourceName = Literal["describe", "reflect", "demos", "edits"]
WRITTEN: Sequence[SourceName] = ("describe", "reflect", "demos")  # with a model that writes prompts
UNWRITTEN: Sequence[SourceName] = ("demos", "edits")
KINDS: Mapping[str, type] = {"describe": Text, "reflect": Text, "demos": Demos, "edits": Text}

POOL, POOL_WITH_WRITER = 16, 8  # examples that the incumbent is run on for demonstrations
RESERVED = 0.25  # of the train examples, for descriptions, if there are no demonstrations


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
    """Sources of candidates of a search.

    Attributes:
        names: the sources in use.
        lm: the model that writes prompts; ``None`` for the system's own.
        section: the path of the settings, if it is still open whether a model of the system writes prompts.
        unused: why no model writes prompts.
    """

    names: Sequence[SourceName] = UNWRITTEN
    lm: str | None = None
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
        used = [name for name in self.names if any(isinstance(space, KINDS[name]) for space in spaces)]
        told = f"sources of new prompts and demonstrations: {', '.join(used) or 'none'}"
        if self.writes and not {"describe", "reflect"}.isdisjoint(used):
            writer = self.lm or next(iter(system.lms), "no model")
            told += f" (prompts by {writer}, which reads train examples with their expected results)"
        elif self.unused and any(isinstance(space, Text) for space in spaces):
            told += f"; no model writes prompts: {self.unused}"
        return told


@dataclass(frozen=True)
class Rows:
    """Division of the train examples; the same in all jobs of a run, so that no example changes its part.

    Attributes:
        pool: examples that the incumbent is run on for demonstrations and the first reflections.
        read: examples that descriptions and labelled demonstrations are made of, including the pool.
        scored: examples that candidates are scored on, in random order.
    """

    pool: Sequence[Example]
    read: Sequence[Example]
    scored: Sequence[Example]


def divide(task: Task, sources: CandidateSources) -> Rows:
    """Divide the train examples of a job."""
    ordered = pool_order(task)
    has_demos = any(isinstance(space, Demos) for space in task.system.parameters.values())
    reads = "describe" in sources.names and bool(text_keys(task))
    read = len(ordered) // 2 if has_demos else int(RESERVED * len(ordered)) if reads else 0
    most = POOL_WITH_WRITER if sources.writes else POOL
    uses_pool = has_demos and (("demos" in sources.names and demo_keys(task)) or "reflect" in sources.names)
    count = int(min(read, most, task.scorer.runs_left / 4)) if uses_pool else 0
    rest = ordered[read:]
    order = generator(task.seed, "examples").permutation(len(rest))
    return Rows(ordered[:count], ordered[:read], [rest[i] for i in order])


async def demonstrations(
    task: Task, sources: CandidateSources, rows: Rows
) -> dict[str, Sequence[WeightedDemo]]:
    """Return demonstrations to draw from, by parameter.

    A component that writes the compared output and reads inputs of the system only gets expected answers of
    train examples, which take no run. The others get inputs and outputs of successful runs.
    """
    keys = demo_keys(task) if "demos" in sources.names else []
    labelled = labelled_demos(task.system, task.context.metric, rows.read)
    found = {key: labelled.get(component_of(key), ()) for key in keys}
    pools: dict[str, Sequence[WeightedDemo]] = {
        key: [WeightedDemo(demo, 1.0) for demo in demos] for key, demos in found.items() if demos
    }
    if set(keys) - set(pools):
        pools = {**(await bootstrap_pools(task, rows.pool)), **pools}
    return pools
