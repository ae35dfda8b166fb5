"""Random streams by name: every random choice draws from one named by who makes it and for what.

No choice draws from a global generator, so nothing depends on import order, threads or completion order.
Where a library knows no other one, `fork_torch_rng` lends it its own, and gives it back as it was.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np


def derive_seed(*names: str | int | float) -> int:
    """Return the 63-bit seed of the stream with these names.

    >>> derive_seed(0, "call", "example-1") == derive_seed(0, "call", "example-1")
    True
    >>> derive_seed(0, "a", "b") == derive_seed(0, "ab")
    False
    """
    text = "\x1f".join([f"{type(name).__name__}:{name}" for name in names])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def generator(*names: str | int | float) -> np.random.Generator:
    """Return numpy's counter-based generator for the stream with these names."""
    return np.random.Generator(np.random.Philox(derive_seed(*names)))


_LENT = threading.Lock()


@contextmanager
def fork_torch_rng(*names: str | int | float) -> Iterator[None]:
    """Make torch's global generator the stream with these names, for code that draws from no other one.

    Afterwards it is as it was. One thread at a time holds it.

    >>> import torch
    >>> state = torch.get_rng_state()
    >>> with fork_torch_rng(0, "weights"):
    ...     first = torch.rand(1)
    >>> with fork_torch_rng(0, "weights"):
    ...     bool(torch.rand(1) == first)
    True
    >>> bool((torch.get_rng_state() == state).all())
    True
    """
    import torch

    with _LENT, torch.random.fork_rng():
        torch.manual_seed(derive_seed(*names))
        yield
