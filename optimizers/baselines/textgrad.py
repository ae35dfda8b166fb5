"""TextGrad: rewrite prompts based on feedback that is propagated backwards through the system.

Yuksekgonul et al. 2024, "TextGrad: Automatic 'Differentiation' via Text". A model criticizes the
outputs of a few runs; the criticism of an output leads to a criticism of the prompt and of the
earlier outputs that it was computed from. Rewritten prompts that score lower are reverted.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from graphlib import TopologicalSorter
from typing import Any

from pydantic import Field

from compound.components.llm import LLM
from compound.core.engine import Request
from compound.core.errors import TooManyFailures
from compound.core.example import Example
from compound.core.loops import gather
from compound.core.narrowing import entry
from compound.core.storage.state import State
from compound.execution.rng import derive_seed, generator
from compound.execution.trace import Call, Trace
from compound.graph.component import Component, CompositeBase, Input, Source
from compound.graph.configuration import component_of
from compound.graph.space import Text
from compound.graph.system import System
from compound.optimization.method import JobPlan, PlannedJob, Progress, Proposal, RequestCount, Task
from compound.optimization.settings.base import ModelName, Settings
from compound.optimizers.scheduling import keys_of, text_keys
from compound.optimizers.search.proposers.proposing import (
    NO_REQUESTS,
    ask_for_proposal,
    ask_for_text,
    fields,
    outputs_of,
    read_and_written,
    result,
    verdict,
    writing_request,
)
from compound.optimizers.search.sources import split


class Descent(State):
    """Progress of `TextGrad`."""

    step: int = 0
    held: int
    before: float
    mean: float
    tried: int = 0
    values: dict[str, str] = Field(default_factory=dict)
    # the latest versions of each prompt by key, including those that were reverted
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
            # prompts that passed validation broke these runs
            state.values, state.mean = {}, state.before
            return {}

        async def ask(request: Request) -> str | None:
            return await ask_for_proposal(
                task, request, self.settings.lm, lambda reply: reply.strip() or None
            )

        system = task.system
        texts = {
            key: entry(system.configuration, key, str) for key in keys_of(system, Text)
        } | state.values
        numbers = range(len(traces))
        seeds = [partial(derive_seed, task.seed, "textgrad", step, number) for number in numbers]
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

    If ``runs`` does not cover that, it is the number for which it covers the first step, or 0.

    >>> held_out_size(50, 8, steps=12, batch=3, runs=296)
    20
    >>> held_out_size(50, 8, steps=12, batch=3, runs=13)
    5
    """
    scored = 1 if free_repeats else 2  # the candidate, and the incumbent if it is not cached
    all_steps = (runs - steps * batch) / (1 + steps * scored)
    first_step = (runs - batch) / (1 + scored)
    return max(0, math.floor(min(examples, first_step, max(least, all_steps))))


MOST = 100  # maximum number of requests for one run; the feedback nearest to the result comes first

Ask = Callable[[Request], Coroutine[Any, Any, str | None]]
"""Sends a request for feedback; the answer is ``None`` if there is none."""


@dataclass(frozen=True)
class Gradient:
    """Feedback on a prompt from one call."""

    key: str
    call: Call
    feedback: str


