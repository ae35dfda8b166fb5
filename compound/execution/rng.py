"""Named random streams: every random choice uses a stream named by its consumer and purpose.

No choice uses a global generator, so results do not depend on import order, threads or completion
order. For libraries that only use torch's global generator, `fork_torch_rng` temporarily replaces
its state.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np


def derive_seed(*names: str | int | float) -> int:
    """Return a 63-bit seed derived from the names of a stream.

    >>> derive_seed(0, "call", "example-1") == derive_seed(0, "call", "example-1")
    True
    >>> derive_seed(0, "a", "b") == derive_seed(0, "ab")
    False
    """
    # types and a separator keep (1,) and ("1",), and ("a", "b") and ("ab",), apart
    text = "\x1f".join([f"{type(name).__name__}:{name}" for name in names])
    # 63 bits fit a signed integer
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def generator(*names: str | int | float) -> np.random.Generator:
    """Return numpy's counter-based generator for a named stream."""
    return np.random.Generator(np.random.Philox(derive_seed(*names)))


_LENT = threading.Lock()


@contextmanager
def fork_torch_rng(*names: str | int | float) -> Iterator[None]:
    """Seed torch's global generator with a named stream, for code that only uses that generator.

    The previous state is restored at the end. The block holds a lock: one thread at a time.
    """
    import torch

    with _LENT, torch.random.fork_rng():
        torch.manual_seed(derive_seed(*names))
        yield
