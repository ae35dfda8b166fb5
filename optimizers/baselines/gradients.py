"""Textual gradients: feedback on the outputs of language models, chained backwards through a run.

Yuksekgonul et al. 2024, "TextGrad: Automatic 'Differentiation' via Text", section 2. Feedback on an
output leads to feedback on the prompt that produced it, and on the earlier outputs that it was
computed from. Functions, retrievers and other components without a prompt pass feedback on
unchanged.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from graphlib import TopologicalSorter

from compound.components.llm import LLM
from compound.core.engine import Request
from compound.core.example import Example
from compound.core.loops import gather
from compound.execution.trace import Call, Trace
from compound.graph.component import Component, CompositeBase, Input, Source
from compound.graph.configuration import component_of
from compound.graph.space import Text
from compound.graph.system import System
from compound.optimization.method import PlannedJob
from compound.optimizers.search.proposers.proposing import (
    fields,
    outputs_of,
    read_and_written,
    result,
    verdict,
    writing_request,
)

MOST = 100  # maximum number of requests for one run; the feedback nearest to the result comes first

Ask = Callable[[Request], Awaitable[str | None]]
"""Sends a request for feedback; the answer is ``None`` if there is none."""


@dataclass(frozen=True)
class Gradient:
    """Feedback on a prompt from one call.

    Attributes:
        key: the parameter that holds the prompt.
    """

    key: str
    call: Call
    feedback: str


@dataclass(frozen=True)
class Backward:
    """Backward pass through one run.

    Attributes:
        keys: the prompts that need feedback.
        ask: sends a request for feedback.
        seed_of: returns the seed of a request, given its kind and the addresses concerned.
    """

    system: System
    prompts: Mapping[str, str]
    keys: Sequence[str]
    ask: Ask
    seed_of: Callable[..., int]

    async def gradients(self, trace: Trace, example: Example) -> list[Gradient]:
        """Return the feedback on each prompt from each call with it.

        Requests that do not depend on each other are concurrent. An output has the feedback from
        all calls that read it. Outputs that depend on none of the prompts get no feedback, and
        neither do those for which more than `MOST` requests would be needed.
        """
        calls = {call.address: call for call in trace.calls}
        read = {address: self._writers(call.parents, calls) for address, call in calls.items()}
        read = {
            address: earlier
            for address, earlier in read.items()
            if self._has_prompt(calls[address])
        }
        order = [*TopologicalSorter(read).static_order()]
        needed: set[str] = set()
        for address in order:
            if self._keys_of(calls[address]) or needed.intersection(read[address]):
                needed.add(address)

        feedback: dict[str, list[str]] = {}
        ends = [address for address in self._writers(_ends(trace), calls) if address in needed][
            :MOST
        ]
        losses = [
            loss_request(trace, example, calls[address], self.system, self.seed_of("loss", address))
            for address in ends
        ]
        for address, text in zip(ends, await gather(map(self._asked, losses)), strict=True):
            feedback[address] = [text] if text else []

        found: list[Gradient] = []
        left = MOST - len(ends)
        for address in reversed(order):
            if not feedback.get(address):
                continue
            call, text = calls[address], "\n".join(feedback[address])
            keys, earlier = (
                self._keys_of(call),
                [other for other in read[address] if other in needed],
            )
            system, prompt, seed_of = self.system, self._prompt_of(call), self.seed_of
            on_prompts = [
                prompt_request(
                    call, self.prompts[key], text, system, seed_of("prompt", address, key)
                )
                for key in keys
            ]
            on_outputs = [
                output_request(
                    calls[other], call, prompt, text, system, seed_of("output", address, other)
                )
                for other in earlier
            ]
            requests = on_prompts + on_outputs
            left -= len(requests)
            if left < 0:
                break
            answers = await gather(map(self._asked, requests))
            found += [
                Gradient(k, call, answer)
                for k, answer in zip(keys, answers, strict=False)
                if answer
            ]
            for other, answer in zip(earlier, answers[len(keys) :], strict=True):
                feedback.setdefault(other, []).extend([answer] if answer else [])
        return found

    async def _asked(self, request: Request) -> str | None:
        return await self.ask(request)

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


def loss_request(trace: Trace, example: Example, call: Call, system: System, seed: int) -> Request:
    """Return the request for feedback on an output, given the result of the run and its score."""
    expected = f"The expected result: {fields(example.gold)}\n" if example.gold else ""
    text = (
        f"{_part(system.components[call.component])}\n\n"
        f"The system read {fields(trace.inputs)}\n"
        f"The step wrote {fields(call.outputs)}\n"
        f"The result of the system: {result(trace)}\n{expected}Its score: {verdict(trace)}\n\n"
        f"What is wrong with the output of the step, {outputs_of(system.components[call.component])}, such "
        f"that the score was not higher? {_ADVICE} Do not write a new output."
    )
    return writing_request(text, seed)


def output_request(
    earlier: Call, call: Call, prompt: str, feedback: str, system: System, seed: int
) -> Request:
    """Return the request for feedback on a call's output, given that on the output of a later call."""
    text = (
        f"{_conversation(call, prompt, feedback, system)}\n\n"
        f"An earlier step, {outputs_of(system.components[earlier.component])}, contributed to what it read:\n"
        f"<output>{fields(earlier.outputs)}</output>\n\n"
        f"What is wrong with the output of the earlier step, such that the feedback arose? {_ADVICE} "
        "Do not write a new output."
    )
    return writing_request(text, seed)


def prompt_request(call: Call, prompt: str, feedback: str, system: System, seed: int) -> Request:
    """Return the request for feedback on a prompt, given the feedback on the output of one call with it."""
    text = (
        f"{_conversation(call, prompt, feedback, system)}\n\n"
        f"What is wrong with the instruction, such that the feedback arose? {_ADVICE} It will be used again "
        "for other inputs. Do not write a new instruction."
    )
    return writing_request(text, seed)


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


def _conversation(call: Call, prompt: str, feedback: str, system: System) -> str:
    return (
        f"{_part(system.components[call.component])}\n\nIts instruction:\n<prompt>{prompt}</prompt>\n\n"
        f"{read_and_written(call, system)}\n\nFeedback on what it wrote:\n<feedback>{feedback}</feedback>"
    )
