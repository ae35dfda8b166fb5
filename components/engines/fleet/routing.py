"""Choose the replica of a request: by the start of its prompt, as long as the load stays balanced.

Requests that start alike go to one replica, whose prefix cache then holds the start: the samples of a group,
the turns of a conversation, the forks of a run. The replica is the first by rendezvous hashing [1], so that
only the requests of a replica that fails move. A replica that has more than `BALANCE` times its share of the
requests in flight is passed over for the one with the least load, as in hashing with bounded loads [2].

[1] Thaler, Ravishankar: Using name-based mappings to increase hit rates. IEEE/ACM ToN 6 (1998).
[2] Mirrokni, Thorup, Zadimoghaddam: Consistent hashing with bounded loads. SODA 2018.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping

from compound.engine import Message, Request

BALANCE = 1.25  # most requests in flight at a replica, relative to the mean
FORWARDED = 4096  # characters of a forwarded request's body that are its start


def start_of(request: Request) -> bytes:
    """Return a digest of the start of a request: its adapter, and its messages up to the first of the user.

    >>> question = Message("user", "2 + 2?")
    >>> later = (question, Message("assistant", "4"), Message("user", "Are you sure?"))
    >>> start_of(Request((question,), seed=1)) == start_of(Request(later, seed=2))
    True
    >>> start_of(Request((question,))) == start_of(Request((Message("user", "3 + 3?"),)))
    False
    """
    found = hashlib.blake2b(digest_size=16)
    found.update((request.adapter.sha256 if request.adapter is not None else "").encode())
    if request.forward is not None:
        found.update(request.forward.body[:FORWARDED].encode("utf-8", "surrogatepass"))
        return found.digest()
    for message in request.messages:
        found.update(f"\0{message.role}\0".encode())
        _add_content(found, message)
        if message.role == "user":
            break
    return found.digest()


def rank(start: bytes, replica: str) -> bytes:
    """Return a replica's score for a start; the replica with the greatest score is preferred."""
    return hashlib.blake2b(replica.encode(), digest_size=16, key=start).digest()


def load_bound(loads: Mapping[str, int]) -> int:
    """Return the most requests that a replica may have after one more is placed.

    >>> load_bound({"a": 10, "b": 10}), load_bound({"a": 3, "b": 0})
    (14, 3)
    """
    return math.ceil(BALANCE * (sum(loads.values()) + 1) / len(loads))


def capacity(concurrency: int) -> int:
    """Return the most requests in flight at a replica, of a fleet whose mean is ``concurrency``.

    It is above the mean, as otherwise a busy fleet would have a place at one replica only at any time, and
    requests could not follow their start.

    >>> capacity(64)
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
        The name of a replica with at most `load_bound` requests, this one included, or with the least
        load; None if all are full.
    """
    free = [name for name, load in loads.items() if load < capacity]
    if not free:
        return None
    preferred = max(free, key=lambda name: rank(start, name))
    if loads[preferred] < load_bound(loads):
        return preferred
    return min(free, key=lambda name: (loads[name], name))


def _add_content(found: hashlib.blake2b, message: Message) -> None:
    parts = (message.content,) if isinstance(message.content, str) else message.content
    for part in parts:
        found.update((part if isinstance(part, str) else part.sha256).encode("utf-8", "surrogatepass"))
