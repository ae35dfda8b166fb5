"""Attempts of a call: retries, timeouts, type checks, and failures as data."""

from __future__ import annotations

import asyncio
import inspect
import itertools
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field

from compound.concurrency.own_thread import exit_as_error
from compound.containers import copy_containers
from compound.engine import NO_USAGE
from compound.errors import CallError, CompoundError, OutputTypeError, TransientError
from compound.execution.calls.context import Context, RequestSender
from compound.execution.exchange import Exchange
from compound.execution.observers.events import RunListener, TextPiece, TextRelay
from compound.execution.outcomes import CallResult
from compound.execution.throttle import FIRST_WAIT, LONGEST_WAIT
from compound.execution.trace import Failure
from compound.extras import raise_missing_extra
from compound.graph.component import Operation
from compound.graph.json_values import find_nonfinite
from compound.graph.types import accepts, format_type
from compound.registry.user_code import located, short_place
from compound.security.limits import OUTPUT_DEPTH
from compound.security.sanitize import replace_surrogates
from compound.storage.records import is_deep

RUN = "run(self, inputs, values, call)"


@dataclass(frozen=True, slots=True)
class PendingCall:
    """A call to execute, in one or several attempts.

    Attributes:
        component: the component.
        address: the address of the call in the trace.
        inputs: values by input port.
        values: values of the component's parameters.
        seed: seeds sampling, and the waits between attempts.
        bypass: whether the cache is not used.
        exchanges: receives the requests to models and their answers.
        listener: receives the text of the call as it arrives.
    """

    component: Operation
    address: str
    inputs: Mapping[str, object]
    values: Mapping[str, object]
    seed: int
    bypass: bool
    exchanges: list[Exchange] = field(default_factory=list)
    listener: RunListener | None = None


async def run_attempts(
    pending: PendingCall, key: str, sender: RequestSender, sleep: Callable[[float], Awaitable[None]]
) -> CallResult:
    """Make a call: retry until it succeeds, fails permanently, or has no retries left.

    Args:
        pending: the call.
        key: its cache key; ``""`` if it is not cached.
        sender: sends the requests of the component.
        sleep: waits between attempts.
    """
    component = pending.component
    usage, tries = NO_USAGE, 0
    while True:
        tries += 1
        context = Context(pending.address, pending.seed, sender, exchanges=pending.exchanges)
        context.last_attempt = tries > component.retries
        context.relay = _relays(pending, tries)
        try:
            outputs = await _once(pending, context)
        except TransientError as error:
            usage += context.usage
            if tries <= component.retries:
                await sleep(retry_delay(error, tries, pending.seed))
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
            raise_missing_extra(error, pending.address)
            failure = Failure("error", located(error, component, RUN))
            return CallResult({}, failure, usage + context.usage, tuple(context.tokens), tries, key=key)
        return CallResult(outputs, None, usage + context.usage, tuple(context.tokens), tries, key=key)


async def _once(pending: PendingCall, context: Context) -> Mapping[str, object]:
    """Make one attempt.

    Raises:
        TransientError: the attempt timed out, or a service such as a search server did not answer.
    """
    component = pending.component
    try:
        with exit_as_error(pending.address):
            if component.timeout is None:
                outputs = await _start(pending, context)
            else:
                async with asyncio.timeout(component.timeout) as context.timer:
                    outputs = await _start(pending, context)
    except (ConnectionError, TimeoutError) as error:
        if context.timer is not None and context.timer.expired():
            raise TransientError(f"{pending.address} took longer than {component.timeout:g} s") from None
        raise TransientError(f"{type(error).__name__}: {error}") from error
    _check_outputs(component, pending.address, outputs)
    return replace_surrogates(outputs)


def retry_delay(error: TransientError, tries: int, seed: int) -> float:
    """Return the seconds to wait: as requested by the server, or exponential backoff with seeded jitter."""
    if error.retry_after is not None:
        return min(error.retry_after, LONGEST_WAIT)
    jitter = 0.5 + (seed + tries) % 1000 / 1000
    return min(FIRST_WAIT * 2.0 ** (tries - 1) * jitter, LONGEST_WAIT)


def _relays(pending: PendingCall, tries: int) -> Callable[[], TextRelay] | None:
    """Return a function that makes the relay of each request of an attempt; ``None`` without a listener."""
    listener = pending.listener
    if listener is None:
        return None
    requests = itertools.count()

    def relay() -> TextRelay:
        number, name = next(requests), pending.component.name
        return TextRelay(lambda text: listener.on_text(TextPiece(pending.address, name, text, tries, number)))

    return relay


def _start(pending: PendingCall, context: Context) -> Awaitable[Mapping[str, object]]:
    """Start a component; reject one that does not run asynchronously."""
    component = pending.component
    started: object = component.run(copy_containers(pending.inputs), copy_containers(pending.values), context)
    if not inspect.isawaitable(started):
        raise OutputTypeError(
            f"run of {pending.address} returned {type(started).__name__}, which cannot be awaited"
            f"{_place(component)}",
            hint=f"write async def {RUN}",
        )
    return started


def _place(component: Operation) -> str:
    """Return where a user's component computes its outputs."""
    return short_place(component.run) or short_place(component)


def _check_outputs(component: Operation, address: str, outputs: object) -> None:
    """Raise an `OutputTypeError` unless the outputs have the declared fields and types."""
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
        elif (number := find_nonfinite(outputs[name])) is not None:
            problem = f"{address}.{name} holds {number}, which is not a finite number"
        if problem:
            kept = {n: v for n, v in outputs.items() if n in ports and accepts(ports[n].type, v)}
            raise OutputTypeError(f"{problem}{_place(component)}", outputs=kept)
