"""Instructions and demonstrations of all components, chosen together by TPE on minibatches: MIPROv2.

Opsahl-Ong et al. 2024, "Optimizing Instructions and Demonstrations for Multi-Stage Language Model
Programs". A few values are made for each parameter beforehand; trials choose among them jointly, each on
a minibatch, and after every round the best by mean is scored on a larger set, which decides in the end.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field

from compound.bounds import JobBound, Outlook
from compound.configuration import canonical
from compound.optimization import Progress, Proposal, Task
from compound.optimizers import opro
from compound.optimizers.demos import Found, draw
from compound.optimizers.edits import GROWTH, bounded_edit
from compound.optimizers.opro import written
from compound.optimizers.prompts import bootstrapped, split
from compound.optimizers.trials import changes, rounds, sizes, trials_for
from compound.references import ModelName
from compound.settings import Settings
from compound.space import Demos, Text
from compound.streams import generator

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
        state = dict(task.resume or {})
        if not state:
            pools = await bootstrapped(task, pool_examples)
            values = {key: await self._values(task, key, pools.get(key, ())) for key in task.keys}
            values = {key: some for key, some in values.items() if some}
            state = {"values": values, **self._sizes(task, values, len(examples))}
            state |= {"round": 0, "trials": [], "scored": []}
            yield Progress(state, f"{sum(map(len, values.values()))} values for {len(values)} parameters")
        larger = examples[: state["larger"]]
        if state["values"] and larger:
            async for after in rounds(task, state, larger):
                state = after
                yield Progress(state, _note(state))
        yield _proposal(state)

    async def _values(self, task: Task, key: str, pool: Sequence[Found]) -> list[Any]:
        """Return values for one parameter besides the incumbent's."""
        seen = {canonical(task.system.configuration[key])}
        found: list[Any] = []
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
    ) -> Any:
        rng = generator(task.seed, "mipro", key, attempt)
        space = task.system.parameters[key]
        if isinstance(space, Demos):
            return draw(pool, space.max, rng) if pool else None
        if not self.proposers:
            return None
        if self.proposers[attempt % len(self.proposers)] == "opro":
            return await written(task, key, attempt, self.lm, known)
        assert isinstance(space, Text)  # the method gives no other kind to this optimizer
        return bounded_edit(task.system.configuration[key], rng, space, self.most_edits)

    def _sizes(self, task: Task, values: Mapping[str, Sequence[Any]], examples: int) -> dict[str, int]:
        trials = trials_for([len(some) + 1 for some in values.values()])
        least, most = min(task.minibatch, examples), min(self.minibatch, examples)
        batch, larger = sizes(trials, least, most, examples, task.scorer.left, task.scorer.free_repeats)
        return {"wanted": trials, "batch": batch, "larger": larger}


def _note(state: Mapping[str, Any]) -> str:
    best = max(mean for _, mean in state["scored"])
    trials, scored = len(state["trials"]), len(state["scored"])
    return f"{trials} trials, {scored} on {state['larger']} examples: best {best:.3f}"


def _proposal(state: Mapping[str, Any]) -> Proposal:
    tried = len({canonical(point) for point, _ in state["trials"]})
    if not state["trials"]:
        return Proposal({}, note="nothing to choose from, or too few runs to try anything")
    (_, before), *_ = state["scored"]
    point, after = max(state["scored"], key=lambda pair: pair[1])
    values = changes(state, point)
    return Proposal(values, before, after, tried, "" if values else "no trial beat the incumbent")
