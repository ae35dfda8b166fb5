"""The offline phase (OPTIMAS, section 4.2): preference pairs under the starting configuration, in waves.

Each wave collects from twice as many inputs as were collected from before. It leaves out components whose
rewards are surely good, those that have nothing to learn, and those whose pairs would cost more than is left.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from compound.example import Example
from compound.formatting import plural
from compound.graph.configuration import component_of
from compound.optimization.bounds import JobBound, Outlook
from compound.optimization.method import Progress, Proposal, Task
from compound.optimizers.optimas.guides import Guide, LearnedRewards
from compound.optimizers.optimas.rewarding import RunRewards, tunable
from compound.optimizers.search.prompts import PromptSearch, bootstrapped, demo_keys, split, text_keys
from compound.rewards.heads import LEAST_INPUTS
from compound.rewards.pairs import expected_cost
from compound.rewards.settings import RewardLearning
from compound.storage.state import State


class Collecting(State):
    """The progress of a job that collects pairs.

    Attributes:
        iteration: the iteration of the pairs.
        proposals: for each component, candidate settings to draw its outputs with.
        inputs: from how many inputs the job has collected pairs.
    """

    iteration: int
    proposals: dict[str, list[dict[str, object]]]
    inputs: int = 0


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
        pool, examples = split(task)
        if task.resume is not None:
            state = Collecting.from_json(task.resume)
        else:
            iteration = rewards.iteration + 1
            state = Collecting(iteration=iteration, proposals=await self._proposals(task, pool))
            yield Progress(state.to_json(), "candidates to draw outputs with")
        while wave := await self._wave(task, rewards, state.inputs):
            fresh = rewards.fresh(examples, wave.inputs)
            note = await collect_pairs(rewards, wave.components, state, fresh)
            yield Progress(state.to_json(), note)
        if state.inputs:
            yield await self.guide.opened(rewards, tunable(task))
        else:
            lacks = "train does" if len(examples) < LEAST_INPUTS else "the budget does"
            note = f"{lacks} not hold the {LEAST_INPUTS} inputs that rewards are learned from"
            yield Proposal({}, note=note, facts=rewards.facts(None))

    async def _wave(self, task: Task, rewards: RunRewards, done: int) -> Wave | None:
        """Return where to collect pairs next: from twice as many inputs each time.

        Components that are settled need no more, and those whose rewards would cost more than what is left
        get no more: the cheapest come first.

        Args:
            task: the job.
            rewards: the run's.
            done: from how many inputs pairs were collected.
        """
        least = 1 if done else LEAST_INPUTS
        components = await self.guide.unsettled(rewards, tunable(task)) if done else tunable(task)
        kept, left = list[str](), task.scorer.left - least
        for name in sorted(components, key=rewards.cost_of_learning):
            left -= rewards.cost_of_learning(name)
            kept += [name] if left >= 0 else []
        most = min(self.learning.pairs.inputs, len(split(task)[1])) - done
        count = affordable(task, rewards, kept, min(max(done, LEAST_INPUTS), most), 1.0)
        return Wave(kept, count) if kept and count >= least else None

    async def _proposals(self, task: Task, pool: Sequence[Example]) -> dict[str, list[dict[str, object]]]:
        """Return candidate prompts and demonstrations of each component that has them."""
        pools = await bootstrapped(task, pool) if "demos" in self.prompts.proposers else {}
        found: dict[str, list[dict[str, object]]] = {}
        for component in tunable(task):
            keys = tuple(key for key in task.keys if key.startswith(f"{component}."))
            own = replace(task, keys=keys, candidates=2 * task.candidates)
            if demo_keys(own) or text_keys(own):
                mine = {key: pools[key] for key in keys if key in pools}
                found[component] = settings_of(await self.prompts.candidates(own, mine))
        return found


def settings_of(candidates: Sequence[Mapping[str, object]]) -> list[dict[str, object]]:
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


async def collect_pairs(
    rewards: RunRewards, components: Sequence[str], state: Collecting, fresh: Sequence[Example]
) -> str:
    """Collect and remember pairs of some components from fresh inputs; return a note for people."""
    traced = list(zip(fresh, await rewards.task.scorer.traces({}, fresh), strict=True))
    found = await rewards.collect(components, traced, state.proposals, state.iteration)
    state.inputs += len(fresh)
    return f"{plural(len(found.pairs), 'pair')} from {plural(len(fresh), 'input')}"
