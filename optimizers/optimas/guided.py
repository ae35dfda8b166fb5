"""Local optimization (OPTIMAS, section 4.3): search the parameters of one component by its local reward.

The local reward of the component lowers the variance of the estimated gains of its candidates
(`compound.optimizers.optimas.guided_race`); it never decides alone. A component whose local evaluation costs
as much as a global one, such as the last one, is searched by the global reward, at what its candidates cost.
If a parameter can be chosen per input, the component's reward is a further candidate, which is tested on
examples apart from those of the job's race. Earlier jobs may have raced on some of them.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace

from pydantic import Field

from compound.example import Example
from compound.formatting import plural
from compound.graph.configuration import canonical_json, components_of
from compound.graph.space import PerInput
from compound.graph.system import System
from compound.optimization.bounds import JobBound, Outlook
from compound.optimization.method import Progress, Proposal, Task
from compound.optimization.prices import Prices
from compound.optimization.savings import LocalSavings
from compound.optimizers.optimas.candidates import first_candidates, has_more, next_candidates
from compound.optimizers.optimas.evaluation_table import Conditions, FitCritic
from compound.optimizers.optimas.guided_race import GuidedRace, GuidedRacer, RaceMemory
from compound.optimizers.optimas.part import Part, part_of
from compound.optimizers.optimas.rewarding import RunRewards, shared_backbone, tunable
from compound.optimizers.search.prompts import PromptSearch, RaceProgress, split
from compound.optimizers.search.racing import race
from compound.optimizers.search.reserve import ReservingScorer
from compound.rewards.buffer import Entry
from compound.rewards.gains.critic import fit_critic
from compound.rewards.gains.estimates import EstimateGains, estimate_gains
from compound.rewards.model import RewardModel
from compound.rewards.pairs import has_certain_downstream
from compound.rewards.policy import store_reward
from compound.rewards.settings import RewardLearning
from compound.storage.artifacts import without_path
from compound.storage.state import State

WORTH = 1.2  # price of a global over a local evaluation below which there is nothing to save
POLICY_SHARE = 0.3  # of a job's runs, to test a reward that chooses per input
NOTHING_FOLLOWS = "nothing counted follows it"
APART = 0.4  # of the examples, for that test; the job's race does not use them
ARMS = 3  # candidates of that test: the incumbent, the best single option, and the per-input candidate


class ScoredValues(State):
    """A candidate with its estimated gain."""

    values: dict[str, object]
    gain: float


class GuidedProgress(RaceProgress):
    """Progress of `GuidedSearch`; its race is that of the current round, if it is by the global reward.

    Attributes:
        iteration: the iteration of the draws that the job adds.
        candidates: the candidates of the current round.
        round: the number of completed rounds.
        reserve: the system runs that the current round leaves; ``None`` before its start.
        guided: the guided race of the current round; ``None`` before its first rung.
        scored: the candidates of the completed rounds.
        best: the values with the highest estimated gain in the last completed round; empty if none gains.
        gain: their estimated gain over the incumbent.
        before: the incumbent's mean score; ``None`` before the first evaluation.
        policies: the candidates of the last test: the best values, and the reward that chooses per input;
            ``None`` before.
    """

    iteration: int
    candidates: list[dict[str, object]]
    round: int = 0
    reserve: float | None = None
    guided: GuidedRace | None = None
    scored: list[ScoredValues] = Field(default_factory=list)
    best: dict[str, object] = Field(default_factory=dict)
    gain: float = 0.0
    before: float | None = None
    policies: list[dict[str, object]] | None = None


@dataclass(frozen=True)
class GuidedSearch:
    """Optimizer that searches the parameters of one component, guided by its local reward.

    Attributes:
        learning: settings of the reward.
        prompts: proposes prompts and demonstrations.
        rounds: the maximum number of rounds of candidates; each starts from the best of the previous one.
        gold: whether the local reward may read the gold answers of train examples.
        estimate: estimates gains from evaluations; see `compound.rewards.gains.estimates`.
        fit: fits the local reward to draws.
    """

    learning: RewardLearning
    prompts: PromptSearch
    rounds: int = 2
    gold: bool = True
    estimate: EstimateGains = estimate_gains
    fit: FitCritic = fit_critic

    def bound(self, outlook: Outlook) -> JobBound:
        """Declare the requests of all rounds, and what the local reward may save."""
        found = self.prompts.rounds_bound(outlook, self.rounds)
        return replace(found, savings=savings_of(outlook.system, components_of(outlook.keys), outlook.prices))

    async def propose(self, task: Task) -> AsyncIterator[Progress | Proposal]:
        """Race candidates in rounds, and propose the one with the highest estimated gain."""
        (component,) = tunable(task)
        rewards = RunRewards.open(task, self.learning)
        pool, examples = split(task)
        part = part_of(task.system, [component], task.prices)
        price = task.prices.change([component])
        guided = is_worthwhile(part, price)
        if task.resume is not None:
            state = GuidedProgress.from_json(task.resume)
        else:
            candidates = await first_candidates(task, self.prompts, pool)
            state = GuidedProgress(iteration=rewards.iteration + 1, candidates=candidates)
            yield Progress(state.to_json(), plural(len(candidates), "candidate"))
        rounds = self.rounds if has_more(task) else 1
        apart = round(APART * len(examples)) if per_input_keys(task) else 0
        examples, others = examples[: len(examples) - apart], examples[len(examples) - apart :]
        while state.candidates and state.policies is None:
            if state.reserve is None:
                state.reserve = self._reserve(task, rounds - state.round)
            own = replace(task, scorer=ReservingScorer(task.scorer, state.reserve))
            run = (
                self._by_reward(own, part, price, examples, rewards, state)
                if guided
                else self._globally(own, price, examples, state)
            )
            async for note in run:
                yield Progress(state.to_json(), note)
            await self._finish_round(task, state, part, examples, rewards, rounds)
            yield Progress(state.to_json(), f"round {state.round} of {rounds}: gain {state.gain:+.3f}")
        async for note in self._test_policy(task, component, price, others, rewards, state):
            yield Progress(state.to_json(), note)
        yield await self._proposal(task, component, part, price, rewards, state)

    def _reserve(self, task: Task, rounds: int) -> float:
        """Return the runs to keep back for later rounds, and for the test of a per-input candidate."""
        left = task.scorer.runs_left
        if not math.isfinite(left):
            return 0.0
        policy = POLICY_SHARE * left if per_input_keys(task) else 0.0
        return policy + (left - policy) * (1 - 1 / rounds)

    async def _by_reward(
        self,
        task: Task,
        part: Part,
        price: float,
        examples: Sequence[Example],
        rewards: RunRewards,
        state: GuidedProgress,
    ) -> AsyncIterator[str]:
        """Run a round as a guided race; yield its notes."""
        memory = RaceMemory.of(task.context.memory)
        conditions = self._conditions(task, part, price)
        earlier = BufferDraws(rewards, part.name)
        racer = GuidedRacer(task, conditions, state.candidates, examples, earlier, state.iteration)
        async for guided in racer.run(state.guided, memory.races.get(part.name)):
            state.guided = guided
            yield guided.note()
        if state.guided is None:
            return
        draws = racer.draws()
        rewards.add(draws, state.iteration, len({draw.example for draw in draws}))
        memory = RaceMemory.of(task.context.memory)
        memory.races[part.name] = state.guided.statistics()
        memory.store(task.context.memory)

    @staticmethod
    async def _globally(
        task: Task, price: float, examples: Sequence[Example], state: GuidedProgress
    ) -> AsyncIterator[str]:
        """Run a round as a race by the global reward; yield its notes."""
        async for after in race(state.candidates, examples, task.scorer, task.minibatch, price, state.race):
            state.race = after
            yield after.note()

    async def _finish_round(
        self,
        task: Task,
        state: GuidedProgress,
        part: Part,
        examples: Sequence[Example],
        rewards: RunRewards,
        rounds: int,
    ) -> None:
        """Store the results of a round, and propose the candidates of the next one."""
        gains: dict[int, float] = {}
        best: int | None = None
        if state.guided is not None:
            gains = {i: gain for i, gain in enumerate(state.guided.gains) if gain is not None}
            best, state.before = state.guided.best, state.guided.before
        elif state.race is not None and state.race.standings:
            first, *_ = state.race.ranking()
            gains = {standing.candidate: standing.gain for standing in state.race.standings}
            best, state.before = first.candidate if first.gain > 0 else None, first.incumbent
            await rewards.remember_race(part.name, state.candidates, state.race, examples, state.iteration)
        state.scored += [ScoredValues(values=state.candidates[i], gain=gain) for i, gain in gains.items()]
        state.best, state.gain = (state.candidates[best], gains[best]) if best is not None else ({}, 0.0)
        state.round += 1
        state.reserve = None
        state.guided, state.race = (None, None) if state.round < rounds else (state.guided, state.race)
        state.candidates = []
        if gains and state.round < rounds:
            scored = [(candidate.values, candidate.gain) for candidate in state.scored]
            state.candidates = await next_candidates(task, self.prompts, state.round, state.best, scored)

    async def _test_policy(
        self,
        task: Task,
        component: str,
        price: float,
        others: Sequence[Example],
        rewards: RunRewards,
        state: GuidedProgress,
    ) -> AsyncIterator[str]:
        """Test the component's reward as a choice per input, on examples that the job's race did not use."""
        if not per_input_keys(task) or not state.round or not others:
            return
        if state.policies is None:
            learned = await rewards.learn([component])
            found = (
                per_input_candidates(task, rewards, component, learned.model)
                if component in learned.model.rewards_of
                else []
            )
            state.policies = [*([state.best] if state.best and found else []), *found]
            state.race = None
            yield f"{plural(len(found), 'reward')} to choose per input"
        if state.policies:
            async for after in race(state.policies, others, task.scorer, task.minibatch, price, state.race):
                state.race = after
                yield after.note()
            if state.race is not None and state.race.standings:
                first, *_ = state.race.ranking()
                state.before = first.incumbent
                state.best, state.gain = (
                    (state.policies[first.candidate], first.gain) if first.gain > 0 else ({}, 0.0)
                )

    def _conditions(self, task: Task, part: Part, price: float) -> Conditions:
        return conditions_of(
            task, self.learning, part, price, gold=self.gold, estimate=self.estimate, fit=self.fit
        )

    async def _proposal(
        self, task: Task, component: str, part: Part, price: float, rewards: RunRewards, state: GuidedProgress
    ) -> Proposal:
        """Return the proposal of the job, and fit the rewards to its draws for the next ones."""
        learned = await rewards.learn() if rewards.buffer.of(component) else None
        facts = {**rewards.facts(learned), **guide_facts(part, price, state.guided)}
        after = None if state.before is None else state.before + state.gain
        note = "" if state.best else "no candidate is expected to gain"
        return Proposal(state.best, state.before, after, len(state.scored), note, facts)


def conditions_of(
    task: Task,
    learning: RewardLearning,
    part: Part,
    price: float,
    *,
    gold: bool,
    estimate: EstimateGains,
    fit: FitCritic,
) -> Conditions:
    """Return the conditions of a job that a local reward guides."""
    settings = learning.backbone
    backbone = shared_backbone(settings.model, settings.max_length, settings.placement)
    backbone.store_in(task.context.memory.folder / f"features-{settings.max_length}.bin")
    certain = all(has_certain_downstream(task.system, name) for name in part.components)
    return Conditions(part, price, part.template(), backbone, gold, certain, estimate, fit)


@dataclass(frozen=True)
class BufferDraws:
    """Draws of one component in the buffer of a run."""

    rewards: RunRewards
    component: str

    def entries(self) -> Sequence[Entry]:
        """Return the draws, oldest first."""
        return self.rewards.buffer.of(self.component)


def per_input_keys(task: Task) -> list[str]:
    """Return the job's parameters that a reward can choose per input."""
    return [key for key in task.keys if isinstance(task.system.parameters[key], PerInput)]


