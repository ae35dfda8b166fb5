"""Prompt search: candidates from several proposers, raced on train examples by the global reward.

Examples that provide demonstrations are never used to score candidates.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
from pydantic import Field

from compound.engine import Engine
from compound.errors import CompoundError
from compound.example import Example
from compound.execution.rng import generator
from compound.execution.trace import Trace
from compound.formatting import plural
from compound.graph.configuration import canonical_json, component_of
from compound.graph.space import Demos, Text
from compound.graph.system import System
from compound.narrowing import entry
from compound.optimization.bounds import JobBound, Outlook
from compound.optimization.method import Progress, Proposal, Task
from compound.optimizers.search.memory_part import MemoryPart
from compound.optimizers.search.proposers import opro
from compound.optimizers.search.proposers.demos import WeightedDemo, bootstrap, correct_calls, draw_demos
from compound.optimizers.search.proposers.edits import GROWTH, bounded_edit, clauses_for
from compound.optimizers.search.proposers.exemplars import exemplars
from compound.optimizers.search.proposers.opro import propose_prompt
from compound.optimizers.search.racing import Race, Standing, Track, race
from compound.settings.base import Settings
from compound.settings.references import ModelName
from compound.storage.state import State

MAX_POOL = 48  # examples that demonstrations are bootstrapped from
ATTEMPTS = 6  # per candidate of a round, since duplicates are dropped
POOL_SHARE = 0.4  # of a job's system runs, for bootstrapping demonstrations

Pools = Mapping[str, Sequence[WeightedDemo]]  # demonstrations to draw from, by parameter
Exemplars = Mapping[str, Sequence[str]]  # worked examples of a component as text, by parameter
Proposer = Literal["demos", "edits", "opro"]


class OPROSettings(Settings):
    """Settings of OPRO: a model that sees earlier prompts with their scores writes new ones."""

    lm: ModelName | None = None
    """The model that writes prompts; the system's own by default."""


class PromptSettings(OPROSettings):
    """Proposal of prompts and demonstrations."""

    proposers: tuple[Proposer, ...] | None = None
    """Sources of candidates, used in turn: `demos` (demonstrations from successful traces), `edits` (a
    grammar of edits), `opro` (prompts written by a model). Default: `demos` and `edits`, and `opro` if `lm`
    is set or a model of the system is behind a server; models that run in this process are usually too
    small to write prompts."""
    edits_per_candidate: int = Field(default=2, ge=1)
    """Maximum number of edits between the incumbent and a candidate (a trust region)."""


class RaceProgress(State):
    """Progress of an optimizer that ends with a race.

    Attributes:
        race: the race after its last completed rung; ``None`` before the first.
    """

    race: Race | None = None


class CandidateRace(RaceProgress):
    """Progress of an optimizer that proposes candidates once and races them.

    Attributes:
        candidates: the values that each candidate changes.
    """

    candidates: list[dict[str, object]]


class Source(State):
    """Runs that demonstrations were taken from.

    Attributes:
        configuration: the configuration of the system.
        examples: the names of the examples.
    """

    configuration: dict[str, object]
    examples: list[str]


class Sources(MemoryPart):
    """Memory of demonstrations: the runs they were taken from.

    Attributes:
        sources: the runs by configuration, latest last.
    """

    NAME = "demonstrations"
    sources: list[Source] = Field(default_factory=list)


@dataclass(frozen=True)
class Known:
    """What the proposers of a round read.

    Attributes:
        pools: demonstrations to draw from.
        exemplars: worked examples of the component of each text.
        written: the prompts that a model wrote in this round.
    """

    pools: Pools
    exemplars: Exemplars
    written: list[str]


