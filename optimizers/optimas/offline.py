"""Offline phase (OPTIMAS, section 4.2): collect preference pairs under the initial configuration, in waves.

Each wave doubles the number of inputs collected from. It skips components whose rewards are already accurate,
components with constant outputs, and components whose pairs would cost more than the remaining budget.
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
from compound.optimizers.scheduling.jobs import demo_keys, text_keys
from compound.optimizers.search.joint import JointSearch, start
from compound.optimizers.search.rows import divide
from compound.optimizers.search.sources import CandidateSources
from compound.rewards.heads import MIN_INPUTS
from compound.rewards.pairs import expected_cost
from compound.rewards.settings import RewardLearning
from compound.storage.state import State


class Collecting(State):
    """Progress of the collection of pairs in a job.

    Attributes:
        iteration: the iteration of the pairs.
        proposals: by component, candidate settings to sample outputs with.
        inputs: the number of inputs that the job has collected pairs from.
    """

    iteration: int
    proposals: dict[str, list[dict[str, object]]]
    inputs: int = 0


@dataclass(frozen=True)
class Wave:
    """The components to collect pairs of, and the number of further inputs to collect from."""

    components: Sequence[str]
    inputs: int


@dataclass(frozen=True)
class OfflineRewards:
    """Optimizer of the offline phase: collects pairs of every component, and proposes no values.

    Attributes:
        learning: settings of pair collection and reward learning.
        sources: sources of prompts and demonstrations to sample outputs with.
        guide: processes the pairs.
    """

    learning: RewardLearning
    sources: CandidateSources
    guide: Guide = field(default_factory=LearnedRewards)

    def bound(self, outlook: Outlook) -> JobBound:
        """Declare the requests for the candidates that outputs are sampled with; none is proposed."""
        bounds = [
            JointSearch(self.sources).bound(replace(outlook, keys=(key,)))
            for key in {component_of(key): key for key in outlook.keys if key in outlook.texts}.values()
        ]
        return JobBound([request for bound in bounds for request in bound.requests])

    async def propose(self, task: Task) -> AsyncIterator[Progress | Proposal]:
        """Collect pairs of all components in waves, then fit the rewards and report their accuracy."""
        rewards = RunRewards.open(task, self.learning)
        examples = divide(task, self.sources).scored
        if task.resume is not None:
            state = Collecting.from_json(task.resume)
        else:
            iteration = rewards.iteration + 1
            state = Collecting(iteration=iteration, proposals=await self._proposals(task))
            yield Progress(state.to_json(), "proposed candidates to sample outputs with")
        while wave := await self._wave(task, rewards, state.inputs):
            fresh = rewards.fresh(examples, wave.inputs)
            note = await collect_pairs(rewards, wave.components, state, fresh)
            yield Progress(state.to_json(), note)
        if state.inputs:
            yield await self.guide.finish_offline(rewards, tunable(task))
        else:
            limit = "the train split" if len(examples) < MIN_INPUTS else "the budget"
            note = f"{limit} is too small: learning rewards requires {MIN_INPUTS} inputs"
            yield Proposal({}, note=note, facts=rewards.facts(None))

    async def _wave(self, task: Task, rewards: RunRewards, done: int) -> Wave | None:
        """Return the next wave; ``None`` if no component needs more pairs or the budget is used up.

        Components are selected in order of increasing cost, as long as the budget covers learning their
        rewards.

        Args:
            task: the job.
            rewards: the rewards of the run.
            done: the number of inputs that pairs were collected from.
        """
        least = 1 if done else MIN_INPUTS
        components = await self.guide.needing_pairs(rewards, tunable(task)) if done else tunable(task)
        selected, left = list[str](), task.scorer.runs_left - least
        for name in sorted(components, key=rewards.cost_of_learning):
            left -= rewards.cost_of_learning(name)
            selected += [name] if left >= 0 else []
        most = min(self.learning.pairs.inputs, len(divide(task, self.sources).scored)) - done
        count = affordable_inputs(task, rewards, selected, min(max(done, MIN_INPUTS), most))
        return Wave(selected, count) if selected and count >= least else None

    async def _proposals(self, task: Task) -> dict[str, list[dict[str, object]]]:
        """Return candidate settings of each component that has prompts or demonstrations."""
        proposals: dict[str, list[dict[str, object]]] = {}
        for component in tunable(task):
            keys = tuple(key for key in task.keys if component_of(key) == component)
            own = replace(task, keys=keys)
            if demo_keys(own) or text_keys(own):
                made = await start(own, self.sources, divide(own, self.sources))
                proposals[component] = settings_of([candidate.values for candidate in made.candidates])
        return proposals


def settings_of(candidates: Sequence[Mapping[str, object]]) -> list[dict[str, object]]:
    """Return candidates as settings of their component: with keys without the component's name.

    >>> settings_of([{"answerer.prompt": "Be brief."}])
    [{'prompt': 'Be brief.'}]
    """
    return [{key.split(".", maxsplit=1)[1]: value for key, value in c.items()} for c in candidates]


def affordable_inputs(task: Task, rewards: RunRewards, components: Sequence[str], wanted: int) -> int:
    """Return the number of inputs whose pairs the job's remaining budget covers.

    Args:
        task: the job.
        rewards: the rewards of the run.
        components: the components to collect pairs of.
        wanted: the maximum number of inputs.
    """
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
