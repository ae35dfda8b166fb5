"""Engine of several replicas of one model.

A request goes to the replica that `compound.components.engines.fleet.routing` chooses. If that replica fails,
the request moves to another one within the same call where it certainly cost nothing: the server could not be
reached, or it has ended and bills nothing. Otherwise the call fails with a transient error, is charged like
that of any other engine, and the executor's next attempt, which reserves budget of its own, goes to another
replica. A call therefore never costs more than the worst case of one request.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from typing import ClassVar

from compound.components.engines.fleet.identity import only_model
from compound.components.engines.fleet.pool import ReplicaPool
from compound.components.engines.fleet.replica import Replica, ReplicaStats
from compound.components.engines.fleet.routing import start_of
from compound.components.engines.fleet.settings import make_replicas, name_without_address
from compound.components.engines.openai.engine import OpenAIEngine
from compound.components.engines.options import Count, check_settings
from compound.components.engines.vllm.engine import VLLMEngine
from compound.components.engines.vllm.link import ServerEnded
from compound.concurrency.background import run_in_background
from compound.engine import NO_USAGE, Adapter, Completion, OnText, Prefilled, Request, Usage
from compound.errors import (
    CallError,
    CompoundError,
    DeclarationError,
    RateLimited,
    TransientError,
)
from compound.narrowing import report_wrong_arguments
from compound.security.trust import Origin


@report_wrong_arguments
class FleetEngine:
    """Engine of several replicas of one model: running servers, or vLLM processes that it starts.

    Before the first request, every replica is asked what it serves. A replica that does not answer, or that
    serves another model or version than the others, is refused with its address. A replica that fails later
    is taken out, and asked until it answers and serves the same; a process of the engine's own is started
    again. The name of the engine contains no address, and answers do not depend on the replica.

    Args:
        urls: the addresses of running servers, such as ``["http://gpu1:8000/v1", "http://gpu2:8000/v1"]``.
        replicas: the number of vLLM processes to start, instead of addresses.
        devices: the GPUs of each vLLM process to start, such as ``[[0, 1], [2, 3]]``.
        vllm: settings of the engine `vllm` for each replica. Its concurrency is the mean over the replicas;
            one replica may have a quarter more, so that equal prompts stay together. Adapters are loaded and
            checked at each replica before it samples with them.
        openai: settings of the engine `openai` for each replica; the default for addresses. Without a
            model, it is the only one that the first server serves.

    Raises:
        DeclarationError: the settings do not fit together, or an address is not a plain HTTP address.

    Example:
        >>> urls = ["http://gpu1:8000/v1", "http://gpu2:8000/v1"]
        >>> fleet = FleetEngine(urls, vllm={"model": "Qwen/Qwen3-8B"})
        >>> fleet.name, fleet.concurrency
        ('fleet:vllm:Qwen/Qwen3-8B', 128)
    """

    requires: ClassVar[tuple[str, ...]] = ("httpx",)

    def __init__(
        self,
        urls: tuple[str, ...] | list[str] = (),
        *,
        replicas: Count | None = None,
        devices: list[list[int]] | None = None,
        vllm: Mapping[str, object] | None = None,
        openai: Mapping[str, object] | None = None,
    ) -> None:
        check_settings(FleetEngine, {"urls": urls, "replicas": replicas})
        self._vllm = vllm
        made, self._mean = make_replicas(urls, replicas, devices, vllm, openai)
        self._first = made[0].engine
        self._pool = ReplicaPool(made, self._first.concurrency)

    @property
    def model(self) -> str:
        """Model that the replicas serve; the first use asks a server if no setting names it."""
        if not self._first.model:
            first = self._pool.replicas[0]
            found = only_model(first.name, self._first.api_key_env)
            for replica in self._pool.replicas:
                replica.engine.model = found
        return self._first.model

    @property
    def name(self) -> str:
        """Name used in cache keys: the model and its settings, without addresses."""
        assert self.model
        return f"fleet:{name_without_address(self._first, self._vllm)}"

    @property
    def concurrency(self) -> int:
        """Maximum number of requests in flight, the sum over replicas."""
        return self._mean * len(self._pool.replicas)

    writes_prompts = True

    @property
    def remote(self) -> bool:
        """Whether the servers are independent of the engine."""
        return self._first.remote

    @property
    def priced(self) -> bool:
        """Whether the price is known."""
        return self._first.priced

    @property
    def max_wait(self) -> float:
        """Maximum total time in seconds that a call waits for servers that limit the rate."""
        return self._first.max_wait

    @property
    def forwards(self) -> bool:
        """Whether requests of other programs are sent as they are."""
        return isinstance(self._first, OpenAIEngine)

    @property
    def takes_format(self) -> bool:
        """Whether the format of an answer is sent."""
        return not isinstance(self._first, OpenAIEngine)

    @property
    def native_tools(self) -> bool:
        """Whether tools are declared to the model."""
        return isinstance(self._first, VLLMEngine) and self._first.native_tools

    @property
    def takes_images(self) -> bool:
        """Whether the model takes images."""
        return isinstance(self._first, VLLMEngine) and self._first.takes_images

    @property
    def trainable(self) -> str | None:
        """Base model of the adapters; None if the replicas do not serve adapters."""
        return self._first.trainable if isinstance(self._first, VLLMEngine) else None

    @property
    def max_loras(self) -> int:
        """Maximum number of adapters on each replica; 0 if the replicas do not serve adapters."""
        return self._first.max_loras if isinstance(self._first, VLLMEngine) else 0

    @property
    def distribution_options(self) -> list[str]:
        """Settings that make the sampling distribution differ from the one a trainer computes."""
        return self._first.distribution_options if isinstance(self._first, VLLMEngine) else []

    @property
    def max_lora_rank(self) -> int | None:
        """Maximum rank of an adapter; None if it is not known."""
        return self._first.max_lora_rank if isinstance(self._first, VLLMEngine) else None

    @property
    def prefill(self) -> Prefilled:
        """Prompt tokens of all replicas, and those served from their prefix caches."""
        return sum((engine.prefill for engine in self._engines), Prefilled())

    @property
    def replicas(self) -> Sequence[ReplicaStats]:
        """Work of each replica so far."""
        return [replica.stats for replica in self._pool.replicas]

    @property
    def processes(self) -> Sequence[VLLMEngine]:
        """Engines of the vLLM processes that it starts."""
        return [engine for engine in self._engines if engine.api_base is None]

    @property
    def _engines(self) -> list[VLLMEngine]:
        """Engines of replicas that serve adapters."""
        found = (replica.engine for replica in self._pool.replicas)
        return [engine for engine in found if isinstance(engine, VLLMEngine)]

    def require_key(self) -> None:
        """Raise `CompoundError` if the environment variable of the key is not set."""
        self._first.require_key()

    def prepare(self, lora_rank: int) -> None:
        """Raise the adapter rank of servers that are started later."""
        for engine in self._engines:
            engine.prepare(lora_rank)

    def limit_gpu_memory(self, shares: Mapping[str, float]) -> None:
        """Set the share of memory by GPU that servers started later may use."""
        for engine in self.processes:
            engine.limit_gpu_memory(shares)

    @contextlib.asynccontextmanager
    async def asleep(self, gpus: Collection[str]) -> AsyncIterator[bool]:
        """Release the memory of the servers that have one of the GPUs while the block runs.

        Raises:
            CompoundError: a server has no sleep mode.
        """
        async with contextlib.AsyncExitStack() as stack:
            entering = (stack.enter_async_context(engine.asleep(gpus)) for engine in self.processes)
            # a task group would cancel the others at a failure, and servers whose sleep is cancelled restart
            found = await asyncio.gather(*entering, return_exceptions=True)
            for result in found:
                if isinstance(result, BaseException):
                    raise result
            yield any(found)

    def worst_case(self, request: Request) -> Usage:
        """Return an upper bound of the request's usage, which is charged at most once."""
        return self._first.worst_case(request)

    async def warm_up(self) -> None:
        """Check all replicas, and start processes, before the first request.

        Raises:
            CompoundError: a replica does not answer, or serves something else than the others.
        """
        if not self._pool.opened:
            await asyncio.to_thread(lambda: self.model)
            await run_in_background(self._pool.open())

    async def admit(self, adapter: Adapter) -> None:
        """Load an adapter on every replica that is up and check it, without sampling.

        Raises:
            DeclarationError: the replicas are not vLLM servers.
            CompoundError: a replica does not support the adapter, or no replica can be used again.
            TransientError: no replica answers.
        """
        if self.trainable is None:
            raise DeclarationError(
                "a fleet with settings of openai does not serve adapters", hint="give it settings of vllm"
            )
        await self.warm_up()
        await run_in_background(self._admit(adapter))

    async def generate(self, request: Request) -> Completion:
        """Answer one request."""
        await self.warm_up()
        return await run_in_background(self._answer(request, None))

    async def stream(self, request: Request, on_text: OnText) -> Completion:
        """Answer one request, and report its text: as it arrives, or as a whole from vLLM replicas."""
        await self.warm_up()
        loop = asyncio.get_running_loop()

        def report(piece: str) -> None:
            loop.call_soon_threadsafe(on_text, piece)

        return await run_in_background(self._answer(request, report))

    async def aclose(self) -> None:
        """Close the connections, and end the servers that the engine started; a later call opens it again."""
        await run_in_background(self._pool.aclose())

    # -- on the background loop, where the connections live ----------------------------------------------

    async def _answer(self, request: Request, report: OnText | None) -> Completion:
        start, limited, use = start_of(request), dict[Replica, RateLimited](), self._pool.use
        relay = None if report is None else _Relay(report)
        for moves_left in reversed(range(2 * len(self._pool.replicas))):
            async with self._pool.taken(use, start, limited) as replica:
                if replica is None:  # every free replica limits the rate
                    raise next(iter(limited.values()))
                try:
                    return await replica.answer(request, relay)
                except RateLimited as error:
                    limited[replica] = error
                except CompoundError as error:
                    if use is not self._pool.use:  # closed: asking the replica would start it again
                        raise
                    again = await self._costs_nothing(replica, error)
                    if not (again and moves_left) or (relay is not None and relay.reported):
                        raise
                    replica.count_moved()
        raise next(iter(limited.values()))

    async def _costs_nothing(self, replica: Replica, error: CompoundError) -> bool:
        """Return whether a failed request certainly costs nothing, and so may be sent to another replica."""
        if not isinstance(error, TransientError):  # it was refused, or the process could not be started
            return not isinstance(error, CallError) and replica.ended and await self._pool.has_ended(replica)
        ended = await self._pool.has_ended(replica)
        # the process may have been started again before this request noticed that it had ended
        ended = ended or isinstance(error, ServerEnded)
        return error.charged == NO_USAGE or (ended and not _bills(replica))

    async def _admit(self, adapter: Adapter) -> None:
        engines = [
            replica.engine for replica in await self._pool.up() if isinstance(replica.engine, VLLMEngine)
        ]
        found = await asyncio.gather(*(each.admit(adapter) for each in engines), return_exceptions=True)
        failures = [error for error in found if isinstance(error, BaseException)]
        lasting = [error for error in failures if not isinstance(error, TransientError)]
        if lasting or len(failures) == len(engines):
            raise (lasting or failures)[0]


class _Relay:
    """Report pieces of text, and note whether there were any."""

    def __init__(self, report: OnText) -> None:
        self._report, self.reported = report, False

    def __call__(self, piece: str) -> None:
        self.reported = True
        self._report(piece)


def _bills(replica: Replica) -> bool:
    """Return whether a provider may charge money for a request of which no answer arrived.

    A server without a price may bill, unless it is on this machine.
    """
    if not isinstance(replica.engine, OpenAIEngine):
        return False
    if replica.engine.price is not None:
        return any(replica.engine.price)
    return replica.address is None or not Origin.of(replica.address).is_loopback
