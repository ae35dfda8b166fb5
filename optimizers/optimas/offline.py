"""Offline phase (OPTIMAS, section 4.2): collect preference pairs under the initial configuration, in waves.

Each wave doubles the number of inputs collected from. It skips components whose rewards are already
accurate, components with constant outputs, and components whose pairs would cost more than the
remaining budget.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace

from compound.core.example import Example
from compound.core.formatting import plural
from compound.core.storage.state import State
from compound.graph.configuration import component_of
from compound.optimization.method import JobPlan, PlannedJob, Progress, Proposal, Task
from compound.optimizers.scheduling.jobs import demo_keys, text_keys
from compound.optimizers.search.joint import JointSearch, start
from compound.optimizers.search.rewarding import RunRewards, tunable
from compound.optimizers.search.rows import divide
from compound.optimizers.search.sources import CandidateSources
from compound.rewards.heads import MIN_INPUTS
from compound.rewards.pairs import expected_cost
from compound.rewards.settings import RewardLearning


class Collecting(State):
    """Progress of the collection of pairs in a job.

    Attributes:
        proposals: by component, candidate settings to sample outputs with.
        inputs: the number of inputs that the job has collected pairs from.
    """

    iteration: int
    proposals: dict[str, list[dict[str, object]]]
    inputs: int = 0


@dataclass(frozen=True)
class OfflineRewards:
    """Optimizer of the offline phase: collects pairs of every component, and proposes no values.

    Attributes:
        learning: settings of pair collection and reward learning.
        sources: sources of prompts and demonstrations to sample outputs with.
    """

    learning: RewardLearning
    sources: CandidateSources
    scoring: type[RunRewards] = RunRewards

    def plan(self, job: PlannedJob) -> JobPlan:
        """Return the requests for the candidates that outputs are sampled with; none is proposed."""
        first = {component_of(key): key for key in job.texts}
        plans = [
            JointSearch(self.sources).plan(replace(job, keys=(key,))) for key in first.values()
        ]
        return JobPlan([request for plan in plans for request in plan.requests])

    async def propose(self, task: Task) -> AsyncIterator[Progress | Proposal]:
        """Collect pairs of all components in waves, then fit the rewards and report their accuracy."""
        rewards = self.scoring.load(task, self.learning)
        examples = divide(task, self.sources).scored
        if task.resume is not None:
            state = Collecting.from_json(task.resume)
        else:
            iteration = rewards.iteration + 1
            state = Collecting(iteration=iteration, proposals=await self._proposals(task))
            yield Progress(state.to_json(), "proposed candidates to sample outputs with")
        while wave := await self._wave(task, rewards, state.inputs):
            components, count = wave
            note = await collect_pairs(rewards, components, state, rewards.fresh(examples, count))
            yield Progress(state.to_json(), note)
        if state.inputs:
            yield await rewards.finish_offline(tunable(task))
        else:
            limit = "the train split" if len(examples) < MIN_INPUTS else "the budget"
            note = f"{limit} is too small: learning rewards requires {MIN_INPUTS} inputs"
            yield Proposal({}, note=note, facts=rewards.facts(None))

    async def _wave(
        self, task: Task, rewards: RunRewards, done: int
    ) -> tuple[list[str], int] | None:
        """Return the components and the number of inputs of the next wave, if there is one.

        There is none if no component needs more pairs, or the budget is used up.

        Components are selected in order of increasing cost, as long as the budget covers learning
        their rewards.
        """
        least = 1 if done else MIN_INPUTS
        components = await rewards.needing_pairs(tunable(task)) if done else tunable(task)
        selected, left = list[str](), task.scorer.runs_left - least
        for name in sorted(components, key=rewards.cost_of_learning):
            left -= rewards.cost_of_learning(name)
            selected += [name] if left >= 0 else []
        most = min(self.learning.pairs.inputs, len(divide(task, self.sources).scored)) - done
        count = affordable_inputs(task, rewards, selected, min(max(done, MIN_INPUTS), most))
        return (selected, count) if selected and count >= least else None

    async def _proposals(self, task: Task) -> dict[str, list[dict[str, object]]]:
        """Return candidate settings of each component that has prompts or demonstrations."""
        proposals: dict[str, list[dict[str, object]]] = {}
        for component in tunable(task):
            keys = tuple(key for key in task.keys if component_of(key) == component)
            own = replace(task, keys=keys)
            if demo_keys(own) or text_keys(own):
                made = await start(own, self.sources, divide(own, self.sources))
                proposals[component] = [
                    {
                        key.removeprefix(f"{component}."): value
                        for key, value in candidate.values.items()
                    }
                    for candidate in made.candidates
                ]
        return proposals


def affordable_inputs(
    task: Task, rewards: RunRewards, components: Sequence[str], wanted: int
) -> int:
    """Return the number of inputs whose pairs the job's remaining budget covers."""
    sampling = rewards.buffer.sampling
    cost = 1 + sum(expected_cost(task.system, component, sampling) for component in components)
    left = task.scorer.runs_left
    return wanted if left == float("inf") else min(wanted, int(left / cost))


async def collect_pairs(
    rewards: RunRewards, components: Sequence[str], state: Collecting, fresh: Sequence[Example]
) -> str:
    """Collect and store pairs of some components from fresh inputs; return a progress note."""
    traced = list(zip(fresh, await rewards.task.scorer.traces({}, fresh), strict=True))
    collected = await rewards.collect(components, traced, state.proposals, state.iteration)
    state.inputs += len(fresh)
    return f"{plural(len(collected.pairs), 'pair')} from {plural(len(fresh), 'input')}"
