"""The way of a call: cache and single flight, attempts, checks of outputs, and requests to models.

A component failure is data (`Failure`). User errors (a missing library or model, an invalid file)
and an exhausted budget are exceptions and end the run.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager, asynccontextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Self

import numpy as np

from compound.core.engine import (
    NO_USAGE,
    Capabilities,
    Completion,
    Engine,
    Message,
    OnText,
    Request,
    TokenRecord,
    Usage,
)
from compound.core.errors import (
    CallError,
    CompoundError,
    DeclarationError,
    OutputTypeError,
    TransientError,
    raise_missing_extra,
)
from compound.core.example import CallValues, copy_containers
from compound.core.loops import Sessions
from compound.core.security.limits import OUTPUT_DEPTH
from compound.core.security.sanitize import replace_surrogates
from compound.core.storage.artifacts import Reference, without_path
from compound.core.storage.records import Damaged, is_deep
from compound.core.threads import exit_error
from compound.execution.budget import Meter
from compound.execution.cache import Cache
from compound.execution.exchange import Exchange, record_exchange
from compound.execution.observers import (
    CallFacts,
    RunListener,
    TextPiece,
    TextRelay,
    traced,
)
from compound.execution.results import SharedResults, read_answer
from compound.execution.rng import derive_seed
from compound.execution.sender import (
    FIRST_WAIT,
    LONGEST_WAIT,
    Attempt,
    Engines,
    Notify,
    Sender,
)
from compound.execution.tool_text import from_text, to_text
from compound.execution.trace import Call, CallResult, Failure
from compound.graph.component import Operation
from compound.graph.configuration import digest
from compound.graph.json_values import find_nonfinite
from compound.graph.registry.engines import check_images, has_stable_name
from compound.graph.registry.plugins import score
from compound.graph.registry.user_code import located, short_place
from compound.graph.types import Port, accepts, format_type

ASK_RETRIES, ASK_SECONDS = 3, 120.0  # for requests outside of nodes
RUN = "run(self, inputs, values, call)"
TokensOf = Callable[[Request, Completion], TokenRecord]


@dataclass(slots=True)
class PendingCall:
    """A call to execute, in one or several attempts.

    ``stream`` names the random stream of sampling and of the waits between attempts.
    """

    component: Operation
    address: str
    inputs: Mapping[str, object]
    values: Mapping[str, object]
    stream: tuple[str | int, ...]
    sample: int
    ports: Mapping[str, Port]
    bypass: bool = False
    listener: RunListener | None = None
    exchanges: tuple[Exchange, ...] = ()
    _seed: int | None = None

    @property
    def seed(self) -> int:
        """Seed of the stream, derived at its first use, since few components draw."""
        if self._seed is None:
            self._seed = derive_seed(*self.stream, self.sample)
        return self._seed


class Context(Attempt):
    """Resources of a running component; see `compound.graph.component.CallContext`."""

    tokens: tuple[TokenRecord, ...] = ()
    _rng: np.random.Generator | None = None
    _requests = 0

    def __init__(self, pending: PendingCall, caller: Caller, number: int) -> None:
        self._pending, self._caller, self._number = pending, caller, number

    @property
    def address(self) -> str:
        """Address of the call in the trace."""
        return self._pending.address

    @property
    def seed(self) -> int:
        """Seed of the call's random stream."""
        return self._pending.seed

    @property
    def rng(self) -> np.random.Generator:
        """Random generator of the call."""
        if self._rng is None:
            self._rng = np.random.Generator(np.random.Philox(self._pending.seed))
        return self._rng

    @property
    def sessions(self) -> Sessions:
        """Connections that stay open until the executor is closed."""
        return self._caller.sessions

    async def generate(
        self, lm: str, request: Request, on_text: OnText | None = None
    ) -> Completion:
        """Send a request to engine ``lm``, within the budget and the engine's concurrency."""
        caller, pending = self._caller, self._pending
        sent = request if request.forward is not None else await caller.adapt(lm, request)
        relays = [TextRelay(on_text)] if on_text is not None else []
        # forwarded streams hold events, not text
        if pending.listener is not None and request.forward is None:
            relays.append(self._relay(pending.listener))
        answered = False
        try:
            completion = await caller.send(lm, sent, self, _to_all(relays))
            answered = True
        finally:
            for relay in relays:
                relay.close(complete=answered)
        tokens = completion.tokens
        if request.want_tokens and caller.tokens_of is not None:
            tokens = caller.tokens_of(sent, completion)
        if tokens is not None:
            self.tokens += (tokens,)
        pending.exchanges += record_exchange(lm, sent, completion)
        if request.uses_tools and not sent.uses_tools:
            return from_text(request, completion)
        return completion

    def _relay(self, listener: RunListener) -> TextRelay:
        """Return a relay of the next request's text to the listener of the run."""
        pending, attempt, number = self._pending, self._number, self._requests
        self._requests += 1
        address, name = pending.address, pending.component.name
        return TextRelay(
            lambda text: listener.on_text(TextPiece(address, name, text, attempt, number))
        )

    @asynccontextmanager
    async def reserve(self, worst: Usage) -> AsyncIterator[list[Usage]]:
        """Reserve budget for requests that the component sends itself; append their usage to the list."""
        used: list[Usage] = []
        meter = self._caller.meter
        try:
            async with meter.reserve(worst) as charged:
                try:
                    yield used
                finally:
                    charged.extend(used)
            if meter.budget.cost is not None and any(item.unpriced for item in charged):
                raise DeclarationError(
                    "budget.cost is set, but the price of the component's own requests is unknown",
                    hint="report usage with its cost, and without unpriced calls",
                )
        finally:
            for item in used or [worst]:
                self.usage += item

    def forwards(self, lm: str) -> bool:
        """Return whether engine ``lm`` sends requests in OpenAI's format as they are."""
        return Capabilities(self._caller.engine(lm)).forwards

    async def scores(
        self, reward: Reference, component: str, calls: Sequence[CallValues]
    ) -> Sequence[float]:
        """Score (inputs, outputs) pairs of a component by a stored reward."""
        return await score(reward, self._caller.folder, component, calls)


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
        self.folder, self.meter = folder, meter
        self._cache = cache
        self._results = SharedResults(cache)
        self.tokens_of: TokensOf | None = None
        self._sleep = sleep
        self._sender = Sender(engines, sleep, notify)
        self._native_tools: dict[str, bool] = {}
        self.sessions = Sessions()

    def replace(self, **attributes: object) -> Self:
        """Return a caller that shares everything except some attributes."""
        other = copy.copy(self)
        other.__dict__.update(attributes)
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

    def call(self, pending: PendingCall) -> Awaitable[CallResult]:
        """Make a call, or reuse the result from the cache or from an equal call in flight."""
        component, key = pending.component, self._key(pending)
        made = (
            self._results.get(key, component, lambda: self.execute(pending, key), self.meter)
            if key
            else self.execute(pending, "")
        )
        return traced(made, lambda: CallFacts(component, pending.address, pending.inputs))

    def _key(self, pending: PendingCall) -> str:
        """Return the cache key of a call; ``""`` if it is not cached."""
        component, values = pending.component, pending.values
        if self._cache is None or pending.bypass or not component.cacheable:
            return ""
        lm = values.get("lm")
        if not self._is_cached(lm):
            return ""
        try:
            return digest(
                [
                    component.version,
                    {name: without_path(value) for name, value in values.items()},
                    list(pending.inputs.items()),  # order matters: it is the order in the prompt
                    self.engine(lm).name if isinstance(lm, str) else None,
                    None if component.deterministic(values) else pending.seed,
                ]
            )
        except (TypeError, ValueError):  # inputs without a JSON form have no key
            return ""

    def _is_cached(self, lm: object) -> bool:
        """Return whether answers of a model may be cached: elsewhere its name may be that of another."""
        shares = getattr(self._cache, "shared", False)
        return not (shares and isinstance(lm, str)) or has_stable_name(self.engine(lm))

    def settle(self, calls: Sequence[Call]) -> None:
        """Mark which of several equal calls was executed: the first in order, regardless of timing."""
        self._results.settle(calls)

    def execute(self, pending: PendingCall, key: str) -> Awaitable[CallResult]:
        """Make a call; cancel it when the run's minutes are used up. Clusters replace this by workers."""
        return self.meter.before_deadline(self._attempts(pending, key))

    async def _attempts(self, pending: PendingCall, key: str) -> CallResult:
        """Make a call: retry until it succeeds, fails permanently, or has no retries left."""
        component, started = pending.component, time.perf_counter()
        result = CallResult({}, attempts=0, key=key)
        while True:
            result.attempts += 1
            context = Context(pending, self, result.attempts)
            try:
                if component.timeout is None:
                    outputs = await _start(pending, context)
                else:
                    async with asyncio.timeout(component.timeout) as context.timer:
                        outputs = await _start(pending, context)
                result.outputs = _checked_outputs(pending, outputs)
            except (TransientError, ConnectionError, TimeoutError) as error:
                reason = _as_transient(error, pending, context)
                if result.attempts <= component.retries:
                    result.usage += context.usage
                    await self._sleep(retry_delay(reason, result.attempts, pending.seed))
                    continue
                result.failure = Failure(reason.kind, str(reason))
                context.tokens = ()
            except CallError as error:
                result.failure = Failure(error.kind, str(error))
                result.outputs = {
                    name: value
                    for name, value in error.outputs.items()
                    if not is_deep(value, OUTPUT_DEPTH)
                }
            except CompoundError:
                raise
            except SystemExit as error:
                ended = exit_error(pending.address, error)
                result.failure = Failure(ended.kind, str(ended))
            except Exception as error:  # noqa: BLE001 - any exception of a component is a failed call
                raise_missing_extra(error, pending.address)
                result.failure = Failure("error", located(error, component, RUN))
            if context.usage is not NO_USAGE:
                result.usage += context.usage
            result.tokens, result.exchanges = context.tokens, pending.exchanges
            result.seconds = time.perf_counter() - started
            return result

    async def adapt(self, lm: str, request: Request) -> Request:
        """Return a request in the form that the engine takes.

        Tools become text for an engine that does not take them. An engine that does is not asked to
        enforce a format while the model may call tools.

        Raises:
            DeclarationError: the request has images, which the engine does not take.
        """
        check_images(self.engine(lm), lm, request)
        if not request.uses_tools:
            return request
        if lm not in self._native_tools:
            # a thread, because a model's chat template may have to be loaded
            engine = Capabilities(self.engine(lm))
            self._native_tools[lm] = await asyncio.to_thread(lambda: engine.native_tools)
        if not self._native_tools[lm]:
            return to_text(request)
        if request.tools and request.tool_choice == "auto":
            return replace(request, format=None)
        return request

    def send(
        self, lm: str, request: Request, attempt: Attempt, on_text: OnText | None = None
    ) -> Awaitable[Completion]:
        """Send a request within rate limit and budget, and charge its usage to ``attempt``."""
        if request.adapter is not None and self.folder is not None:
            path = str(self.folder.absolute() / request.adapter.path)
            request = replace(request, adapter=replace(request.adapter, path=path))
        return self._sender.send(lm, request, self.meter, attempt, on_text)

    async def ask(self, lm: str, request: Request) -> Completion:
        """Send a request outside of nodes; its answer is cached like that of a call."""
        cache = self._cache if self._is_cached(lm) else None
        key = digest(["ask", self.engine(lm).name, request_key(request)])
        if cache is not None and (row := cache.get(key)) is not None:
            try:
                text, usage = read_answer(row)
            except Damaged as error:
                cache.drop(key, str(error))
            else:
                if cache.take_pending(key):
                    await self.meter.charge_recorded(usage)
                    cache.put(key, row)
                return Completion(text, usage)
        completion = await self.meter.before_deadline(self._ask_with_retries(lm, request))
        if cache is not None:
            cache.put(key, {"text": completion.text, "usage": completion.usage.to_json()})
        return completion

    async def _ask_with_retries(self, lm: str, request: Request) -> Completion:
        """Send a request with retries; the usage covers all attempts."""
        usage, tries = NO_USAGE, 0
        while True:
            tries += 1
            attempt = Attempt()
            try:
                async with asyncio.timeout(ASK_SECONDS) as attempt.timer:
                    completion = await self.send(lm, request, attempt)
                return replace(completion, usage=usage + attempt.usage)
            except (TransientError, TimeoutError) as error:
                usage += attempt.usage
                if tries > ASK_RETRIES:
                    raise TransientError(
                        f"{lm} returned no answer in {tries} attempts: {error}"
                    ) from error
                passing = error if isinstance(error, TransientError) else TransientError(str(error))
                await self._sleep(retry_delay(passing, tries, request.seed))

    async def aclose(self) -> None:
        """Close every engine and every connection opened here."""
        await self.sessions.aclose()
        await self._sender.aclose()


