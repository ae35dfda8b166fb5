"""Replicas of one model: what each serves, which one answers a request, and how a failed one comes back.

Requests that start alike go to one replica, whose prefix cache then holds the start: the samples of
a group, the turns of a conversation, the forks of a run. The replica is the first by rendezvous
hashing [1], so that only the requests of a replica that fails move. A replica that has more than
`BALANCE` times its share of the requests in flight is passed over for the one with the least load,
as in hashing with bounded loads [2]. Routers such as litellm's choose by load or cost only, and
know nothing of adapters.

[1] Thaler, Ravishankar: Using name-based mappings to increase hit rates. IEEE/ACM ToN 6 (1998).
[2] Mirrokni, Thorup, Zadimoghaddam: Consistent hashing with bounded loads. SODA 2018.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import math
import time
from collections.abc import AsyncIterator, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from enum import Enum

from compound.core.engine import NO_USAGE, Completion, OnText, Request
from compound.core.errors import CallError, CompoundError, TransientError
from compound.core.security.sanitize import sanitize_for_terminal
from compound.engines.adapter_files import TOLERANCE
from compound.engines.credentials import read_key
from compound.engines.openai import OpenAIEngine
from compound.engines.server_api import ServerAPI, model_entries
from compound.engines.vllm.engine import Fingerprint, VLLMEngine

BALANCE = 1.25  # most requests in flight at a replica, relative to the mean
FORWARDED = 4096  # characters of a forwarded request's body that are its start
FIRST_WAIT, LONGEST_WAIT = 0.25, 15.0  # seconds between questions to a replica that is down
RETRY_AFTER = 2.0  # seconds that a caller should wait if no replica answers
SECONDS, LARGEST = 10.0, 2**20  # limits of a question to a server, and of the bytes of its answer
# Fields of a model in ``/v1/models`` that differ between models or versions; other fields differ
# between equal servers, such as the time of their start. ``meta`` is llama.cpp's.
COMPARED = ("root", "max_model_len", "owned_by", "parent", "meta")
_LOG = logging.getLogger("compound")


def start_of(request: Request) -> bytes:
    """Return a digest of the start of a request: its adapter, and its messages up to the first of the user.

    >>> from compound.core.engine import Message
    >>> question = Message("user", "2 + 2?")
    >>> later = (question, Message("assistant", "4"), Message("user", "Are you sure?"))
    >>> start_of(Request((question,), seed=1)) == start_of(Request(later, seed=2))
    True
    """
    parts = [request.adapter.sha256 if request.adapter is not None else ""]
    if request.forward is not None:
        parts.append(request.forward.body[:FORWARDED])
    for message in () if request.forward is not None else request.messages:
        content = (message.content,) if isinstance(message.content, str) else message.content
        parts.append(f"\0{message.role}\0")
        parts += [part if isinstance(part, str) else part.sha256 for part in content]
        if message.role == "user":
            break
    text = "".join(parts).encode("utf-8", "surrogatepass")
    return hashlib.blake2b(text, digest_size=16).digest()


def capacity_of(concurrency: int) -> int:
    """Return the most requests in flight at a replica, of a fleet whose mean is ``concurrency``.

    It is above the mean, as otherwise a busy fleet would have a place at one replica only at any
    time, and requests could not follow their start.

    >>> capacity_of(64)
    80
    """
    return math.ceil(BALANCE * concurrency)


def choose(start: bytes, loads: Mapping[str, int], capacity: int) -> str | None:
    """Choose the replica of a request.

    Args:
        start: the start of the request; see `start_of`.
        loads: number of requests in flight, by the name of each replica that is up.
        capacity: maximum number of requests in flight at a replica.

    Returns:
        The name of a replica with at most `BALANCE` times the mean number of requests, this one
        included, or with the least load; None if all are full.
    """
    free = [name for name, load in loads.items() if load < capacity]
    if not free:
        return None
    preferred = max(
        free, key=lambda name: hashlib.blake2b(name.encode(), digest_size=16, key=start).digest()
    )
    if loads[preferred] < math.ceil(BALANCE * (sum(loads.values()) + 1) / len(loads)):
        return preferred
    return min(free, key=lambda name: (loads[name], name))


@dataclass(frozen=True, slots=True)
class ReplicaIdentity:
    """Description of what a replica serves.

    Attributes:
        facts: what the server reports, such as its version; empty for a process of the engine's
            own.
        fingerprint: tokens and log-probabilities of a text, if the replica was asked for them.
    """

    facts: Mapping[str, str] = field(default_factory=dict)
    fingerprint: Fingerprint | None = None

    def difference(self, other: ReplicaIdentity) -> str:
        """Return how another replica differs, as text; ``""`` if it serves the same.

        >>> ReplicaIdentity({"version": "0.31"}).difference(ReplicaIdentity({"version": "0.32"}))
        "version '0.31' and '0.32'"
        """
        for name in (*COMPARED, "version"):
            one, two = self.facts.get(name), other.facts.get(name)
            if one != two:
                return f"{name} {one!r} and {two!r}"
        if self.fingerprint is None or other.fingerprint is None:
            return ""
        (tokens, ours), (others, theirs) = self.fingerprint, other.fingerprint
        if tokens != others:
            return "different tokens of the same text"
        apart = sum(abs(a - b) for a, b in zip(ours, theirs, strict=True)) / max(1, len(ours))
        if apart <= TOLERANCE:
            return ""
        return f"log-probabilities of the same text that differ by {apart:.2g} nats per token"


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


@dataclass(slots=True, eq=False)
class Replica:
    """A replica, used from one event loop, and its work so far.

    Attributes:
        name: the address of its server, or ``process 0`` for a process of the engine's own.
        engine: the engine that sends to it.
        address: the address of its server; None for a process of the engine's own.
        condition: whether it receives requests.
        load: number of its requests in flight.
        requests: number of requests that it answered.
        moved: number of its requests that other replicas answered, because it ended or was not
            reachable.
        prompt_tokens: prompt tokens of the answered requests.
        completion_tokens: completion tokens of the answered requests.
        busy_seconds: time during which it had at least one request, until its last request ended.
        failure: why it is not used again.
        recovery: the task that asks it whether it still serves the model.
        gone: whether its server had ended when it was last asked; pending until it was.
    """

    name: str
    engine: VLLMEngine | OpenAIEngine
    address: str | None
    condition: ReplicaCondition = ReplicaCondition.UP
    load: int = 0
    requests: int = 0
    moved: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    busy_seconds: float = 0.0
    failure: CompoundError | None = None
    recovery: asyncio.Task[None] | None = None
    gone: asyncio.Future[bool] | None = None
    _since: float = 0.0

    @property
    def up(self) -> bool:
        """Whether it receives requests."""
        return self.condition is ReplicaCondition.UP

    @property
    def ended(self) -> bool:
        """Whether it is a process of the engine's own that has ended."""
        return isinstance(self.engine, VLLMEngine) and self.engine.server_ended

    @property
    def tokens_per_second(self) -> float:
        """Completion tokens per second of the busy time."""
        return self.completion_tokens / self.busy_seconds if self.busy_seconds else 0.0

    async def identify(self, *, thoroughly: bool) -> ReplicaIdentity:
        """Return what it serves; start its process if it is one of the engine's own.

        Args:
            thoroughly: whether to compare log-probabilities, too, for which requests in flight are
                awaited.

        Raises:
            TransientError: it does not answer.
            CompoundError: it does not serve the model, or cannot be started.
        """
        facts: Mapping[str, str] = {}
        if self.address is not None:
            facts = await _served(self.address, self.engine.model, self.engine.api_key_env)
        if isinstance(self.engine, OpenAIEngine):
            return ReplicaIdentity(facts)
        if thoroughly:
            return ReplicaIdentity(facts, await self.engine.fingerprint())
        await self.engine.connect()
        return ReplicaIdentity(facts)

    async def answer(self, request: Request, on_text: OnText | None) -> Completion:
        """Answer a request; errors are those of the engine."""
        if on_text is not None and isinstance(self.engine, OpenAIEngine):
            completion = await self.engine.stream(request, on_text)
        else:
            completion = await self.engine.generate(request)
            if on_text is not None:
                on_text(completion.text)
        self.requests += 1
        self.prompt_tokens += completion.usage.prompt_tokens
        self.completion_tokens += completion.usage.completion_tokens
        return completion

    @contextlib.contextmanager
    def in_flight(self) -> Iterator[None]:
        """Count a request in flight while the block runs."""
        if not self.load:
            self._since = time.monotonic()
        self.load += 1
        try:
            yield
        finally:
            self.load -= 1
            if not self.load:
                self.busy_seconds += time.monotonic() - self._since


