"""Prompt search: candidates from pluggable proposers, raced on train examples by the global reward.

Examples that demonstrations are taken from are never used to score them.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from pydantic import Field

from compound.example import Example
from compound.execution.rng import generator
from compound.execution.trace import Trace
from compound.formatting import plural
from compound.graph.configuration import canonical, component_of
from compound.graph.space import Demos, Text
from compound.narrowing import entry
from compound.optimization.bounds import JobBound, Outlook
from compound.optimization.method import Progress, Proposal, Task
from compound.optimizers.search import opro
from compound.optimizers.search.demos import Found, bootstrap, corrected, draw
from compound.optimizers.search.edits import GROWTH, bounded_edit
from compound.optimizers.search.opro import written
from compound.optimizers.search.racing import Race, Standing, race, rungs
from compound.optimizers.search.remembered import Remembered
from compound.settings.base import Settings
from compound.settings.references import ModelName
from compound.storage.state import State

LARGEST_POOL = 48  # examples
ATTEMPTS = 6  # to make each candidate of a round; those equal to an earlier one are dropped
POOL_SHARE = 0.4  # of a job's system runs, to find demonstrations

Pools = Mapping[str, Sequence[Found]]
Proposer = Literal["demos", "edits", "opro"]


class OPROSettings(Settings):
    """How prompts are rewritten by a model that sees earlier prompts with their scores."""

    lm: ModelName | None = None
    """The model that writes prompts; the system's own by default."""


class PromptSettings(OPROSettings):
    """How prompts and demonstrations are proposed."""

    proposers: tuple[Proposer, ...] = ("demos", "edits")
    """Where candidates come from: demonstrations from successful traces, a grammar of edits, an LLM."""
    edits_per_candidate: int = Field(default=2, ge=1)
    """The most edits between an incumbent and a candidate: a trust region."""


class Contest(State):
    """The progress of an optimizer that ends with a race.

    Attributes:
        race: the race after its last rung; ``None`` before the first.
    """

    race: Race | None = None


class CandidateRace(Contest):
    """The progress of an optimizer that makes candidates once and races them.

    Attributes:
        candidates: values to change, one mapping for each candidate.
    """

    candidates: list[dict[str, object]]


class Source(State):
    """Runs that demonstrations were taken from.

    Attributes:
        configuration: the values of the system that was run.
        examples: the names of the examples.
    """

    configuration: dict[str, object]
    examples: list[str]


class Sources(Remembered):
    """What a run remembers of its demonstrations: where they were found, the latest configuration last."""

    NAME = "demonstrations"
    sources: list[Source] = Field(default_factory=list)


