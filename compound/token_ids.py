"""Tuples of token ids in which equal ids are one object, since a training step holds millions of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar


class _SharedIds(dict[int, int]):
    """One integer object per token id, created at its first use.

    Python creates an object of 28 bytes for each integer above 256, in addition to 8 bytes in a tuple.
    """

    CAPACITY: ClassVar[int] = 2**18  # the largest vocabularies; a server may send any number

    def __missing__(self, token: int) -> int:
        if type(token) is int and len(self) < self.CAPACITY:  # 1 and 1.0 would be the same key
            return self.setdefault(token, token)
        return token


_SHARED = _SharedIds()


def token_ids(ids: Iterable[int]) -> tuple[int, ...]:
    """Return token ids as a tuple; equal ids are one object in all tuples of this process.

    >>> one, other = token_ids([5000, 7]), token_ids([int("5000")])
    >>> one, one[0] is other[0]
    ((5000, 7), True)
    """
    return tuple(map(_SHARED.__getitem__, ids))