class ReplicaPool:
    """Replicas of one model. Use it from one event loop only.

    Args:
        replicas: the replicas.
        capacity: maximum number of requests in flight at a replica.
    """

    def __init__(self, replicas: Sequence[Replica], capacity: int) -> None:
        self.replicas, self.capacity = tuple(replicas), capacity
        self.use = object()  # stands for the time until the pool is closed
        self._reference: ReplicaIdentity | None = None
        self._opening: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()  # replaced at each change of a load or a condition

    @property
    def opened(self) -> bool:
        """Whether all replicas were found to serve the same."""
        return self._reference is not None

    async def open(self) -> None:
        """Check once that every replica answers, and that all serve the same; start processes of our own.

        Raises:
            CompoundError: one does not; the message has its address.
        """
        if self.opened:
            return
        if self._opening is None:
            self._opening = asyncio.create_task(self._check_all())
            self._opening.add_done_callback(self._checked)
        await asyncio.shield(self._opening)

    @contextlib.asynccontextmanager
    async def taken(
        self, use: object, start: bytes, avoid: Collection[Replica] = ()
    ) -> AsyncIterator[Replica | None]:
        """Wait for a replica, and count a request in flight at it while the block runs.

        Args:
            use: the value of `use` when the request began, so that it ends with the pool.
            start: the start of the request; see `start_of`.
            avoid: replicas not to take. If there are some, nothing is awaited, and the block may
                get None.

        Raises:
            TransientError: no replica answers, or the pool was closed.
            CompoundError: no replica can be used again.
        """
        while (replica := self._choose(use, start, avoid)) is None and not avoid:
            await self._wait()
        if replica is None:
            yield None
            return
        try:
            with replica.in_flight():
                yield replica
        finally:
            self._wake()

    async def up(self) -> Sequence[Replica]:
        """Return the replicas that are up; wait until there is one; raises like `taken`."""
        use = self.use
        while not (found := [replica for replica in self.replicas if replica.up]):
            await self._wait()
            self._check_use(use)
        return found

    async def has_ended(self, replica: Replica) -> bool:
        """Ask a replica that failed whether it still serves the model; return whether its server has ended.

        It receives no requests until it has answered. The question is shared by all requests that
        failed.
        """
        gone = replica.gone
        if replica.condition is ReplicaCondition.FAILED:  # it may live, and serve something else
            return gone is not None and gone.done() and not gone.cancelled() and gone.result()
        return await asyncio.shield(self._suspect(replica))

    async def aclose(self) -> None:
        """Stop asking replicas, and close their engines; requests that wait or are in flight fail."""
        self.use, self._reference = object(), None
        self._wake()
        tasks = (self._opening, *(replica.recovery for replica in self.replicas))
        if running := [task for task in tasks if task is not None]:
            for task in running:
                task.cancel()
            await asyncio.wait(running)
        for replica in self.replicas:
            if replica.requests:
                speed = f"{replica.tokens_per_second:.1f} tokens per second"
                _LOG.info("replica %s: %d requests, %s", replica.name, replica.requests, speed)
            await replica.engine.aclose()
            replica.condition, replica.failure = ReplicaCondition.UP, None

    async def _check_all(self) -> None:
        asked = (replica.identify(thoroughly=True) for replica in self.replicas)
        found = await asyncio.gather(*asked, return_exceptions=True)
        pairs = list(zip(self.replicas, found, strict=True))
        silent = [
            f"{replica.name} ({result.message})"
            for replica, result in pairs
            if isinstance(result, TransientError)
        ]
        if silent:
            raise CompoundError(
                f"{len(silent)} of {len(pairs)} replicas do not answer: {', '.join(silent)}",
                hint="start them, or remove their addresses from urls; nothing was sent to a model",
            )
        reference: ReplicaIdentity | None = None
        for replica, result in pairs:
            if isinstance(result, BaseException):
                raise result
            reference = reference or result
            if problem := reference.difference(result):
                raise _different(self.replicas[0].name, replica.name, problem)
        self._reference = reference

    def _checked(self, task: asyncio.Task[None]) -> None:
        self._opening = None
        if not task.cancelled():
            task.exception()  # retrieve it even if every waiting call was cancelled, or asyncio logs an error

    def _choose(self, use: object, start: bytes, avoid: Collection[Replica]) -> Replica | None:
        self._check_use(use)
        for replica in self.replicas:
            if replica.up and replica.ended:
                self._suspect(replica)  # its process ended while it had no request
        up = {each.name: each for each in self.replicas if each.up and each not in avoid}
        loads = {name: replica.load for name, replica in up.items()}
        found = choose(start, loads, self.capacity)
        return None if found is None else up[found]

    def _check_use(self, use: object) -> None:
        """Raise if the pool was closed; a request must not start its processes again."""
        if use is not self.use:
            raise TransientError("the fleet was closed during the call", charged=NO_USAGE)

    async def _wait(self) -> None:
        """Wait until a replica may be free; raise if none is up or being checked."""
        conditions = {replica.condition for replica in self.replicas}
        if conditions & {ReplicaCondition.UP, ReplicaCondition.CHECKING}:
            await self._changed.wait()
            return
        if ReplicaCondition.DOWN in conditions:
            down = (r.name for r in self.replicas if r.condition is ReplicaCondition.DOWN)
            raise TransientError(
                f"no replica answers: {', '.join(down)}",
                retry_after=RETRY_AFTER,
                charged=NO_USAGE,
                hint="start one",
            )
        failures = [replica.failure for replica in self.replicas if replica.failure is not None]
        raise CompoundError(f"no replica can be used: {failures[0].message}", hint=failures[0].hint)

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _suspect(self, replica: Replica) -> asyncio.Future[bool]:
        """Take a replica out, and ask it whether it still serves the model; concurrent calls ask once."""
        if replica.gone is None or replica.recovery is None:
            replica.condition = ReplicaCondition.CHECKING
            replica.gone = asyncio.get_running_loop().create_future()
            replica.recovery = asyncio.create_task(self._recover(replica, replica.gone))
            replica.recovery.add_done_callback(lambda _: self._recovered(replica))
        return replica.gone

    async def _recover(self, replica: Replica, gone: asyncio.Future[bool]) -> None:
        """Ask a replica until it serves the model again, or turns out to serve something else."""
        wait, was_gone = FIRST_WAIT, replica.ended
        if was_gone:
            gone.set_result(True)
        try:
            while True:
                try:
                    identity = await replica.identify(thoroughly=was_gone)
                    break
                except TransientError as error:
                    if not gone.done():
                        gone.set_result(error.charged == NO_USAGE)
                    if replica.condition is not ReplicaCondition.DOWN:
                        _LOG.warning("replica %s is down: %s", replica.name, error.message)
                    was_gone, replica.condition = True, ReplicaCondition.DOWN
                    self._wake()
                    await asyncio.sleep(wait)
                    wait = min(2 * wait, LONGEST_WAIT)
            reference = self._reference or identity
            if problem := reference.difference(identity):
                raise _different("the others", replica.name, problem)
        except CompoundError as error:
            replica.condition, replica.failure = ReplicaCondition.FAILED, error
            _LOG.warning("replica %s is not used again: %s", replica.name, error)
            return
        if was_gone:
            if isinstance(replica.engine, VLLMEngine):
                replica.engine.forget_adapters()
            _LOG.warning("replica %s is up again", replica.name)
        replica.condition = ReplicaCondition.UP

    def _recovered(self, replica: Replica) -> None:
        """Release the requests that wait for a recovery; it may have been cancelled before it began."""
        if replica.gone is not None and not replica.gone.done():
            replica.gone.set_result(False)
        replica.recovery = None
        self._wake()


