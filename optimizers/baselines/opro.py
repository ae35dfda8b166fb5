"""OPRO: generations of prompts written by a model that sees all earlier ones with their scores.

Yang et al. 2023, "Large Language Models as Optimizers". All new prompts are scored on the same train
examples as the incumbent, and the best one is proposed.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import NamedTuple

from pydantic import Field

from compound.core.engine import Request
from compound.core.errors import TooManyFailures
from compound.core.example import Example, Metric
from compound.core.narrowing import entry
from compound.core.storage.state import State
from compound.evaluation.metrics.comparison import Comparison
from compound.execution.rng import derive_seed, generator
from compound.execution.trace import Call, Trace
from compound.graph.component import Component, Output
from compound.graph.configuration import component_of
from compound.graph.space import Demos
from compound.graph.system import System
from compound.optimization.method import JobPlan, PlannedJob, Progress, Proposal, RequestCount, Task
from compound.optimization.settings.base import ModelName, Settings
from compound.optimizers.scheduling import text_keys
from compound.optimizers.search.proposers.proposing import (
    NO_REQUESTS,
    Attempt,
    ask_for_text,
    fields,
    outputs_of,
    tried,
    writing_request,
)
from compound.optimizers.search.sources import split

MOST = 20  # maximum number of generations
GENERATIONS = 4  # generations that a small share should cover before fewer examples are used
FEWEST = 2  # prompts per generation that a small share covers before fewer generations are made
TRIES = 2  # requests per prompt that the runs could score, since duplicates are dropped


class OPROSettings(Settings):
    """Settings of OPRO: a model that sees earlier prompts with their scores writes new ones."""

    lm: ModelName | None = None
    """The model that writes prompts; the system's own by default."""


class ScoredText(State):
    """A text with its mean score."""

    text: str
    mean: float


class Generations(State):
    """Progress of `OPRO`."""

    size: int
    each: int
    generations: int
    done: int = 0
    before: float
    mean: float
    tried: int = 0
    best: dict[str, str] = Field(default_factory=dict)
    # the scored prompts of each parameter, in order; the first is the incumbent's
    history: dict[str, list[ScoredText]]
    exemplars: dict[str, list[str]]


class GenerationPlan(NamedTuple):
    """Sizes of a job: examples per score, prompts per generation, and generations."""

    size: int
    each: int
    generations: int

    @property
    def runs(self) -> int:
        """System runs of the job, with those of the incumbent."""
        return self.size * (1 + self.each * self.generations)


