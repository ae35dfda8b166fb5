"""Local optimization (OPTIMAS, section 4.3): one component's settings, chosen by its local reward.

A candidate runs the component alone on recorded inputs; its mean local reward there is compared with the
incumbent's on the same inputs. The best few then meet the global reward on train examples, unless the local
reward is nearly always right. Where a parameter may be a reward that chooses for each input, the component's
own joins them. Components whose rewards order too few held-out pairs right go by the global reward, together.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from compound.bounds import JobBound, Outlook
from compound.configuration import canonical, component_of, components_of
from compound.contracts import Example
from compound.optimization import Progress, Proposal, Task
from compound.optimizers.guides import Guidance, Guide, LearnedRewards
from compound.optimizers.local_scoring import LocalScorer, LocalSearchSettings, State, finalists
from compound.optimizers.offline import affordable, collected, settings_of
from compound.optimizers.per_input import chosen_by_reward
from compound.optimizers.prompts import PromptSearch, bootstrapped, contest, demo_keys, split, text_keys
from compound.optimizers.rewarding import RunRewards, tunable
from compound.optimizers.sampling import enumerated, suggest
from compound.rewards.heads import LEAST_INPUTS
from compound.rewards.settings import RewardLearning
from compound.space import Choice, Demos, Float, Int, Text
from compound.streams import generator

ONLINE, LOCAL = 0.2, 0.5  # of a job's share: for fresh pairs, and for local runs; the rest tests the best


@dataclass(frozen=True)
class LocalSearch:
    """Improves one component by its local reward.

    Attributes:
        learning: how pairs are collected and rewards learned.
        search: how many rounds, and how the best are chosen.
        prompts: makes candidate prompts and demonstrations.
        verify: whether the best always meet the global reward too, however good the local one is.
        guide: what scores calls.
        fresh: inputs that each job collects pairs from.
    """

    learning: RewardLearning
    search: LocalSearchSettings
    prompts: PromptSearch
    verify: bool = False
    guide: Guide = field(default_factory=LearnedRewards)
    fresh: int = 0

    def bound(self, outlook: Outlook) -> JobBound:
        """Declare the candidates of each local round, or two rounds where the global reward steers."""
        texts = [key for key in outlook.texts if key in outlook.system.parameters]
        together = replace(outlook, keys=tuple(dict.fromkeys((*outlook.keys, *texts))))
        return self.prompts.rounds_bound(together, max(2, self.search.rounds))

    async def propose(self, task: Task) -> AsyncIterator[Progress | Proposal]:
        """Adapt the reward on fresh inputs, search locally, and put the best to the test."""
        (component,) = tunable(task)
        pool, examples = split(task)
        rewards = RunRewards.open(task, self.learning)
        state: State = dict(task.resume or {"share": limit(task), "iteration": rewards.iteration + 1})
        if "candidates" not in state:
            state |= {"candidates": await self._first(task, rewards, pool), "race": None, "step": 0}
            state["proposals"] = {component: settings_of(state["candidates"])}
            yield Progress(dict(state), f"{len(state['candidates'])} candidates")
        async for event in self._adapt(task, rewards, component, state, examples):
            yield event
        guidance = await self.guide.guidance(rewards, component)
        steered = not guidance.distrust
        facts = {**guidance.facts, "component": component, "steered": steered, "why": guidance.distrust}
        together = not steered and (text_keys(task) or demo_keys(task))
        search = self._together if together else self._alone
        async for step in search(task, rewards, guidance, state):
            yield replace(step, facts={**facts, **step.facts}) if isinstance(step, Proposal) else step

    async def _adapt(
        self, task: Task, rewards: RunRewards, component: str, state: State, examples: Sequence[Example]
    ) -> AsyncIterator[Progress]:
        """Collect pairs of fresh inputs: more where the offline phase could not afford enough."""
        if "adapted" in state or not self.guide.adapts or rewards.mute(component):
            return
        state["adapted"] = True
        enough = len({pair.example for pair, _ in rewards.buffer.pairs(component)}) >= LEAST_INPUTS
        wanted = self.fresh if enough else self.learning.pairs.inputs
        count = affordable(task, rewards, [component], wanted, ONLINE)
        if count and (enough or count >= LEAST_INPUTS):
            yield await collected(rewards, [component], state, rewards.fresh(examples, count))

    async def _together(
        self, task: Task, rewards: RunRewards, guidance: Guidance, state: State
    ) -> AsyncIterator[Progress | Proposal]:
        """Search texts and demonstrations of all components that no reward may steer by the global one.

        Together, since demonstrations of several components come from the same traces (ADR 0007).
        """
        keys = tuple(
            key
            for key, space in task.system.parameters.items()
            if isinstance(space, Text | Demos) and component_of(key) in guidance.distrusted
        )
        facts = {"together": components_of(keys)}
        tried = [known for known in task.tried if set(keys) <= set(known.values)]  # what says all of them
        whole = replace(task, keys=keys, tried=tried, resume=state.get("together"))
        async for event in self.prompts.propose(whole):
            if isinstance(event, Progress):
                state["together"] = event.state
                yield Progress(dict(state), f"by the global reward: {event.note}")
                continue
            if len(facts["together"]) == 1 and (raced := state.get("together")):
                await self._remember(task, rewards, raced["candidates"], raced["race"], state["iteration"])
            yield replace(event, facts=facts)

    async def _alone(
        self, task: Task, rewards: RunRewards, guidance: Guidance, state: State
    ) -> AsyncIterator[Progress | Proposal]:
        """Search one component by its local reward, if that may steer, and put the best to the test."""
        if "finalists" not in state and guidance.distrust:
            state |= {"finalists": state["candidates"], "local": {}, "tested": True}
            yield Progress(dict(state), f"by the global reward: {guidance.distrust}")
        elif "finalists" not in state:
            async for event in self._by_reward(task, rewards, guidance, state):
                yield event
        best, tried = state["finalists"], state["local"].get("locally_tried", 0)
        if not guidance.distrust and not best:
            note = "no candidate beat the incumbent by the local reward"
            yield Proposal({}, tried=tried, note=note, facts=state["local"])
            return
        if best and not state["tested"]:
            yield Proposal(best[0], tried=tried, note="by the local reward alone", facts=state["local"])
            return
        async for result in contest(task, state["finalists"], split(task)[1], state):
            if isinstance(result, Progress):
                state["race"] = result.state["race"]
                yield result
                continue
            await self._remember(task, rewards, state["finalists"], state["race"], state["iteration"])
            yield replace(result, facts=state["local"])

    async def _by_reward(
        self, task: Task, rewards: RunRewards, guidance: Guidance, state: State
    ) -> AsyncIterator[Progress]:
        """Score candidates locally; leaves the finalists in the state."""
        (component,) = tunable(task)
        scorer = LocalScorer(task, component, guidance.scores, self.search.rounds, LOCAL + ONLINE)
        recorded = await self.guide.recorded(rewards, component, state.get("recorded"))
        state["recorded"] = sorted({trace.example for trace, _ in recorded.calls})
        async for event in scorer.rounds(state, recorded, self._next):
            yield event
        state |= finalists(task, state["scored"], self.search.temperature)
        rewards.note_tried(task, [values for values, _ in state["scored"]])
        state["tested"] = self._tested(task, guidance.facts, component)
        if for_each := chosen_by_reward(task, rewards, component, guidance.scores):
            state |= {"finalists": [*state["finalists"][:1], *for_each], "tested": True}
        yield Progress(dict(state), f"{len(state['finalists'])} to test")

    async def _remember(
        self,
        task: Task,
        rewards: RunRewards,
        candidates: Sequence[Mapping[str, Any]],
        race: Mapping[str, Any] | None,
        iteration: int,
    ) -> None:
        """Keep what a race of one component's settings told."""
        if self.guide.adapts and race:
            (component,) = tunable(task)
            examples = split(task)[1]
            await rewards.remember_race(component, candidates, race, examples, iteration)

    def _tested(self, task: Task, facts: Mapping[str, Any], component: str) -> bool:
        """Return whether the best meet the global reward: unless it can say nothing, or nothing new."""
        if task.scorer.left < 2 * task.minibatch:
            return False
        accuracy = facts["accuracy"].get(component)
        return self.verify or accuracy is None or accuracy["mean"] < self.learning.reward.check_below

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


def _drawn(task: Task, number: int) -> dict[str, Any]:
    rng = generator(task.seed, "draw", number)
    spaces = {key: task.system.parameters[key] for key in task.keys}
    return {key: s.draw(rng) for key, s in spaces.items() if isinstance(s, Choice | Int | Float)}
