"""TextGrad: rewrite prompts based on feedback that is propagated backwards through the system.

Yuksekgonul et al. 2024, "TextGrad: Automatic 'Differentiation' via Text". In each step a model
criticizes the outputs of a few runs; from the last output backwards, the criticism of an output
leads to a criticism of the prompt and of the earlier outputs that it was computed from
(`compound.optimizers.baselines.gradients`). Another request rewrites each prompt. New prompts that
score lower on validation examples are reverted.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from pydantic import Field

from compound.core.engine import Request
from compound.core.errors import TooManyFailures
from compound.core.example import Example
from compound.core.loops import gather
from compound.core.narrowing import entry
from compound.core.storage.state import State
from compound.execution.rng import derive_seed, generator
from compound.graph.configuration import component_of
from compound.graph.space import Text
from compound.optimization.method import JobPlan, PlannedJob, Progress, Proposal, RequestCount, Task
from compound.optimization.settings.base import ModelName, Settings
from compound.optimizers.baselines.gradients import (
    Backward,
    Gradient,
    most_requests,
    rewrite_request,
)
from compound.optimizers.baselines.pool import split
from compound.optimizers.scheduling import keys_of, text_keys
from compound.optimizers.search.proposers.proposing import (
    NO_REQUESTS,
    ask_for_proposal,
    ask_for_text,
)


class Descent(State):
    """Progress of `TextGrad`.

    Attributes:
        before: the incumbent's mean score on them.
        mean: the mean score of the current prompts.
        values: the current prompts that differ from the incumbent's.
        written: the latest versions of each prompt by key, including those that were reverted.
    """

    step: int = 0
    held: int
    before: float
    mean: float
    tried: int = 0
    values: dict[str, str] = Field(default_factory=dict)
    written: dict[str, list[str]] = Field(default_factory=dict)


class TextGradSettings(Settings):
    """Settings of `textgrad`: prompts are rewritten based on criticism of the runs."""

    lm: ModelName | None = None
    """The model that criticizes outputs and prompts and rewrites prompts; the system's own by default."""
    steps: int = Field(default=12, ge=1)
    """Number of rewriting steps of a job."""
    batch: int = Field(default=3, ge=1)
    """Number of runs criticized in one step."""
    held_out: int = Field(default=50, ge=1)
    """Maximum number of validation examples, of the train examples."""
    joint: bool = False
    """Whether one job rewrites the prompts of all components in each step; by default each component has a
    job of its own."""
    momentum: int = Field(default=0, ge=0)
    """Number of earlier versions of a prompt shown when it is rewritten."""
    constraints: tuple[str, ...] = ()
    """Conditions that each new prompt must meet, in words."""


