"""Local optimization (OPTIMAS, section 4.3): one component's settings, chosen by its local reward.

A candidate runs the component alone on recorded inputs; its mean local reward there is compared with the
incumbent's on the same inputs. The best few then meet the global reward on train examples, unless the local
reward is nearly always right. Where a parameter may be a reward that chooses for each input, the component's
own joins them. A component whose reward orders too few held-out pairs right goes by the global reward alone.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from compound.configuration import canonical
from compound.contracts import Example
from compound.optimization import Progress, Proposal, Task
from compound.optimizers.guides import Guide, LearnedRewards
from compound.optimizers.local_scoring import LocalScorer, State, finalists
from compound.optimizers.per_input import chosen_by_reward
from compound.optimizers.prompts import PromptSearch, bootstrapped, contest, demo_keys, split, text_keys
from compound.optimizers.rewarding import RunRewards, tunable
from compound.optimizers.sampling import enumerated, suggest
from compound.rewards.heads import LEAST_INPUTS
from compound.rewards.pairs import expected_cost
from compound.settings import RewardSettings
from compound.space import Choice, Float, Int
from compound.streams import generator

ONLINE, LOCAL = 0.2, 0.5  # of a job's share: for fresh pairs, and for local runs; the rest tests the best


@dataclass(frozen=True)
class OfflineRewards:
    """The offline phase: pairs of every component under the starting configuration; proposes nothing.

    Attributes:
        settings: how rewards are learned.
        prompts: makes candidate prompts to draw outputs with.
        guide: takes up the pairs.
    """

    settings: RewardSettings
    prompts: PromptSearch
    guide: Guide = field(default_factory=LearnedRewards)

    async def propose(self, task: Task) -> AsyncIterator[Progress | Proposal]:
        """Collect pairs of all components in one batch, then learn and judge their rewards."""
        rewards = RunRewards.open(task, self.settings)
        state: State = dict(task.resume or {"iteration": rewards.iteration + 1})
        components = tunable(task)
        pool, examples = split(task)
        if "proposals" not in state:
            state["proposals"] = await self._proposals(task, pool)
            yield Progress(dict(state), "candidates to draw outputs with")
        while wanted := await self._wanted(task, rewards, state):
            yield await _collected(rewards, components, state, rewards.fresh(examples, wanted))
        if "inputs" in state:
            yield await self.guide.opened(rewards, components)
        else:
            note = f"the budget does not hold the pairs of {LEAST_INPUTS} inputs"
            yield Proposal({}, note=note, facts=rewards.facts(None))

    async def _wanted(self, task: Task, rewards: RunRewards, state: State) -> int:
        """Return how many more inputs to collect from: twice as many each time, until all are settled."""
        done = state.get("inputs", 0)
        if done and await self.guide.settled(rewards, tunable(task)):
            return 0
        most = min(self.settings.inputs, len(split(task)[1])) - done
        count = _inputs(task, rewards, tunable(task), min(max(done, LEAST_INPUTS), most), 1.0)
        return count if done or count >= LEAST_INPUTS else 0

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


@dataclass(frozen=True)
class LocalSearch:
    """Improves one component by its local reward.

    Attributes:
        settings: how rewards are learned and used.
        prompts: makes candidate prompts and demonstrations.
        verify: whether the best always meet the global reward too, however good the local one is.
        guide: what scores calls.
    """

    settings: RewardSettings
    prompts: PromptSearch
    verify: bool = False
    guide: Guide = field(default_factory=LearnedRewards)

    async def propose(self, task: Task) -> AsyncIterator[Progress | Proposal]:
        """Adapt the reward on fresh inputs, search locally, and put the best to the test."""
        (component,) = tunable(task)
        pool, examples = split(task)
        rewards = RunRewards.open(task, self.settings)
        state: State = dict(task.resume or {"share": limit(task), "iteration": rewards.iteration + 1})
        if "candidates" not in state:
            state |= {"candidates": await self._first(task, rewards, pool), "race": None, "step": 0}
            state["proposals"] = {component: settings_of(state["candidates"])}
            yield Progress(dict(state), f"{len(state['candidates'])} candidates")
        facts: dict[str, Any] = {}
        async for event in self._adapt(task, rewards, component, state, examples):
            yield event
        async for event in self._search(task, rewards, component, state, facts):
            yield event
        if state["finalists"] and not state["tested"]:
            values, tried = state["finalists"][0], facts["locally_tried"]
            yield Proposal(values, tried=tried, note="by the local reward alone", facts=facts)
            return
        async for result in contest(task, state["finalists"], examples, state):
            if isinstance(result, Progress):
                state["race"] = result.state["race"]
                yield result
                continue
            if self.guide.adapts and state["race"]:
                rows = state["race"]["standings"]
                await rewards.remember_race(component, state["finalists"], rows, examples, state["iteration"])
            yield replace(result, facts=facts)

    async def _adapt(
        self, task: Task, rewards: RunRewards, component: str, state: State, examples: Sequence[Example]
    ) -> AsyncIterator[Progress]:
        """Collect pairs of fresh inputs: more where the offline phase could not afford enough."""
        if "adapted" in state or not self.guide.adapts:
            return
        state["adapted"] = True
        enough = len({pair.example for pair, _ in rewards.buffer.pairs(component)}) >= LEAST_INPUTS
        wanted = self.settings.fresh if enough else self.settings.inputs
        count = _inputs(task, rewards, [component], wanted, ONLINE)
        if count and (enough or count >= LEAST_INPUTS):
            yield await _collected(rewards, [component], state, rewards.fresh(examples, count))

    async def _search(
        self, task: Task, rewards: RunRewards, component: str, state: State, facts: dict[str, Any]
    ) -> AsyncIterator[Progress]:
        """Search by the local reward, where it may steer; leaves the finalists in the state."""
        guidance = await self.guide.guidance(rewards, component)
        why, steered = guidance.distrust, not guidance.distrust
        facts |= {**guidance.facts, "component": component, "steered": steered, "why": why}
        if "finalists" not in state and not steered:
            state |= {"finalists": state["candidates"], "local": {}, "tested": True}
            yield Progress(dict(state), f"by the global reward: {why}")
        elif "finalists" not in state:
            scorer = LocalScorer(task, component, guidance.scores, self.settings, LOCAL + ONLINE)
            recorded = await self.guide.recorded(rewards, component)
            async for event in scorer.rounds(state, recorded, self._next):
                yield event
            state |= finalists(task, state["scored"], self.settings.temperature)
            rewards.note_tried(task, [values for values, _ in state["scored"]])
            state["tested"] = self._tested(task, facts, component)
            if for_each := chosen_by_reward(task, rewards, component, guidance.scores):
                state |= {"finalists": [*state["finalists"][:1], *for_each], "tested": True}
            yield Progress(dict(state), f"{len(state['finalists'])} to test")
        facts |= state["local"]

    def _tested(self, task: Task, facts: Mapping[str, Any], component: str) -> bool:
        """Return whether the best meet the global reward: unless it can say nothing, or nothing new."""
        if task.scorer.left < 2 * task.minibatch:
            return False
        accuracy = facts["accuracy"].get(component)
        return self.verify or accuracy is None or accuracy["mean"] < self.settings.sure

    async def _first(
        self, task: Task, rewards: RunRewards, pool: Sequence[Example]
    ) -> list[Mapping[str, Any]]:
        """Return the first round of candidates, others than an earlier job had in this place."""
        if demo_keys(task) or text_keys(task):
            pools = await bootstrapped(task, pool) if "demos" in self.prompts.proposers else {}
            return rewards.untried(task, await self.prompts.candidates(task, pools))
        grid = enumerated(task)
        if len(grid) <= task.candidates:
            return rewards.untried(task, grid)
        drawn = {canonical(values): values for i in range(8 * task.candidates) if (values := _drawn(task, i))}
        return rewards.untried(task, list(drawn.values()))[: task.candidates]

    async def _next(self, task: Task, scored: Sequence[Sequence[Any]]) -> list[dict[str, Any]]:
        """Return another round: edits of the best prompt so far, or what TPE suggests."""
        best = max(scored, key=lambda item: item[1])[0]
        if text_keys(task):
            nearby = replace(task, system=task.system.bind({**task.system.configuration, **best}))
            made = await self.prompts.candidates(nearby, {})
            return [{**best, **values} for values in made]
        if demo_keys(task) or len(enumerated(task)) <= task.candidates:
            return []
        trials = [[{key: values[key] for key in task.keys}, mean] for values, mean in scored if values]
        round_: list[dict[str, Any]] = []
        for _ in range(task.candidates):
            round_.append(suggest(task, trials, round_))
        return round_


def limit(task: Task) -> float | None:
    """Return the system runs a job may spend, ``None`` without a limit: a state is JSON."""
    return None if task.scorer.left == float("inf") else task.scorer.left


def settings_of(candidates: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return candidates as settings of their component: keys without its name.

    >>> settings_of([{"answerer.prompt": "Be brief."}])
    [{'prompt': 'Be brief.'}]
    """
    return [{key.split(".", maxsplit=1)[1]: value for key, value in c.items()} for c in candidates]


def _drawn(task: Task, number: int) -> dict[str, Any]:
    rng = generator(task.seed, "draw", number)
    spaces = {key: task.system.parameters[key] for key in task.keys}
    return {key: s.draw(rng) for key, s in spaces.items() if isinstance(s, Choice | Int | Float)}


def _inputs(task: Task, rewards: RunRewards, components: Sequence[str], wanted: int, part: float) -> int:
    """Return how many inputs' pairs fit into a part of what is left."""
    sampling = rewards.buffer.sampling
    cost = 1 + sum(expected_cost(task.system, component, sampling) for component in components)
    return wanted if task.scorer.left == float("inf") else min(wanted, int(part * task.scorer.left / cost))


async def _collected(
    rewards: RunRewards, components: Sequence[str], state: State, fresh: Sequence[Example]
) -> Progress:
    traced = list(zip(fresh, await rewards.task.scorer.traces({}, fresh), strict=True))
    found = await rewards.collect(components, traced, state["proposals"], state["iteration"])
    state["inputs"] = state.get("inputs", 0) + len(fresh)
    return Progress(dict(state), f"{len(found.pairs)} pairs from {len(fresh)} inputs")
