"""Execution of single calls: cache, single flight, budget, and requests to engines.

A component failure is data (`Failure`). User errors (a missing library or model, an invalid file) and an
exhausted budget are exceptions and end the run.
"""

from __future__ import annotations

import asyncio
import copy
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Self, TypedDict, cast

from compound.concurrency.sessions import Sessions
from compound.engine import NO_USAGE, Completion, Engine, OnText, Request, Usage, UsageDocument
from compound.errors import DeclarationError, TransientError
from compound.execution.budget import Meter
from compound.execution.cache import Cache
from compound.execution.calls.attempts import PendingCall, retry_delay, run_attempts
from compound.execution.calls.context import Context, TokensOf
from compound.execution.calls.request_key import request_key
from compound.execution.calls.shared_results import SharedResults
from compound.execution.observers.spans import active_tracer, within
from compound.execution.outcomes import CallResult
from compound.execution.sender import Engines, Notify, Sender
from compound.execution.throttle import Throttle
from compound.execution.tool_text import to_text
from compound.execution.trace import Call
from compound.graph.component import Component
from compound.graph.configuration import digest
from compound.registry.engine_checks import check_images, has_stable_name
from compound.storage.artifacts import without_path

ASK_RETRIES, ASK_SECONDS = 3, 120.0  # for requests outside of nodes


class AnswerRow(TypedDict):
    """Cached answer to a request outside of nodes."""

    text: str
    usage: UsageDocument


