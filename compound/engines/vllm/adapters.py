"""Adapters on a vLLM server: loaded by version, checked before use, and unloaded when least recently used.

A version's name on the server is a prefix of its digest, so two versions never share a name.
Neither a request during a swap nor the server's prefix cache, whose keys contain the name, can mix
them.

Loading waits for the requests in flight, and later requests wait for it, for two reasons: a
server's numbers are comparable exactly only if no other request shares their batch, and vLLM 0.32
crashes on prompt log-probabilities together with requests with adapters (its CPU kernel selects the
wrong rows). One task loads all requested versions while it holds the write lock once; afterwards
the waiting calls sample concurrently.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from compound.core.engine import Adapter
from compound.core.errors import AdapterNotServed, CallError, CompoundError, TransientError
from compound.core.loops import RWLock
from compound.core.storage.artifacts import SHOWN, verify_reference
from compound.engines.adapter_files import (
    CHECKS,
    TEXT,
    Probe,
    changes_nothing,
    check_logprobs,
    read_config,
    read_probe,
    rotate,
    weights_digest,
)
from compound.engines.remote import TRANSIENT_STATUSES, first_line
from compound.engines.vllm.api import VLLMAPI

# Results of checking an adapter, as `VLLMEngine.adapters` reports them.
MATCHES_PROBE = "matches its probe"
DIFFERS_FROM_OTHERS = "differs from the base and other adapters"
INDISTINGUISHABLE = "indistinguishable from the base"


@dataclass(frozen=True, slots=True)
class Served:
    """Version that is loaded on the server."""

    name: str
    weights: str  # digest of the weights, which several versions can share
    verdict: str


class ServedAdapters:
    """Versions on one server, which must share the file system. Use it from one event loop only.

    Up to ``capacity`` versions are kept on the server, and in any case those that calls use or
    wait for. ``timeout`` limits the seconds of loading one, and of each request that checks it. Each
    is checked ``checks`` times over new connections, once if a single process answers.

    Attributes:
        served: the loaded versions by digest, least recently used first.
    """

    def __init__(self, api: VLLMAPI, capacity: int, timeout: float, checks: int = CHECKS) -> None:
        self._api, self._capacity, self._timeout, self._checks = api, capacity, timeout, checks
        self._lock = RWLock()
        self._calls: Counter[str] = Counter()  # calls that use a version or wait for it, by digest
        self._loading: dict[Adapter, asyncio.Future[None]] = {}  # versions that calls wait for
        self._loader: asyncio.Task[None] | None = None
        self.served: dict[str, Served] = {}

    @contextlib.asynccontextmanager
    async def sampling(self, adapter: Adapter | None) -> AsyncIterator[str]:
        """Keep a version loaded and checked while the block runs; yields its name on the server.

        Without an adapter, this yields the base model's name.

        Raises:
            ConfigurationError: the folder does not match the adapter's digest, or its probe is
                invalid.
            AdapterNotServed: the server reports that it serves the adapter, but does not.
            CompoundError: the server rejects the adapter.
            TransientError: the server does not answer.
        """
        if adapter is None:
            async with self._lock.read():
                yield self._api.model
            return
        digest = adapter.sha256
        self._calls[digest] += 1  # prevents unloading
        try:
            if digest not in self.served:
                await self._wait_until_loaded(adapter)
            if digest in self.served:  # false if `forget` was called in between
                self.served[digest] = self.served.pop(digest)
            async with self._lock.read():
                yield _name(adapter)
        finally:
            self._calls[digest] -= 1
            if not self._calls[digest]:
                del self._calls[digest]

    def forget(self, adapter: Adapter) -> None:
        """Mark a version that the server has lost, so that the next use loads it again."""
        self.served.pop(adapter.sha256, None)

    @contextlib.asynccontextmanager
    async def drained(self) -> AsyncIterator[None]:
        """Wait for the requests in flight, and hold back later ones while the block runs."""
        async with self._lock.write():
            yield

    async def aclose(self) -> None:
        """Stop loading; calls that wait for a version fail."""
        if self._loader is not None:
            self._loader.cancel()
            await asyncio.wait([self._loader])

    async def _wait_until_loaded(self, adapter: Adapter) -> None:
        """Wait until the loader has loaded a version; an error is raised in every call that waits for it."""
        if adapter not in self._loading:
            done = self._loading[adapter] = asyncio.get_running_loop().create_future()
            # Retrieve the exception even if every waiting call was cancelled, or asyncio logs an
            # error.
            done.add_done_callback(lambda done: done.exception())
        if self._loader is None:
            self._loader = asyncio.create_task(self._load_wanted())
        await asyncio.shield(self._loading[adapter])

    async def _load_wanted(self) -> None:
        """Load all versions that calls wait for, under the write lock."""
        try:
            async with self._lock.write():
                while self._loading:
                    await self._settle(*next(iter(self._loading.items())))
        finally:
            self._loader = None
            closed = TransientError(f"{self._api.model}: closed while loading adapters")
            for done in self._loading.values():  # not empty only if this task was cancelled
                done.set_exception(closed)
            self._loading.clear()

    async def _settle(self, adapter: Adapter, done: asyncio.Future[None]) -> None:
        """Load a version, unless all calls that wait for it were cancelled; then release those calls."""
        try:
            if self._calls[adapter.sha256] and adapter.sha256 not in self.served:
                await self._load(adapter)
        except Exception as error:  # noqa: BLE001 - every error must reach the calls that wait
            done.set_exception(error)
        else:
            done.set_result(None)
        del self._loading[adapter]

    async def _load(self, adapter: Adapter) -> None:
        folder = await asyncio.to_thread(
            verify_reference, {"path": adapter.path, "sha256": adapter.sha256}
        )
        await asyncio.to_thread(read_config, folder)
        probe = await asyncio.to_thread(read_probe, folder)
        weights = await asyncio.to_thread(weights_digest, folder)
        await self._evict()
        name = _name(adapter)
        body = {"lora_name": name, "lora_path": str(folder.absolute())}
        answer = await self._api.send("load_lora_adapter", body, self._timeout)
        # Another process may have loaded the same content; it is checked like our own.
        if answer.status >= 400 and "already been loaded" not in answer.text:
            raise self._refused(folder, answer.status, answer.message)
        try:
            verdict = await self._check(name, weights, probe, folder)
        except TransientError:
            raise
        except (AdapterNotServed, CallError) as error:
            await self._unload(name)
            raise AdapterNotServed(
                f"the server of {self._api.model!r} reports that it serves the adapter {folder} as {name}, "
                f"but {error.message}",
                hint="restart the server, and give the address of a single server: adapters do not work with "
                "several servers behind one address. If that does not help, upgrade vLLM",
            ) from None
        self.served[adapter.sha256] = Served(name, weights, verdict)

    async def _check(self, name: str, weights: str, probe: Probe | None, folder: Path) -> str:
        """Compare the server's log-probabilities with the probe, or else with those of its other models.

        Each check uses a new connection and another start of the text, as load balancers choose the
        server by either. The requests for the new version are consecutive, so that round-robin
        balancing reaches every server.
        """
        first = TEXT if probe is None else probe.tokens
        tokens, found = await self._ask(name, first)
        answers = [(tokens, found)]
        for number in range(1, self._checks):
            text = rotate(tokens, number)
            answers.append((text, (await self._ask(name, text))[1]))
        matches = probe is not None and check_logprobs(probe, found)
        if not matches and (
            (probe is not None and not probe.differs)
            or await asyncio.to_thread(changes_nothing, folder)
        ):
            return INDISTINGUISHABLE
        others = [other.name for other in self.served.values() if other.weights != weights]
        for other in (self._api.model, *others):
            for text, found in answers[1 if matches else 0 :]:
                if (await self._ask(other, text))[1] == found:
                    raise AdapterNotServed(
                        f"its log-probabilities are identical to those of {other}"
                    )
        return MATCHES_PROBE if matches else DIFFERS_FROM_OTHERS

    async def _ask(
        self, name: str, text: str | Sequence[int]
    ) -> tuple[tuple[int, ...], tuple[float, ...]]:
        return await self._api.logprobs(name, text, self._timeout, fresh=True)

    async def _evict(self) -> None:
        idle = [digest for digest in self.served if not self._calls[digest]]
        for digest in idle[: max(0, len(self.served) - self._capacity + 1)]:
            await self._unload(self.served.pop(digest).name)

    async def _unload(self, name: str) -> None:
        """Unload a version; it may be unloaded already."""
        with contextlib.suppress(TransientError):
            await self._api.send("unload_lora_adapter", {"lora_name": name}, self._timeout)

    def _refused(self, folder: Path, status: int, message: str) -> CompoundError:
        """Return the error for a rejected adapter; vLLM returns status 500 for one that it cannot load."""
        if status in TRANSIENT_STATUSES or status > 500:
            return TransientError(f"{self._api.model}: {first_line(message)}")
        if "max_lora_rank" in message:
            hint = "raise max_lora_rank of the engine"
        elif status == 404 and "adapter" not in message.lower():
            hint = "start the server with --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=True"
        elif status == 404:
            hint = "the server must read the same files as this process"
        else:
            hint = ""
        return CompoundError(
            f"the server of {self._api.model!r} does not load the adapter {folder}: {first_line(message)}",
            hint=hint,
        )


def _name(adapter: Adapter) -> str:
    return adapter.sha256[:SHOWN]
