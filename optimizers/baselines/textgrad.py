"""Prompts rewritten from criticism: TextGrad.

Yuksekgonul et al. 2024, "TextGrad: Automatic 'Differentiation' via Text". A model reads a few runs and
says what the prompt of one component did wrong; a second request rewrites the prompt accordingly. Every
few steps the prompt is scored on examples held out from the criticism, and the search continues
from the best.
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
from compound.optimizers.baselines.criticism import WRITTEN, bounds, criticise, rewrite
from compound.optimizers.search.opro import proposal
from compound.optimizers.search.prompts import split, text_keys
from compound.optimizers.search.proposing import ask
from compound.settings.base import Settings
from compound.settings.references import ModelName
from compound.storage.state import State

EVERY = 2  # steps between two validations


class Descent(State):
    """The progress of `TextGrad`.

    Attributes:
        step: how many steps are completed.
        held: the number of examples that prompts are validated on.
        before: the incumbent's mean score on them.
        mean: the mean score of the best prompts.
        tried: how many rewritten prompts were validated.
        best: the best prompts that were validated, besides the incumbent's.
        values: the present prompts, besides the incumbent's: the best ones, or ones not validated yet.
    """

    step: int = 0
    held: int
    before: float
    mean: float
    tried: int = 0
    best: dict[str, str] = Field(default_factory=dict)
    values: dict[str, str] = Field(default_factory=dict)


class TextGradSettings(Settings):
    """How prompts are rewritten from criticism."""

    lm: ModelName | None = None
    """The model that criticises and rewrites; the system's own by default."""


@dataclass(frozen=True)
class TextGrad:
    """Rewrites one prompt at a time.

    Attributes:
        steps: how many rewritings.
        batch: the traces one criticism is made from.
        held_out: the most examples that a rewritten prompt is validated on.
        lm: the model that criticises and rewrites; the system's own when ``None``.
    """

    steps: int = 12
    batch: int = 4
    held_out: int = 50
    lm: str | None = None

    def bound(self, outlook: Outlook) -> JobBound:
        """Declare a criticism and a rewriting for each step."""
        return JobBound(bounds(outlook, self.steps, self.batch, self.lm), written=WRITTEN)

    async def propose(self, task: Task) -> AsyncIterator[Progress | Proposal]:
        """Criticise, rewrite, validate; propose the best of what was validated."""
        _, examples = split(task)
        keys = text_keys(task)
        if task.resume is not None:
            state = Descent.from_json(task.resume)
        elif not task.scorer.may_ask(self.lm):
            yield Proposal({}, note="the model that criticises and rewrites is not asked")
            return
        else:
            most = min(self.held_out, len(examples) // 2)
            left, free = task.scorer.left, task.scorer.free_repeats
            size = held_out_size(most, task.minibatch, self.steps, self.batch, left, free)
            if not size or not keys:
                yield Proposal({}, note="too few examples or runs to compare anything")
                return
            mean = (await task.scorer.score([{}], examples[:size]))[0].mean
            state = Descent(held=size, before=mean, mean=mean)
            note = f"the incumbent on {size} example{'s' * (size != 1)}: {mean:.3f}"
            yield Progress(state.to_json(), note, step=0, of=self.steps)
        held, learn = examples[: state.held], examples[len(examples) // 2 :]
        while (step := state.step) < self.steps:
            if step % EVERY == 0 and self._pair(task, len(held)) > task.scorer.left:
                break
            if not task.scorer.may_ask(self.lm) and state.values == state.best:
                break  # nothing new would be validated
            key = keys[step // EVERY % len(keys)]
            state.values = await self._rewritten(task, key, state, learn)
            state.step = step + 1
            if state.step % EVERY == 0 or state.step == self.steps:
                await self._validate(task, state, held)
            note = f"best {state.mean:.3f}"
            yield Progress(state.to_json(), note, step=state.step, of=self.steps)
        note = "" if state.best else "no rewritten prompt beat the incumbent"
        yield Proposal(state.best, state.before, state.mean, state.tried, note)

    def _pair(self, task: Task, held: int) -> float:
        """Return the most runs that the steps up to the next validation, and that one, can cost."""
        return EVERY * self.batch + held * (1 if task.scorer.free_repeats else 2)

    async def _rewritten(
        self, task: Task, key: str, state: Descent, learn: Sequence[Example]
    ) -> dict[str, str]:
        """Return the values with one prompt rewritten; as they were when a model gave nothing usable."""
        values, step = state.values, state.step
        component = task.system.components[component_of(key)]
        prompt = values[key] if key in values else entry(task.system.configuration, key, str)
        order = generator(task.seed, "textgrad", step).permutation(len(learn))[: self.batch]
        try:
            traces = await task.scorer.traces(values, [learn[i] for i in order])
        except TooManyFailures:  # a prompt that breaks the runs is given up
            return state.best
        seeds = [derive_seed(task.seed, "textgrad", kind, step) for kind in ("criticise", "rewrite")]
        request = criticise(component, prompt, traces, seeds[0])
        criticism = await ask(task, request, self.lm, lambda reply: reply.strip() or None)
        if criticism is None:
            return values
        space = task.system.parameters[key]

        def read(reply: str) -> str | None:
            found = proposal(reply)
            return None if found is None or space.problem(found) else found

        request = rewrite(component, prompt, criticism, seeds[1])
        text = await ask(task, request, self.lm, read, lambda found: found == prompt)
        return values if text is None else {**values, key: text}

    async def _validate(self, task: Task, state: Descent, held: Sequence[Example]) -> None:
        """Score what the last steps made; the next ones start from the best so far."""
        if state.values == state.best:
            return
        # beside the incumbent, a prompt that breaks the runs only loses
        _, after = await task.scorer.score([{}, state.values], held)
        state.tried += 1
        if after.mean > state.mean:
            state.best, state.mean = state.values, after.mean
        else:
            state.values = state.best


def held_out_size(
    examples: int, least: int, steps: int, batch: int, runs: float, free_repeats: bool = True
) -> int:
    """Return how many examples to validate on: as many as leave runs for all steps, but ``least``.

    Below that, as many as leave runs for the first steps and their validation; 0 when nothing does.

    >>> held_out_size(50, 8, steps=12, batch=4, runs=188)
    20
    >>> held_out_size(50, 8, steps=12, batch=4, runs=16)
    4
    """
    each = 1 if free_repeats else 2  # beside the candidate, the incumbent
    whole = (runs - steps * batch) / (1 + math.ceil(steps / EVERY) * each)
    first = (runs - EVERY * batch) / (1 + each)
    return max(0, math.floor(min(examples, first, max(least, whole))))