def per_input_candidates(
    task: Task, rewards: RunRewards, component: str, model: RewardModel
) -> list[dict[str, object]]:
    """Return the per-input candidate of a component, if any, and note that it was tried.

    By definition such a candidate chooses the option with the highest local reward, so that a comparison by
    the local reward would be biased. It is tested by the global reward instead.

    The list is empty if the component has no parameter that can be chosen per input, the budget does not
    cover a test, or the candidate was tried before.

    Args:
        task: the job.
        rewards: the rewards of the run, which store the tried candidates.
        component: the component that the job's keys belong to.
        model: the rewards of the run.
    """
    keys = per_input_keys(task)
    if not keys or task.scorer.runs_left < ARMS * task.minibatch:
        return []
    reference = store_reward(model, component, rewards.memory.folder)
    current = task.system.configuration[keys[0]]
    if canonical_json(without_path(current)) == canonical_json(without_path(reference)):
        return []
    candidates = rewards.untried(task, [{keys[0]: reference}])
    rewards.note_tried(task, candidates)
    return candidates


def is_worthwhile(part: Part, price: float) -> bool:
    """Return whether a local evaluation of a component saves anything."""
    return price > 0 and price >= WORTH * part.price


def savings_of(system: System, components: Sequence[str], prices: Prices) -> LocalSavings:
    """Return what the local reward of a component or segment may save."""
    part, price = part_of(system, components, prices), prices.change(components)
    reason = ""
    if not is_worthwhile(part, price):
        follows = price > part.price + 1e-9
        reason = f"a global evaluation costs less than {WORTH:g} local ones" if follows else NOTHING_FOLLOWS
    return LocalSavings(part.name, price, part.price, reason)


def guide_facts(part: Part, price: float, race: GuidedRace | None) -> dict[str, object]:
    """Return what a run's record holds about the local reward of a job."""
    return {
        "component": part.name,
        "steered": race is not None and race.slope > 0,
        "why": unused_reason(part, price, race),
        "savings": price / part.price if part.price else None,
        "guided": None if race is None else race.statistics().model_dump(mode="json"),
    }


def unused_reason(part: Part, price: float, race: GuidedRace | None) -> str:
    """Return why the local reward was not used; ``""`` if it was."""
    if not is_worthwhile(part, price):
        return "a local evaluation costs as much as a global one"
    if race is None or not race.slope:
        return "the local reward does not predict the global one"
    return ""