def _start(pending: PendingCall, context: Context) -> Awaitable[Mapping[str, object]]:
    """Start a component; reject one that does not run asynchronously."""
    component = pending.component
    values = copy_containers(pending.values) if pending.values else {}
    started: object = component.run(copy_containers(pending.inputs), values, context)
    if not inspect.iscoroutine(started) and not inspect.isawaitable(started):
        raise OutputTypeError(
            f"run of {pending.address} returned {type(started).__name__}, which cannot be awaited"
            f"{_place(component)}",
            hint=f"write async def {RUN}",
        )
    return started


def _as_transient(error: Exception, pending: PendingCall, context: Context) -> TransientError:
    """Return the error of a failed attempt: its own, that it timed out, or that a service did not answer."""
    if isinstance(error, TransientError):
        return error
    if context.timer is not None and context.timer.expired():
        return TransientError(f"{pending.address} took longer than {pending.component.timeout:g} s")
    return TransientError(f"{type(error).__name__}: {error}")


def retry_delay(error: TransientError, tries: int, seed: int) -> float:
    """Return the seconds to wait: as requested by the server, or exponential backoff with seeded jitter."""
    if error.retry_after is not None:
        return min(error.retry_after, LONGEST_WAIT)
    jitter = 0.5 + (seed + tries) % 1000 / 1000
    return min(FIRST_WAIT * 2.0 ** (tries - 1) * jitter, LONGEST_WAIT)


