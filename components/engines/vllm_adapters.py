"""The adapters that a vLLM server samples with: loaded by version, checked before use, unloaded when old.

A version's name on the server is the beginning of its digest. So no name ever means two things: not to
requests that overlap a swap, and not to the server's prefix cache, which goes by names.

A swap waits for the requests in flight, and those that come wait for it: a server's numbers compare exactly
only when nothing else is computed with them, and vLLM 0.32 crashes on a prompt's log-probabilities among
requests with adapters (the CPU's kernel takes the wrong rows).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path

from compound.artifacts import SHOWN, verified
from compound.components.engines.gate import Gate
from compound.components.engines.probe import TEXT, Probe, is_silent, judge, read_probe, weights_digest
from compound.components.engines.remote import MAY_PASS, first_line
from compound.components.engines.vllm_api import API
from compound.contracts import Adapter
from compound.errors import AdapterNotServed, CallError, CompoundError, TransientError

TOLD, ALIKE, NOTHING = "told apart by its probe", "other numbers than without it", "nothing to tell apart"


@dataclass(slots=True, eq=False)
class Served:
    """A version that the server has."""

    name: str
    weights: str  # their digest, which several versions can share
    verdict: str
    users: int = 0


class Adapters:
    """The versions on one server, which must read the same file system.

    Args:
        api: the server.
        most: how many versions to keep there; those in use are kept anyway.
        timeout: seconds for loading one, and for each request that checks it.

    Attributes:
        served: by digest, the least recently used first.
    """

    def __init__(self, api: API, most: int, timeout: float) -> None:
        self._api, self._most, self._timeout = api, most, timeout
        self._gate = Gate()
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
            async with self._gate.open():
                yield self._api.model
            return
        if adapter.sha256 not in self.served:
            async with self._gate.alone():
                if adapter.sha256 not in self.served:
                    await self._load(adapter)
        version = self.served.pop(adapter.sha256)
        self.served[adapter.sha256] = version
        version.users += 1
        try:
            async with self._gate.open():
                yield version.name
        finally:
            version.users -= 1

    def forget(self, adapter: Adapter) -> None:
        """Load a version again at its next use: the server does not know it any more."""
        self.served.pop(adapter.sha256, None)

    async def _load(self, adapter: Adapter) -> None:
        folder = await asyncio.to_thread(verified, {"path": adapter.path, "sha256": adapter.sha256})
        probe = await asyncio.to_thread(read_probe, folder)
        weights = await asyncio.to_thread(weights_digest, folder)
        await self._make_room()
        name = adapter.sha256[:SHOWN]
        body = {"lora_name": name, "lora_path": str(folder.absolute())}
        answer = await self._api.send("load_lora_adapter", body, self._timeout)
        # Another process may have loaded it: it is the same content, and is checked like our own.
        if answer.status >= 400 and "already been loaded" not in answer.text:
            raise self._refused(folder, answer.status, answer.message)
        version = Served(name, weights, "")
        try:
            verdict = await self._check(version, probe, folder)
        except TransientError:
            raise
        except (AdapterNotServed, CallError) as error:
            await self._unload(name)
            raise AdapterNotServed(
                f"the server of {self._api.model!r} says that it serves the adapter {folder} as {name}, but "
                f"{error.message}",
                hint="restart the server; if that does not help, its version of vLLM does not swap adapters",
            ) from None
        self.served[adapter.sha256] = replace(version, verdict=verdict)

    async def _check(self, version: Served, probe: Probe | None, folder: Path) -> str:
        """Compare what the server says with the probe, and where that cannot tell, with its other models."""
        prompt = TEXT if probe is None else probe.tokens
        tokens, found = await self._api.logprobs(version.name, prompt, self._timeout)
        if probe is not None and judge(probe, found):
            return TOLD
        if (probe is not None and not probe.visible) or await asyncio.to_thread(is_silent, folder):
            return NOTHING
        others = [other for other in self.served.values() if other.weights != version.weights]
        for other in (self._api.model, *(each.name for each in others)):
            if (await self._api.logprobs(other, tokens, self._timeout))[1] == found:
                raise AdapterNotServed(f"its log-probabilities are, number for number, those of {other}")
        return ALIKE

    async def _make_room(self) -> None:
        """Unload the versions that were not used for longest."""
        idle = [digest for digest, version in self.served.items() if not version.users]
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
