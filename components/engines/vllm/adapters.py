"""The adapters that a vLLM server samples with: loaded by version, checked before use, unloaded when old.

A version's name on the server is the beginning of its digest, so one server never knows two versions under
one name: neither a request during a swap nor the server's prefix cache, which goes by names, mixes them.

Loading waits for the requests in flight, and requests that come later wait for it: a server's numbers compare
exactly only when nothing else is computed with them, and vLLM 0.32 crashes on a prompt's log-probabilities
among requests with adapters (the CPU's kernel takes the wrong rows). One task loads every version that is
wanted at the time while the lock is closed once; then all calls that waited sample concurrently.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from compound.components.engines.adapter_files import read_config
from compound.components.engines.probe import (
    CHECKS,
    TEXT,
    Probe,
    is_silent,
    judge,
    read_probe,
    rotated,
    weights_digest,
)
from compound.components.engines.remote import MAY_PASS, first_line
from compound.components.engines.vllm.api import API
from compound.concurrency.rwlock import RWLock
from compound.engine import Adapter
from compound.errors import AdapterNotServed, CallError, CompoundError, TransientError
from compound.storage.artifacts import SHOWN, verified

TOLD, ALIKE, NOTHING = "told apart by its probe", "other numbers than without it", "nothing to tell apart"


@dataclass(frozen=True, slots=True)
class Served:
    """A version that the server has."""

    name: str
    weights: str  # their digest, which several versions can share
    verdict: str


@dataclass(frozen=True, slots=True, eq=False)
class Loading:
    """A version that calls wait for."""

    adapter: Adapter
    done: asyncio.Future[None]


class ServedAdapters:
    """The versions on one server, which must read the same file system. For tasks of one event loop.

    Args:
        api: the server.
        most: how many versions to keep there; those that calls use or wait for are kept anyway.
        timeout: seconds for loading one, and for each request that checks it.
        checks: how many times each version is checked, over a new connection each time; 1 is enough where
            a single process answers, see `compound.components.engines.probe`.

    Attributes:
        served: by digest, the least recently used first.
    """

    def __init__(self, api: API, most: int, timeout: float, checks: int = CHECKS) -> None:
        self._api, self._most, self._timeout, self._checks = api, most, timeout, checks
        self._lock = RWLock()
        self._calls: Counter[str] = Counter()  # that use a version or wait for it, by digest
        self._loading: dict[str, Loading] = {}
        self._loader: asyncio.Task[None] | None = None
        self.served: dict[str, Served] = {}

    @contextlib.asynccontextmanager
    async def sampling(self, adapter: Adapter | None) -> AsyncIterator[str]:
        """Have a version on the server, loaded and checked, while the block runs; gives its name there.

        Without an adapter, the base model's name.

        Raises:
            ConfigurationError: its folder is not what its digest says, or holds no good probe.
            AdapterNotServed: the server says that it serves it, and does not.
            CompoundError: the server refuses it.
            TransientError: the server does not answer.
        """
        if adapter is None:
            async with self._lock.read():
                yield self._api.model
            return
        digest = adapter.sha256
        self._calls[digest] += 1  # from now on it is not unloaded
        try:
            if digest not in self.served:
                await self._loaded(adapter)
            if digest in self.served:  # unless it was lost in between
                self.served[digest] = self.served.pop(digest)
            async with self._lock.read():
                yield _name(adapter)
        finally:
            self._calls[digest] -= 1
            if not self._calls[digest]:
                del self._calls[digest]

    def forget(self, adapter: Adapter) -> None:
        """Load a version again at its next use: the server does not know it any more."""
        self.served.pop(adapter.sha256, None)

    async def aclose(self) -> None:
        """Stop loading; calls that wait for a version fail."""
        if self._loader is not None:
            self._loader.cancel()
            await asyncio.wait([self._loader])

    async def _loaded(self, adapter: Adapter) -> None:
        """Wait until the loader has loaded a version; an error reaches every call that waits for it."""
        wanted = self._loading.get(adapter.sha256)
        if wanted is None:
            done = asyncio.get_running_loop().create_future()
            done.add_done_callback(lambda done: done.exception())  # whoever waited may have been cancelled
            wanted = self._loading[adapter.sha256] = Loading(adapter, done)
        if self._loader is None:
            self._loader = asyncio.create_task(self._load_wanted())
        await asyncio.shield(wanted.done)

    async def _load_wanted(self) -> None:
        """Close the lock, and load every version that calls wait for until none is left."""
        try:
            async with self._lock.write():
                while self._loading:
                    await self._settle(next(iter(self._loading.values())))
        finally:
            self._loader = None
            for wanted in self._loading.values():  # where this was cancelled
                wanted.done.set_exception(TransientError(f"{self._api.model}: closed while loading adapters"))
            self._loading.clear()

    async def _settle(self, wanted: Loading) -> None:
        """Load a version, unless every call that wanted it was cancelled; tell those that wait."""
        digest = wanted.adapter.sha256
        try:
            if self._calls[digest]:
                await self._load(wanted.adapter)
        except Exception as error:  # noqa: BLE001 - whoever waits must hear of it, whatever it is
            wanted.done.set_exception(error)
        else:
            wanted.done.set_result(None)
        del self._loading[digest]

    async def _load(self, adapter: Adapter) -> None:
        folder = await asyncio.to_thread(verified, {"path": adapter.path, "sha256": adapter.sha256})
        await asyncio.to_thread(read_config, folder)
        probe = await asyncio.to_thread(read_probe, folder)
        weights = await asyncio.to_thread(weights_digest, folder)
        await self._make_room()
        name = _name(adapter)
        body = {"lora_name": name, "lora_path": str(folder.absolute())}
        answer = await self._api.send("load_lora_adapter", body, self._timeout)
        # Another process may have loaded it: it is the same content, and is checked like our own.
        if answer.status >= 400 and "already been loaded" not in answer.text:
            raise self._refused(folder, answer.status, answer.message)
        try:
            verdict = await self._check(name, weights, probe, folder)
        except TransientError:
            raise
        except (AdapterNotServed, CallError) as error:
            await self._unload(name)
            raise AdapterNotServed(
                f"the server of {self._api.model!r} says that it serves the adapter {folder} as {name}, but "
                f"{error.message}",
                hint="restart the server, and name its own address: several behind one cannot be used with "
                "adapters; if that does not help, its version of vLLM does not swap adapters",
            ) from None
        self.served[adapter.sha256] = Served(name, weights, verdict)

    async def _check(self, name: str, weights: str, probe: Probe | None, folder: Path) -> str:
        """Compare what the server says with the probe, and where that cannot tell, with its other models.

        Each time over a new connection, which a load balancer may lead to another server, and with another
        beginning, by which some choose. The requests for the new version follow each other directly: servers
        that take turns are all asked.
        """
        first = TEXT if probe is None else probe.tokens
        tokens, found = await self._ask(name, first)
        answers = [(tokens, found)]
        for number in range(1, self._checks):
            text = rotated(tokens, number)
            answers.append((text, (await self._ask(name, text))[1]))
        told = probe is not None and judge(probe, found)
        if not told and (
            (probe is not None and not probe.visible) or await asyncio.to_thread(is_silent, folder)
        ):
            return NOTHING
        others = [other.name for other in self.served.values() if other.weights != weights]
        for other in (self._api.model, *others):
            for text, found in answers[1 if told else 0 :]:
                if (await self._ask(other, text))[1] == found:
                    raise AdapterNotServed(f"its log-probabilities are, number for number, those of {other}")
        return TOLD if told else ALIKE

    async def _ask(self, name: str, text: str | Sequence[int]) -> tuple[tuple[int, ...], tuple[float, ...]]:
        """Return a text's tokens and log-probabilities, over a new connection."""
        return await self._api.logprobs(name, text, self._timeout, fresh=True)

    async def _make_room(self) -> None:
        """Unload the versions that were not used for longest."""
        idle = [digest for digest in self.served if not self._calls[digest]]
        for digest in idle[: max(0, len(self.served) - self._most + 1)]:
            await self._unload(self.served.pop(digest).name)

    async def _unload(self, name: str) -> None:
        """Unload a version; that it is gone already is as good."""
        with contextlib.suppress(TransientError):
            await self._api.send("unload_lora_adapter", {"lora_name": name}, self._timeout)

    def _refused(self, folder: Path, status: int, said: str) -> CompoundError:
        """Return the error of an adapter that was not taken; vLLM says 500 for one that it cannot load."""
        if status in MAY_PASS or status > 500:
            return TransientError(f"{self._api.model}: {first_line(said)}")
        if "max_lora_rank" in said:
            hint = "raise max_lora_rank of the engine"
        elif status == 404 and "adapter" not in said.lower():
            hint = "start the server with --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=True"
        elif status == 404:
            hint = "the server must read the same files as this process"
        else:
            hint = ""
        return CompoundError(
            f"the server of {self._api.model!r} does not load the adapter {folder}: {first_line(said)}",
            hint=hint,
        )


def _name(adapter: Adapter) -> str:
    """Return a version's name on the server."""
    return adapter.sha256[:SHOWN]