def only_model(address: str, key_env: str | None) -> str:
    """Return the name of the only model that a server serves; blocks until it has answered.

    Raises:
        CompoundError: the server does not answer, or serves several models, or one whose name
            cannot be recorded.
    """
    try:
        with ThreadPoolExecutor(1) as pool:  # the calling thread may run an event loop
            listing, _ = pool.submit(asyncio.run, _reports(address, "fleet", key_env)).result()
    except TransientError as error:
        hint = "start the server, or set the model of the fleet"
        raise CompoundError(error.message, hint=hint) from None
    names = [
        str(entry.get("id")) for entry in model_entries(listing or {}) if not entry.get("parent")
    ]
    if len(names) != 1:
        raise CompoundError(
            f"the server at {address} serves {_shown(names) or 'no model by name'}",
            hint="set the model of the fleet",
        )
    if not names[0].isprintable() or not names[0].strip():
        raise CompoundError(
            f"the server at {address} serves a model named {names[0]!a:.200}, which contains "
            "characters that cannot be recorded",
            hint="check the server; set the model of the fleet if this is the right one",
        )
    return names[0]


async def _served(address: str, model: str, key_env: str | None) -> Mapping[str, str]:
    """Return what a server reports of itself and the model; empty if it reports nothing.

    Raises:
        TransientError: the server does not answer; `charged` is nothing if it cannot be reached at
            all.
        CompoundError: the server does not serve the model, or refuses the key.
    """
    listing, version = await _reports(address, model, key_env)
    facts = {"version": str(version["version"])} if version and "version" in version else {}
    if listing is None:
        return facts
    entries = model_entries(listing)
    entry = next(
        (each for each in entries if str(each.get("id")) == model and not each.get("parent")), None
    )
    if entry is None:
        names = [str(each.get("id")) for each in entries if not each.get("parent")]
        raise CompoundError(
            f"the server at {address} does not serve {model!r}",
            hint=f"it serves {_shown(names) or 'nothing'}; set the model of the fleet",
        )
    return facts | {name: str(entry[name]) for name in COMPARED if entry.get(name) is not None}


