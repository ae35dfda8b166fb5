"""Engine of several replicas of one model.

If a replica fails, the request moves to another one within the same call where it certainly cost
nothing: the server could not be reached, or it has ended and bills nothing. Otherwise the call
fails with a transient error, is charged like that of any other engine, and the executor's next
attempt, which reserves budget of its own, goes to another replica. A call therefore never costs
more than the worst case of one request.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar

from compound.core.engine import (
    NO_USAGE,
    Adapter,
    Completion,
    OnText,
    Prefilled,
    Request,
)
from compound.core.errors import (
    CallError,
    CompoundError,
    DeclarationError,
    RateLimited,
    TransientError,
)
from compound.core.formatting import plural
from compound.core.loops import in_background, run_in_background
from compound.core.narrowing import report_wrong_arguments
from compound.core.security.trust import Origin
from compound.engines.openai import OpenAIEngine
from compound.engines.options import Count, takes_settings
from compound.engines.replicas import (
    BALANCE,
    Replica,
    ReplicaIdentity,
    choose,
    only_model,
    start_of,
)
from compound.engines.vllm import arguments
from compound.engines.vllm.engine import VLLMEngine
from compound.engines.vllm.server import ServerEnded

KINDS: Mapping[str, type[VLLMEngine | OpenAIEngine]] = {"vllm": VLLMEngine, "openai": OpenAIEngine}
ReplicaSettings = Mapping[str, object]
FIRST_WAIT, LONGEST_WAIT = 0.25, 15.0  # seconds between questions to a replica that is down
RETRY_AFTER = 2.0  # seconds that a caller should wait if no replica answers
_LOG = logging.getLogger("compound")


@dataclass(frozen=True)
class FleetSettings:
    """Settings of `FleetEngine`, which describes them."""

    urls: tuple[str, ...] | list[str] = ()
    _: KW_ONLY
    replicas: Count | None = None
    devices: list[list[int]] | None = None
    vllm: Mapping[str, object] | None = None
    openai: Mapping[str, object] | None = None


@report_wrong_arguments
class FleetEngine:
    """Engine of several replicas of one model: running servers, or vLLM processes that it starts.

    Before the first request, every replica is asked what it serves. A replica that does not answer,
    or that serves another model or version than the others, is refused with its address. A replica
    that fails later is taken out, and asked until it answers and serves the same; a process of the
    engine's own is started again. The name of the engine contains no address, and answers do not
    depend on the replica.

    Args:
        urls: the addresses of running servers, such as ``["http://gpu1:8000/v1",
            "http://gpu2:8000/v1"]``. In YAML, a list of them may stand for all settings.
        replicas: the number of vLLM processes to start, instead of addresses.
        devices: the GPUs of each vLLM process to start, such as ``[[0, 1], [2, 3]]``.
        vllm: settings of the engine `vllm` for each replica, without ``api_base``. Its concurrency
            is the mean over the replicas; one replica may have a quarter more, so that equal
            prompts stay together. Adapters are loaded and checked at each replica before it samples
            with them.
        openai: settings of the engine `openai` for each replica, without ``api_base``; the default
            for addresses. Without a model, it is the only one that the first server serves.

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
    api_base = None  # it differs between replicas
    replicas: tuple[Replica, ...] = ()

    @takes_settings(FleetSettings)
    def __init__(self, settings: FleetSettings) -> None:
        _check_combination(settings)
        self._kind = "openai" if settings.vllm is None and settings.urls else "vllm"
        self._settings = (settings.openai if self._kind == "openai" else settings.vllm) or {}
        self._mean = _made(self._kind, self._settings).concurrency
        # above the mean, as otherwise a busy fleet would have a place at one replica only at any
        # time, and requests could not follow their start
        self._capacity = math.ceil(BALANCE * self._mean)
        each = {**self._settings, "concurrency": self._capacity}
        if settings.urls:
            found = [
                Replica(url, _made(self._kind, {**each, "api_base": url}), url)
                for url in _different_addresses(settings.urls)
            ]
        else:
            found = _processes(settings.replicas or 0, settings.devices or (), each)
        self.replicas = tuple(found)
        self._use = object()  # stands for the time until the engine is closed
        self._reference: ReplicaIdentity | None = None  # what all replicas serve
        self._opening = asyncio.Lock()
        self._changed = asyncio.Event()  # replaced at each change of a load or a condition

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - a member of the engine of a replica
        if name.startswith("_") or not self.replicas:
            raise AttributeError(name)
        return getattr(self.replicas[0].engine, name)

    @property
    def model(self) -> str:
        """Model that the replicas serve; the first use asks a server if no setting names it."""
        first = self.replicas[0]
        if not first.engine.model:
            found = only_model(first.name, first.engine.api_key_env)
            for replica in self.replicas:
                replica.engine.model = found
        return first.engine.model

    @property
    def name(self) -> str:
        """Name used in cache keys: the model and its settings, without addresses."""
        if self._kind == "openai":
            return f"fleet:openai:{self.model}"
        return f"fleet:{_made('vllm', {**self._settings, 'api_base': None}).name}"

    @property
    def concurrency(self) -> int:
        """Maximum number of requests in flight, the sum over replicas."""
        return self._mean * len(self.replicas)

    @property
    def prefill(self) -> Prefilled:
        """Prompt tokens of all replicas, and those served from their prefix caches."""
        return sum((engine.prefill for engine in self._vllm_engines()), Prefilled())

    @property
    def processes(self) -> Sequence[VLLMEngine]:
        """Engines of the vLLM processes that it starts."""
        return [engine for engine in self._vllm_engines() if engine.api_base is None]

    def prepare(self, lora_rank: int) -> None:
        """Raise the adapter rank of servers that are started later."""
        for engine in self._vllm_engines():
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

    async def warm_up(self) -> None:
        """Check all replicas, and start processes, before the first request.

        Raises:
            CompoundError: a replica does not answer, or serves something else than the others.
        """
        if self._reference is None:
            await asyncio.to_thread(lambda: self.model)
            await run_in_background(self._open())

    async def admit(self, adapter: Adapter) -> None:
        """Load an adapter on every replica that is up and check it, without sampling.

        Raises:
            DeclarationError: the replicas are not vLLM servers.
            CompoundError: a replica does not support the adapter, or no replica can be used again.
            TransientError: no replica answers.
        """
        if not self._vllm_engines():
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

    @in_background
    async def aclose(self) -> None:
        """Close the connections, and end the servers that the engine started; a later call opens it again."""
        self._use, self._reference = object(), None
        self._wake()
        if running := [each.recovery for each in self.replicas if each.recovery is not None]:
            for task in running:
                task.cancel()
            await asyncio.wait(running)
        for replica in self.replicas:
            await replica.engine.aclose()
            replica.condition, replica.failure = "up", None

    def _vllm_engines(self) -> list[VLLMEngine]:
        engines = (replica.engine for replica in self.replicas)
        return [engine for engine in engines if isinstance(engine, VLLMEngine)]

    # -- on the background loop, where the connections live ----------------------------------------------

    async def _open(self) -> None:
        """Check once that every replica answers, and that all serve the same."""
        async with self._opening:
            if self._reference is None:
                use, found = self._use, await self._check_all()
                self._check_use(use)
                self._reference = found

    async def _check_all(self) -> ReplicaIdentity:
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
        identities = []
        for replica, result in pairs:
            if isinstance(result, BaseException):
                raise result
            identities.append(result)
            if problem := identities[0].difference(result):
                raise _different(self.replicas[0].name, replica.name, problem)
        return identities[0]

    async def _admit(self, adapter: Adapter) -> None:
        use = self._use
        while not (up := [replica.engine for replica in self.replicas if replica.up]):
            await self._wait(use)
        engines = [engine for engine in up if isinstance(engine, VLLMEngine)]
        asked = (engine.admit(adapter) for engine in engines)
        found = await asyncio.gather(*asked, return_exceptions=True)
        failures = [error for error in found if isinstance(error, BaseException)]
        lasting = [error for error in failures if not isinstance(error, TransientError)]
        if lasting or len(failures) == len(engines):
            raise (lasting or failures)[0]

    async def _answer(self, request: Request, report: OnText | None) -> Completion:
        start, limited, use = start_of(request), dict[Replica, RateLimited](), self._use
        reported: list[str] = []

        def relay(piece: str) -> None:
            reported.append(piece)
            assert report is not None
            report(piece)

        for moves_left in reversed(range(2 * len(self.replicas))):
            while (replica := self._choose(use, start, limited)) is None and not limited:
                await self._wait(use)
            if replica is None:  # every free replica limits the rate
                break
            try:
                replica.load += 1
                try:
                    return await replica.answer(request, None if report is None else relay)
                finally:
                    replica.load -= 1
                    self._wake()
            except RateLimited as error:
                limited[replica] = error
            except CompoundError as error:
                if use is not self._use:  # closed: asking the replica would start it again
                    raise
                again = await self._costs_nothing(replica, error)
                if not (again and moves_left) or reported:
                    raise
                replica.moved += 1
        raise next(iter(limited.values()))

    def _choose(self, use: object, start: bytes, limited: Collection[Replica]) -> Replica | None:
        self._check_use(use)
        for replica in self.replicas:
            if replica.up and replica.ended:
                self._suspect(replica)  # its process ended while it had no request
        up = {each.name: each for each in self.replicas if each.up and each not in limited}
        loads = {name: replica.load for name, replica in up.items()}
        found = choose(start, loads, self._capacity)
        return None if found is None else up[found]

    async def _wait(self, use: object) -> None:
        """Wait until a replica may be free.

        Raises:
            TransientError: no replica answers, or the engine was closed.
            CompoundError: no replica can be used again.
        """
        conditions = {replica.condition for replica in self.replicas}
        if conditions & {"up", "checking"}:
            await self._changed.wait()
            self._check_use(use)
            return
        if "down" in conditions:
            down = (replica.name for replica in self.replicas if replica.condition == "down")
            raise TransientError(
                f"no replica answers: {', '.join(down)}",
                retry_after=RETRY_AFTER,
                charged=NO_USAGE,
                hint="start one",
            )
        failures = [replica.failure for replica in self.replicas if replica.failure is not None]
        raise CompoundError(f"no replica can be used: {failures[0].message}", hint=failures[0].hint)

    def _check_use(self, use: object) -> None:
        """Raise if the engine was closed; a request must not start its processes again."""
        if use is not self._use:
            raise TransientError("the fleet was closed during the call", charged=NO_USAGE)

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _costs_nothing(self, replica: Replica, error: CompoundError) -> bool:
        """Return whether a failed request certainly costs nothing, and so may be sent to another replica."""
        if not isinstance(
            error, TransientError
        ):  # it was refused, or the process cannot be started
            refused = isinstance(error, CallError) or not replica.ended
            return not refused and await self._has_ended(replica)
        # the process may have been started again before this request noticed that it had ended
        ended = await self._has_ended(replica) or isinstance(error, ServerEnded)
        return error.charged == NO_USAGE or (ended and not replica.bills)

    async def _has_ended(self, replica: Replica) -> bool:
        """Ask a replica that failed whether it still serves the model; return whether its server has ended.

        It receives no requests until it has answered. The question is shared by all requests that
        failed.
        """
        if replica.condition != "failed":  # otherwise it may live, and serve something else
            self._suspect(replica)
        return replica.gone is not None and await asyncio.shield(replica.gone)

    def _suspect(self, replica: Replica) -> None:
        """Take a replica out, and ask it whether it still serves the model; concurrent calls ask once."""
        if replica.recovery is None:
            replica.condition = "checking"
            replica.gone = asyncio.get_running_loop().create_future()
            replica.recovery = asyncio.create_task(self._recover(replica, replica.gone))
            replica.recovery.add_done_callback(lambda _: self._recovered(replica))

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
                    if replica.condition != "down":
                        _LOG.warning("replica %s is down: %s", replica.name, error.message)
                    was_gone, replica.condition = True, "down"
                    self._wake()
                    await asyncio.sleep(wait)
                    wait = min(2 * wait, LONGEST_WAIT)
            reference = self._reference or identity
            if problem := reference.difference(identity):
                raise _different("the others", replica.name, problem)
        except CompoundError as error:
            replica.condition, replica.failure = "failed", error
            _LOG.warning("replica %s is not used again: %s", replica.name, error)
            return
        if was_gone:
            if isinstance(replica.engine, VLLMEngine):
                replica.engine.forget_adapters()
            _LOG.warning("replica %s is up again", replica.name)
        replica.condition = "up"

    def _recovered(self, replica: Replica) -> None:
        """Release the requests that wait for a recovery; it may have been cancelled before it began."""
        if replica.gone is not None and not replica.gone.done():
            replica.gone.set_result(False)
        replica.recovery = None
        self._wake()