@dataclass(frozen=True)
class PromptSearch:
    """Optimizer that searches the texts and demonstrations of one or several components jointly.

    A candidate changes the demonstrations of all components at once, since they come from the same successful
    traces, but one text at a time.

    Attributes:
        proposers: the sources of candidates, used in turn: ``demos``, ``edits``, ``opro``.
        most_edits: the maximum number of edits between the incumbent and a candidate.
        lm: the model that writes prompts for ``opro``; ``None`` for the system's own.
        section: the path of its settings, if ``opro`` is added for a model of the system that writes prompts.
        unused: why ``opro`` was not added.
    """

    proposers: tuple[str, ...] = ("demos", "edits")
    most_edits: int = 2
    lm: str | None = None
    section: str = field(default="", compare=False)
    unused: str = field(default="", compare=False)

    @classmethod
    def of(cls, settings: PromptSettings, section: str) -> PromptSearch:
        """Return the search with the settings of a section of ``optimize:``; see `with_writer`."""
        if settings.proposers is not None:
            return cls(settings.proposers, settings.edits_per_candidate, settings.lm)
        proposers, edits = ("demos", "edits"), settings.edits_per_candidate
        if settings.lm is not None:
            return cls((*proposers, "opro"), edits, settings.lm)
        return cls(proposers, edits, section=f"optimize.{section}")

    def with_writer(self, system: System, engine_of: Callable[[str], Engine]) -> PromptSearch:
        """Return the search with ``opro``, if it is left open and a model of the system writes prompts."""
        if not self.section:
            return self
        reasons = []
        for lm in system.lms:
            if not (reason := reason_not_to_write(lm, engine_of)):
                writer = None if lm == system.lms[0] else lm
                return replace(self, proposers=(*self.proposers, "opro"), lm=writer, section="")
            reasons.append(reason)
        why = ", ".join(reasons) or "the system names no model"
        return replace(self, unused=f"{why}; set {self.section}.lm to a model that writes prompts")

    def describe(self, system: System, keys: Collection[str]) -> str:
        """Return the proposers that a search of some parameters uses, and why no model writes prompts."""
        kinds = {"demos": Demos, "edits": Text, "opro": Text}
        spaces = [system.parameters[key] for key in keys]
        used = [name for name in self.proposers if any(isinstance(s, kinds[name]) for s in spaces)]
        told = f"sources of new prompts and demonstrations: {', '.join(used) or 'none'}"
        if "opro" in used:
            told += f" (prompts by {self.lm or next(iter(system.lms), 'no model')})"
        has_texts = any(isinstance(space, Text) for space in spaces)
        return f"{told}; no model writes prompts: {self.unused}" if self.unused and has_texts else told

    def bound(self, outlook: Outlook) -> JobBound:
        """Declare the requests of one round of candidates, all from ``opro``."""
        return self.rounds_bound(outlook, 1)

    def rounds_bound(self, outlook: Outlook, rounds: float) -> JobBound:
        """Return the bound of several rounds, each of which starts from the best of the previous one."""
        keys = [key for key in outlook.keys if key in outlook.texts]
        growth = GROWTH if keys and "edits" in self.proposers else 0
        candidates = first_rung_size(outlook)
        if not keys or "opro" not in self.proposers:
            return JobBound(growth=growth, candidates=candidates)
        longest = max(keys, key=lambda key: outlook.texts[key].bytes)
        calls = rounds * ATTEMPTS * outlook.candidates
        return JobBound([opro.bound(outlook, longest, calls, self.lm)], growth, opro.MAX_TOKENS, candidates)

    async def propose(self, task: Task) -> AsyncIterator[Progress | Proposal]:
        """Bootstrap demonstrations, propose candidates, race them, and propose the winner."""
        pool_examples, examples = split(task)
        if task.resume is not None:
            state = CandidateRace.from_json(task.resume)
        else:
            pools = await bootstrap_pools(task, pool_examples) if "demos" in self.proposers else {}
            shown = await self.exemplars(task, pool_examples or examples)
            state = CandidateRace(candidates=await self.candidates(task, pools, shown))
            count = sum(map(len, pools.values()))
            note = f"{plural(len(state.candidates), 'candidate')}, {plural(count, 'demonstration')} found"
            yield Progress(state.to_json(), note)
        async for event in race_incumbent(task, state.candidates, examples, state):
            yield event

    async def exemplars(self, task: Task, examples: Sequence[Example]) -> Exemplars:
        """Return worked examples of the component of each text, from runs of the incumbent.

        There are none without ``opro``, or if repeating the runs later would cost system runs again.

        Args:
            task: the job.
            examples: examples that the incumbent is run on anyway, of which the first ones are used.
        """
        keys, left = text_keys(task), task.scorer.runs_left
        if "opro" not in self.proposers or not keys or not task.scorer.has_free_repeats:
            return {}
        rows = examples[: int(min(task.minibatch, left))]
        traces = await task.scorer.traces({}, rows) if rows else []
        known, components = {example.id: example for example in rows}, task.system.components
        return {
            key: exemplars(components[component_of(key)], traces, task.system, task.context.metric, known)
            for key in keys
        }

    async def candidates(
        self, task: Task, pools: Pools, shown: Exemplars | None = None
    ) -> list[dict[str, object]]:
        """Return distinct new candidates; the proposers take turns, and later candidates may combine two.

        Args:
            task: the job.
            pools: demonstrations to draw from.
            shown: worked examples, of which requests for new prompts show a few.
        """
        has_texts = bool(text_keys(task))
        is_usable = {"demos": any(pools.values()), "edits": has_texts, "opro": has_texts}
        active = [name for name in self.proposers if is_usable[name]]
        seen = {canonical_json({k: task.system.configuration[k] for k in task.keys})}
        seen |= {canonical_json(dict(t.values)) for t in task.tried}
        candidates: list[dict[str, object]] = []
        known = Known(pools, shown or {}, [])
        for attempt in range(ATTEMPTS * task.candidates if active else 0):
            if len(candidates) == task.candidates or (
                active == ["opro"] and not task.scorer.may_ask(self.lm)
            ):
                break
            rng = generator(task.seed, "candidate", attempt)
            values = await self._propose(active[attempt % len(active)], task, known, rng, attempt)
            if values and len(active) > 1 and attempt >= task.candidates // 2 and rng.random() < 0.5:
                other = active[(attempt + 1) % len(active)]
                values = {**(await self._propose(other, task, known, rng, attempt)), **values}
            full = {k: values.get(k, task.system.configuration[k]) for k in task.keys}
            if values and canonical_json(full) not in seen:
                seen.add(canonical_json(full))
                candidates.append(values)
        return candidates

    async def _propose(
        self,
        proposer: str,
        task: Task,
        known: Known,
        rng: np.random.Generator,
        attempt: int,
    ) -> dict[str, object]:
        if proposer == "demos":
            return {
                key: draw_demos(pool, space.max, rng)
                for key, pool in known.pools.items()
                if pool and isinstance(space := task.system.parameters[key], Demos)
            }
        keys = text_keys(task)
        key = keys[rng.integers(len(keys))]
        current = entry(task.system.configuration, key, str)
        if proposer == "edits":
            space = task.system.parameters[key]
            assert isinstance(space, Text)  # `text_keys` returns keys of texts only
            text = bounded_edit(current, rng, space, self.most_edits, clauses_for(task.system, key))
            return {} if text is None or text == current else {key: text}
        shown = known.exemplars.get(key, ())
        order = generator(task.seed, "exemplars", attempt).permutation(len(shown))
        some = [shown[i] for i in order[: opro.EXEMPLARS]]
        new = await propose_prompt(task, key, attempt, self.lm, known.written, exemplars=some)
        known.written.extend([] if new is None else [new])
        return {} if new is None else {key: new}