class Caller:
    """Executes calls for an executor."""

    def __init__(
        self,
        engines: Engines | None,
        cache: Cache | None,
        meter: Meter,
        sleep: Callable[[float], Awaitable[None]],
        folder: Path | None = None,
        notify: Notify | None = None,
    ) -> None:
        self.folder = folder
        self._cache = cache
        self.caches = cache is not None
        self.shares = getattr(cache, "shared", False)
        self._results = SharedResults(cache)
        self._meter = meter
        self.tokens_of: TokensOf | None = None
        self._sleep = sleep
        self._sender = Sender(engines, sleep, notify)
        self._native_tools: dict[str, bool] = {}
        self.sessions = Sessions()

    def with_meter(self, meter: Meter) -> Self:
        """Return a caller that shares everything except the budget."""
        other = copy.copy(self)
        other._meter = meter
        return other

    def with_tokens(self, tokens_of: TokensOf) -> Self:
        """Return a caller that shares everything, but asks a function for the tokens of answers."""
        other = copy.copy(self)
        other.tokens_of = tokens_of
        return other

    def batch(self) -> AbstractContextManager[None]:
        """Let equal calls also share failures within a block; see `SharedResults.batch`."""
        return self._results.batch()

    def engine(self, lm: str) -> Engine:
        """Return the engine of a model, opening it once."""
        return self._sender.engine(lm)

    @property
    def engines(self) -> Mapping[str, Engine]:
        """Engines that are open, by model name."""
        return self._sender.opened

    def throttle(self, lm: str) -> Throttle:
        """Return the admission control of a model's engine in this event loop."""
        return self._sender.throttle(self.engine(lm))

    async def adapt(self, lm: str, request: Request) -> Request:
        """Return a request in the form that the engine takes.

        Tools become text for an engine that does not take them. An engine that does is not asked to enforce a
        format while the model may call tools.

        Raises:
            DeclarationError: the request has images, which the engine does not take.
        """
        check_images(self.engine(lm), lm, request)
        if not request.uses_tools:
            return request
        if lm not in self._native_tools:  # a thread, because a model's chat template may have to be loaded
            self._native_tools[lm] = await asyncio.to_thread(_takes_tools, self.engine(lm))
        if not self._native_tools[lm]:
            return to_text(request)
        return replace(request, format=None) if request.tools and request.tool_choice == "auto" else request

    async def generate(
        self, lm: str, request: Request, context: Context | None = None, on_text: OnText | None = None
    ) -> Completion:
        """Send a request within rate limit and budget, and charge its usage to ``context``."""
        if request.adapter is not None and self.folder is not None:
            located = str(self.folder.absolute() / request.adapter.path)
            request = replace(request, adapter=replace(request.adapter, path=located))
        return await self._sender.send(lm, request, self._meter, context or Context("", 0, self), on_text)

    @asynccontextmanager
    async def reserve(self, worst: Usage) -> AsyncIterator[list[Usage]]:
        """Reserve budget for requests that are not sent through an engine.

        Raises:
            DeclarationError: the cost is limited, and the price of the requests is unknown.
        """
        limited = self._meter.budget.cost is not None
        async with self._meter.reserve(worst) as used:
            yield used
        if limited and any(item.unpriced for item in used):
            raise DeclarationError(
                "budget.cost is set, but the price of the component's own requests is unknown",
                hint="give the component price=(…, …), in dollars per million prompt and completion tokens",
            )

    async def ask(self, lm: str, request: Request) -> Completion:
        """Send a request outside of nodes; its answer is cached like that of a call."""
        cache = self._cache if self._is_cached(lm) else None
        key = digest(["ask", self.engine(lm).name, request_key(request)])
        row = cast("AnswerRow | None", cache.get(key)) if cache is not None else None
        if row is not None:
            usage = Usage.from_json(row["usage"])
            if cache is not None and cache.take_pending(key):
                await self._meter.charge_recorded(usage)
            return Completion(row["text"], usage)
        completion = await self._ask_with_retries(lm, request)
        if cache is not None:
            kept: AnswerRow = {"text": completion.text, "usage": completion.usage.to_json()}
            cache.put(key, kept)
        return completion

    async def _ask_with_retries(self, lm: str, request: Request) -> Completion:
        """Send a request with retries; the usage covers all attempts."""
        usage, tries = NO_USAGE, 0
        async with self._meter.deadline():
            while True:
                tries += 1
                context = Context("", 0, self)
                try:
                    async with asyncio.timeout(ASK_SECONDS) as context.timer:
                        completion = await self.generate(lm, request, context)
                    return replace(completion, usage=usage + context.usage)
                except (TransientError, TimeoutError) as error:
                    usage += context.usage
                    if tries > ASK_RETRIES:
                        raise TransientError(
                            f"{lm} returned no answer in {tries} attempts: {error}"
                        ) from error
                    passing = error if isinstance(error, TransientError) else TransientError(str(error))
                    await self._sleep(retry_delay(passing, tries, request.seed))

    async def call(self, pending: PendingCall) -> CallResult:
        """Make a call, or reuse the result from the cache or from an equal call in flight."""
        tracer = active_tracer()
        if tracer is None:
            return await self._call(pending)
        span = tracer.call(pending.component, pending.address, pending.inputs)
        return await within(span, self._call(pending))

    async def _call(self, pending: PendingCall) -> CallResult:
        key = self.key(pending)
        if not key:
            return await self._recorded(pending, "")
        return await self.share(key, pending.component, lambda: self._recorded(pending, key))

    def key(self, pending: PendingCall) -> str:
        """Return the cache key of a call; ``""`` if it is not cached."""
        if not self.caches or pending.bypass or not pending.component.cacheable:
            return ""
        if not self._is_cached(pending.values.get("lm")):
            return ""
        try:
            return self._key(pending)
        except (TypeError, ValueError):  # inputs without a JSON form have no key
            return ""

    def _is_cached(self, lm: object) -> bool:
        """Return whether answers of a model may be cached: elsewhere its name may be that of another."""
        return not (self.shares and isinstance(lm, str)) or has_stable_name(self.engine(lm))

    async def share(
        self, key: str, component: Component, execute: Callable[[], Awaitable[CallResult]]
    ) -> CallResult:
        """Return the result of a call from the cache or an equal call in flight, or execute it.

        Args:
            key: the cache key of the call.
            component: the component, whose ports convert stored outputs.
            execute: makes the call.
        """
        return await self._results.get(key, component, execute, self._meter)

    def settle(self, calls: Sequence[Call]) -> None:
        """Mark which of several equal calls was executed: the first in order, regardless of timing."""
        self._results.settle(calls)

    def _key(self, pending: PendingCall) -> str:
        component, values = pending.component, pending.values
        lm = values.get("lm")
        return digest(
            [
                component.version,
                {name: without_path(value) for name, value in values.items()},
                list(pending.inputs.items()),  # order matters: it is the order in the prompt
                self.engine(lm).name if isinstance(lm, str) else None,
                None if component.deterministic(values) else pending.seed,
            ]
        )

    async def _recorded(self, pending: PendingCall, key: str) -> CallResult:
        """Make a call, and record its exchanges with models; cancel it when the run's minutes are used up."""
        started = time.perf_counter()
        async with self._meter.deadline():
            result = await run_attempts(pending, key, self, self._sleep)
        seconds = time.perf_counter() - started
        return replace(result, exchanges=tuple(pending.exchanges), seconds=seconds)

    async def aclose(self) -> None:
        """Close every engine and every connection opened here."""
        await self.sessions.aclose()
        await self._sender.aclose()


def _takes_tools(engine: Engine) -> bool:
    return bool(getattr(engine, "native_tools", False))
