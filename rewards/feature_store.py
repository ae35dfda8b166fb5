"""Store computed features in memory and in the folder of a run.

The last digits of a feature depend on the batch in which it is computed. A run that resumes after a crash
must therefore reuse stored features instead of computing them again in other batches. Each record has a
checksum; damaged records are reported and computed again.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from compound.security.limits import ARTIFACT
from compound.security.untrusted import UntrustedFolder, os_errors_as

Array = NDArray[np.float32]
KEY = 16  # bytes
HEAD = b"compound features 2\n"  # older files start with a record, and have no checksums
logger = logging.getLogger(__name__)


class FeatureStore:
    """Vectors by 16-byte keys; with a path, also appended to a file, whose incomplete last record is dropped.

    >>> store = FeatureStore(None, 2)
    >>> store.put([b"k" * 16], np.array([[1.0, 2.0]], np.float32))
    >>> store.get(b"k" * 16).tolist(), b"x" * 16 in store
    ([1.0, 2.0], False)

    Raises:
        RunDirectoryError: the path is not a regular file, is a link, or cannot be read.
    """

    def __init__(self, path: Path | None, dim: int) -> None:
        self.path = path
        self._fields = [("key", f"V{KEY}"), ("vector", np.float32, (dim,))]
        self._checked = True
        self._found: dict[bytes, Array] = {}
        if path is not None:
            self._load(UntrustedFolder(path.parent), path.name)

    @property
    def _record(self) -> np.dtype[np.void]:
        return np.dtype([*self._fields, ("checksum", "<u4")] if self._checked else self._fields)

    def _load(self, folder: UntrustedFolder, name: str) -> None:
        if folder.kind(name) is None:
            return
        raw = folder.read(name, ARTIFACT)
        self._checked = raw.startswith(HEAD) or HEAD.startswith(raw)
        start = len(HEAD) if self._checked else 0
        whole = max(0, len(raw) - start) // self._record.itemsize
        end = start + whole * self._record.itemsize if len(raw) >= start else 0
        if len(raw) != end:
            folder.truncate(name, end)
        damaged = 0
        for record in np.frombuffer(raw[start:end], self._record):
            if self._checked and record["checksum"] != _checksum(record["key"], record["vector"]):
                damaged += 1
            else:
                self._found[record["key"].tobytes()] = record["vector"]
        if damaged:
            logger.warning("%s: %d damaged features are computed again", self.path, damaged)

    def __contains__(self, key: bytes) -> bool:
        return key in self._found

    def __len__(self) -> int:
        return len(self._found)

    def get(self, key: bytes) -> Array:
        """Return the vector of a key."""
        return self._found[key]

    def put(self, keys: Sequence[bytes], vectors: Array) -> None:
        """Store vectors.

        Raises:
            RunDirectoryError: the file cannot be written.
        """
        self._found.update(zip(keys, vectors, strict=True))
        if self.path is None:
            return
        records = np.zeros(len(keys), self._record)
        records["key"] = np.array(keys, f"V{KEY}")
        records["vector"] = vectors
        if self._checked:
            records["checksum"] = [_checksum(r["key"], r["vector"]) for r in records]
        folder = UntrustedFolder(self.path.parent)
        head = HEAD if self._checked and not folder.size(self.path.name) else b""
        with folder.appender(self.path.name) as file, os_errors_as(self.path):
            file.write(head + records.tobytes())
            file.flush()


def _checksum(key: np.void, vector: Array) -> int:
    return zlib.crc32(vector.tobytes(), zlib.crc32(key.tobytes()))
