"""Engine of several replicas of one model.

A request goes to the replica that `compound.engines.replicas` chooses. If that replica fails, the
request moves to another one within the same call where it certainly cost nothing: the server could
not be reached, or it has ended and bills nothing. Otherwise the call fails with a transient error,
is charged like that of any other engine, and the executor's next attempt, which reserves budget of
its own, goes to another replica. A call therefore never costs more than the worst case of one
request.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from typing import Any, ClassVar

from compound.core.engine import NO_USAGE, Adapter, Completion, OnText, Prefilled, Request, Usage
from compound.core.errors import (
    CallError,
    CompoundError,
    DeclarationError,
    RateLimited,
    TransientError,
)
from compound.core.formatting import plural
from compound.core.loops import run_in_background
from compound.core.security.trust import Origin
from compound.engines.openai import OpenAIEngine
from compound.engines.options import Count, checked_settings
from compound.engines.replicas import (
    Replica,
    ReplicaPool,
    capacity_of,
    only_model,
    start_of,
)
from compound.engines.vllm import arguments
from compound.engines.vllm.engine import VLLMEngine
from compound.engines.vllm.link import ServerEnded

KINDS: Mapping[str, type[VLLMEngine | OpenAIEngine]] = {"vllm": VLLMEngine, "openai": OpenAIEngine}
ReplicaSettings = Mapping[str, object]


def _ability(name: str, otherwise: object, doc: str) -> Any:  # noqa: ANN401 - any type
    """Return a property with the value of the replicas' engine, or another value if it has none."""
    return property(lambda fleet: getattr(fleet._first, name, otherwise), doc=doc)


