"""Instructions and demonstrations of all components, chosen together by TPE on minibatches: MIPROv2.

Opsahl-Ong et al. 2024, "Optimizing Instructions and Demonstrations for Multi-Stage Language Model
Programs". A few values are made for each parameter beforehand; trials choose among them jointly, each on
a minibatch, and after every round the best by mean is scored on a larger set, which decides in the end.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from compound.configuration import canonical
from compound.optimization import Progress, Proposal, Task
from compound.optimizers.demos import Found, draw
from compound.optimizers.edits import edited
from compound.optimizers.opro import written
from compound.optimizers.prompts import bootstrapped, split
from compound.optimizers.trials import changes, rounds, sizes, trials_for
from compound.space import Demos
from compound.streams import generator


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
        wanted = max(1, min(self.values, task.candidates) - 1)
        for attempt in range(4 * wanted):
            if len(found) == wanted:
                break
            value = await self._value(task, key, pool, attempt)
            if value and canonical(value) not in seen:
                seen.add(canonical(value))
                found.append(value)
        return found

    async def _value(self, task: Task, key: str, pool: Sequence[Found], attempt: int) -> Any:
        rng = generator(task.seed, "mipro", key, attempt)
        space = task.system.parameters[key]
        if isinstance(space, Demos):
            return draw(pool, space.max, rng) if pool else None
        if not self.proposers:
            return None
        if self.proposers[attempt % len(self.proposers)] == "opro":
            return await written(task, key, attempt, self.lm)
        text = edited(task.system.configuration[key], rng, self.most_edits)
        return None if space.problem(text) else text

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
