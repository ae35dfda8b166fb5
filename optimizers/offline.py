"""The offline phase (OPTIMAS, section 4.2): preference pairs under the starting configuration, in waves.

Each wave collects from twice as many inputs as were collected from before. It leaves out components whose
rewards are surely good, those that have nothing to learn, and those whose pairs would cost more than is left.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from compound.bounds import JobBound, Outlook
from compound.configuration import component_of
from compound.contracts import Example
from compound.optimization import Progress, Proposal, Task
from compound.optimizers.guides import Guide, LearnedRewards
from compound.optimizers.local_scoring import State
from compound.optimizers.prompts import PromptSearch, bootstrapped, demo_keys, split, text_keys
from compound.optimizers.rewarding import RunRewards, tunable
from compound.rewards.heads import LEAST_INPUTS
from compound.rewards.pairs import expected_cost
from compound.rewards.settings import RewardLearning


@dataclass(frozen=True)
class Wave:
    """Components to collect pairs of, and from how many further inputs."""

    components: Sequence[str]
    inputs: int


@dataclass(frozen=True)
class OfflineRewards:
    """The offline phase: pairs of every component under the starting configuration; proposes nothing.

    Attributes:
        learning: how pairs are collected and rewards learned.
        prompts: makes candidate prompts to draw outputs with.
        guide: takes up the pairs.
    """

    learning: RewardLearning
    prompts: PromptSearch
    guide: Guide = field(default_factory=LearnedRewards)

    def bound(self, outlook: Outlook) -> JobBound:
        """Declare the candidates that outputs are drawn with; none of them is proposed."""
        found = [
            self.prompts.bound(replace(outlook, keys=(key,), candidates=2 * outlook.candidates))
            for key in {component_of(key): key for key in outlook.keys if key in outlook.texts}.values()
        ]
        return JobBound([request for bound in found for request in bound.requests])

    async def propose(self, task: Task) -> AsyncIterator[Progress | Proposal]:
        """Collect pairs of all components in one batch, then learn and judge their rewards."""
        rewards = RunRewards.open(task, self.learning)
        state: State = dict(task.resume or {"iteration": rewards.iteration + 1})
        components = tunable(task)
        pool, examples = split(task)
        if "proposals" not in state:
            state["proposals"] = await self._proposals(task, pool)
            yield Progress(dict(state), "candidates to draw outputs with")
        while wave := await self._wave(task, rewards, state):
            yield await collected(rewards, wave.components, state, rewards.fresh(examples, wave.inputs))
        if "inputs" in state:
            yield await self.guide.opened(rewards, components)
        else:
            lacks = "train does" if len(examples) < LEAST_INPUTS else "the budget does"
            note = f"{lacks} not hold the {LEAST_INPUTS} inputs that rewards are learned from"
            yield Proposal({}, note=note, facts=rewards.facts(None))

    async def _wave(self, task: Task, rewards: RunRewards, state: State) -> Wave | None:
        """Return where to collect pairs next: from twice as many inputs each time.

        Components that are settled need no more, and those whose rewards would cost more than what is left
        get no more: the cheapest come first.
        """
        done, least = state.get("inputs", 0), 1 if state.get("inputs") else LEAST_INPUTS
        components = await self.guide.unsettled(rewards, tunable(task)) if done else tunable(task)
        kept, left = list[str](), task.scorer.left - least
        for name in sorted(components, key=rewards.cost_of_learning):
            left -= rewards.cost_of_learning(name)
            kept += [name] if left >= 0 else []
        most = min(self.learning.pairs.inputs, len(split(task)[1])) - done
        count = affordable(task, rewards, kept, min(max(done, LEAST_INPUTS), most), 1.0)
        return Wave(kept, count) if kept and count >= least else None

    async def _proposals(self, task: Task, pool: Sequence[Example]) -> dict[str, list[Mapping[str, Any]]]:
        """Return candidate prompts and demonstrations of each component that has them."""
        pools = await bootstrapped(task, pool) if "demos" in self.prompts.proposers else {}
        found = {}
        for component in tunable(task):
            keys = tuple(key for key in task.keys if key.startswith(f"{component}."))
            own = replace(task, keys=keys, candidates=2 * task.candidates)
            if demo_keys(own) or text_keys(own):
                mine = {key: pools[key] for key in keys if key in pools}
                found[component] = settings_of(await self.prompts.candidates(own, mine))
        return found


def settings_of(candidates: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return candidates as settings of their component: keys without its name.

    >>> settings_of([{"answerer.prompt": "Be brief."}])
    [{'prompt': 'Be brief.'}]
    """
    return [{key.split(".", maxsplit=1)[1]: value for key, value in c.items()} for c in candidates]


def affordable(task: Task, rewards: RunRewards, components: Sequence[str], wanted: int, part: float) -> int:
    """Return how many inputs' pairs fit into a part of what is left, at most those wanted.

    Args:
        task: the job.
        rewards: the run's.
        components: whose pairs.
        wanted: inputs.
        part: of what is left.
    """
    sampling = rewards.buffer.sampling
    cost = 1 + sum(expected_cost(task.system, component, sampling) for component in components)
    return wanted if task.scorer.left == float("inf") else min(wanted, int(part * task.scorer.left / cost))


async def collected(
    rewards: RunRewards, components: Sequence[str], state: State, fresh: Sequence[Example]
) -> Progress:
    """Collect and remember pairs of some components from fresh inputs."""
    traced = list(zip(fresh, await rewards.task.scorer.traces({}, fresh), strict=True))
    found = await rewards.collect(components, traced, state["proposals"], state["iteration"])
    state["inputs"] = state.get("inputs", 0) + len(fresh)
    return Progress(dict(state), f"{len(found.pairs)} pairs from {len(fresh)} inputs")
