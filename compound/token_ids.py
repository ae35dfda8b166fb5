"""Tuples of token ids in which equal ids are one object, since a training step holds millions of them."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from operator import itemgetter

SIZE = 300_000  # above the largest vocabularies; larger ids are kept, but not shared


@functools.cache
def _integers() -> tuple[int, ...]:
    """Return the shared objects, which take about 10 MiB."""
    return tuple(range(SIZE))


def token_ids(ids: Iterable[int]) -> tuple[int, ...]:
    """Return token ids as a tuple; in tuples of two and more, equal ids are one object in this process.

    Otherwise each id above 256 is an object of 28 bytes, in addition to 8 bytes in the tuple.

    >>> one, other = token_ids([5000, 7]), token_ids([int("5000"), 8])
    >>> one, one[0] is other[0]
    ((5000, 7), True)
    """
    found = tuple(ids)
    if len(found) < 2:  # `itemgetter` returns tuples for two and more
        return found
    try:
        shared: tuple[int, ...] = itemgetter(*found)(_integers())
    except (IndexError, TypeError):  # ids above `SIZE`, or a malformed file, which is not checked here
        return found
    return shared if min(found) >= 0 else found  # negative ids would count from the end
