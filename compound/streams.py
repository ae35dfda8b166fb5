"""Random streams by name: every random choice draws from one named by who makes it and for what.

No global generator is used anywhere, so nothing depends on import order, threads or completion order.
"""

from __future__ import annotations

import hashlib

import numpy as np


def stream(*names: str | int | float) -> int:
    """Return the 63-bit seed of the stream with these names.

    >>> stream(0, "call", "example-1") == stream(0, "call", "example-1")
    True
    >>> stream(0, "a", "b") == stream(0, "ab")
    False
    """
    text = "\x1f".join([f"{type(name).__name__}:{name}" for name in names])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def generator(*names: str | int | float) -> np.random.Generator:
    """Return numpy's counter-based generator for the stream with these names."""
    return np.random.Generator(np.random.Philox(stream(*names)))
