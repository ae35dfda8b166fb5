"""Search of one component's parameters by a local score, for behaviour cloning (`hbc`).

A candidate runs the component alone on recorded inputs; its mean local score is compared with the
incumbent's on the same inputs. The best few are then tested by the global reward on train examples, if the
budget covers it. Components with nothing to imitate are searched by the global reward, jointly.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

from pydantic import Field

from compound.example import Example
from compound.execution.rng import generator
from compound.formatting import plural
from compound.graph.configuration import canonical_json, component_of, components_of
from compound.graph.space import Choice, Demos, Float, Int, Text
from compound.optimization.bounds import JobBound, Outlook
from compound.optimization.method import Progress, Proposal, Task
from compound.optimizers.optimas.guides import Guidance
from compound.optimizers.optimas.hbc import Cloning, targets_of
from compound.optimizers.optimas.local_scoring import (
    Gain,
    LocalScorer,
    LocalSearchSettings,
    Scoring,
    finalists,
)
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
from compound.optimizers.search.sampling import enumerate_settings, suggest
from compound.rewards.settings import RewardLearning

LOCAL = 0.7  # fraction of a job's share of the budget for local scoring; the rest tests the finalists

Phase = Literal["searching", "testing", "decided"]


class LocalProgress(RaceProgress):
    """Progress of `LocalSearch`; its race is that of the finalists.

    Attributes:
        phase: the next phase of the job.

            * ``searching``: score candidates by the local score. If the component has nothing to imitate,
              either all candidates become finalists, or texts and demonstrations are searched by the global
              reward, jointly with those of other such components.
            * ``testing``: race the finalists by the global reward.
            * ``decided``: propose the first finalist without a test, if there is one.
        scoring: progress of the search by the local score.
        together: progress of the joint search by the global reward; ``None`` before its start.
        finalists: the candidates to test, best local score first; empty while searching.
        local_gain: the local score of the first finalist minus the incumbent's; ``None`` if no candidate
            beat the incumbent.
    """

    FORMAT: ClassVar[int] = 2
    phase: Phase = "searching"
    scoring: Scoring
    together: CandidateRace | None = None
    finalists: list[dict[str, object]] = Field(default_factory=list)
    local_gain: float | None = None


@dataclass(frozen=True)
class LocalSearch:
    """Optimizer that searches the parameters of one component by its local score.

    Attributes:
        learning: settings of the pairs of the offline phase.
        search: settings of the local search.
        prompts: proposes prompts and demonstrations.
        guide: scores the component's calls.
    """

    learning: RewardLearning
    search: LocalSearchSettings
    prompts: PromptSearch
    guide: Cloning = field(default_factory=Cloning)

    def bound(self, outlook: Outlook) -> JobBound:
        """Declare the requests of all local rounds, or of two rounds if the global reward is used."""
        texts = [key for key in outlook.texts if key in outlook.system.parameters]
        together = replace(outlook, keys=tuple(dict.fromkeys((*outlook.keys, *texts))))
        return self.prompts.rounds_bound(together, max(2, self.search.rounds))

    async def propose(self, task: Task) -> AsyncIterator[Progress | Proposal]:
        """Search by the local score, and test the finalists by the global reward."""
        (component,) = tunable(task)
        rewards = RunRewards.open(task, self.learning)
        if task.resume is not None:
            state = LocalProgress.from_json(task.resume)
        else:
            state = await self._start(task, rewards)
            yield Progress(state.to_json(), plural(len(state.scoring.candidates), "candidate"))
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

    async def _start(self, task: Task, rewards: RunRewards) -> LocalProgress:
        """Return the progress of a new job, with the first round of candidates."""
        share = None if task.scorer.runs_left == float("inf") else task.scorer.runs_left
        candidates = await self._first_candidates(task, rewards, split(task)[0])
        return LocalProgress(scoring=Scoring(share=share, candidates=candidates))

    async def _search_together(
        self, task: Task, rewards: RunRewards, guidance: Guidance, state: LocalProgress
    ) -> AsyncIterator[Progress | Proposal]:
        """Search texts and demonstrations of all components with nothing to imitate by the global reward.

        The search is joint, since demonstrations of several components come from the same traces (ADR 0007).
        """
        keys = tuple(
            key
            for key, space in task.system.parameters.items()
            if isinstance(space, Text | Demos) and not targets_of(rewards.buffer, component_of(key))
        )
        components = components_of(keys)
        tried = [known for known in task.tried if set(keys) <= set(known.values)]  # only complete candidates
        resume = None if state.together is None else state.together.to_json()
        async for event in self.prompts.propose(replace(task, keys=keys, tried=tried, resume=resume)):
            if isinstance(event, Progress):
                state.together = CandidateRace.from_json(event.state)
                yield Progress(state.to_json(), f"by the global reward: {event.note}")
                continue
            yield replace(event, facts={"together": components})

    async def _search_alone(
        self, task: Task, rewards: RunRewards, guidance: Guidance, state: LocalProgress
    ) -> AsyncIterator[Progress | Proposal]:
        """Search one component by its local score, if it has one, and test the finalists."""
        if state.phase == "searching":
            if guidance.untrusted_reason:
                state.finalists, state.phase = state.scoring.candidates, "testing"
                note = f"by the global reward: {guidance.untrusted_reason}"
            else:
                async for round_note in self._score(task, rewards, guidance, state.scoring):
                    yield Progress(state.to_json(), round_note)
                self._choose(task, rewards, state)
                note = f"{len(state.finalists)} to test"
            yield Progress(state.to_json(), note)
        tried = state.scoring.tried
        facts = {} if guidance.untrusted_reason else {"local_gain": state.local_gain, "locally_tried": tried}
        if state.phase == "decided":
            best = state.finalists[0] if state.finalists else {}
            note = "by the local score alone" if best else "no candidate had a better local score"
            yield Proposal(best, tried=tried, note=note, facts=facts)
            return
        async for event in race_incumbent(task, state.finalists, split(task)[1], state):
            if isinstance(event, Progress):
                yield event
                continue
            yield replace(event, facts=facts)

    async def _score(
        self, task: Task, rewards: RunRewards, guidance: Guidance, state: Scoring
    ) -> AsyncIterator[str]:
        """Score rounds of candidates by the local score; yield a progress note after each round."""
        (component,) = tunable(task)
        scorer = LocalScorer(task, component, guidance.scores, self.search.rounds, LOCAL)
        recorded = await self.guide.recorded_calls(rewards, component, state.recorded)
        state.recorded = sorted({trace.example for trace, _ in recorded.calls})
        async for note in scorer.rounds(state, recorded, self._next_candidates):
            yield note

    def _choose(self, task: Task, rewards: RunRewards, state: LocalProgress) -> None:
        """Choose the finalists among the locally scored candidates; test them if the budget covers it."""
        chosen = finalists(task, state.scoring.scored, self.search.temperature)
        state.finalists = [candidate.values for candidate in chosen]
        state.local_gain = chosen[0].gain if chosen else None
        rewards.note_tried(task, [candidate.values for candidate in state.scoring.scored])
        is_tested = task.scorer.runs_left >= 2 * task.minibatch
        state.phase = "testing" if state.finalists and is_tested else "decided"

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