@dataclass(frozen=True)
class PromptSearch:
    """Searches the texts and demonstrations of one or several components together.

    Demonstrations of several components come from the same successful traces, so a candidate changes those
    of all components at once; a text is changed one at a time.

    Attributes:
        proposers: where candidates come from, in turn: ``demos``, ``edits``, ``opro``.
        most_edits: the most edits between the incumbent and a candidate.
        lm: the model that writes for ``opro``; the system's own when ``None``.
    """

    proposers: tuple[str, ...] = ("demos", "edits")
    most_edits: int = 2
    lm: str | None = None

    @classmethod
    def of(cls, settings: PromptSettings) -> PromptSearch:
        """Return the search that settings describe."""
        return cls(settings.proposers, settings.edits_per_candidate, settings.lm)

    def bound(self, outlook: Outlook) -> JobBound:
        """Declare the requests of one round of candidates; only ``opro`` makes any."""
        return self.rounds_bound(outlook, 1)

    def rounds_bound(self, outlook: Outlook, rounds: int) -> JobBound:
        """Return the bound of several rounds, each of which starts from the best of the one before."""
        keys = [key for key in outlook.keys if key in outlook.texts]
        growth = GROWTH if keys and "edits" in self.proposers else 0
        held = raced(outlook)
        if not keys or "opro" not in self.proposers:
            return JobBound(growth=growth, candidates=held)
        longest = max(keys, key=lambda key: outlook.texts[key].bytes)
        calls = rounds * ATTEMPTS * outlook.candidates
        return JobBound([opro.bound(outlook, longest, calls, self.lm)], growth, opro.WRITTEN, held)

    async def propose(self, task: Task) -> AsyncIterator[Progress | Proposal]:
        """Bootstrap demonstrations, make candidates, race them, propose the winner."""
        pool_examples, examples = split(task)
        if task.resume is not None:
            state = CandidateRace.from_json(task.resume)
        else:
            pools = await bootstrapped(task, pool_examples) if "demos" in self.proposers else {}
            state = CandidateRace(candidates=await self.candidates(task, pools))
            found = sum(map(len, pools.values()))
            note = f"{plural(len(state.candidates), 'candidate')}, {plural(found, 'demonstration')} found"
            yield Progress(state.to_json(), note)
        async for event in race_incumbent(task, state.candidates, examples, state):
            yield event

    async def candidates(self, task: Task, pools: Pools) -> list[dict[str, object]]:
        """Make distinct candidates, the proposers taking turns; later ones may combine two changes."""
        texts = bool(text_keys(task))
        makers = {"demos": any(pools.values()), "edits": texts, "opro": texts}
        active = [name for name in self.proposers if makers[name]]
        seen = {canonical({k: task.system.configuration[k] for k in task.keys})}
        seen |= {canonical(dict(t.values)) for t in task.tried}
        found: list[dict[str, object]] = []
        written: list[str] = []  # by a model, in this round
        for attempt in range(ATTEMPTS * task.candidates if active else 0):
            if len(found) == task.candidates or (active == ["opro"] and not task.scorer.may_ask(self.lm)):
                break
            rng = generator(task.seed, "candidate", attempt)
            made = await self._make(active[attempt % len(active)], task, pools, rng, attempt, written)
            if made and len(active) > 1 and attempt >= task.candidates // 2 and rng.random() < 0.5:
                other = active[(attempt + 1) % len(active)]
                made = {**(await self._make(other, task, pools, rng, attempt, written)), **made}
            full = {k: made.get(k, task.system.configuration[k]) for k in task.keys}
            if made and canonical(full) not in seen:
                seen.add(canonical(full))
                found.append(made)
        return found

    async def _make(
        self,
        proposer: str,
        task: Task,
        pools: Pools,
        rng: np.random.Generator,
        attempt: int,
        known: list[str],
    ) -> dict[str, object]:
        if proposer == "demos":
            return {
                key: draw(pool, space.max, rng)
                for key, pool in pools.items()
                if pool and isinstance(space := task.system.parameters[key], Demos)
            }
        keys = text_keys(task)
        key = keys[rng.integers(len(keys))]
        current = entry(task.system.configuration, key, str)
        if proposer == "edits":
            space = task.system.parameters[key]
            assert isinstance(space, Text)  # of `text_keys`
            text = bounded_edit(current, rng, space, self.most_edits)
            return {} if text is None or text == current else {key: text}
        new = await written(task, key, attempt, self.lm, known)
        known += [] if new is None else [new]
        return {} if new is None else {key: new}


async def bootstrapped(task: Task, examples: Sequence[Example]) -> dict[str, list[Found]]:
    """Run the incumbent on examples set apart, and return demonstrations for each key that holds some.

    What earlier jobs of the run did well on examples set apart serves again: it is in the cache.
    """
    keys = demo_keys(task)
    if not keys or not examples:
        return {}
    traces = await task.scorer.traces({}, examples)
    served = [trace.example for trace in traces if is_whole(trace) and (trace.score or 0.0) > 0]
    traces += await _earlier(task, [example.id for example in examples], served)
    corrections = corrected(traces, task.system, task.context.metric, {e.id: e for e in task.train})
    components = {key: task.system.components[component_of(key)] for key in keys}
    return {key: bootstrap(traces, component, corrections) for key, component in components.items()}