async def _reports(
    address: str, model: str, key_env: str | None
) -> tuple[Mapping[str, object] | None, Mapping[str, object] | None]:
    """Return a server's list of models and its version; None for what it does not report."""
    root = address.removesuffix("/v1")
    key = read_key(model, key_env)
    api = ServerAPI(root, model, key=key, key_name=key_env or "api_key_env")
    try:
        models = await _ask(api, "models" if root == address else "v1/models")
        return models, await _ask(api, "version")
    finally:
        await api.aclose()


async def _ask(api: ServerAPI, path: str) -> Mapping[str, object] | None:
    answer = await api.send(path, None, SECONDS, LARGEST)
    if answer.status in {404, 405, 501}:
        return None
    try:
        return api.read(answer)
    except TransientError:
        raise
    except CallError as error:  # a refused key, or no JSON: the same for every request
        raise CompoundError(f"{api.address}: {error.message}", hint=error.hint) from None


def _shown(names: Sequence[str]) -> str:
    """Return names for a message; a server may report any text."""
    return ", ".join(sanitize_for_terminal(name) for name in names)


def _different(one: str, other: str, problem: str) -> CompoundError:
    return CompoundError(
        f"replicas of a fleet must serve the same model in the same version, but {one} and {other} have "
        f"{problem}",
        hint="start all servers alike, or remove an address from urls",
    )
