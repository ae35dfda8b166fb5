"""Find the prompts of external agents by running them on a few examples."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

from compound.components.external_agent import ExternalAgent
from compound.components.gateway.clustering import FoundPrompt, RecordedRequest, find_prompts
from compound.components.gateway.documents import Document, Route, text_slots
from compound.core.engine import NO_USAGE, Engine, Usage
from compound.core.errors import DeclarationError
from compound.core.example import Example
from compound.core.loops import run_blocking
from compound.core.storage.records import Damaged, parse
from compound.execution.executor import Executor
from compound.execution.trace import Call, Trace
from compound.graph.registry.engines import for_system
from compound.graph.system import System

__all__ = ["Discovery", "discover", "prompts_tree"]

CONCURRENCY = 4  # runs at a time


@dataclass(frozen=True)
class Discovery:
    """The prompts of one agent.

    Attributes:
        agent: the component's name.
        prompts: prompts that were found in requests that no declared prompt recognizes.
        recognized: number of requests by declared prompt.
        other: number of requests without a prompt, declared or found.
        runs: number of runs.
        failed: messages of failed runs.
        usage: usage of the runs.
        results: outputs of the runs that did not fail.
    """

    agent: str
    prompts: Sequence[FoundPrompt]
    recognized: Mapping[str, int]
    other: int
    runs: int
    failed: Sequence[str] = ()
    usage: Usage = field(default=NO_USAGE)
    results: Sequence[Mapping[str, object]] = ()


def discover(
    system: System,
    examples: Sequence[Example],
    find: Callable[[str], Engine],
) -> list[Discovery]:
    """Run a system on examples, and return the prompts of each of its external agents.

    Raises:
        DeclarationError: the system has no external agent, or there are fewer than two examples.
    """
    agents = [found for found in system.components.values() if isinstance(found, ExternalAgent)]
    if not agents:
        raise DeclarationError(
            f"system {system.name!r} has no external agent",
            hint="declare one: external_agent: {call: module:function}",
        )
    if len(examples) < 2:
        raise DeclarationError("finding prompts needs at least 2 examples, but there are fewer")
    traces = run_blocking(_run(system, examples, find))
    return [_discovery(agent, system, traces) for agent in agents]


async def _run(
    system: System, examples: Sequence[Example], find: Callable[[str], Engine]
) -> list[Trace]:
    executor = Executor(for_system(find, system))
    turns = asyncio.Semaphore(CONCURRENCY)

    async def one(example: Example) -> Trace:
        async with turns:
            inputs = {name: example.inputs[name] for name in system.inputs}
            return await executor.run(system, inputs, example=example.id)

    try:
        return list(await asyncio.gather(*map(one, examples)))
    finally:
        await executor.aclose()


def _discovery(agent: ExternalAgent, system: System, traces: Sequence[Trace]) -> Discovery:
    other = f"{agent.name}_other"
    names = [prompt.name for prompt in agent.prompts]
    recognized = {name: sum(len(trace.calls_of(name)) for trace in traces) for name in names}
    requests = [_recorded(trace, call) for trace in traces for call in trace.calls_of(other)]
    prompts = find_prompts(requests, system.components)
    failed = [trace.failure.message for trace in traces if trace.failure is not None]
    usage = sum((trace.usage for trace in traces), NO_USAGE)
    left = len(requests) - sum(prompt.requests for prompt in prompts)
    results = [trace.outputs for trace in traces if trace.failure is None]
    return Discovery(agent.name, prompts, recognized, left, len(traces), failed, usage, results)


def _recorded(trace: Trace, call: Call) -> RecordedRequest:
    texts: dict[str, str] = {}
    route, document = cast("Route", call.inputs["route"]), cast("Document", call.inputs["request"])
    slots = list(text_slots(route, document))
    for slot in slots:
        texts.setdefault(slot.role, slot.text)
    others = [other for other in trace.calls if other is not call]
    answers = [
        {name: v for name, v in other.outputs.items() if name != "response"} for other in others
    ]
    messages = document.get("messages" if route == "chat/completions" else "input")
    tools = [m for m in messages if _is_tool_result(m)] if isinstance(messages, list) else []
    return RecordedRequest(
        trace.example,
        texts,
        frozenset(_strings(dict(trace.inputs))),
        frozenset(_strings([answers, [m.get("content", m.get("output")) for m in tools]])),
        continues=sum(slot.role == "user" for slot in slots) > 1,
        model=str(document.get("model") or ""),
        failed=call.failure is not None,
    )


def _is_tool_result(message: object) -> bool:
    return isinstance(message, dict) and (
        "tool_call_id" in message or message.get("type") == "function_call_output"
    )


def _strings(value: object) -> Iterator[str]:
    """Yield the texts and numbers in a value at any depth, also in a text that is JSON.

    >>> list(_strings({"answer": '{"text": ["a", 1]}'}))
    ['{"text": ["a", 1]}', 'a', '1']
    """
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for each in value:
            yield from _strings(each)
    elif value is not None:
        yield str(value)
        if isinstance(value, str) and value.lstrip()[:1] in ("{", "["):
            with contextlib.suppress(Damaged):
                yield from _strings(parse(value))


def prompts_tree(prompts: Sequence[FoundPrompt]) -> dict[str, dict[str, object]]:
    """Return prompts as the content of a ``prompts_file``, with their texts to tune."""
    tree: dict[str, dict[str, object]] = {}
    for prompt in prompts:
        entry = tree[prompt.name] = {}
        for role, setting in (("system", "system"), ("user", "prompt")):
            if role in prompt.match:
                text = prompt.match[role]
                limit = {"max_length": 2 * len(text)} if len(text) > 4000 else {}
                entry[setting] = {"tune": text, **limit}
    return tree