def reason_not_to_write(lm: str, engine_of: Callable[[str], Engine]) -> str:
    """Return why a model writes no prompts by default, or an empty text if it does."""
    try:
        engine = engine_of(lm)
        if getattr(engine, "writes_prompts", engine.remote):
            return ""
    except CompoundError as error:
        return error.message
    return f"{lm!r} " + ("declares that it writes no prompts" if engine.remote else "runs in this process")


async def bootstrap_pools(task: Task, examples: Sequence[Example]) -> dict[str, list[WeightedDemo]]:
    """Run the incumbent on pool examples, and return a pool of demonstrations for each demonstrations key.

    Successful runs of earlier jobs on pool examples are included at no cost, since they are cached.
    """
    keys = demo_keys(task)
    if not keys or not examples:
        return {}
    traces = await task.scorer.traces({}, examples)
    served = [trace.example for trace in traces if is_whole(trace) and (trace.score or 0.0) > 0]
    traces += await _earlier_traces(task, [example.id for example in examples], served)
    corrections = correct_calls(traces, task.system, task.context.metric, {e.id: e for e in task.train})
    components = {key: task.system.components[component_of(key)] for key in keys}
    return {key: bootstrap(traces, component, corrections) for key, component in components.items()}


async def _earlier_traces(task: Task, seen: Sequence[str], served: Sequence[str]) -> list[Trace]:
    """Return successful traces of earlier jobs on pool examples, and store those of the incumbent.

    Args:
        task: the job.
        seen: the names of the examples that this job ran the incumbent on.
        served: the names of those whose traces provide demonstrations.
    """
    current, known = task.system.configuration.to_json(), Sources.of(task.context.memory)
    traces, before = list[Trace](), list[str]()
    for source in known.sources:
        is_current = source.configuration == current
        before += source.examples if is_current else []
        names = set(source.examples) - set(seen if is_current else ())
        if names and task.scorer.has_free_repeats:
            repeated = [example for example in pool_order(task) if example.id in names]
            traces += await task.scorer.traces(source.configuration, repeated)
    known.sources = [source for source in known.sources if source.configuration != current]
    known.sources.append(Source(configuration=current, examples=sorted({*before, *served})))
    known.store(task.context.memory)
    return traces