@dataclass(frozen=True)
class OPRO:
    """Optimizer that improves texts, which take turns, by generations of prompts written by a model.

    The system runs pay for every prompt in full; those that cached calls leave allow further generations.
    """

    lm: str | None = None
    rows: int = 50

    def plan(self, job: PlannedJob) -> JobPlan:
        """Return the requests for the prompts that the runs could score, and the number of prompts."""
        has_demos = any(isinstance(space, Demos) for space in job.system.parameters.values())
        examples = len(job.train) - (len(job.train) // 2 if has_demos else 0)
        plan = self._plan(job.candidates, job.minibatch, examples, job.runs)
        if not job.texts or plan is None:
            return JobPlan(candidates=0)
        least = min(job.minibatch, self.rows, examples)
        requests = RequestCount(
            "new prompts", most_requests(job.candidates, least, job.runs), self.lm
        )
        return JobPlan([requests], candidates=plan.each * plan.generations)

    def _plan(self, each: int, least: int, examples: int, runs: float) -> GenerationPlan | None:
        return plan_generations(each, min(self.rows, examples), min(least, examples), runs)

    async def propose(self, task: Task) -> AsyncIterator[Progress | Proposal]:
        """Score the incumbent, write and score generations of prompts, and propose the best one."""
        _, examples = split(task)
        keys = text_keys(task)
        if task.resume is not None:
            state = Generations.from_json(task.resume)
        elif not task.scorer.may_ask(self.lm):
            yield Proposal({}, note=NO_REQUESTS)
            return
        else:
            plan = self._plan(task.candidates, task.minibatch, len(examples), task.scorer.runs_left)
            if plan is None or not keys:
                yield Proposal({}, note="too few examples or system runs to compare prompts")
                return
            state = await self._start(task, keys, plan, examples[: plan.size])
            note = f"the incumbent on {plan.size} example{'s' * (plan.size != 1)}: {state.mean:.3f}"
            yield Progress(state.to_json(), note, step=0, of=state.generations)
        rows = examples[: state.size]
        while state.done < state.generations:
            if task.scorer.runs_left < state.size or not task.scorer.may_ask(self.lm):
                break
            await self._generation(task, keys[state.done % len(keys)], state, rows)
            state.done += 1
            note = f"best of {state.tried}: {state.mean:.3f}"
            yield Progress(state.to_json(), note, step=state.done, of=state.generations)
        note = "" if state.best else "no written prompt beat the incumbent"
        yield Proposal(state.best, state.before, state.mean, state.tried, note)

    async def _start(
        self, task: Task, keys: Sequence[str], plan: GenerationPlan, rows: Sequence[Example]
    ) -> Generations:
        requests = most_requests(
            task.candidates, min(task.minibatch, plan.size), task.scorer.runs_left
        )
        traces = await task.scorer.traces({}, rows)
        mean = fmean(trace.score or 0.0 for trace in traces)
        known, metric = {example.id: example for example in rows}, task.context.metric
        current = {key: entry(task.system.configuration, key, str) for key in keys}
        return Generations(
            size=plan.size,
            each=plan.each,
            generations=requests // plan.each,
            before=mean,
            mean=mean,
            history={key: [ScoredText(text=text, mean=mean)] for key, text in current.items()},
            exemplars={
                key: exemplars(
                    task.system.components[component_of(key)], traces, task.system, metric, known
                )
                for key in keys
            },
        )

    async def _generation(
        self, task: Task, key: str, state: Generations, rows: Sequence[Example]
    ) -> None:
        texts = await self._write(task, key, state)
        texts = texts[: int(min(len(texts), task.scorer.runs_left // state.size))]
        means = await _means(task, [{**state.best, key: text} for text in texts], rows)
        state.tried += len(texts)
        for text, mean in zip(texts, means, strict=True):
            state.history[key].append(ScoredText(text=text, mean=mean))
        if means and max(means) > state.mean:
            state.mean = max(means)
            state.best = {**state.best, key: texts[means.index(state.mean)]}

    async def _write(self, task: Task, key: str, state: Generations) -> list[str]:
        """Ask a model for new prompts, each given the same history, and return the distinct new ones."""
        purpose = outputs_of(task.system.components[component_of(key)])
        own = [(scored.text, scored.mean) for scored in state.history[key]]
        history, names = [*tried(task, key), *own], ("opro", key, state.done)
        order = generator(task.seed, *names).permutation(len(state.exemplars[key]))
        shown = [state.exemplars[key][i] for i in order[:EXEMPLARS]]
        known, new = {text for text, _ in history}, list[str]()
        for number in range(state.each):
            if not task.scorer.may_ask(self.lm):
                break
            seed = derive_seed(task.seed, *names, number)
            request = prompt_request(purpose, history, seed, shown)
            text = await ask_for_text(task, key, request, self.lm, known)
            if text is not None and text not in known:
                known.add(text)
                new.append(text)
        return new


async def _means(
    task: Task, candidates: Sequence[Mapping[str, str]], rows: Sequence[Example]
) -> list[float]:
    """Return the mean score of each candidate; the failure score if all of them break the runs."""
    if not candidates:
        return []
    try:
        return [evaluation.mean for evaluation in await task.scorer.score(candidates, rows)]
    except TooManyFailures:
        return [task.context.rules.failure_score] * len(candidates)


def most_requests(each: int, least: int, runs: float) -> int:
    """Return the maximum number of requests of a job with ``runs`` system runs.

    >>> most_requests(8, 8, runs=100), most_requests(8, 8, runs=float("inf"))
    (26, 160)
    """
    most = TRIES * math.ceil(runs / least) if math.isfinite(runs) else math.inf
    return int(min(each * MOST, most))


def plan_generations(each: int, most: int, least: int, runs: float) -> GenerationPlan | None:
    """Return the sizes of a job that ``runs`` system runs cover; ``None`` if they cover no comparison.

    They are reduced in this order: generations, down to `GENERATIONS`; examples, down to ``least``;
    prompts per generation, down to `FEWEST`; generations; prompts; and examples, down to 1.

    >>> plan_generations(8, 50, 8, float("inf")), plan_generations(8, 50, 8, 400)
    (GenerationPlan(size=50, each=8, generations=20), GenerationPlan(size=12, each=8, generations=4))
    >>> plan_generations(8, 50, 8, 100), plan_generations(8, 50, 8, 16)
    (GenerationPlan(size=8, each=2, generations=4), GenerationPlan(size=8, each=1, generations=1))
    """
    if not most:
        return None
    return next((plan for plan in _plans(each, most, min(least, most)) if plan.runs <= runs), None)


def _plans(each: int, most: int, least: int) -> Iterator[GenerationPlan]:
    """Yield sizes in the order in which they are preferred."""
    few = min(FEWEST, each)
    for generations in range(MOST, GENERATIONS - 1, -1):
        yield GenerationPlan(most, each, generations)
    for size in range(most - 1, least - 1, -1):
        yield GenerationPlan(size, each, GENERATIONS)
    for fewer in range(each - 1, few - 1, -1):
        yield GenerationPlan(least, fewer, GENERATIONS)
    for generations in range(GENERATIONS - 1, 0, -1):
        yield GenerationPlan(least, few, generations)
    for size in range(least, 0, -1):
        yield GenerationPlan(size, 1, 1)


SHOWN = 20  # earlier prompts in a request, as in the paper
EXEMPLARS = 3  # maximum number of exemplars in a request, as in the paper


def prompt_request(
    purpose: str, history: Sequence[Attempt], seed: int, exemplars: Sequence[str] = ()
) -> Request:
    """Return the request for one new prompt."""
    best = sorted(
        dict(history).items(), key=lambda item: -math.inf if item[1] is None else item[1]
    )[-SHOWN:]
    lines = "\n".join(
        f"<prompt>{text}</prompt> " + ("not scored yet" if score is None else f"score {score:.3f}")
        for text, score in best
    )
    examples = "\n\n".join(exemplars)
    text = (
        f"A language model performs one step of a larger system. The step: {purpose}\n\n"
        f"Instructions tried so far, with their scores (higher is better):\n{lines}\n\n"
        + (f"Examples of the step's task:\n{examples}\n\n" if examples else "")
        + "Write one new instruction that is different from all of these and scores higher. "
        "Write it between <prompt> and </prompt>, and nothing else."
    )
    return writing_request(text, seed)


MOST_KEPT = 24  # exemplars of a component that a job stores


def exemplars(
    component: Component,
    traces: Sequence[Trace],
    system: System,
    metric: Metric,
    examples: Mapping[str, Example],
) -> list[str]:
    """Return what a component read in each run, and the right answer as far as it is known.

    If the metric does not compare the component's output, an exemplar shows that with the run's score.
    """
    source = system.outputs.get(metric.output) if isinstance(metric, Comparison) else None
    shown = []
    for trace in traces:
        calls = [call for call in trace.calls_of(component.name) if call.failure is None]
        if trace.failure is None and calls and trace.example in examples:
            example = examples[trace.example]
            accepted = metric.accepted(example) if isinstance(metric, Comparison) else []
            given = fields({"answer": accepted[0]}).removeprefix("answer: ") if accepted else None
            is_judged = isinstance(source, Output) and source.node.name == calls[0].node
            shown.append(_exemplar(calls[0], trace, component, given, is_judged))
    return list(dict.fromkeys(shown))[:MOST_KEPT]


def _exemplar(
    call: Call, trace: Trace, component: Component, expected: str | None, is_judged: bool
) -> str:
    read = fields({name: v for name, v in call.inputs.items() if name not in component.settings})
    if expected is not None and is_judged:
        return f"Input: {read}\nRight answer: {expected}"
    text = (
        f"Input: {read}\nOutput: {fields(call.outputs)}\nScore of the run: {trace.score or 0.0:.3f}"
    )
    return text if expected is None else f"{text}\nRight result of the whole system: {expected}"
