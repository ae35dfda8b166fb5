"""Where computed features are kept: in memory, and in a run's folder.

How a text is batched moves its last digits. A run that goes on after a crash must therefore read what it
computed before, not compute it again in other company.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]
KEY = 16  # bytes


class FeatureStore:
    """Vectors by 16-byte keys; with a path, also appended to a file, whose torn last record is dropped.

    >>> store = FeatureStore(None, 2)
    >>> store.put([b"k" * 16], np.array([[1.0, 2.0]], np.float32))
    >>> store.get(b"k" * 16).tolist(), b"x" * 16 in store
    ([1.0, 2.0], False)
    """

    def __init__(self, path: Path | None, dim: int) -> None:
        self.path = path
        self._record = np.dtype([("key", f"V{KEY}"), ("vector", np.float32, (dim,))])
        self._found: dict[bytes, Array] = {}
        if path is not None and path.exists():
            self._load(path)

    def _load(self, path: Path) -> None:
        whole = path.stat().st_size // self._record.itemsize
        if path.stat().st_size != whole * self._record.itemsize:
            with path.open("r+b") as file:
                file.truncate(whole * self._record.itemsize)
        for record in np.fromfile(path, self._record, whole):
            self._found[record["key"].tobytes()] = record["vector"]

    def __contains__(self, key: bytes) -> bool:
        return key in self._found

    def __len__(self) -> int:
        return len(self._found)

    def get(self, key: bytes) -> Array:
        """Return the vector of a key."""
        return self._found[key]

    def put(self, keys: Sequence[bytes], vectors: Array) -> None:
        """Keep vectors."""
        self._found.update(zip(keys, vectors, strict=True))
        if self.path is not None:
            records = np.zeros(len(keys), self._record)
            records["key"] = np.array(keys, f"V{KEY}")
            records["vector"] = vectors
            with self.path.open("ab") as file:
                file.write(records.tobytes())
