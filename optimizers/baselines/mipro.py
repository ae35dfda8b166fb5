"""MIPROv2: choose the instructions and demonstrations of all components jointly, by TPE on minibatches.

Opsahl-Ong et al. 2024, "Optimizing Instructions and Demonstrations for Multi-Stage Language Model
Programs". A few values are proposed for each parameter in advance. Trials choose among them jointly, each on
a minibatch; after every round, the best point by mean is scored on a larger set, which decides in the end.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from pydantic import Field

from compound.execution.rng import generator
from compound.formatting import plural
from compound.graph.configuration import canonical_json
from compound.graph.space import Demos, Text
from compound.narrowing import entry
from compound.optimization.bounds import JobBound, Outlook
from compound.optimization.method import Progress, Proposal, Task
from compound.optimizers.search import opro
from compound.optimizers.search.demos import WeightedDemo, draw_demos
from compound.optimizers.search.edits import GROWTH, bounded_edit
from compound.optimizers.search.opro import propose_prompt
from compound.optimizers.search.prompts import bootstrap_pools, split
from compound.optimizers.search.trials import JointSearch, rounds, sizes, trials_for
from compound.settings.base import Settings
from compound.settings.references import ModelName

ATTEMPTS = 4  # per value, since duplicates are dropped
MIN_MINIBATCHES = 3  # of the smallest search: the incumbent, one trial, and the trial's final score


class MIPROSettings(Settings):
    """Settings of `mipro`: proposal of instructions. Demonstrations come from successful traces."""

    proposers: tuple[Literal["edits", "opro"], ...] = ("edits",)
    """Sources of instructions, used in turn: `edits` (a grammar of edits), `opro` (instructions written by a
    model)."""
    edits_per_candidate: int = Field(default=2, ge=1)
    """Maximum number of edits between the incumbent and an instruction of `edits`."""
    lm: ModelName | None = None
    """The model that writes instructions; the system's own by default."""


@dataclass(frozen=True)
class Mipro:
    """Optimizer that searches the texts and demonstrations of all components jointly.

    Attributes:
        proposers: the sources of texts, used in turn: ``edits``, ``opro``.
        most_edits: the maximum number of edits between the incumbent and a text of ``edits``.
        lm: the model that writes texts for ``opro``; ``None`` for the system's own.
        values: the maximum number of values of a parameter, including the incumbent's.
        minibatch: the maximum number of examples of one trial.
    """

    proposers: tuple[str, ...] = ("edits",)
    most_edits: int = 2
    lm: str | None = None
    values: int = 6
    minibatch: int = 35

    def bound(self, outlook: Outlook) -> JobBound:
        """Declare the requests of ``opro``, which has its turn in some of the attempts at each text."""
        keys = [key for key in outlook.keys if key in outlook.texts]
        growth = GROWTH if keys and "edits" in self.proposers else 0
        attempts = range(ATTEMPTS * self._new_values(outlook.candidates))
        turns = sum(self.proposers[n % len(self.proposers)] == "opro" for n in attempts if self.proposers)
        candidates = 0 if outlook.runs < MIN_MINIBATCHES * outlook.minibatch else None
        if not keys or not turns:
            return JobBound(growth=growth, candidates=candidates)
        requests = [opro.bound(outlook, key, turns, self.lm) for key in keys]
        return JobBound(requests, growth, opro.MAX_TOKENS, candidates)

    async def propose(self, task: Task) -> AsyncIterator[Progress | Proposal]:
        """Propose values, try them jointly, and propose the best point on the larger set."""
        pool_examples, examples = split(task)
        if task.resume is not None:
            state = JointSearch.from_json(task.resume)
        else:
            pools = await bootstrap_pools(task, pool_examples)
            values = {key: await self._values(task, key, pools.get(key, ())) for key in task.keys}
            state = self._start(task, {key: some for key, some in values.items() if some}, len(examples))
            count = sum(map(len, state.values.values()))
            yield Progress(
                state.to_json(), f"{plural(count, 'value')} for {plural(len(state.values), 'parameter')}"
            )
        larger = examples[: state.larger]
        if state.values and larger:
            async for after in rounds(task, state, larger):
                done, best = len(after.trials), max(trial.mean for trial in after.scored)
                note = f"{len(after.scored)} on {after.larger} examples: best {best:.3f}"
                yield Progress(after.to_json(), note, step=done, of=after.wanted)
        yield _proposal(state)

    async def _values(self, task: Task, key: str, pool: Sequence[WeightedDemo]) -> list[object]:
        """Return new values of a parameter, without the incumbent's."""
        seen = {canonical_json(task.system.configuration[key])}
        values: list[object] = []
        count = self._new_values(task.candidates)
        for attempt in range(ATTEMPTS * count):
            if len(values) == count:
                break
            value = await self._value(task, key, pool, attempt, [v for v in values if isinstance(v, str)])
            if value and canonical_json(value) not in seen:
                seen.add(canonical_json(value))
                values.append(value)
        return values

    def _new_values(self, candidates: int) -> int:
        """Return the number of new values per parameter, without the incumbent's."""
        return max(1, min(self.values, candidates) - 1)

    async def _value(
        self, task: Task, key: str, pool: Sequence[WeightedDemo], attempt: int, known: Sequence[str]
    ) -> object:
        """Return a new value; ``None`` if there is none."""
        rng = generator(task.seed, "mipro", key, attempt)
        space = task.system.parameters[key]
        if isinstance(space, Demos):
            return draw_demos(pool, space.max, rng) if pool else None
        if not self.proposers:
            return None
        if self.proposers[attempt % len(self.proposers)] == "opro":
            return await propose_prompt(task, key, attempt, self.lm, known)
        assert isinstance(space, Text)  # the method passes texts and demonstrations only
        return bounded_edit(entry(task.system.configuration, key, str), rng, space, self.most_edits)

    def _start(self, task: Task, values: Mapping[str, list[object]], examples: int) -> JointSearch:
        """Return the progress of a new search."""
        wanted = trials_for([len(some) + 1 for some in values.values()])
        least, most = min(task.minibatch, examples), min(self.minibatch, examples)
        batch, larger = sizes(
            wanted, least, most, examples, task.scorer.runs_left, task.scorer.has_free_repeats
        )
        return JointSearch(values=dict(values), wanted=wanted, batch=batch, larger=larger)


def _proposal(state: JointSearch) -> Proposal:
    """Propose the point that is best on the larger set."""
    if not state.trials:
        return Proposal({}, note="no new values to choose from, or too few system runs for a trial")
    before, best = state.scored[0].mean, max(state.scored, key=lambda trial: trial.mean)
    values = state.changes(best.point)
    tried = len({canonical_json(trial.point) for trial in state.trials})
    return Proposal(values, before, best.mean, tried, "" if values else "no trial beat the incumbent")