async def _earlier(task: Task, seen: Sequence[str], served: Sequence[str]) -> list[Trace]:
    """Return what earlier jobs did on examples set apart, and remember which of the incumbent's runs serve.

    Args:
        task: the job.
        seen: names of the examples that it ran the incumbent on.
        served: those of them whose runs demonstrations come from.
    """
    current, known = task.system.configuration.to_json(), Sources.of(task.context.memory)
    traces, before = list[Trace](), list[str]()
    for source in known.sources:
        is_current = source.configuration == current
        before += source.examples if is_current else []
        wanted = set(source.examples) - set(seen if is_current else ())
        if wanted and task.scorer.free_repeats:
            again = [example for example in set_apart(task) if example.id in wanted]
            traces += await task.scorer.traces(source.configuration, again)
    known.sources = [source for source in known.sources if source.configuration != current]
    known.sources.append(Source(configuration=current, examples=sorted({*before, *served})))
    known.store(task.context.memory)
    return traces


def is_whole(trace: Trace) -> bool:
    """Return whether no call of a trace failed: to run it again costs nothing, where calls are cached."""
    return trace.failure is None and all(call.failure is None for call in trace.calls)


def set_apart(task: Task) -> list[Example]:
    """Return the train examples in an order that is the same in all jobs of a run."""
    return [task.train[i] for i in generator(task.pool_seed, "pool").permutation(len(task.train))]


def split(task: Task) -> tuple[Sequence[Example], Sequence[Example]]:
    """Return the examples to find demonstrations on and, apart from them, those to race on.

    The second are never those that any demonstration of the system came from, in whichever job.
    """
    apart = set_apart(task)
    shown = any(isinstance(space, Demos) for space in task.system.parameters.values())
    most = len(apart) // 2 if shown else 0
    share = most if task.scorer.left == float("inf") else int(task.scorer.left * POOL_SHARE)
    count = min(most, max(share, task.minibatch), LARGEST_POOL) if demo_keys(task) else 0
    rest = apart[most:]
    order = generator(task.seed, "examples").permutation(len(rest))
    return apart[:count], [rest[i] for i in order]


def demo_keys(task: Task) -> list[str]:
    """Return the keys that hold demonstrations."""
    spaces = task.system.parameters
    return [key for key in task.keys if isinstance(space := spaces[key], Demos) and space.max]


def text_keys(task: Task) -> list[str]:
    """Return the keys that hold texts."""
    return [key for key in task.keys if isinstance(task.system.parameters[key], Text)]


def raced(outlook: Outlook) -> int:
    """Return how many candidates a race compares at first, after demonstrations are found."""
    spaces = outlook.system.parameters
    shown = any(isinstance(space, Demos) for space in spaces.values())
    most = len(outlook.train) // 2 if shown else 0
    own = any(isinstance(spaces[key], Demos) for key in outlook.keys)
    runs, pool = outlook.runs, 0
    if own and math.isfinite(runs):
        pool = min(most, max(int(runs * POOL_SHARE), outlook.minibatch), LARGEST_POOL)
    plan = rungs(outlook.candidates, outlook.minibatch, len(outlook.train) - most, runs - pool)
    return plan[0][0] if plan else 0


async def race_incumbent(
    task: Task,
    candidates: Sequence[Mapping[str, object]],
    examples: Sequence[Example],
    state: Contest,
) -> AsyncIterator[Progress | Proposal]:
    """Race candidates, and propose the winner.

    Args:
        task: the job.
        candidates: values to change, one mapping for each candidate.
        examples: in the order in which they are used.
        state: the job's progress, which keeps the race.
    """
    if candidates:
        async for after in race(candidates, examples, task.scorer, task.minibatch, state.race):
            state.race = after
            yield Progress(state.to_json(), after.note())
    yield winner(candidates, state.race.ranking() if state.race else [])


def winner(candidates: Sequence[Mapping[str, object]], standings: Sequence[Standing]) -> Proposal:
    """Return the best candidate of the last rung, if it beat the incumbent there."""
    if not standings:
        return Proposal({}, tried=len(candidates), note="no candidate could be scored")
    best = standings[0]
    values = candidates[best.candidate] if best.mean > best.incumbent else {}
    note = "" if values else "no candidate beat the incumbent"
    return Proposal(values, best.incumbent, best.mean, len(candidates), note)
