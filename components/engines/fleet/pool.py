"""Pool of the replicas of one model: check them, assign requests, and use failed ones again."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import AsyncIterator, Collection, Sequence

from compound.components.engines.fleet.identity import Identity, difference
from compound.components.engines.fleet.replica import Replica, ReplicaCondition
from compound.components.engines.fleet.routing import choose
from compound.components.engines.vllm.engine import VLLMEngine
from compound.engine import NO_USAGE
from compound.errors import CompoundError, TransientError

FIRST_WAIT, LONGEST_WAIT = 0.25, 15.0  # seconds between questions to a replica that is down
RETRY_AFTER = 2.0  # seconds that a caller should wait if no replica answers
_LOG = logging.getLogger("compound")


class ReplicaPool:
    """Replicas of one model. Use it from one event loop only.

    Args:
        replicas: the replicas.
        capacity: maximum number of requests in flight at a replica.
    """

    def __init__(self, replicas: Sequence[Replica], capacity: int) -> None:
        self.replicas, self.capacity = tuple(replicas), capacity
        self._reference: Identity | None = None
        self._use = object()  # replaced when the pool is closed
        self._opening: asyncio.Task[None] | None = None
        self._waiting: deque[asyncio.Future[None]] = deque()

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

    @property
    def use(self) -> object:
        """Object that stands for the time until the pool is closed."""
        return self._use

    @contextlib.asynccontextmanager
    async def taken(
        self, use: object, start: bytes, avoid: Collection[Replica] = ()
    ) -> AsyncIterator[Replica | None]:
        """Wait for a replica, and count a request in flight at it while the block runs.

        Args:
            use: the value of `use` when the request began, so that it ends with the pool.
            start: the start of the request; see `compound.components.engines.fleet.routing`.
            avoid: replicas not to take. If there are some, nothing is awaited, and the block may get None.

        Raises:
            TransientError: no replica answers, or the pool was closed.
            CompoundError: no replica can be used again.
        """
        while (replica := self._choose(use, start, avoid)) is None and not avoid:
            self._check_any_usable()
            await self._wait()
        if replica is None:
            yield None
            return
        replica.begin()
        try:
            yield replica
        finally:
            replica.end()
            self._wake(1)

    async def up(self) -> Sequence[Replica]:
        """Return the replicas that are up; wait until there is one.

        Raises:
            TransientError: no replica answers, or the pool was closed.
            CompoundError: no replica can be used again.
        """
        use = self._use
        while not (found := [r for r in self.replicas if r.condition is ReplicaCondition.UP]):
            self._check_any_usable()
            await self._wait()
            self._check_use(use)
        return found

    async def has_ended(self, replica: Replica) -> bool:
        """Ask a replica that failed whether it still serves the model; return whether its server has ended.

        It receives no requests until it has answered. The question is shared by all requests that failed.
        """
        if replica.condition is ReplicaCondition.FAILED:  # it may live, and serve something else
            gone = replica.gone
            return gone is not None and gone.done() and not gone.cancelled() and gone.result()
        return await asyncio.shield(self._suspect(replica))

    async def aclose(self) -> None:
        """Stop asking replicas, and close their engines; requests that wait or are in flight fail."""
        self._use, self._reference = object(), None
        self._wake(len(self._waiting))
        tasks = [self._opening, *(replica.recovery for replica in self.replicas)]
        running = [task for task in tasks if task is not None]
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running)
        for replica in self.replicas:
            stats = replica.stats
            if stats.requests:
                speed = f"{stats.tokens_per_second:.1f} tokens per second"
                _LOG.info("replica %s: %d requests, %s", stats.name, stats.requests, speed)
            await replica.engine.aclose()
            replica.condition, replica.failure = ReplicaCondition.UP, None

    async def _check_all(self) -> None:
        asked = (replica.identify(thoroughly=True) for replica in self.replicas)
        found = await asyncio.gather(*asked, return_exceptions=True)
        silent = [
            f"{replica.name} ({result.message})"
            for replica, result in zip(self.replicas, found, strict=True)
            if isinstance(result, TransientError)
        ]
        if silent:
            raise CompoundError(
                f"{len(silent)} of {len(self.replicas)} replicas do not answer: {', '.join(silent)}",
                hint="start them, or remove their addresses from urls; nothing was sent to a model",
            )
        identities = []
        for result in found:
            if isinstance(result, BaseException):
                raise result
            identities.append(result)
        for replica, identity in zip(self.replicas, identities, strict=True):
            if problem := difference(identities[0], identity):
                raise _different(self.replicas[0].name, replica.name, problem)
        self._reference = identities[0]

    def _checked(self, task: asyncio.Task[None]) -> None:
        self._opening = None
        if not task.cancelled():
            task.exception()  # retrieve it even if every waiting call was cancelled, or asyncio logs an error

    def _choose(self, use: object, start: bytes, avoid: Collection[Replica]) -> Replica | None:
        self._check_use(use)
        for replica in self.replicas:
            if replica.condition is ReplicaCondition.UP and replica.ended:
                self._suspect(replica)  # its process ended while it had no request
        up = {r.name: r for r in self.replicas if r.condition is ReplicaCondition.UP and r not in avoid}
        if not up:
            return None
        found = choose(start, {name: replica.load for name, replica in up.items()}, self.capacity)
        return None if found is None else up[found]

    def _check_use(self, use: object) -> None:
        """Raise if the pool was closed; a request must not start its processes again."""
        if use is not self._use:
            raise TransientError("the fleet was closed during the call", charged=NO_USAGE)

    def _check_any_usable(self) -> None:
        """Raise if no replica is up or being checked, so that waiting would not end."""
        conditions = {replica.condition for replica in self.replicas}
        if conditions & {ReplicaCondition.UP, ReplicaCondition.CHECKING}:
            return
        if ReplicaCondition.DOWN in conditions:
            names = ", ".join(r.name for r in self.replicas if r.condition is ReplicaCondition.DOWN)
            raise TransientError(
                f"no replica answers: {names}", retry_after=RETRY_AFTER, charged=NO_USAGE, hint="start one"
            )
        failures = [replica.failure for replica in self.replicas if replica.failure is not None]
        raise CompoundError(f"no replica can be used: {failures[0].message}", hint=failures[0].hint)

    async def _wait(self) -> None:
        """Wait until a replica may be free."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(waiter)
        try:
            await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled():  # woken and cancelled at once
                self._wake(1)
            raise

    def _wake(self, most: int) -> None:
        while self._waiting and most:
            waiter = self._waiting.popleft()
            if not waiter.done():
                waiter.set_result(None)
                most -= 1

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
                except TransientError as error:
                    if not gone.done():
                        gone.set_result(error.charged == NO_USAGE)
                    if replica.condition is not ReplicaCondition.DOWN:
                        _LOG.warning("replica %s is down: %s", replica.name, error.message)
                    was_gone, replica.condition = True, ReplicaCondition.DOWN
                    self._wake(len(self._waiting))
                    await asyncio.sleep(wait)
                    wait = min(2 * wait, LONGEST_WAIT)
                else:
                    self._readmit(replica, identity, was_gone)
                    return
        except CompoundError as error:
            replica.condition, replica.failure = ReplicaCondition.FAILED, error
            _LOG.warning("replica %s is not used again: %s", replica.name, error)

    def _recovered(self, replica: Replica) -> None:
        """Release the requests that wait for a recovery; it may have been cancelled before it began."""
        if replica.gone is not None and not replica.gone.done():
            replica.gone.set_result(False)
        replica.recovery = None
        self._wake(len(self._waiting))

    def _readmit(self, replica: Replica, identity: Identity, was_gone: bool) -> None:
        reference = self._reference
        if reference is not None and (problem := difference(reference, identity)):
            raise _different("the others", replica.name, problem)
        if was_gone:
            if isinstance(replica.engine, VLLMEngine):
                replica.engine.forget_adapters()
            _LOG.warning("replica %s is up again", replica.name)
        replica.condition = ReplicaCondition.UP


def _different(one: str, other: str, problem: str) -> CompoundError:
    return CompoundError(
        f"replicas of a fleet must serve the same model in the same version, but {one} and {other} have "
        f"{problem}",
        hint="start all servers alike, or remove an address from urls",
    )
