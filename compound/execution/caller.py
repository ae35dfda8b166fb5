"""Execution of single calls: cache, single flight, retries, timeouts, type checks.

A component failure is data (`Failure`). User errors (a missing library or model, an invalid file) and an
exhausted budget are exceptions and end the run.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import itertools
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Self, TypedDict, cast

import numpy as np

from compound.concurrency.own_thread import exit_as_error
from compound.concurrency.sessions import Sessions
from compound.containers import copy_containers
from compound.engine import (
    NO_USAGE,
    Completion,
    Engine,
    Message,
    OnText,
    Request,
    TokenRecord,
    Usage,
    UsageDocument,
)
from compound.errors import CallError, CompoundError, DeclarationError, OutputTypeError, TransientError
from compound.example import CallValues
from compound.execution.budget import Meter
from compound.execution.cache import Cache
from compound.execution.exchange import Exchange, record_exchange
from compound.execution.observers.events import RunListener, TextPiece, TextRelay
from compound.execution.observers.spans import active_tracer, within
from compound.execution.outcomes import CallResult, CallResultRow, from_row, read_outputs, to_row
from compound.execution.sender import Engines, Notify, Sender
from compound.execution.throttle import FIRST_WAIT, LONGEST_WAIT, Throttle
from compound.execution.tool_text import from_text, to_text
from compound.execution.trace import Call, Failure
from compound.extras import raise_missing_extra
from compound.graph.component import Component, Operation
from compound.graph.configuration import digest
from compound.graph.types import accepts, format_type
from compound.registry.engine_checks import check_images
from compound.registry.policies import score
from compound.registry.user_code import located, short_place
from compound.security.limits import OUTPUT_DEPTH
from compound.security.sanitize import replace_surrogates
from compound.storage.artifacts import Reference, without_path
from compound.storage.records import is_deep

RUN = "run(self, inputs, values, call)"
ASK_RETRIES, ASK_SECONDS = 3, 120.0  # for requests outside of nodes


class AnswerRow(TypedDict):
    """Cached answer to a request outside of nodes."""

    text: str
    usage: UsageDocument


@dataclass(frozen=True, slots=True)
class Attempt:
    """A call to execute; ``listener`` receives its text as it arrives."""

    component: Operation
    address: str
    inputs: Mapping[str, object]
    values: Mapping[str, object]
    seed: int
    bypass: bool
    exchanges: list[Exchange] = field(default_factory=list)
    listener: RunListener | None = None


@dataclass(slots=True)
class Context:
    """Resources of a running component; see `compound.graph.component.CallContext`."""

    address: str
    seed: int
    caller: Caller
    usage: Usage = NO_USAGE
    tokens: list[TokenRecord] = field(default_factory=list)
    exchanges: list[Exchange] = field(default_factory=list)
    last_attempt: bool = True
    timer: asyncio.Timeout | None = None
    relay: Callable[[], TextRelay] | None = None
    _rng: np.random.Generator | None = None
    _queued: int = 0
    _seconds_left: float = 0.0

    @property
    def rng(self) -> np.random.Generator:
        """Random generator of the call."""
        if self._rng is None:
            self._rng = np.random.Generator(np.random.Philox(self.seed))
        return self._rng

    @property
    def sessions(self) -> Sessions:
        """Connections that stay open until the executor is closed."""
        return self.caller.sessions

    async def generate(self, lm: str, request: Request, on_text: OnText | None = None) -> Completion:
        """Send a request to engine ``lm``, within the budget and the engine's concurrency."""
        sent = request if request.forward is not None else await self.caller.adapt(lm, request)
        relays = [TextRelay(on_text)] if on_text is not None else []
        if self.relay is not None and request.forward is None:  # forwarded streams hold events, not text
            relays.append(self.relay())
        answered = False
        try:
            completion = await self.caller.generate(lm, sent, self, _to_all(relays))
            answered = True
        finally:
            for relay in relays:
                relay.close(complete=answered)
        if completion.tokens is not None:
            self.tokens.append(completion.tokens)
        self.exchanges += record_exchange(lm, sent, completion)
        return from_text(request, completion) if request.uses_tools and not sent.uses_tools else completion

    @asynccontextmanager
    async def reserve(self, worst: Usage) -> AsyncIterator[list[Usage]]:
        """Reserve budget for requests that the component sends itself; append their usage to the list."""
        used: list[Usage] = []
        try:
            async with self.caller.reserve(worst) as charged:
                try:
                    yield used
                finally:
                    charged.extend(used)
        finally:
            for item in used or [worst]:
                self.usage += item

    def forwards(self, lm: str) -> bool:
        """Return whether engine ``lm`` sends requests in OpenAI's format as they are."""
        return bool(getattr(self.caller.engine(lm), "forwards", False))

    async def scores(self, reward: Reference, component: str, calls: Sequence[CallValues]) -> Sequence[float]:
        """Score (inputs, outputs) pairs of a component by a stored reward."""
        return await score(reward, self.caller.folder, component, calls)

    def pause(self) -> None:
        """Stop the timeout's clock while a request is queued."""
        if self.timer is not None:
            if not self._queued:
                # concurrent requests of one component share the clock: the first one to wait stops it
                self._seconds_left = (self.timer.when() or 0.0) - asyncio.get_running_loop().time()
                self.timer.reschedule(None)
            self._queued += 1

    def resume(self) -> None:
        """Restart the timeout's clock when the request is sent."""
        if self.timer is not None:
            self._queued -= 1
            if not self._queued:
                self.timer.reschedule(asyncio.get_running_loop().time() + self._seconds_left)


