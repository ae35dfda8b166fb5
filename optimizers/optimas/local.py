"""OPTIMAS in the form of the paper: each component is searched by its local reward alone (section 4.3).

A job adapts the reward to the current configuration by preference pairs of a fresh minibatch (section
4.2). Candidates of the component then run on the same inputs as the incumbent, without what follows
them, and the one with the highest mean reward is proposed. `hbc` searches by the similarity to
preferred outputs. The offline phase collects pairs under the initial configuration, in waves of
twice as many inputs, of components whose rewards are not accurate yet.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from pydantic import Field

from compound.core.example import CallValues, Example
from compound.core.formatting import plural
from compound.core.storage.state import State
from compound.execution.rng import generator
from compound.graph.configuration import (
    canonical_json,
    component_of,
    components_of,
    to_readable_json,
    to_readable_values,
)
from compound.graph.space import Choice, Float, Int, PerInput
from compound.optimization.method import JobPlan, PlannedJob, Progress, Proposal, Task
from compound.optimizers.scheduling import demo_keys, text_keys
from compound.optimizers.search.candidates import Values
from compound.optimizers.search.joint import JointSearch, start
from compound.optimizers.search.memory_part import MemoryPart
from compound.optimizers.search.part import Part, part_of, run_parts
from compound.optimizers.search.rewarding import Guidance, RunRewards
from compound.optimizers.search.sources import CandidateSources, divide
from compound.rewards.buffer import PairBuffer, input_key
from compound.rewards.features import Embedder, Template, as_text
from compound.rewards.heads import MIN_INPUTS
from compound.rewards.model import ScoreCalls, Vector, store_reward
from compound.rewards.pairs import expected_cost
from compound.rewards.settings import RewardLearning


class Collecting(State):
    """Progress of the collection of pairs in a job."""

    iteration: int
    # by component, candidate settings to sample outputs with
    proposals: dict[str, list[dict[str, object]]]
    inputs: int = 0  # the number of inputs that the job has collected pairs from


@dataclass(frozen=True)
class OfflineRewards:
    """Optimizer of the offline phase: collects pairs of every component, and proposes no values."""

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
            yield await rewards.finish_offline(components_of(task.keys))
        else:
            limit = "the train split" if len(examples) < MIN_INPUTS else "the budget"
            note = f"{limit} is too small: learning rewards requires {MIN_INPUTS} inputs"
            yield Proposal({}, note=note, facts=rewards.facts(None))

    async def _wave(
        self, task: Task, rewards: RunRewards, done: int
    ) -> tuple[list[str], int] | None:
        """Return the components and the number of inputs of the next wave, if one needs pairs.

        Components are selected in order of increasing cost, as far as the budget covers learning.
        """
        least = 1 if done else MIN_INPUTS
        components = components_of(task.keys)
        components = await rewards.needing_pairs(components) if done else components
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
        for component in components_of(task.keys):
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


ADAPTATION = 0.5  # of a job's runs, at most, for fresh pairs


class LocalProgress(Collecting):
    """Progress of `LocalSearch`."""

    candidates: list[dict[str, object]] | None = None
    # the mean local reward of each candidate minus the incumbent's; `None` before the evaluation
    gains: list[float] | None = None


@dataclass(frozen=True)
class LocalSearch:
    """Optimizer that searches the parameters of one component by its local reward alone."""

    learning: RewardLearning
    sources: CandidateSources
    scoring: type[RunRewards] = RunRewards
    temperature: float = 0.0  # of the draw of choices and numbers; 0 selects the best

    def plan(self, job: PlannedJob) -> JobPlan:
        """Return the requests for new prompts."""
        return JointSearch(self.sources).plan(job)

    async def propose(self, task: Task) -> AsyncIterator[Progress | Proposal]:
        """Adapt the reward, score candidates by it, and propose the best one."""
        (component,) = {component_of(key) for key in task.keys}
        rewards, rows = self.scoring.load(task, self.learning), divide(task, self.sources)
        if task.resume is not None:
            state = LocalProgress.from_json(task.resume)
        else:
            state = LocalProgress(iteration=rewards.iteration + 1, proposals={})
        if rewards.learns and not state.inputs and state.candidates is None:
            note = await self._adapt(task, rewards, component, state, rows.scored)
            yield Progress(state.to_json(), note)
        guidance = await rewards.guidance(component)
        why = guidance.unusable
        facts = {**guidance.facts, "component": component, "steered": not why, "why": why}
        if guidance.unusable:
            yield Proposal({}, note=guidance.unusable, facts=facts)
            return
        if chosen := await self._per_input(task, rewards, component):
            yield Proposal(
                chosen, tried=1, note="the local reward chooses for each input", facts=facts
            )
            return
        if state.candidates is None:
            made = await start(task, self.sources, rows)
            state.candidates = [candidate.values for candidate in made.candidates]
            yield Progress(state.to_json(), plural(len(state.candidates), "candidate"))
        if state.gains is None:
            part = part_of(task.system, component, task.prices)
            known = guidance.examples
            usable = [row for row in rows.scored if known is None or row.id in known]
            examples = self._examples(task, part, len(state.candidates), usable)
            state.gains = await gains_of(
                task, part, rewards.base, state.candidates, examples, guidance.scores
            )
            yield Progress(state.to_json(), f"scored on {plural(len(examples), 'example')}")
        best = self._choose(task, state.gains)
        values = {} if best is None else state.candidates[best]
        facts["local_gain"] = None if best is None else state.gains[best]
        note = "by the local reward alone" if values else "no candidate has a higher local reward"
        yield Proposal(values, tried=len(state.candidates), note=note, facts=facts)

    async def _adapt(
        self,
        task: Task,
        rewards: RunRewards,
        component: str,
        state: LocalProgress,
        examples: Sequence[Example],
    ) -> str:
        affordable = affordable_inputs(task, rewards, [component], 2 * len(examples))
        fresh = rewards.fresh(examples, min(task.minibatch, int(ADAPTATION * affordable)))
        if not fresh:
            return "no runs for fresh pairs"
        return await collect_pairs(rewards, [component], state, fresh)

    async def _per_input(self, task: Task, rewards: RunRewards, component: str) -> Values:
        """Return the reward as the value of a parameter that is chosen for each input, if there is one."""
        key = next((k for k in task.keys if isinstance(task.system.parameters[k], PerInput)), None)
        if key is None or not rewards.learns:
            return {}
        learned = await rewards.learn([component])
        return {key: store_reward(learned.model, component, rewards.memory.folder)}

    @staticmethod
    def _examples(
        task: Task, part: Part, candidates: int, examples: Sequence[Example]
    ) -> Sequence[Example]:
        each = part.weight + candidates * part.price
        left = task.scorer.runs_left
        return (
            examples if left == float("inf") or not each else examples[: int((left + 1e-9) / each)]
        )

    def _choose(self, task: Task, gains: Sequence[float]) -> int | None:
        spaces = [task.system.parameters[key] for key in task.keys]
        is_drawn = all(isinstance(space, Choice | Int | Float) for space in spaces)
        rng = generator(task.seed, "boltzmann")
        chosen = boltzmann([0.0, *gains], self.temperature if is_drawn else 0.0, rng)
        return chosen - 1 if chosen else None


async def gains_of(
    task: Task,
    part: Part,
    configuration: Mapping[str, object],
    candidates: Sequence[Mapping[str, object]],
    examples: Sequence[Example],
    scores: ScoreCalls,
) -> list[float]:
    """Return the mean score of each candidate's calls minus the incumbent's; failed calls are the worst."""
    own = {key: task.system.configuration[key] for key in task.keys}
    systems = [part.bind({**configuration, **own, **values}) for values in ({}, *candidates)]
    traces = await run_parts(task.context, part, systems, examples)
    calls = [
        (row, (column, call.address), call)
        for row, found in enumerate(traces)
        for column, trace in enumerate(found)
        for call in trace.calls_of(part.component)
    ]
    succeeded = [(call.inputs, call.outputs) for *_, call in calls if call.failure is None]
    rewards = scores(part.component, succeeded) if succeeded else np.zeros(0)
    worst, remaining = float(rewards.min(initial=0.0)) - 1, iter(rewards.tolist())
    table: list[dict[tuple[int, str], float]] = [{} for _ in traces]
    for row, place, call in calls:
        table[row][place] = worst if call.failure is not None else next(remaining)
    gains = []
    for found in table[1:]:
        shared = [found[place] - table[0][place] for place in found if place in table[0]]
        gains.append(float(np.mean(shared)) if shared else 0.0)
    return gains


def boltzmann(rewards: Sequence[float], temperature: float, rng: np.random.Generator) -> int:
    """Draw an index with probability proportional to ``exp(reward / temperature)``; at 0, the best.

    >>> boltzmann([0.0, 9.0, 0.0], 0.1, np.random.default_rng(0))
    1
    """
    noisy = np.asarray(rewards, float)
    if temperature:
        noisy = noisy / temperature + rng.gumbel(size=len(rewards))
    return int(np.argmax(noisy))


NO_TARGETS = "no input has an output that reliably leads to a higher score than another"


class CloningMemory(MemoryPart):
    """Memory of `hbc`: the configuration that the pairs were collected with."""

    NAME = "cloning"
    start: dict[str, object] = Field(default_factory=dict)


@dataclass(frozen=True)
class Target:
    """The outputs to imitate for one input."""

    # the preferred outputs; several if they are equally good
    preferred: tuple[Mapping[str, object], ...]
    gap: float  # the largest difference in global reward between a preferred and another output
    example: str


@dataclass(frozen=True)
class Imitation:
    """Scores outputs of one component by their similarity to the target."""

    targets: Mapping[str, Target]
    labels: frozenset[str]  # the output fields that are categorical
    backbone: Embedder

    def rewards(self, component: str, calls: Sequence[CallValues]) -> Vector:
        """Return similarity × gap / mean gap for each call; 0 for calls without a target."""
        targets = [
            self.targets.get(canonical_json(to_readable_json(inputs))) for inputs, _ in calls
        ]
        written = [to_readable_values(outputs) for _, outputs in calls]
        texts = {text: None for outputs in written for text in self._texts(outputs)}
        preferred = [y for target in targets if target for y in target.preferred]
        texts |= {text: None for outputs in preferred for text in self._texts(outputs)}
        vectors = self._embedded(list(texts))
        mean_gap = sum(target.gap for target in self.targets.values()) / max(1, len(self.targets))
        return np.array(
            [
                target.gap
                / mean_gap
                * max(self._similarity(outputs, y, vectors) for y in target.preferred)
                if target
                else 0.0
                for outputs, target in zip(written, targets, strict=True)
            ]
        )

    def _similarity(
        self,
        outputs: Mapping[str, object],
        preferred: Mapping[str, object],
        vectors: Mapping[str, Vector],
    ) -> float:
        """Return the mean similarity of fields: cosine for texts, equality for numbers and labels."""
        similarities = []
        for name, target in preferred.items():
            value = outputs[name]
            if self._is_text(name, target) and self._is_text(name, value) and value != target:
                similarities.append(float(vectors[as_text(value)] @ vectors[as_text(target)]))
            else:
                similarities.append(float(value == target))
        return sum(similarities) / len(similarities)

    def _is_text(self, name: str, value: object) -> bool:
        is_number = isinstance(value, bool | int | float)
        return self.backbone.dim > 0 and name not in self.labels and not is_number

    def _texts(self, outputs: Mapping[str, object]) -> list[str]:
        return [as_text(value) for name, value in outputs.items() if self._is_text(name, value)]

    def _embedded(self, texts: Sequence[str]) -> dict[str, Vector]:
        if not texts:
            return {}
        rows = self.backbone.embed([("", text) for text in texts]).astype(np.float64)
        lengths = np.linalg.norm(rows, axis=1, keepdims=True)
        return dict(zip(texts, rows / np.where(lengths > 0, lengths, 1.0), strict=True))


class Cloning(RunRewards):
    """Scores calls by preferred outputs instead of rewards."""

    learns = False

    async def needing_pairs(self, components: Sequence[str]) -> list[str]:
        """Return all components: every further input may add a target."""
        return list(components)

    async def finish_offline(self, components: Sequence[str]) -> Proposal:
        """Store the configuration that the pairs were collected with, and report the number of targets."""
        CloningMemory(start=self.task.system.configuration.to_json()).store(self.memory)
        counts = {name: len(targets_of(self.buffer, name)) for name in components}
        note = ", ".join(f"{name} {count}" for name, count in counts.items())
        facts = {**self.facts(None), "targets": counts}
        return Proposal({}, note=f"inputs with an output to imitate: {note}", facts=facts)

    async def guidance(self, component: str) -> Guidance:
        """Return scoring by similarity to the targets, if the component has any."""
        targets = targets_of(self.buffer, component)
        labels = frozenset(Template.of(self.task.system.components[component]).labels)
        missing = "" if targets else NO_TARGETS
        examples = frozenset(target.example for target in targets.values())
        scores = Imitation(targets, labels, self.frozen_backbone())
        return Guidance(scores.rewards, self.facts(None), missing, missing, examples)

    @property
    def base(self) -> Mapping[str, object]:
        """The initial configuration, whose calls have the inputs of the targets."""
        return CloningMemory.of(self.memory).start or super().base


def targets_of(buffer: PairBuffer, component: str) -> dict[str, Target]:
    """Return the target of each input of a component that has a preference pair."""
    targets: dict[str, Target] = {}
    for pair, _ in buffer.pairs(component):
        key = input_key(pair)
        known = targets.get(key)
        if known is None or pair.gap > known.gap:
            targets[key] = Target((pair.chosen,), pair.gap, pair.example)
        elif pair.gap == known.gap and pair.chosen not in known.preferred:
            targets[key] = Target((*known.preferred, pair.chosen), pair.gap, known.example)
    return targets
