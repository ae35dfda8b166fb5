"""Instructions and demonstrations of all components, chosen together by TPE on minibatches: MIPROv2.

Opsahl-Ong et al. 2024, "Optimizing Instructions and Demonstrations for Multi-Stage Language Model
Programs". A few values are made for each parameter beforehand; trials choose among them jointly, each on
a minibatch, and after every round the best by mean is scored on a larger set, which decides in the end.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from pydantic import Field

from compound.execution.rng import generator
from compound.formatting import plural
from compound.graph.configuration import canonical
from compound.graph.space import Demos, Text
from compound.narrowing import entry
from compound.optimization.bounds import JobBound, Outlook
from compound.optimization.method import Progress, Proposal, Task
from compound.optimizers.search import opro
from compound.optimizers.search.demos import Found, draw
from compound.optimizers.search.edits import GROWTH, bounded_edit
from compound.optimizers.search.opro import written
from compound.optimizers.search.prompts import bootstrapped, split
from compound.optimizers.search.trials import JointSearch, rounds, sizes, trials_for
from compound.settings.base import Settings
from compound.settings.references import ModelName

ATTEMPTS = 4  # to make each value
MINIBATCHES = 3  # that the smallest search runs


class MIPROSettings(Settings):
    """How instructions are proposed; demonstrations come from successful traces."""

    proposers: tuple[Literal["edits", "opro"], ...] = ("edits",)
    """Where instructions come from, in turn: a grammar of edits, an LLM."""
    edits_per_candidate: int = Field(default=2, ge=1)
    """The most edits between the incumbent and an instruction of `edits`."""
    lm: ModelName | None = None
    """The model that writes instructions; the system's own by default."""


@dataclass(frozen=True)
class Mipro:
    """Searches the texts and demonstrations of all components jointly.

    Attributes:
        proposers: where texts come from, in turn: ``edits``, ``opro``.
        most_edits: the most edits between the incumbent and a text of ``edits``.
        lm: the model that writes for ``opro``; the system's own when ``None``.
        values: the most values of one parameter, the incumbent's among them.
        minibatch: the most examples of one trial.
    """

    proposers: tuple[str, ...] = ("edits",)
    most_edits: int = 2
    lm: str | None = None
    values: int = 6
    minibatch: int = 35

    def bound(self, outlook: Outlook) -> JobBound:
        """Declare the requests of ``opro``, whose turn it is at some of the attempts at each text."""
        keys = [key for key in outlook.keys if key in outlook.texts]
        growth = GROWTH if keys and "edits" in self.proposers else 0
        attempts = range(ATTEMPTS * self._wanted(outlook.candidates))
        turns = sum(self.proposers[n % len(self.proposers)] == "opro" for n in attempts if self.proposers)
        least = MINIBATCHES * outlook.minibatch  # the incumbent, a trial, and its final score
        held = 0 if outlook.runs < least else None
        if not keys or not turns:
            return JobBound(growth=growth, candidates=held)
        asked = [opro.bound(outlook, key, turns, self.lm) for key in keys]
        return JobBound(asked, growth, opro.WRITTEN, held)

    async def propose(self, task: Task) -> AsyncIterator[Progress | Proposal]:
        """Make values, try them together, propose the best by the larger set."""
        pool_examples, examples = split(task)
        if task.resume is not None:
            state = JointSearch.from_json(task.resume)
        else:
            pools = await bootstrapped(task, pool_examples)
            values = {key: await self._values(task, key, pools.get(key, ())) for key in task.keys}
            state = self._start(task, {key: some for key, some in values.items() if some}, len(examples))
            count = sum(map(len, state.values.values()))
            yield Progress(
                state.to_json(), f"{plural(count, 'value')} for {plural(len(state.values), 'parameter')}"
            )
        larger = examples[: state.larger]
        if state.values and larger:
            async for after in rounds(task, state, larger):
                done = len(after.trials)
                yield Progress(after.to_json(), _note(after), step=done, of=after.wanted)
        yield _proposal(state)

    async def _values(self, task: Task, key: str, pool: Sequence[Found]) -> list[object]:
        """Return values for one parameter besides the incumbent's."""
        seen = {canonical(task.system.configuration[key])}
        found: list[object] = []
        wanted = self._wanted(task.candidates)
        for attempt in range(ATTEMPTS * wanted):
            if len(found) == wanted:
                break
            value = await self._value(task, key, pool, attempt, [v for v in found if isinstance(v, str)])
            if value and canonical(value) not in seen:
                seen.add(canonical(value))
                found.append(value)
        return found

    def _wanted(self, candidates: int) -> int:
        """Return how many values of a parameter to make besides the incumbent's."""
        return max(1, min(self.values, candidates) - 1)

    async def _value(
        self, task: Task, key: str, pool: Sequence[Found], attempt: int, known: Sequence[str]
    ) -> object:
        """Return another value; ``None`` when there is none."""
        rng = generator(task.seed, "mipro", key, attempt)
        space = task.system.parameters[key]
        if isinstance(space, Demos):
            return draw(pool, space.max, rng) if pool else None
        if not self.proposers:
            return None
        if self.proposers[attempt % len(self.proposers)] == "opro":
            return await written(task, key, attempt, self.lm, known)
        assert isinstance(space, Text)  # the method gives no other kind to this optimizer
        return bounded_edit(entry(task.system.configuration, key, str), rng, space, self.most_edits)

    def _start(self, task: Task, values: Mapping[str, list[object]], examples: int) -> JointSearch:
        """Return a search before its first trial."""
        wanted = trials_for([len(some) + 1 for some in values.values()])
        least, most = min(task.minibatch, examples), min(self.minibatch, examples)
        batch, larger = sizes(wanted, least, most, examples, task.scorer.left, task.scorer.free_repeats)
        return JointSearch(values=dict(values), wanted=wanted, batch=batch, larger=larger)


def _note(state: JointSearch) -> str:
    best = max(trial.mean for trial in state.scored)
    return f"{len(state.scored)} on {state.larger} examples: best {best:.3f}"


def _proposal(state: JointSearch) -> Proposal:
    """Propose the point that is best on the larger set."""
    if not state.trials:
        return Proposal({}, note="nothing to choose from, or too few runs to try anything")
    before, best = state.scored[0].mean, max(state.scored, key=lambda trial: trial.mean)
    values = state.changes(best.point)
    tried = len({canonical(trial.point) for trial in state.trials})
    return Proposal(values, before, best.mean, tried, "" if values else "no trial beat the incumbent")