@dataclass
class _Batch:
    """Number of open batches, and failures in them; shared by all callers of one budget tree."""

    open: int = 0
    failed: dict[str, CallResult] = field(default_factory=dict)


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
        self._meter = meter
        self._sleep = sleep
        self._sender = Sender(engines, sleep, notify)
        self._in_flight: dict[str, asyncio.Future[CallResult]] = {}
        self._unsettled: Counter[str] = Counter()  # executions not yet counted for a trace
        self._batch = _Batch()
        self._native_tools: dict[str, bool] = {}
        self.sessions = Sessions()

    def with_meter(self, meter: Meter) -> Self:
        """Return a caller that shares everything except the budget."""
        other = copy.copy(self)
        other._meter = meter
        return other

    @contextmanager
    def batch(self) -> Iterator[None]:
        """Let equal calls also share failures within a block.

        A failed call is not cached, since it may succeed later. But the number of attempts in a batch must
        not depend on whether equal calls happen to be in flight at the same time.
        """
        self._batch.open += 1
        try:
            yield
        finally:
            self._batch.open -= 1
            if not self._batch.open:
                self._batch.failed.clear()

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
        key = digest(["ask", self.engine(lm).name, _as_key(request)])
        row = cast("AnswerRow | None", self._cache.get(key)) if self._cache is not None else None
        if row is not None:
            usage = Usage.from_json(row["usage"])
            if self._cache is not None and self._cache.take_pending(key):
                await self._meter.charge_recorded(usage)
            return Completion(row["text"], usage)
        completion = await self._ask_with_retries(lm, request)
        if self._cache is not None:
            kept: AnswerRow = {"text": completion.text, "usage": completion.usage.to_json()}
            self._cache.put(key, kept)
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
                    await self._sleep(_wait(passing, tries, request.seed))

    async def call(self, attempt: Attempt) -> CallResult:
        """Make a call, or reuse the result from the cache or from an equal call in flight."""
        tracer = active_tracer()
        if tracer is None:
            return await self._call(attempt)
        span = tracer.call(attempt.component, attempt.address, attempt.inputs)
        return await within(span, self._call(attempt))

    async def _call(self, attempt: Attempt) -> CallResult:
        key = self.key(attempt)
        if not key:
            return await self._recorded(attempt, "")
        return await self.share(key, attempt.component, lambda: self._recorded(attempt, key))

    def key(self, attempt: Attempt) -> str:
        """Return the cache key of a call; ``""`` if it is not cached."""
        if not self.caches or attempt.bypass or not attempt.component.cacheable:
            return ""
        try:
            return self._key(attempt)
        except (TypeError, ValueError):  # inputs without a JSON form have no key
            return ""

    async def share(
        self, key: str, component: Component, execute: Callable[[], Awaitable[CallResult]]
    ) -> CallResult:
        """Return the result of a call from the cache or an equal call in flight, or execute it.

        Args:
            key: the cache key of the call.
            component: the component, whose ports convert stored outputs.
            execute: makes the call.
        """
        assert self._cache is not None
        while (pending := self._in_flight.get(key)) is not None:
            await asyncio.wait([pending])
            # a cancelled call has no result: look again, since another waiter may have restarted it
            if not pending.cancelled():
                return pending.result().as_cached()
        if key in self._batch.failed:
            return self._batch.failed[key].as_cached()
        stored = self._cache.get(key)
        if stored is not None:
            return await self._reuse(key, component, stored)
        return await self._execute_shared(key, component, execute)

    async def _execute_shared(
        self, key: str, component: Component, execute: Callable[[], Awaitable[CallResult]]
    ) -> CallResult:
        """Execute while equal calls wait for this one; its cancellation cancels them."""
        future: asyncio.Future[CallResult] = asyncio.get_running_loop().create_future()
        self._in_flight[key] = future
        try:
            result = await execute()
            self._unsettled[key] += 1
            # a wrong answer is a result like any other; other failures may be transient and are not cached
            if result.failure is None or result.failure.kind in ("parse", "type"):
                self._store(key, component, result)
            elif self._batch.open:
                self._batch.failed[key] = result
        except BaseException as error:
            if isinstance(error, asyncio.CancelledError):
                future.cancel()
            else:
                future.set_exception(error)
                future.exception()  # mark as retrieved; there may be no waiter
            raise
        else:
            future.set_result(result)
            return result
        finally:
            del self._in_flight[key]

    def _store(self, key: str, component: Component, result: CallResult) -> None:
        """Cache a result, unless its JSON form reads back as something else."""
        assert self._cache is not None
        row = to_row(result)
        if row is not None and read_outputs(row, component) == result.outputs:
            self._cache.put(key, row)

    async def _reuse(self, key: str, component: Component, row: Mapping[str, object]) -> CallResult:
        assert self._cache is not None
        result = from_row(cast("CallResultRow", row), key, component)  # rows are validated by the cache
        if not self._cache.take_pending(key):
            return result.as_cached()
        self._unsettled[key] += 1
        await self._meter.charge_recorded(result.usage)
        return result

    def settle(self, calls: Sequence[Call]) -> None:
        """Mark which of several equal calls was executed: the first in order, regardless of timing."""
        for call in calls:
            if call.key:
                call.reused = not self._unsettled[call.key]
                self._unsettled[call.key] -= not call.reused
                if not self._unsettled[call.key]:
                    del self._unsettled[call.key]

    def _key(self, attempt: Attempt) -> str:
        component, values = attempt.component, attempt.values
        lm = values.get("lm")
        return digest(
            [
                component.version,
                {name: without_path(value) for name, value in values.items()},
                list(attempt.inputs.items()),  # order matters: it is the order in the prompt
                self.engine(lm).name if isinstance(lm, str) else None,
                None if component.deterministic(values) else attempt.seed,
            ]
        )

    async def _recorded(self, attempt: Attempt, key: str) -> CallResult:
        """Make a call, and record its exchanges with models; cancel it when the run's minutes are used up."""
        async with self._meter.deadline():
            result = await self._try(attempt, key)
        return replace(result, exchanges=tuple(attempt.exchanges))

    async def _try(self, attempt: Attempt, key: str) -> CallResult:
        """Retry until the call succeeds, fails permanently, or has no retries left."""
        component = attempt.component
        usage, tries = NO_USAGE, 0
        while True:
            tries += 1
            context = Context(attempt.address, attempt.seed, self, exchanges=attempt.exchanges)
            context.last_attempt = tries > component.retries
            context.relay = _relays(attempt, tries)
            try:
                outputs = await self._once(attempt, context)
            except TransientError as error:
                usage += context.usage
                if tries <= component.retries:
                    await self._sleep(_wait(error, tries, attempt.seed))
                    continue
                return CallResult({}, Failure(error.kind, str(error)), usage, (), tries, key=key)
            except CallError as error:
                failure = Failure(error.kind, str(error))
                usage += context.usage
                kept = {name: v for name, v in error.outputs.items() if not is_deep(v, OUTPUT_DEPTH)}
                return CallResult(kept, failure, usage, tuple(context.tokens), tries, key=key)
            except CompoundError:
                raise
            except Exception as error:  # noqa: BLE001 - any exception of a component is a failed call
                raise_missing_extra(error, attempt.address)
                failure = Failure("error", located(error, component, RUN))
                return CallResult({}, failure, usage + context.usage, tuple(context.tokens), tries, key=key)
            return CallResult(outputs, None, usage + context.usage, tuple(context.tokens), tries, key=key)

    @staticmethod
    async def _once(attempt: Attempt, context: Context) -> Mapping[str, object]:
        """Make one attempt.

        Raises:
            TransientError: the attempt timed out, or a service such as a search server did not answer.
        """
        component = attempt.component
        try:
            with exit_as_error(attempt.address):
                if component.timeout is None:
                    outputs = await _running(attempt, context)
                else:
                    async with asyncio.timeout(component.timeout) as context.timer:
                        outputs = await _running(attempt, context)
        except (ConnectionError, TimeoutError) as error:
            if context.timer is not None and context.timer.expired():
                raise TransientError(f"{attempt.address} took longer than {component.timeout:g} s") from None
            raise TransientError(f"{type(error).__name__}: {error}") from error
        _check_outputs(component, attempt.address, outputs)
        return replace_surrogates(outputs)

    async def aclose(self) -> None:
        """Close every engine and every connection opened here."""
        await self.sessions.aclose()
        await self._sender.aclose()


