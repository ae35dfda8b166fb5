"""Replicas of a fleet: what each serves, and which one answers a request.

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
import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from compound.core.engine import Completion, OnText, Request
from compound.core.errors import CallError, CompoundError, TransientError
from compound.core.loops import run_blocking
from compound.core.security.sanitize import sanitize_for_terminal
from compound.core.security.trust import Origin
from compound.engines.adapter_files import TOLERANCE
from compound.engines.credentials import read_key
from compound.engines.openai import OpenAIEngine
from compound.engines.server_api import ServerAPI, model_entries
from compound.engines.vllm.engine import Fingerprint, VLLMEngine

BALANCE = 1.25  # most requests in flight at a replica, relative to the mean
FORWARDED = 4096  # characters of a forwarded request's body that are its start
SECONDS, LARGEST = 10.0, 2**20  # limits of a question to a server, and of the bytes of its answer
# Fields of a model in ``/v1/models`` that differ between models or versions; other fields differ
# between equal servers, such as the time of their start. ``meta`` is llama.cpp's.
COMPARED = ("root", "max_model_len", "owned_by", "parent", "meta")


def start_of(request: Request) -> bytes:
    """Return a digest of a request's adapter, and of its messages up to the first of the user."""
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


def choose(start: bytes, loads: Mapping[str, int], capacity: int) -> str | None:
    """Choose the replica of a request by its start and the requests in flight at those that are up.

    It has at most `BALANCE` times the mean number of requests, this one included, or the least
    load. Returns None if all have ``capacity`` requests.
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
    """What a server reports of itself, and the log-probabilities of a text if it was asked for them."""

    facts: Mapping[str, str]
    fingerprint: Fingerprint | None = None

    def difference(self, other: ReplicaIdentity) -> str:
        """Return how another replica differs, as text; ``""`` if it serves the same."""
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


@dataclass(slots=True, eq=False)
class Replica:
    """A replica and its work so far.

    Attributes:
        name: the address of its server, or ``process 0`` for a process of the engine's own.
        condition: ``up`` receives requests; ``checking`` is asked whether it still serves the
            model, or starts; ``down`` did not answer, and is asked again at growing intervals;
            ``failed`` serves something else or cannot be started, and is not used again.
        requests: number of requests that it answered.
        moved: number of its requests that others answered, because it ended or was not reachable.
        gone: whether its server had ended when it was last asked; pending until it was.
    """

    name: str
    engine: VLLMEngine | OpenAIEngine
    address: str | None
    condition: Literal["up", "checking", "down", "failed"] = "up"
    load: int = 0
    requests: int = 0
    moved: int = 0
    failure: CompoundError | None = None
    recovery: asyncio.Task[None] | None = None
    gone: asyncio.Future[bool] | None = None

    @property
    def up(self) -> bool:
        """Whether it receives requests."""
        return self.condition == "up"

    @property
    def ended(self) -> bool:
        """Whether it is a process of the engine's own that has ended."""
        return isinstance(self.engine, VLLMEngine) and self.engine.server_ended

    @property
    def bills(self) -> bool:
        """Whether a provider may charge for a request of which no answer arrived."""
        if not isinstance(self.engine, OpenAIEngine):
            return False
        if self.engine.price is not None:
            return any(self.engine.price)
        return self.address is None or not Origin.of(self.address).is_loopback

    async def identify(self, *, thoroughly: bool) -> ReplicaIdentity:
        """Return what it serves, after starting a process of the engine's own.

        ``thoroughly`` compares log-probabilities, too, for which requests in flight are awaited.

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
        return completion


def only_model(address: str, key_env: str | None) -> str:
    """Return the name of the only model that a server serves; blocks until it has answered."""
    try:
        listing, _ = run_blocking(_reports(address, "fleet", key_env))
    except TransientError as error:
        hint = "start the server, or set the model of the fleet"
        raise CompoundError(error.message, hint=hint) from None
    names = _names(listing or {})
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
    for entry in model_entries(listing):
        if str(entry.get("id")) == model and not entry.get("parent"):
            known = {name: str(entry[name]) for name in COMPARED if entry.get(name) is not None}
            return facts | known
    raise CompoundError(
        f"the server at {address} does not serve {model!r}",
        hint=f"it serves {_shown(_names(listing)) or 'nothing'}; set the model of the fleet",
    )


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


def _names(listing: Mapping[str, object]) -> list[str]:
    return [str(each.get("id")) for each in model_entries(listing) if not each.get("parent")]


def _shown(names: Sequence[str]) -> str:
    """Return names for a message; a server may report any text."""
    return ", ".join(sanitize_for_terminal(name) for name in names)
