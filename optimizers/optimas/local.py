"""Local optimization (OPTIMAS, section 4.3): search the parameters of one component by its local reward.

A candidate runs the component alone on recorded inputs; its mean local reward is compared with the
incumbent's on the same inputs. The best few are then tested by the global reward on train examples, unless
the local reward is accurate enough. If a parameter can be chosen per input by a reward, the component's own
local reward is an additional finalist. Components whose local rewards are not accurate enough are searched
by the global reward, jointly.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from pydantic import Field

from compound.example import Example
from compound.execution.rng import generator
from compound.formatting import plural
from compound.graph.configuration import canonical_json, component_of, components_of
from compound.graph.space import Choice, Demos, Float, Int, Text
from compound.optimization.bounds import JobBound, Outlook
from compound.optimization.method import Progress, Proposal, Task
from compound.optimizers.optimas.guides import Guidance, Guide, LearnedRewards
from compound.optimizers.optimas.local_scoring import (
    Gain,
    LocalScorer,
    LocalSearchSettings,
    Scoring,
    finalists,
)
from compound.optimizers.optimas.offline import Collecting, affordable_inputs, collect_pairs, settings_of
from compound.optimizers.optimas.per_input import per_input_candidates
from compound.optimizers.optimas.rewarding import RunRewards, tunable
from compound.optimizers.search.prompts import (
    CandidateRace,
    PromptSearch,
    RaceProgress,
    bootstrap_pools,
    demo_keys,
    race_incumbent,
    split,
    text_keys,
)
from compound.optimizers.search.racing import Race
from compound.optimizers.search.sampling import enumerate_settings, suggest
from compound.rewards.heads import MIN_INPUTS
from compound.rewards.settings import RewardLearning

# Fractions of a job's share of the budget for collecting fresh pairs and for local scoring; the rest is for
# testing the finalists.
ONLINE, LOCAL = 0.2, 0.5

Phase = Literal["collecting", "searching", "testing", "decided"]


class LocalProgress(RaceProgress):
    """Progress of `LocalSearch`; its race is that of the finalists.

    Attributes:
        phase: the next phase of the job.

            * ``collecting``: collect pairs from fresh inputs, and fit the local reward to them.
            * ``searching``: score candidates by the local reward. If that is not trusted, either all
              candidates become finalists, or texts and demonstrations are searched by the global reward,
              jointly with those of other components.
            * ``testing``: race the finalists by the global reward.
            * ``decided``: propose the first finalist without a test, if there is one.
        pairs: progress of the collection of pairs.
        scoring: progress of the search by the local reward.
        together: progress of the joint search by the global reward; ``None`` before its start.
        finalists: the candidates to test, best local reward first; empty while searching.
        local_gain: the local reward of the first finalist minus the incumbent's; ``None`` if no candidate
            beat the incumbent.
    """

    phase: Phase = "collecting"
    pairs: Collecting
    scoring: Scoring
    together: CandidateRace | None = None
    finalists: list[dict[str, object]] = Field(default_factory=list)
    local_gain: float | None = None


@dataclass(frozen=True)
class LocalSearch:
    """Optimizer that searches the parameters of one component by its local reward.

    Attributes:
        learning: settings of pair collection and reward learning.
        search: settings of the local search.
        prompts: proposes prompts and demonstrations.
        verify: whether finalists are always tested by the global reward, even if the local one is accurate.
        guide: scores the component's calls.
        fresh: the number of inputs that each job collects pairs from.
    """

    learning: RewardLearning
    search: LocalSearchSettings
    prompts: PromptSearch
    verify: bool = False
    guide: Guide = field(default_factory=LearnedRewards)
    fresh: int = 0

    def bound(self, outlook: Outlook) -> JobBound:
        """Declare the requests of all local rounds, or of two rounds if the global reward is used."""
        texts = [key for key in outlook.texts if key in outlook.system.parameters]
        together = replace(outlook, keys=tuple(dict.fromkeys((*outlook.keys, *texts))))
        return self.prompts.rounds_bound(together, max(2, self.search.rounds))

    async def propose(self, task: Task) -> AsyncIterator[Progress | Proposal]:
        """Update the local reward on fresh inputs, search by it, and test the finalists."""
        (component,) = tunable(task)
        rewards = RunRewards.open(task, self.learning)
        if task.resume is not None:
            state = LocalProgress.from_json(task.resume)
        else:
            state = await self._start(task, rewards, component)
            yield Progress(state.to_json(), plural(len(state.scoring.candidates), "candidate"))
        if state.phase == "collecting":
            note = await self._collect(task, rewards, component, state.pairs)
            state.phase = "searching"
            if note:
                yield Progress(state.to_json(), note)
        guidance = await self.guide.guidance(rewards, component)
        steered = not guidance.untrusted_reason
        facts = {
            **guidance.facts,
            "component": component,
            "steered": steered,
            "why": guidance.untrusted_reason,
        }
        is_joint = not steered and (text_keys(task) or demo_keys(task))
        search = self._search_together if is_joint else self._search_alone
        async for event in search(task, rewards, guidance, state):
            yield replace(event, facts={**facts, **event.facts}) if isinstance(event, Proposal) else event

    async def _start(self, task: Task, rewards: RunRewards, component: str) -> LocalProgress:
        """Return the progress of a new job, with the first round of candidates."""
        share = None if task.scorer.runs_left == float("inf") else task.scorer.runs_left
        candidates = await self._first_candidates(task, rewards, split(task)[0])
        proposals = {component: settings_of(candidates)}
        return LocalProgress(
            pairs=Collecting(iteration=rewards.iteration + 1, proposals=proposals),
            scoring=Scoring(share=share, candidates=candidates),
        )

    async def _collect(
        self, task: Task, rewards: RunRewards, component: str, pairs: Collecting
    ) -> str | None:
        """Collect pairs from fresh inputs; from more of them if the offline phase collected too few.

        Returns:
            A progress note; ``None`` if no pairs were collected.
        """
        if not self.guide.collects_online or rewards.is_constant(component):
            return None
        enough = len({pair.example for pair, _ in rewards.buffer.pairs(component)}) >= MIN_INPUTS
        wanted = self.fresh if enough else self.learning.pairs.inputs
        count = affordable_inputs(task, rewards, [component], wanted, ONLINE)
        if not count or (not enough and count < MIN_INPUTS):
            return None
        return await collect_pairs(rewards, [component], pairs, rewards.fresh(split(task)[1], count))

    async def _search_together(
        self, task: Task, rewards: RunRewards, guidance: Guidance, state: LocalProgress
    ) -> AsyncIterator[Progress | Proposal]:
        """Search texts and demonstrations of all components without a trusted reward by the global reward.

        The search is joint, since demonstrations of several components come from the same traces (ADR 0007).
        """
        keys = tuple(
            key
            for key, space in task.system.parameters.items()
            if isinstance(space, Text | Demos) and component_of(key) in guidance.untrusted
        )
        components = components_of(keys)
        tried = [known for known in task.tried if set(keys) <= set(known.values)]  # only complete candidates
        resume = None if state.together is None else state.together.to_json()
        async for event in self.prompts.propose(replace(task, keys=keys, tried=tried, resume=resume)):
            if isinstance(event, Progress):
                state.together = CandidateRace.from_json(event.state)
                yield Progress(state.to_json(), f"by the global reward: {event.note}")
                continue
            if len(components) == 1 and state.together:
                await self._add_race(task, rewards, state, state.together.candidates, state.together.race)
            yield replace(event, facts={"together": components})

    async def _search_alone(
        self, task: Task, rewards: RunRewards, guidance: Guidance, state: LocalProgress
    ) -> AsyncIterator[Progress | Proposal]:
        """Search one component by its local reward, if that is trusted, and test the finalists."""
        if state.phase == "searching":
            if guidance.untrusted_reason:
                state.finalists, state.phase = state.scoring.candidates, "testing"
                note = f"by the global reward: {guidance.untrusted_reason}"
            else:
                async for round_note in self._score(task, rewards, guidance, state.scoring):
                    yield Progress(state.to_json(), round_note)
                self._choose(task, rewards, guidance, state)
                note = f"{len(state.finalists)} to test"
            yield Progress(state.to_json(), note)
        tried = state.scoring.tried
        facts = {} if guidance.untrusted_reason else {"local_gain": state.local_gain, "locally_tried": tried}
        if state.phase == "decided":
            best = state.finalists[0] if state.finalists else {}
            note = (
                "by the local reward alone" if best else "no candidate beat the incumbent by the local reward"
            )
            yield Proposal(best, tried=tried, note=note, facts=facts)
            return
        async for event in race_incumbent(task, state.finalists, split(task)[1], state):
            if isinstance(event, Progress):
                yield event
                continue
            await self._add_race(task, rewards, state, state.finalists, state.race)
            yield replace(event, facts=facts)

    async def _score(
        self, task: Task, rewards: RunRewards, guidance: Guidance, state: Scoring
    ) -> AsyncIterator[str]:
        """Score rounds of candidates by the local reward; yield a progress note after each round."""
        (component,) = tunable(task)
        scorer = LocalScorer(task, component, guidance.scores, self.search.rounds, LOCAL + ONLINE)
        recorded = await self.guide.recorded_calls(rewards, component, state.recorded)
        state.recorded = sorted({trace.example for trace, _ in recorded.calls})
        async for note in scorer.rounds(state, recorded, self._next_candidates):
            yield note

    def _choose(self, task: Task, rewards: RunRewards, guidance: Guidance, state: LocalProgress) -> None:
        """Choose the finalists among the locally scored candidates, and decide whether to test them.

        A reward that chooses per input is always tested.
        """
        (component,) = tunable(task)
        chosen = finalists(task, state.scoring.scored, self.search.temperature)
        state.finalists = [candidate.values for candidate in chosen]
        state.local_gain = chosen[0].gain if chosen else None
        rewards.note_tried(task, [candidate.values for candidate in state.scoring.scored])
        is_tested = self._is_worth_testing(task, guidance)
        if per_input := per_input_candidates(task, rewards, component, guidance.scores):
            state.finalists, is_tested = [*state.finalists[:1], *per_input], True
        state.phase = "testing" if state.finalists and is_tested else "decided"

    def _is_worth_testing(self, task: Task, guidance: Guidance) -> bool:
        """Return whether to race finalists: the budget covers it, and the local reward may be wrong."""
        is_sure = guidance.accuracy is not None and guidance.accuracy >= self.learning.reward.check_below
        return task.scorer.runs_left >= 2 * task.minibatch and (self.verify or not is_sure)

    async def _add_race(
        self,
        task: Task,
        rewards: RunRewards,
        state: LocalProgress,
        candidates: Sequence[Mapping[str, object]],
        race: Race | None,
    ) -> None:
        """Add the preference pairs that a race of one component's values provides."""
        if self.guide.collects_online and race:
            (component,) = tunable(task)
            examples = split(task)[1]
            await rewards.remember_race(component, candidates, race, examples, state.pairs.iteration)

    async def _first_candidates(
        self, task: Task, rewards: RunRewards, pool: Sequence[Example]
    ) -> list[dict[str, object]]:
        """Return the first round of candidates, without those scored by earlier jobs."""
        if demo_keys(task) or text_keys(task):
            pools = await bootstrap_pools(task, pool) if "demos" in self.prompts.proposers else {}
            return rewards.untried(task, await self.prompts.candidates(task, pools))
        grid = enumerate_settings(task)
        if len(grid) <= task.candidates:
            return rewards.untried(task, grid)
        # more draws than candidates, since some draws are equal or were tried before
        draws = [_random_values(task, i) for i in range(8 * task.candidates)]
        distinct = {canonical_json(values): values for values in draws if values}
        return rewards.untried(task, list(distinct.values()))[: task.candidates]

    async def _next_candidates(self, task: Task, scored: Sequence[Gain]) -> list[dict[str, object]]:
        """Return another round of candidates: edits of the best prompt so far, or suggestions of TPE."""
        best = max(scored, key=lambda candidate: candidate.gain).values
        if text_keys(task):
            nearby = replace(task, system=task.system.bind({**task.system.configuration, **best}))
            edited = await self.prompts.candidates(nearby, {})
            return [{**best, **values} for values in edited]
        if demo_keys(task) or len(enumerate_settings(task)) <= task.candidates:
            return []
        trials = [({key: c.values[key] for key in task.keys}, c.gain) for c in scored if c.values]
        round_: list[dict[str, object]] = []
        for _ in range(task.candidates):
            round_.append(suggest(task, trials, round_))
        return round_


def _random_values(task: Task, number: int) -> dict[str, object]:
    """Return random values of the job's choices and numbers."""
    rng = generator(task.seed, "draw", number)
    spaces = {key: task.system.parameters[key] for key in task.keys}
    return {key: s.draw(rng) for key, s in spaces.items() if isinstance(s, Choice | Int | Float)}