def _takes_tools(engine: Engine) -> bool:
    return bool(getattr(engine, "native_tools", False))


def _to_all(relays: Sequence[TextRelay]) -> OnText | None:
    """Return a function that gives each piece to all relays; ``None`` without any."""
    if len(relays) < 2:
        return relays[0] if relays else None

    def pass_on(piece: str) -> None:
        for relay in relays:
            relay(piece)

    return pass_on


def _as_key(request: Request) -> dict[str, object]:
    """Return the fields of a request; one without the newer fields has the key of earlier versions."""
    fields = asdict(replace(request, messages=()))
    fields["messages"] = [_message_as_key(message) for message in request.messages]
    for name, default in (("format", None), ("tools", ()), ("tool_choice", "auto"), ("forward", None)):
        if getattr(request, name) == default:
            del fields[name]
    return fields


def _message_as_key(message: Message) -> dict[str, object]:
    """Return the fields of a message, with digests of images."""
    parts = (message.content,) if isinstance(message.content, str) else message.content
    content = [part if isinstance(part, str) else {"image": part.sha256} for part in parts]
    found: dict[str, object] = {"role": message.role}
    found["content"] = content[0] if isinstance(message.content, str) else content
    if message.tool_calls:
        found["tool_calls"] = [asdict(call) for call in message.tool_calls]
    if message.tool_call_id:
        found["tool_call_id"] = message.tool_call_id
    return found


