"""Test doubles: a scripted model, and a method memory without a run directory."""

from __future__ import annotations

import asyncio
import inspect
import json
import re
import shutil
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from compound.core.engine import Completion, OnText, Request, Usage
from compound.core.errors import CallError
from compound.execution.rng import generator

Reply = str | Exception | Completion
Script = Sequence[Reply] | Mapping[str, Reply] | Callable[..., object]


class ScriptedLM:
    """Engine that answers from a script, for tests and simulations.

    Args:
        script: a list (replies in order), a mapping (the first key contained in the last message
            selects the reply), or a function of the last message, or of the message and the
            request's random generator (two parameters without defaults); it may be async. A reply
            that is an exception is raised.
        latency: seconds to wait, or a function of the request's generator.
        price: dollars per word of prompt and answer.
        priced: whether the price counts as known.
        remote: whether time limits include the wait for an answer.
        native_tools: whether it takes tools; a reply that calls them is a `Completion` with tool
            calls.
        takes_images: whether it takes images.
        stable_name: whether equal names mean equal scripts, so that `cp.evaluate` may cache the
            answers.
        writes_prompts: whether searches ask it for new prompts by default.

    Usage counts words as tokens. ``requests`` records the requests.

    Example:
        >>> from compound.core.engine import Message
        >>> lm = ScriptedLM({"capital of France": "Paris"})
        >>> ask = Request((Message("user", "What is the capital of France?"),))
        >>> asyncio.run(lm.generate(ask)).text
        'Paris'
    """

    def __init__(
        self,
        script: Script,
        *,
        name: str = "scripted",
        concurrency: int = 64,
        latency: float | Callable[[np.random.Generator], float] = 0.0,
        price: float = 0.0,
        priced: bool = True,
        remote: bool = True,
        native_tools: bool = False,
        takes_images: bool = False,
        stable_name: bool = False,
        writes_prompts: bool = False,
    ) -> None:
        self._script = script
        self._random = callable(script) and _required_parameters(script) >= 2
        self._name = name
        self._concurrency = concurrency
        self._latency = latency
        self._price = price
        self.priced = priced
        self.remote = remote
        self.native_tools, self.takes_images, self.stable_name = (
            native_tools,
            takes_images,
            stable_name,
        )
        self.writes_prompts = writes_prompts
        self.requests: list[Request] = []
        self.in_flight = 0
        self.most_in_flight = 0

    @property
    def name(self) -> str:
        """The model's name."""
        return self._name

    @property
    def concurrency(self) -> int:
        """Maximum number of requests in flight."""
        return self._concurrency

    def worst_case(self, request: Request) -> Usage:
        """Return the words of the prompt and ``max_tokens``, at this model's price per token."""
        words = _words(request)
        return Usage(
            1,
            words,
            request.max_tokens,
            self._price * (words + request.max_tokens),
            int(not self.priced),
        )

    async def generate(self, request: Request) -> Completion:
        """Answer from the script."""
        number = len(self.requests)
        self.requests.append(request)
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            rng = generator("scripted", request.seed)
            wait = self._latency(rng) if callable(self._latency) else self._latency
            if wait:
                await asyncio.sleep(wait)
            return await self._answer(request, number)
        finally:
            self.in_flight -= 1

    async def stream(self, request: Request, on_text: OnText) -> Completion:
        """Answer from the script, and report the answer word by word."""
        completion = await self.generate(request)
        for word in re.findall(r"\s*\S+|\s+$", completion.text):
            on_text(word)
            await asyncio.sleep(0)
        return completion

    async def _answer(self, request: Request, number: int) -> Completion:
        reply = self._reply(request, number)
        if isinstance(reply, Awaitable):
            reply = await reply
        if isinstance(reply, Exception):
            raise reply
        if isinstance(reply, Completion):
            return reply
        answer = str(reply)
        for stop in request.stop:
            answer = answer.split(stop, maxsplit=1)[0]
        words = re.findall(r"\s*\S+", answer)
        text = "".join(words[: request.max_tokens])
        used = min(len(words), request.max_tokens)
        prompt = _words(request)
        return Completion(
            text,
            Usage(1, prompt, used, self._price * (prompt + used), int(not self.priced)),
            "length" if len(words) > used else "stop",
        )

    def _reply(self, request: Request, number: int) -> object:
        message = request.cued[-1].text
        script = self._script
        if callable(script):
            return (
                script(message, generator("reply", request.seed))
                if self._random
                else script(message)
            )
        if isinstance(script, Mapping):
            for key, reply in script.items():
                if key in message:
                    return reply
            raise CallError(f"the script has no reply to {message!r:.200}")
        if number >= len(script):
            raise CallError(
                f"the script has {len(script)} replies, but this is request {number + 1}"
            )
        return script[number]

    async def aclose(self) -> None:
        """Do nothing, because a script has no resources to release."""


def _required_parameters(function: Callable[..., object]) -> int:
    """Return the number of positional parameters without a default."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # some callables of C have no signature
        return 1
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(item.kind in positional and item.default is item.empty for item in parameters)


def _words(request: Request) -> int:
    tools = [f"{tool.name} {tool.description} {tool.parameters}" for tool in request.tools]
    return sum(len(text.split()) for text in [*(message.text for message in request.cued), *tools])


@dataclass(frozen=True)
class MemorySnapshot:
    """Snapshot of a `PlainMemory`."""

    state: str
    records: tuple[str, ...]
    files: Path


class PlainMemory:
    """A method's memory outside a run directory; implements `compound.optimization.method.Memory`."""

    def __init__(self, folder: Path) -> None:
        self.state: dict[str, object] = {}
        self.folder = folder
        self._records: list[str] = []

    def append(self, record: Mapping[str, object]) -> None:
        """Add a record."""
        self._records.append(json.dumps(record))

    def flush(self) -> None:
        """Do nothing: there are no checkpoints."""

    def records(self) -> list[dict[str, object]]:
        """Return the records, parsed from JSON."""
        return [json.loads(record) for record in self._records]

    def snapshot(self, files: Path) -> MemorySnapshot:
        """Return a snapshot of the memory.

        Args:
            files: the folder to copy the memory's files to; it must not exist yet.
        """
        shutil.copytree(self.folder, files)
        return MemorySnapshot(json.dumps(self.state), tuple(self._records), files)

    def restore(self, snapshot: MemorySnapshot) -> None:
        """Replace the content of the memory by that of a snapshot."""
        self.state = json.loads(snapshot.state)
        self._records = list(snapshot.records)
        shutil.copytree(snapshot.files, self.folder, dirs_exist_ok=True)
