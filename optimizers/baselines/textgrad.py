"""TextGrad: rewrite prompts based on criticism.

Yuksekgonul et al. 2024, "TextGrad: Automatic 'Differentiation' via Text". A model reads a few runs and
criticizes the prompt of one component; a second request rewrites the prompt accordingly. Every few steps the
prompts are validated on examples that the criticism does not see, and the search continues from the best.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from pydantic import Field

from compound.errors import TooManyFailures
from compound.example import Example
from compound.execution.rng import derive_seed, generator
from compound.graph.configuration import component_of
from compound.narrowing import entry
from compound.optimization.bounds import JobBound, Outlook
from compound.optimization.method import Progress, Proposal, Task
from compound.optimizers.baselines.criticism import (
    MAX_TOKENS,
    bounds,
    criticism_request,
    rewrite_request,
)
from compound.optimizers.search.opro import parse_prompt
from compound.optimizers.search.prompts import split, text_keys
from compound.optimizers.search.proposing import ask_for_proposal
from compound.settings.base import Settings
from compound.settings.references import ModelName
from compound.storage.state import State

EVERY = 2  # steps between validations


class Descent(State):
    """Progress of `TextGrad`.

    Attributes:
        step: the number of completed steps.
        held: the number of validation examples.
        before: the incumbent's mean score on them.
        mean: the mean score of the best prompts.
        tried: the number of validations.
        best: the best validated prompts that differ from the incumbent's.
        values: the current prompts that differ from the incumbent's: the best ones, or unvalidated ones.
    """

    step: int = 0
    held: int
    before: float
    mean: float
    tried: int = 0
    best: dict[str, str] = Field(default_factory=dict)
    values: dict[str, str] = Field(default_factory=dict)


class TextGradSettings(Settings):
    """Settings of `textgrad`: prompts are rewritten based on criticism."""

    lm: ModelName | None = None
    """The model that criticizes and rewrites prompts; the system's own by default."""


@dataclass(frozen=True)
class TextGrad:
    """Optimizer that rewrites one prompt at a time, based on criticism.

    Attributes:
        steps: the number of rewriting steps.
        batch: the number of traces per criticism.
        held_out: the maximum number of validation examples.
        lm: the model that criticizes and rewrites prompts; ``None`` for the system's own.
    """

    steps: int = 12
    batch: int = 4
    held_out: int = 50
    lm: str | None = None

    def bound(self, outlook: Outlook) -> JobBound:
        """Declare one request for criticism and one for rewriting per step."""
        return JobBound(bounds(outlook, self.steps, self.batch, self.lm), written=MAX_TOKENS)

    async def propose(self, task: Task) -> AsyncIterator[Progress | Proposal]:
        """Criticize, rewrite and validate prompts, and propose the best validated ones."""
        _, examples = split(task)
        keys = text_keys(task)
        if task.resume is not None:
            state = Descent.from_json(task.resume)
        elif not task.scorer.may_ask(self.lm):
            yield Proposal(
                {}, note="no further requests to the model: too many failed, or the planned number is used"
            )
            return
        else:
            most = min(self.held_out, len(examples) // 2)
            left, free = task.scorer.runs_left, task.scorer.has_free_repeats
            size = held_out_size(most, task.minibatch, self.steps, self.batch, left, free)
            if not size or not keys:
                yield Proposal({}, note="too few examples or system runs to compare prompts")
                return
            mean = (await task.scorer.score([{}], examples[:size]))[0].mean
            state = Descent(held=size, before=mean, mean=mean)
            note = f"the incumbent on {size} example{'s' * (size != 1)}: {mean:.3f}"
            yield Progress(state.to_json(), note, step=0, of=self.steps)
        held, learn = examples[: state.held], examples[len(examples) // 2 :]
        while (step := state.step) < self.steps:
            if step % EVERY == 0 and self._validation_cost(task, len(held)) > task.scorer.runs_left:
                break
            if not task.scorer.may_ask(self.lm) and state.values == state.best:
                break  # there would be no new prompt to validate
            key = keys[step // EVERY % len(keys)]
            state.values = await self._rewrite(task, key, state, learn)
            state.step = step + 1
            if state.step % EVERY == 0 or state.step == self.steps:
                await self._validate(task, state, held)
            note = f"best {state.mean:.3f}"
            yield Progress(state.to_json(), note, step=state.step, of=self.steps)
        note = "" if state.best else "no rewritten prompt beat the incumbent"
        yield Proposal(state.best, state.before, state.mean, state.tried, note)

    def _validation_cost(self, task: Task, held: int) -> float:
        """Return the maximum cost of the steps up to the next validation, including it, in system runs."""
        return EVERY * self.batch + held * (1 if task.scorer.has_free_repeats else 2)

    async def _rewrite(
        self, task: Task, key: str, state: Descent, learn: Sequence[Example]
    ) -> dict[str, str]:
        """Return the prompts with one of them rewritten; unchanged if the replies were unusable."""
        values, step = state.values, state.step
        component = task.system.components[component_of(key)]
        prompt = values[key] if key in values else entry(task.system.configuration, key, str)
        order = generator(task.seed, "textgrad", step).permutation(len(learn))[: self.batch]
        try:
            traces = await task.scorer.traces(values, [learn[i] for i in order])
        except TooManyFailures:  # the current prompts break the runs: return to the best ones
            return state.best
        seeds = [derive_seed(task.seed, "textgrad", kind, step) for kind in ("criticise", "rewrite")]
        request = criticism_request(component, prompt, traces, seeds[0])
        criticism = await ask_for_proposal(task, request, self.lm, lambda reply: reply.strip() or None)
        if criticism is None:
            return values
        space = task.system.parameters[key]

        def read(reply: str) -> str | None:
            text = parse_prompt(reply)
            return None if text is None or space.problem(text) else text

        request = rewrite_request(component, prompt, criticism, seeds[1])
        text = await ask_for_proposal(task, request, self.lm, read, lambda text: text == prompt)
        return values if text is None else {**values, key: text}

    async def _validate(self, task: Task, state: Descent, held: Sequence[Example]) -> None:
        """Score the current prompts; the next steps start from the best ones so far."""
        if state.values == state.best:
            return
        # scored together with the incumbent, since the scorer raises if all candidates fail
        _, after = await task.scorer.score([{}, state.values], held)
        state.tried += 1
        if after.mean > state.mean:
            state.best, state.mean = state.values, after.mean
        else:
            state.values = state.best


def held_out_size(
    examples: int, least: int, steps: int, batch: int, runs: float, free_repeats: bool = True
) -> int:
    """Return the number of validation examples, such that ``runs`` covers all steps; at least ``least``.

    If ``runs`` does not cover ``least``, return the number for which it covers the steps up to the first
    validation, or 0.

    >>> held_out_size(50, 8, steps=12, batch=4, runs=188)
    20
    >>> held_out_size(50, 8, steps=12, batch=4, runs=16)
    4
    """
    scored = 1 if free_repeats else 2  # the candidate, and the incumbent if it is not cached
    all_steps = (runs - steps * batch) / (1 + math.ceil(steps / EVERY) * scored)
    first_steps = (runs - EVERY * batch) / (1 + scored)
    return max(0, math.floor(min(examples, first_steps, max(least, all_steps))))