@dataclass(frozen=True)
class Backward:
    """Backward pass through one run."""

    system: System
    prompts: Mapping[str, str]
    keys: Sequence[str]
    ask: Ask
    # returns the seed of a request, given its kind and the addresses concerned
    seed_of: Callable[..., int]

    async def gradients(self, trace: Trace, example: Example) -> list[Gradient]:
        """Return the feedback on each prompt from each call with it; independent requests are concurrent.

        Outputs that depend on none of the prompts, and those beyond `MOST` requests, get no feedback.
        """
        calls = {call.address: call for call in trace.calls}
        read = {address: self._writers(call.parents, calls) for address, call in calls.items()}
        read = {name: found for name, found in read.items() if self._has_prompt(calls[name])}
        order = [*TopologicalSorter(read).static_order()]
        needed: set[str] = set()
        for address in order:
            if self._keys_of(calls[address]) or needed.intersection(read[address]):
                needed.add(address)

        feedback: dict[str, list[str]] = {}
        ends = [address for address in self._writers(_ends(trace), calls) if address in needed][
            :MOST
        ]
        losses = [(self._of_result(trace, example, calls[end]), "loss", end) for end in ends]
        for address, text in zip(ends, await self._answers(losses), strict=True):
            feedback[address] = [text] if text else []

        found: list[Gradient] = []
        left = MOST - len(ends)
        for address in reversed(order):
            if not feedback.get(address):
                continue
            call, text = calls[address], "\n".join(feedback[address])
            keys = self._keys_of(call)
            earlier = [other for other in read[address] if other in needed]
            prompt = self._prompt_of(call)
            requests = [
                (self._of_prompt(call, self.prompts[key], text), "prompt", address, key)
                for key in keys
            ]
            requests += [
                (self._of_output(calls[other], call, prompt, text), "output", address, other)
                for other in earlier
            ]
            left -= len(requests)
            if left < 0:
                break
            answers = await self._answers(requests)
            answered = zip(keys, answers, strict=False)
            found += [Gradient(key, call, answer) for key, answer in answered if answer]
            for other, answer in zip(earlier, answers[len(keys) :], strict=True):
                feedback.setdefault(other, []).extend([answer] if answer else [])
        return found

    async def _answers(self, asked: Sequence[tuple[str, ...]]) -> list[str | None]:
        """Send requests, each with its text, its kind and the addresses concerned."""
        requests = (writing_request(text, self.seed_of(*names)) for text, *names in asked)
        return await gather(map(self.ask, requests))

    def _of_result(self, trace: Trace, example: Example, call: Call) -> str:
        component = self.system.components[call.component]
        expected = f"The expected result: {fields(example.gold)}\n" if example.gold else ""
        return (
            f"{_part(component)}\n\n"
            f"The system read {fields(trace.inputs)}\n"
            f"The step wrote {fields(call.outputs)}\n"
            f"The result of the system: {result(trace)}\n{expected}Its score: {verdict(trace)}\n\n"
            f"What is wrong with the output of the step, {outputs_of(component)}, such "
            f"that the score was not higher? {_ADVICE} Do not write a new output."
        )

    def _of_output(self, earlier: Call, call: Call, prompt: str, feedback: str) -> str:
        written = outputs_of(self.system.components[earlier.component])
        return (
            f"{self._conversation(call, prompt, feedback)}\n\n"
            f"An earlier step, {written}, contributed to what it read:\n"
            f"<output>{fields(earlier.outputs)}</output>\n\n"
            f"What is wrong with the output of the earlier step, such that the feedback arose? {_ADVICE} "
            "Do not write a new output."
        )

    def _of_prompt(self, call: Call, prompt: str, feedback: str) -> str:
        return (
            f"{self._conversation(call, prompt, feedback)}\n\n"
            f"What is wrong with the instruction, such that the feedback arose? {_ADVICE} "
            "It will be used again for other inputs. Do not write a new instruction."
        )

    def _conversation(self, call: Call, prompt: str, feedback: str) -> str:
        part = _part(self.system.components[call.component])
        return (
            f"{part}\n\nIts instruction:\n<prompt>{prompt}</prompt>\n\n"
            f"{read_and_written(call, self.system)}\n\n"
            f"Feedback on what it wrote:\n<feedback>{feedback}</feedback>"
        )

    def _writers(self, addresses: Sequence[str], calls: Mapping[str, Call]) -> list[str]:
        """Return the calls with prompts that produced the values of calls, through calls without a prompt."""
        found: dict[str, None] = {}
        waiting, seen = [*reversed(addresses)], set[str]()
        while waiting:
            address = waiting.pop()
            if address in seen or address not in calls:
                continue
            seen.add(address)
            if self._has_prompt(calls[address]):
                found[address] = None
            else:
                waiting += reversed(calls[address].parents)
        return [*found]

    def _has_prompt(self, call: Call) -> bool:
        return has_prompt(self.system.components[call.component])

    def _keys_of(self, call: Call) -> list[str]:
        return [key for key in self.keys if component_of(key) == call.component]

    def _prompt_of(self, call: Call) -> str:
        """Return the prompt of a call: its texts that are parameters, or a fixed text."""
        texts = [text for key, text in self.prompts.items() if component_of(key) == call.component]
        fixed = self.system.components[call.component].settings.get("prompt")
        return "\n".join(texts) or (fixed if isinstance(fixed, str) else "")