@dataclass(frozen=True)
class TextGrad:
    """Optimizer that rewrites all prompts of its job in each step, based on textual gradients."""

    settings: TextGradSettings = field(default_factory=TextGradSettings)

    def plan(self, job: PlannedJob) -> JobPlan:
        """Return the requests for criticism and for rewriting of all steps."""
        steps, lm = self.settings.steps, self.settings.lm
        criticism = steps * self.settings.batch * most_requests(job)
        rewriting = steps * len(job.texts)
        return JobPlan(
            [RequestCount("criticism", criticism, lm), RequestCount("rewriting", rewriting, lm)]
        )

    async def propose(self, task: Task) -> AsyncIterator[Progress | Proposal]:
        """Criticize, rewrite and validate prompts, and propose the last ones that were not reverted."""
        settings = self.settings
        _, examples = split(task)
        keys = text_keys(task)
        if task.resume is not None:
            state = Descent.from_json(task.resume)
        elif not task.scorer.may_ask(settings.lm):
            yield Proposal({}, note=NO_REQUESTS)
            return
        else:
            most, free = min(settings.held_out, len(examples) // 2), task.scorer.has_free_repeats
            left = task.scorer.runs_left
            size = held_out_size(most, task.minibatch, settings.steps, settings.batch, left, free)
            if not size or not keys:
                yield Proposal({}, note="too few examples or system runs to compare prompts")
                return
            mean = (await task.scorer.score([{}], examples[:size]))[0].mean
            state = Descent(held=size, before=mean, mean=mean)
            note = f"the incumbent on {size} example{'s' * (size != 1)}: {mean:.3f}"
            yield Progress(state.to_json(), note, step=0, of=settings.steps)
        held, learn = examples[: state.held], examples[len(examples) // 2 :]
        cost = settings.batch + len(held) * (1 if task.scorer.has_free_repeats else 2)
        while state.step < settings.steps and cost <= task.scorer.runs_left:
            if not task.scorer.may_ask(settings.lm):
                break
            new = await self._step(task, keys, state, learn)
            state.step += 1
            await self._validate(task, state, new, held)
            yield Progress(
                state.to_json(), f"best {state.mean:.3f}", step=state.step, of=settings.steps
            )
        values = state.values if state.mean > state.before else {}
        note = "" if values else "no rewritten prompt beat the incumbent"
        yield Proposal(values, state.before, state.mean, state.tried, note)

    async def _step(
        self, task: Task, keys: Sequence[str], state: Descent, learn: Sequence[Example]
    ) -> dict[str, str]:
        """Return the rewritten prompts; those without a usable reply are unchanged."""
        step, size = state.step, self.settings.batch
        order = generator(task.seed, "textgrad", step).permutation(len(learn))[:size]
        examples = [learn[i] for i in order]
        try:
            traces = await task.scorer.traces(state.values, examples)
        except TooManyFailures:
            if not state.values:
                raise
            state.values, state.mean = (
                {},
                state.before,
            )  # prompts that passed validation broke these runs
            return {}

        async def ask(request: Request) -> str | None:
            return await ask_for_proposal(
                task, request, self.settings.lm, lambda reply: reply.strip() or None
            )

        system = task.system
        texts = {
            key: entry(system.configuration, key, str) for key in keys_of(system, Text)
        } | state.values
        seeds = [
            partial(derive_seed, task.seed, "textgrad", step, number)
            for number in range(len(traces))
        ]
        batches = await gather(
            Backward(system, texts, keys, ask, seed_of).gradients(trace, example)
            for trace, example, seed_of in zip(traces, examples, seeds, strict=True)
        )
        found = [gradient for batch in batches for gradient in batch]
        criticized = [key for key in keys if any(gradient.key == key for gradient in found)]
        new = await gather(self._rewrite(task, key, texts[key], found, state) for key in criticized)
        changed = {key: text for key, text in zip(criticized, new, strict=True) if text is not None}
        if shown := self.settings.momentum:
            for key, text in changed.items():
                state.written[key] = [*state.written.get(key, [texts[key]]), text][-shown - 1 :]
        return {**state.values, **changed}

    async def _rewrite(
        self, task: Task, key: str, prompt: str, gradients: Sequence[Gradient], state: Descent
    ) -> str | None:
        """Return a prompt that addresses all feedback on the current one; ``None`` if it is unusable."""
        feedback = [
            (gradient.call, gradient.feedback) for gradient in gradients if gradient.key == key
        ]
        seed = derive_seed(task.seed, "textgrad", "rewrite", state.step, key)
        past = [text for text in state.written.get(key, []) if text != prompt][
            -self.settings.momentum :
        ]
        component = task.system.components[component_of(key)]
        request = rewrite_request(
            component, prompt, feedback, past, self.settings.constraints, task.system, seed
        )
        return await ask_for_text(task, key, request, self.settings.lm, [prompt])

    async def _validate(
        self, task: Task, state: Descent, new: Mapping[str, str], held: Sequence[Example]
    ) -> None:
        """Score new prompts, and keep them unless they score lower than the current ones."""
        if dict(new) == state.values:
            return
        # scored together with the incumbent, since the scorer raises if all candidates fail
        _, after = await task.scorer.score([{}, new], held)
        state.tried += 1
        if after.mean >= state.mean:
            state.values, state.mean = dict(new), after.mean


def held_out_size(
    examples: int, least: int, steps: int, batch: int, runs: float, free_repeats: bool = True
) -> int:
    """Return the number of validation examples, such that ``runs`` covers all steps; at least ``least``.

    If ``runs`` does not cover ``least``, return the number for which it covers the first step, or
    0.

    >>> held_out_size(50, 8, steps=12, batch=3, runs=296)
    20
    >>> held_out_size(50, 8, steps=12, batch=3, runs=13)
    5
    """
    scored = 1 if free_repeats else 2  # the candidate, and the incumbent if it is not cached
    all_steps = (runs - steps * batch) / (1 + steps * scored)
    first_step = (runs - batch) / (1 + scored)
    return max(0, math.floor(min(examples, first_step, max(least, all_steps))))