@checked_settings
class FleetEngine:
    """Engine of several replicas of one model: running servers, or vLLM processes that it starts.

    Before the first request, every replica is asked what it serves. A replica that does not answer,
    or that serves another model or version than the others, is refused with its address. A replica
    that fails later is taken out, and asked until it answers and serves the same; a process of the
    engine's own is started again. The name of the engine contains no address, and answers do not
    depend on the replica.

    Args:
        urls: the addresses of running servers, such as ``["http://gpu1:8000/v1",
            "http://gpu2:8000/v1"]``.
        replicas: the number of vLLM processes to start, instead of addresses.
        devices: the GPUs of each vLLM process to start, such as ``[[0, 1], [2, 3]]``.
        vllm: settings of the engine `vllm` for each replica. Its concurrency is the mean over the
            replicas; one replica may have a quarter more, so that equal prompts stay together.
            Adapters are loaded and checked at each replica before it samples with them.
        openai: settings of the engine `openai` for each replica; the default for addresses. Without
            a model, it is the only one that the first server serves.

    Raises:
        DeclarationError: the settings do not fit together, or an address is not a plain HTTP
            address.

    Example:
        >>> urls = ["http://gpu1:8000/v1", "http://gpu2:8000/v1"]
        >>> fleet = FleetEngine(urls, vllm={"model": "Qwen/Qwen3-8B"})
        >>> fleet.name, fleet.concurrency
        ('fleet:vllm:Qwen/Qwen3-8B', 128)
    """

    requires: ClassVar[tuple[str, ...]] = ("httpx",)
    writes_prompts = True

    priced = _ability("priced", False, "Whether the price is known.")
    remote = _ability("remote", True, "Whether the servers are independent of the engine.")
    max_wait = _ability("max_wait", 0.0, "Maximum seconds that a call waits for rate limits.")
    forwards = _ability("forwards", False, "Whether requests of other programs are sent unchanged.")
    takes_format = _ability("takes_format", True, "Whether the format of an answer is sent.")
    native_tools = _ability("native_tools", False, "Whether tools are declared to the model.")
    takes_images = _ability("takes_images", False, "Whether the model takes images.")
    trainable = _ability("trainable", None, "Base model of the adapters; None if there are none.")
    max_loras = _ability("max_loras", 0, "Maximum number of adapters on each replica.")
    max_lora_rank = _ability("max_lora_rank", None, "Maximum rank of an adapter, if it is known.")
    distribution_options = _ability(
        "distribution_options", (), "Settings that change the distribution a trainer computes."
    )

    def __init__(
        self,
        urls: tuple[str, ...] | list[str] = (),
        *,
        replicas: Count | None = None,
        devices: list[list[int]] | None = None,
        vllm: Mapping[str, object] | None = None,
        openai: Mapping[str, object] | None = None,
    ) -> None:
        _check_combination(urls, replicas, devices, vllm, openai)
        self._kind = "openai" if vllm is None and urls else "vllm"
        self._settings = (openai if self._kind == "openai" else vllm) or {}
        self._mean = _made(self._kind, self._settings).concurrency
        settings = {**self._settings, "concurrency": capacity_of(self._mean)}
        if urls:
            made = [
                Replica(url, _made(self._kind, {**settings, "api_base": url}), url)
                for url in _different_addresses(urls)
            ]
        else:
            made = _processes(replicas or 0, devices or (), settings)
        self._first = made[0].engine
        self._pool = ReplicaPool(made, self._first.concurrency)

    @property
    def model(self) -> str:
        """Model that the replicas serve; the first use asks a server if no setting names it."""
        if not self._first.model:
            found = only_model(self._pool.replicas[0].name, self._first.api_key_env)
            for replica in self._pool.replicas:
                replica.engine.model = found
        return self._first.model

    @property
    def name(self) -> str:
        """Name used in cache keys: the model and its settings, without addresses."""
        if self._kind == "openai":
            return f"fleet:openai:{self.model}"
        return f"fleet:{_made('vllm', {**self._settings, 'api_base': None}).name}"

    @property
    def concurrency(self) -> int:
        """Maximum number of requests in flight, the sum over replicas."""
        return self._mean * len(self._pool.replicas)

    @property
    def prefill(self) -> Prefilled:
        """Prompt tokens of all replicas, and those served from their prefix caches."""
        return sum((engine.prefill for engine in self._engines), Prefilled())

    @property
    def replicas(self) -> Sequence[Replica]:
        """Replicas, with what each has answered so far."""
        return self._pool.replicas

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
            # a task group would cancel the others at a failure, and servers whose sleep is
            # cancelled restart
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
                "a fleet with settings of openai does not serve adapters",
                hint="give it settings of vllm",
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
        reported: list[str] = []

        def relay(piece: str) -> None:
            reported.append(piece)
            assert report is not None
            report(piece)

        for moves_left in reversed(range(2 * len(self._pool.replicas))):
            async with self._pool.taken(use, start, limited) as replica:
                if replica is None:  # every free replica limits the rate
                    raise next(iter(limited.values()))
                try:
                    return await replica.answer(request, None if report is None else relay)
                except RateLimited as error:
                    limited[replica] = error
                except CompoundError as error:
                    if use is not self._pool.use:  # closed: asking the replica would start it again
                        raise
                    again = await self._costs_nothing(replica, error)
                    if not (again and moves_left) or reported:
                        raise
                    replica.moved += 1
        raise next(iter(limited.values()))

    async def _costs_nothing(self, replica: Replica, error: CompoundError) -> bool:
        """Return whether a failed request certainly costs nothing, and so may be sent to another replica."""
        if not isinstance(
            error, TransientError
        ):  # it was refused, or the process cannot be started
            refused = isinstance(error, CallError) or not replica.ended
            return not refused and await self._pool.has_ended(replica)
        # the process may have been started again before this request noticed that it had ended
        ended = await self._pool.has_ended(replica) or isinstance(error, ServerEnded)
        return error.charged == NO_USAGE or (ended and not bills(replica))

    async def _admit(self, adapter: Adapter) -> None:
        up = (replica.engine for replica in await self._pool.up())
        engines = [engine for engine in up if isinstance(engine, VLLMEngine)]
        asked = (engine.admit(adapter) for engine in engines)
        found = await asyncio.gather(*asked, return_exceptions=True)
        failures = [error for error in found if isinstance(error, BaseException)]
        lasting = [error for error in failures if not isinstance(error, TransientError)]
        if lasting or len(failures) == len(engines):
            raise (lasting or failures)[0]