def _checked_outputs(pending: PendingCall, outputs: Mapping[str, object]) -> Mapping[str, object]:
    """Return outputs that can be encoded; raise an `OutputTypeError` unless they are as declared."""
    ports, address = pending.ports, pending.address
    is_dict = type(outputs) is dict or isinstance(outputs, Mapping)
    if not is_dict or outputs.keys() != ports.keys():
        got = sorted(outputs) if is_dict else type(outputs).__name__
        place = _place(pending.component)
        raise OutputTypeError(
            f"{address} must return the fields {sorted(ports)}, but returned {got}{place}"
        )
    is_plain = True
    for name, port in ports.items():
        value = outputs[name]
        if _is_plain(port.type, value):
            continue
        is_plain, problem = False, ""
        if is_deep(value, OUTPUT_DEPTH):  # a record of it could not be read
            problem = f"{address}.{name} is nested more than {OUTPUT_DEPTH} levels deep"
        elif not accepts(port.type, value):
            problem = f"{address}.{name} must be {format_type(port.type)}, but is {value!r:.200}"
        elif (number := find_nonfinite(value)) is not None:
            problem = f"{address}.{name} holds {number}, which is not a finite number"
        if problem:
            kept = {n: v for n, v in outputs.items() if n in ports and accepts(ports[n].type, v)}
            raise OutputTypeError(f"{problem}{_place(pending.component)}", outputs=kept)
    return outputs if is_plain else replace_surrogates(outputs)


def _is_plain(kind: object, value: object) -> bool:
    """Return whether a value is of a plain type, and nothing in it could be wrong."""
    if type(value) is not kind:
        return False
    if kind is int or kind is bool:
        return True
    return (isinstance(value, str) and kind is str and value.isascii()) or (
        isinstance(value, float) and kind is float and math.isfinite(value)
    )


def _place(component: Operation) -> str:
    """Return where a user's component computes its outputs."""
    return short_place(component.run) or short_place(component)


def _to_all(relays: Sequence[TextRelay]) -> OnText | None:
    """Return a function that gives each piece to all relays; ``None`` without any."""
    if len(relays) < 2:
        return relays[0] if relays else None

    def pass_on(piece: str) -> None:
        for relay in relays:
            relay(piece)

    return pass_on


def request_key(request: Request) -> dict[str, object]:
    """Return the fields of a request for its cache key.

    Fields that later versions added are left out at their defaults, so that earlier keys stay
    valid.
    """
    fields = asdict(replace(request, messages=()))
    fields["messages"] = [_message_as_key(message) for message in request.messages]
    for name, default in (
        ("format", None),
        ("tools", ()),
        ("tool_choice", "auto"),
        ("forward", None),
    ):
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