def has_prompt(component: Component) -> bool:
    """Return whether a component is an LLM, or has a text parameter."""
    return isinstance(component, LLM) or any(
        isinstance(v, Text) for v in component.settings.values()
    )


def _ends(trace: Trace) -> Sequence[str]:
    """Return the calls that produced the outputs; the first one that failed, if the run failed."""
    if trace.failure is None and trace.ends is not None:
        return trace.ends
    failed = [call.address for call in trace.calls if call.failure is not None]
    return failed[:1] or [call.address for call in trace.calls[-1:]]


def most_requests(job: PlannedJob) -> float:
    """Return the maximum number of requests of `Backward.gradients` for one run of a job's system."""
    system, calls = job.system, {name: count.most for name, count in job.calls.items()}
    made = sum(calls[c.name] for c in system.components.values() if has_prompt(c))
    prompts = sum(calls[component_of(key)] for key in job.texts)
    if any(isinstance(node.component, CompositeBase) for node in system.nodes.values()):
        return min(MOST, made + prompts + made * (made - 1) / 2)  # a call may read all earlier ones
    writers = {name: len(_writers(system, node.sources)) for name, node in system.nodes.items()}
    edges = sum(writers[name] for name, node in system.nodes.items() if has_prompt(node.component))
    tools = [writers[name] for name, node in system.nodes.items() if not has_prompt(node.component)]
    ends = max(1, len(_writers(system, [*system.outputs.values()])), *tools)  # a tool can fail
    return min(MOST, ends + prompts + edges)


def _writers(system: System, sources: Sequence[Source]) -> set[str]:
    """Return the nodes with prompts that sources come from, possibly by way of other nodes."""
    found, waiting, seen = set[str](), [*sources], set[str]()
    while waiting:
        source = waiting.pop()
        if isinstance(source, Input) or source.node.name in seen:
            continue
        seen.add(source.node.name)
        if has_prompt(source.node.component):
            found.add(source.node.name)
        else:
            waiting += system.nodes[source.node.name].sources
    return found


_ADVICE = "Give specific criticism, in a few sentences; if it is already good, say so."


def rewrite_request(
    component: Component,
    prompt: str,
    feedback: Sequence[tuple[Call, str]],
    past: Sequence[str],
    constraints: Sequence[str],
    system: System,
    seed: int,
) -> Request:
    """Return the request for a prompt that addresses feedback."""
    runs = "\n\n".join(
        f"Run {number}:\n{read_and_written(call, system)}\nCriticism of the instruction:\n{text}"
        for number, (call, text) in enumerate(feedback, start=1)
    )
    versions = "\n".join(f"<past>{text}</past>" for text in past)
    history = (
        f"Earlier versions of the instruction, oldest first:\n{versions}\n"
        "If the criticism is the same as before, change more.\n\n"
    )
    conditions = "".join(f"- {condition}\n" for condition in constraints)
    conditions = f"It must meet these conditions:\n{conditions}" if constraints else ""
    text = (
        f"{_part(component)}\n\nIts instruction:\n<prompt>{prompt}</prompt>\n\n{runs}\n\n"
        f"{history if past else ''}"
        "Rewrite the instruction so that it meets the criticism. The criticism can be mistaken; keep what is "
        f"right. {conditions}"
        "Write it between <prompt> and </prompt>, and nothing else."
    )
    return writing_request(text, seed)


def _part(component: Component) -> str:
    return (
        f"A language model performs one step of a larger system. The step: {outputs_of(component)}"
    )