def bills(replica: Replica) -> bool:
    """Return whether a provider may charge money for a request of which no answer arrived.

    A server without a price may bill, unless it is on this machine.
    """
    if not isinstance(replica.engine, OpenAIEngine):
        return False
    if replica.engine.price is not None:
        return any(replica.engine.price)
    return replica.address is None or not Origin.of(replica.address).is_loopback


def _check_combination(
    urls: Sequence[str],
    replicas: int | None,
    devices: Sequence[Sequence[int]] | None,
    vllm: ReplicaSettings | None,
    openai: ReplicaSettings | None,
) -> None:
    if sum(bool(given) for given in (urls, replicas, devices)) != 1:
        raise DeclarationError(
            "a fleet needs either urls, or the number of replicas, or devices",
            hint="urls: [http://HOST:PORT/v1, …] for running servers, replicas or devices to start them",
        )
    if vllm is not None and openai is not None:
        raise DeclarationError("a fleet has settings of vllm or of openai, not both")
    if "api_base" in (vllm or openai or {}):
        raise DeclarationError("a fleet's servers are its urls; remove api_base")
    if not urls and openai is not None:
        raise DeclarationError(
            "only vLLM servers can be started", hint="give urls, or settings of vllm"
        )
    if not urls and "api_key_env" in (vllm or {}):
        raise DeclarationError(
            "vllm.api_key_env is the key of running servers, and each process of a fleet gets one of its own",
            hint="remove api_key_env, or give urls instead of replicas or devices",
        )


def _different_addresses(urls: Sequence[str]) -> Sequence[str]:
    """Return different addresses without a slash at the end."""
    addresses = [url.rstrip("/") for url in urls]
    for url in addresses:
        Origin.of(url)
        if addresses.count(url) > 1:
            raise DeclarationError(
                f"the address {url} is given twice", hint="a replica is one server"
            )
    return addresses


def _processes(
    count: int, devices: Sequence[Sequence[int]], settings: ReplicaSettings
) -> list[Replica]:
    used = [device for group in devices for device in group]
    if len(set(used)) != len(used) or not all(devices):
        raise DeclarationError(
            "devices must be groups of different GPUs, one for each process",
            hint="such as [[0, 1], [2, 3]]",
        )
    found = []
    for number in range(count or len(devices)):
        engine = _made("vllm", settings)
        assert isinstance(engine, VLLMEngine)
        if devices:
            _check_gpus(devices[number], engine.args)
            engine.environment = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, devices[number]))}
        found.append(Replica(f"process {number}", engine, None))
    return found


def _check_gpus(group: Sequence[int], args: Sequence[str]) -> None:
    """Reject a process that needs more GPUs than its group has, or leaves some of them idle."""
    used = arguments.gpu_count(args)
    # of other kinds of parallelism, the number of GPUs is not computed
    idle = used == 1 < len(group) and not any("parallel" in argument for argument in args)
    if used > len(group) or idle:
        raise DeclarationError(
            f"a group of devices has {plural(len(group), 'GPU')}, but its vLLM process uses {used}",
            hint=f'set vllm.args to [--tensor-parallel-size, "{len(group)}"], or change devices',
        )


def _made(kind: str, settings: ReplicaSettings) -> VLLMEngine | OpenAIEngine:
    try:
        return KINDS[kind](**settings)  # type: ignore[arg-type]  # it checks the types of its settings
    except DeclarationError as error:
        raise DeclarationError(f"{kind} of a fleet: {error.message}", hint=error.hint) from None