def is_whole(trace: Trace) -> bool:
    """Return whether no call of a trace failed; repeating such a run is free if calls are cached."""
    return trace.failure is None and all(call.failure is None for call in trace.calls)


def pool_order(task: Task) -> list[Example]:
    """Return the train examples in an order that is the same in all jobs of a run."""
    return [task.train[i] for i in generator(task.pool_seed, "pool").permutation(len(task.train))]


def split(task: Task) -> tuple[Sequence[Example], Sequence[Example]]:
    """Return the pool examples, to bootstrap demonstrations from, and the examples to race candidates on.

    The two are disjoint in all jobs of a run: no candidate is scored on an example that a demonstration of
    the system came from.
    """
    ordered = pool_order(task)
    has_demos = any(isinstance(space, Demos) for space in task.system.parameters.values())
    most = len(ordered) // 2 if has_demos else 0
    share = most if task.scorer.runs_left == float("inf") else int(task.scorer.runs_left * POOL_SHARE)
    count = min(most, max(share, task.minibatch), MAX_POOL) if demo_keys(task) else 0
    rest = ordered[most:]
    order = generator(task.seed, "examples").permutation(len(rest))
    return ordered[:count], [rest[i] for i in order]


def demo_keys(task: Task) -> list[str]:
    """Return the job's keys of demonstrations."""
    spaces = task.system.parameters
    return [key for key in task.keys if isinstance(space := spaces[key], Demos) and space.max]


def text_keys(task: Task) -> list[str]:
    """Return the job's keys of texts."""
    return [key for key in task.keys if isinstance(task.system.parameters[key], Text)]


def first_rung_size(outlook: Outlook) -> int:
    """Return the number of candidates in the first rung of a race, after bootstrapping demonstrations."""
    spaces = outlook.system.parameters
    has_demos = any(isinstance(space, Demos) for space in spaces.values())
    most = len(outlook.train) // 2 if has_demos else 0
    bootstraps = any(isinstance(spaces[key], Demos) for key in outlook.keys)
    runs, pool = outlook.runs, 0
    if bootstraps and math.isfinite(runs):
        pool = min(most, max(int(runs * POOL_SHARE), outlook.minibatch), MAX_POOL)
    track = Track(outlook.minibatch, len(outlook.train) - most, outlook.prices.keys(outlook.keys))
    return track.entrants(outlook.candidates, runs - pool)


async def race_incumbent(
    task: Task,
    candidates: Sequence[Mapping[str, object]],
    examples: Sequence[Example],
    state: RaceProgress,
) -> AsyncIterator[Progress | Proposal]:
    """Race candidates against the incumbent, and propose the winner.

    Args:
        task: the job.
        candidates: the values that each candidate changes.
        examples: the examples, in the order of use.
        state: the job's progress, whose race is updated.
    """
    if candidates:
        price = sum(map(task.prices.keys, candidates)) / len(candidates)
        async for after in race(candidates, examples, task.scorer, task.minibatch, price, state.race):
            state.race = after
            yield Progress(state.to_json(), after.note())
    yield propose_winner(candidates, state.race.ranking() if state.race else [])


def propose_winner(candidates: Sequence[Mapping[str, object]], standings: Sequence[Standing]) -> Proposal:
    """Propose the best candidate of the last rung, if it beat the incumbent there."""
    if not standings:
        return Proposal({}, tried=len(candidates), note="no candidate could be scored")
    best = standings[0]
    values = candidates[best.candidate] if best.mean > best.incumbent else {}
    note = "" if values else "no candidate beat the incumbent"
    return Proposal(values, best.incumbent, best.mean, len(candidates), note)