def _wait(error: TransientError, tries: int, seed: int) -> float:
    """Return the seconds to wait: as requested by the server, or exponential backoff with seeded jitter."""
    if error.retry_after is not None:
        return min(error.retry_after, LONGEST_WAIT)
    jitter = 0.5 + (seed + tries) % 1000 / 1000
    return min(FIRST_WAIT * 2.0 ** (tries - 1) * jitter, LONGEST_WAIT)


def _relays(attempt: Attempt, tries: int) -> Callable[[], TextRelay] | None:
    """Return a function that makes the relay of each request of an attempt; ``None`` without a listener."""
    listener = attempt.listener
    if listener is None:
        return None
    requests = itertools.count()

    def relay() -> TextRelay:
        number, name = next(requests), attempt.component.name
        return TextRelay(lambda text: listener.on_text(TextPiece(attempt.address, name, text, tries, number)))

    return relay


def _running(attempt: Attempt, context: Context) -> Awaitable[Mapping[str, object]]:
    """Start a component; reject one that does not run asynchronously."""
    component = attempt.component
    started: object = component.run(copy_containers(attempt.inputs), copy_containers(attempt.values), context)
    if not inspect.isawaitable(started):
        raise OutputTypeError(
            f"run of {attempt.address} returned {type(started).__name__}, which cannot be awaited"
            f"{_place(component)}",
            hint=f"write async def {RUN}",
        )
    return started


def _place(component: Operation) -> str:
    """Return where a user's component computes its outputs."""
    return short_place(component.run) or short_place(component)


def _check_outputs(component: Operation, address: str, outputs: object) -> None:
    ports = component.outputs
    if not isinstance(outputs, Mapping) or outputs.keys() != ports.keys():
        got = sorted(outputs) if isinstance(outputs, Mapping) else type(outputs).__name__
        raise OutputTypeError(
            f"{address} must return the fields {sorted(ports)}, but returned {got}{_place(component)}"
        )
    for name, port in ports.items():
        problem = ""
        if is_deep(outputs[name], OUTPUT_DEPTH):  # a record of it could not be read
            problem = f"{address}.{name} is nested more than {OUTPUT_DEPTH} levels deep"
        elif not accepts(port.type, outputs[name]):
            problem = f"{address}.{name} must be {format_type(port.type)}, but is {outputs[name]!r:.200}"
        if problem:
            kept = {n: v for n, v in outputs.items() if n in ports and accepts(ports[n].type, v)}
            raise OutputTypeError(f"{problem}{_place(component)}", outputs=kept)