def _different(one: str, other: str, problem: str) -> CompoundError:
    return CompoundError(
        f"replicas of a fleet must serve the same model in the same version, but {one} and {other} have "
        f"{problem}",
        hint="start all servers alike, or remove an address from urls",
    )


def _check_combination(given: FleetSettings) -> None:
    if sum(map(bool, (given.urls, given.replicas, given.devices))) != 1:
        raise DeclarationError(
            "a fleet needs either urls, or the number of replicas, or devices",
            hint="urls: [http://HOST:PORT/v1, …] for running servers, replicas or devices to start them",
        )
    if given.vllm is not None and given.openai is not None:
        raise DeclarationError("a fleet has settings of vllm or of openai, not both")
    if "api_base" in (given.vllm or given.openai or {}):
        raise DeclarationError("a fleet's servers are its urls; remove api_base")
    if not given.urls and given.openai is not None:
        raise DeclarationError(
            "only vLLM servers can be started", hint="give urls, or settings of vllm"
        )
    if not given.urls and "api_key_env" in (given.vllm or {}):
        raise DeclarationError(
            "vllm.api_key_env is the key of running servers, and each process of a fleet gets one of its own",
            hint="remove api_key_env, or give urls instead of replicas or devices",
        )


def _different_addresses(urls: Sequence[str]) -> Sequence[str]:
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
