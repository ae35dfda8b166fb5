"""Check that replicas serve the same model in the same version, from what their servers report."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

from compound.components.engines.probe import TOLERANCE
from compound.components.engines.vllm.api import API
from compound.components.engines.vllm.engine import Fingerprint
from compound.components.engines.vllm.link import read_key
from compound.errors import CallError, CompoundError, TransientError
from compound.security.sanitize import sanitize_for_terminal

SECONDS = 10.0  # time limit of a question to a server
LARGEST = 2**20  # bytes of an answer
# Fields of a model in ``/v1/models`` that differ between models or versions; other fields differ between
# equal servers, such as the time of their start. ``meta`` is llama.cpp's.
COMPARED = ("root", "max_model_len", "owned_by", "parent", "meta")


@dataclass(frozen=True, slots=True)
class Identity:
    """Description of what a replica serves.

    Attributes:
        facts: what the server reports, such as its version; empty for a process of the engine's own.
        fingerprint: tokens and log-probabilities of a text, if the replica was asked for them.
    """

    facts: Mapping[str, str] = field(default_factory=dict)
    fingerprint: Fingerprint | None = None


async def served(address: str, model: str, key_env: str | None) -> Mapping[str, str]:
    """Return what a server reports of itself and the model; empty if it reports nothing.

    Raises:
        TransientError: the server does not answer; `charged` is nothing if it cannot be reached at all.
        CompoundError: the server does not serve the model, or refuses the key.
    """
    async with _client(address, model, key_env) as (api, prefix):
        listing = await _ask(api, f"{prefix}models")
        version = await _ask(api, "version")
    facts = {"version": str(version["version"])} if version and "version" in version else {}
    if listing is None:
        return facts
    names = _names(listing)
    if model not in names:
        raise CompoundError(
            f"the server at {address} does not serve {model!r}",
            hint=f"it serves {_shown(names) or 'nothing'}; set the model of the fleet",
        )
    entry = next(each for each in _entries(listing) if str(each.get("id")) == model)
    return facts | {name: str(entry[name]) for name in COMPARED if entry.get(name) is not None}


def only_model(address: str, key_env: str | None) -> str:
    """Return the name of the only model that a server serves; blocks until it has answered.

    Raises:
        CompoundError: the server does not answer, or serves several models, or one whose name cannot be
            recorded.
    """
    found: list[str | Exception] = []

    def ask() -> None:
        try:
            found.append(asyncio.run(_only_model(address, key_env)))
        except Exception as error:  # noqa: BLE001 - raised in the calling thread
            found.append(error)

    thread = threading.Thread(target=ask)  # the calling thread may run an event loop
    thread.start()
    thread.join()
    if isinstance(found[0], TransientError):
        raise CompoundError(f"{found[0].message}", hint="start the server, or set the model of the fleet")
    if isinstance(found[0], Exception):
        raise found[0]
    return found[0]


def difference(reference: Identity, other: Identity) -> str:
    """Return how another replica differs, as text; ``""`` if it serves the same.

    >>> difference(Identity({"version": "0.31"}), Identity({"version": "0.32"}))
    "version '0.31' and '0.32'"
    >>> here = Identity(fingerprint=((5, 6, 7), (-1.0, -2.0)))
    >>> difference(here, Identity(fingerprint=((5, 6, 7), (-1.1, -2.0))))
    ''
    >>> difference(here, Identity(fingerprint=((5, 6, 7), (-2.0, -3.0))))
    'log-probabilities of the same text that differ by 1 nats per token'
    """
    for name in (*COMPARED, "version"):
        one, two = reference.facts.get(name), other.facts.get(name)
        if one != two:
            return f"{name} {one!r} and {two!r}"
    if reference.fingerprint is None or other.fingerprint is None:
        return ""
    (tokens, ours), (others, theirs) = reference.fingerprint, other.fingerprint
    if tokens != others:
        return "different tokens of the same text"
    apart = sum(abs(a - b) for a, b in zip(ours, theirs, strict=True)) / max(1, len(ours))
    if apart <= TOLERANCE:
        return ""
    return f"log-probabilities of the same text that differ by {apart:.2g} nats per token"


async def _only_model(address: str, key_env: str | None) -> str:
    async with _client(address, "fleet", key_env) as (api, prefix):
        listing = await _ask(api, f"{prefix}models")
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


@contextlib.asynccontextmanager
async def _client(address: str, model: str, key_env: str | None) -> AsyncIterator[tuple[API, str]]:
    """Connect to the root of a server, where its version is; also yield the prefix of OpenAI's routes."""
    key = read_key(model, key_env)
    root = address.removesuffix("/v1")
    api = API(root, model, key=key, key_name=key_env or "api_key_env", connections=1)
    try:
        yield api, "" if root == address else "v1/"
    finally:
        await api.aclose()


async def _ask(api: API, path: str) -> dict[str, object] | None:
    """Return a JSON object; None if the server has no such path."""
    answer = await api.send(path, None, SECONDS, LARGEST)
    if answer.status in {404, 405, 501}:
        return None
    try:
        return api.read(answer)
    except TransientError:
        raise
    except CallError as error:  # a refused key, or no JSON: the same for every request
        raise CompoundError(f"{api.address}: {error.message}", hint=error.hint) from None


def _entries(listing: Mapping[str, object]) -> Sequence[Mapping[str, object]]:
    data = listing.get("data")
    found = data if isinstance(data, list) else []
    return cast("Sequence[Mapping[str, object]]", [each for each in found if isinstance(each, dict)])


def _shown(names: Sequence[str]) -> str:
    """Return names for a message; a server may report any text."""
    return ", ".join(sanitize_for_terminal(name) for name in names)


def _names(listing: Mapping[str, object]) -> list[str]:
    return [str(entry.get("id")) for entry in _entries(listing) if not entry.get("parent")]
