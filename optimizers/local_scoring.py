"""Scoring candidates by a local reward: the component alone, on recorded inputs, a few rounds."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from compound.configuration import canonical
from compound.errors import first_of
from compound.optimization import Bench, Progress, Task
from compound.optimizers.prompts import demo_keys, text_keys
from compound.rewards.model import CallValues, Vector
from compound.settings import RewardSettings
from compound.streams import generator, stream
from compound.system import System
from compound.trace import Call, Trace

FINALISTS = 2
State = dict[str, Any]
More = Callable[[Task, Sequence[Sequence[Any]]], Awaitable[list[dict[str, Any]]]]


class Scores(Protocol):
    """Scores (inputs, outputs) of a component: `compound.rewards.model.RewardModel`, or a baseline."""

    def rewards(self, component: str, calls: Sequence[CallValues]) -> Vector:
        """Return one number for each call, higher for better outputs."""
        ...


@dataclass(frozen=True)
class Recorded:
    """Calls to make again with other settings, and the system whose traces they are in."""

    system: System
    calls: Sequence[tuple[Trace, Call]]


@dataclass(frozen=True)
class LocalScorer:
    """One component's local search.

    Attributes:
        task: the job.
        component: whose settings are searched.
        model: scores its calls.
        settings: how many rounds.
        part: of the job's share that may be spent by the end of the last round.
    """

    task: Task
    component: str
    model: Scores
    settings: RewardSettings
    part: float

    async def rounds(self, state: State, recorded: Recorded, more: More) -> AsyncIterator[Progress]:
        """Score the candidates of the state, then further rounds; leaves all in ``state["scored"]``."""
        calls = recorded.calls
        scored = state.setdefault("scored", [[{}, 0.0]])
        while calls and state["step"] < self.settings.steps and self._affordable(state, calls):
            first = len(scored) == 1
            fresh = [{}, *state["candidates"]] if first else await self._another(state, more)
            if not fresh:
                break
            means = await self.means(fresh, recorded)
            scored[:] = [*([] if first else scored), *map(list, zip(fresh, means, strict=True))]
            state["step"] += 1
            best = max(mean for _, mean in scored)
            note = f"local round {state['step']}: best {best:+.2f} against {scored[0][1]:+.2f}"
            yield Progress(dict(state), note)

    async def _another(self, state: State, more: More) -> list[dict[str, Any]]:
        seen = {canonical(values) for values, _ in state["scored"]}
        task = replace(self.task, seed=stream(self.task.seed, "round", state["step"]))
        return [values for values in await more(task, state["scored"]) if canonical(values) not in seen]

    def _affordable(self, state: State, calls: Sequence[tuple[Trace, Call]]) -> bool:
        """Return whether another round fits; the first always does."""
        if len(state["scored"]) == 1 or state["share"] == float("inf"):
            return True
        spent = state["share"] - self.task.scorer.left
        counted = max(1, sum(call.counted for call in calls[0][0].calls))
        cost = self.task.candidates * len(calls) / counted if calls[0][1].counted else 0.0
        return bool(spent + cost <= self.part * state["share"])

    async def means(self, candidates: Sequence[Mapping[str, Any]], recorded: Recorded) -> list[float]:
        """Return each candidate's mean local reward over the calls; a failed one gets less than the worst."""
        prefix, calls = f"{self.component}.", recorded.calls
        changes = recorded.system.configuration.diff(self.task.system.configuration)
        own = {c.key: c.after for c in changes if c.key.startswith(prefix)}  # the incumbent's, since then
        jobs = [
            (trace, call, {key.removeprefix(prefix): value for key, value in {**own, **values}.items()})
            for values in candidates
            for trace, call in calls
        ]
        made = await run_alone(self.task.bench, recorded.system, jobs)
        read = [(call.inputs, call.outputs) for call in made if call.failure is None]
        rewards = iter(self.model.rewards(self.component, read).tolist())
        found = np.array([np.nan if call.failure else next(rewards) for call in made])
        rows = found.reshape(len(candidates), len(calls))
        worst = np.where(
            np.isnan(rows).all(0), 0.0, np.nanmin(np.where(np.isnan(rows), np.inf, rows), axis=0)
        )
        return [float(np.where(np.isnan(row), worst - 1.0, row).mean()) for row in rows]


async def run_alone(
    bench: Bench, system: System, jobs: Sequence[tuple[Trace, Call, Mapping[str, Any]]]
) -> list[Call]:
    """Make calls of traces again with other settings, all in flight together; returns them in order.

    Raises:
        BudgetExhausted: the budget ended before all were made.
    """
    places = asyncio.Semaphore(bench.rules.concurrency)
    executor = bench.executor

    async def one(trace: Trace, call: Call, settings: Mapping[str, Any]) -> Call:
        async with places:
            return await executor.again(system, trace, call.address, settings=settings, sample=call.sample)

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(*job)) for job in jobs]
    except BaseExceptionGroup as errors:
        raise first_of(errors) from None
    return [
        executor.settle_call(task.result(), trace) for task, (trace, _, _) in zip(tasks, jobs, strict=True)
    ]


def finalists(task: Task, scored: Sequence[Sequence[Any]], temperature: float) -> State:
    """Return what is put to the test, and the local rewards before and after.

    Of prompts, the best few that beat the incumbent; settings are drawn by their rewards.
    """
    incumbent = scored[0][1]
    count = FINALISTS if task.scorer.left >= 5 * task.minibatch else 1
    if text_keys(task) or demo_keys(task):
        better = sorted((item for item in scored if item[1] > incumbent), key=lambda item: -item[1])
        found = [list(item) for item in better[:count]]
    else:
        rng = generator(task.seed, "boltzmann")
        drawn = boltzmann([mean for _, mean in scored], temperature, count, rng)
        found = [list(scored[i]) for i in drawn if scored[i][0]]
    after = found[0][1] if found else None
    facts = {"local_before": incumbent, "local_after": after, "locally_tried": len(scored) - 1}
    return {"finalists": [values for values, _ in found], "local": facts}


def boltzmann(
    rewards: Sequence[float], temperature: float, count: int, rng: np.random.Generator
) -> list[int]:
    """Draw positions without replacement, with probability proportional to ``exp(reward / temperature)``.

    The largest of reward plus Gumbel noise is such a draw (Gumbel 1954), and the next largest the next.

    >>> boltzmann([0.0, 9.0, 0.0], 0.1, 1, np.random.default_rng(0))
    [1]
    """
    noisy = np.asarray(rewards) / temperature + rng.gumbel(size=len(rewards))
    return [int(i) for i in np.argsort(-noisy, kind="stable")[:count]]
