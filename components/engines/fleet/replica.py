"""One replica of a fleet: its engine, its state, and what it has answered."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from enum import Enum

from compound.components.engines.fleet.identity import Identity, served
from compound.components.engines.openai.engine import OpenAIEngine
from compound.components.engines.vllm.engine import VLLMEngine
from compound.engine import Completion, OnText, Request
from compound.errors import CompoundError


class ReplicaCondition(Enum):
    """Whether a replica receives requests."""

    UP = "up"
    """It receives requests."""
    CHECKING = "checking"
    """It is being asked whether it still serves the model, or its process is starting."""
    DOWN = "down"
    """It did not answer, and is asked again at growing intervals."""
    FAILED = "failed"
    """It serves something else, or cannot be started; it is not used again."""


@dataclass(frozen=True, slots=True)
class ReplicaStats:
    """Work of a replica so far.

    Attributes:
        name: the address of its server, or ``process 0`` for a process of the engine's own.
        up: whether it receives requests.
        requests: number of requests that it answered.
        moved: number of its requests that other replicas answered, because it ended or was not reachable.
        prompt_tokens: prompt tokens of the answered requests.
        completion_tokens: completion tokens of the answered requests.
        busy_seconds: time during which it had at least one request.

    >>> ReplicaStats("process 0", True, 10, 0, 500, 120, 4.0).tokens_per_second
    30.0
    """

    name: str
    up: bool
    requests: int
    moved: int
    prompt_tokens: int
    completion_tokens: int
    busy_seconds: float

    @property
    def tokens_per_second(self) -> float:
        """Completion tokens per second of the busy time."""
        return self.completion_tokens / self.busy_seconds if self.busy_seconds else 0.0


@dataclass(slots=True, eq=False)
class Replica:
    """A replica, used from one event loop.

    Attributes:
        name: the address of its server, or ``process 0`` for a process of the engine's own.
        engine: the engine that sends to it.
        address: the address of its server; None for a process of the engine's own.
        condition: whether it receives requests.
        load: number of its requests in flight.
        failure: why it is not used again.
        recovery: the task that asks it whether it still serves the model.
        gone: whether its server had ended when it was last asked; pending until it was.
    """

    name: str
    engine: VLLMEngine | OpenAIEngine
    address: str | None
    condition: ReplicaCondition = ReplicaCondition.UP
    load: int = 0
    failure: CompoundError | None = None
    recovery: asyncio.Task[None] | None = None
    gone: asyncio.Future[bool] | None = None
    _requests: int = 0
    _moved: int = 0
    _prompt_tokens: int = 0
    _completion_tokens: int = 0
    _busy: float = 0.0
    _since: float = 0.0

    @property
    def ended(self) -> bool:
        """Whether it is a process of the engine's own that has ended."""
        return isinstance(self.engine, VLLMEngine) and self.engine.server_ended

    @property
    def stats(self) -> ReplicaStats:
        """Work so far."""
        busy = self._busy + (time.monotonic() - self._since if self.load else 0.0)
        up = self.condition is ReplicaCondition.UP
        tokens = (self._prompt_tokens, self._completion_tokens)
        return ReplicaStats(self.name, up, self._requests, self._moved, *tokens, busy)

    async def identify(self, *, thoroughly: bool) -> Identity:
        """Return what it serves; start its process if it is one of the engine's own.

        Args:
            thoroughly: whether to compare log-probabilities, too, for which requests in flight are awaited.

        Raises:
            TransientError: it does not answer.
            CompoundError: it does not serve the model, or cannot be started.
        """
        facts = {}
        if self.address is not None:
            facts = dict(await served(self.address, self.engine.model, self.engine.api_key_env))
        if isinstance(self.engine, OpenAIEngine):
            return Identity(facts)
        if thoroughly:
            return Identity(facts, await self.engine.fingerprint())
        await self.engine.connect()
        return Identity(facts)

    def begin(self) -> None:
        """Count a request in flight."""
        if not self.load:
            self._since = time.monotonic()
        self.load += 1

    def end(self) -> None:
        """Count a request in flight as finished."""
        self.load -= 1
        if not self.load:
            self._busy += time.monotonic() - self._since

    def count_moved(self) -> None:
        """Count a request that another replica answers."""
        self._moved += 1

    async def answer(self, request: Request, on_text: OnText | None) -> Completion:
        """Answer a request; errors are those of the engine."""
        if on_text is not None and isinstance(self.engine, OpenAIEngine):
            completion = await self.engine.stream(request, on_text)
        else:
            completion = await self.engine.generate(request)
            if on_text is not None:
                on_text(completion.text)
        self._requests += 1
        self._prompt_tokens += completion.usage.prompt_tokens
        self._completion_tokens += completion.usage.completion_tokens
        return completion
