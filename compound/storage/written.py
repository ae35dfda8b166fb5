"""Folders that this process wrote, whose files need not be read again to know their digest."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

from compound.security.untrusted import FolderStatus, UntrustedFolder

BACK = 10**9  # by which modification times of written files are set back, in ns


class WrittenFolders:
    """Digests of the latest folders that this process wrote, valid while no file in them is changed.

    A change is recognized by the status of the files: identity, size and times of change.

    Args:
        capacity: the maximum number of folders.
    """

    def __init__(self, capacity: int = 256) -> None:
        self._capacity, self._lock = capacity, threading.Lock()
        self._known: dict[str, tuple[str, FolderStatus]] = {}  # by real path, in the order of writing

    def add(self, folder: UntrustedFolder, sha256: str, status: FolderStatus) -> None:
        """Remember the digest of a written folder, and the status of its files before they were hashed."""
        with self._lock:
            self._known.pop(os.path.realpath(folder.path), None)
            self._known[os.path.realpath(folder.path)] = sha256, status
            while len(self._known) > self._capacity:
                del self._known[next(iter(self._known))]

    def digest(self, folder: UntrustedFolder) -> str | None:
        """Return the digest of a folder; ``None`` if this process did not write it, or it was changed.

        Raises:
            CompoundError: an entry of the folder is neither a file nor a folder.
        """
        with self._lock:
            known = self._known.get(os.path.realpath(folder.path))
        return known[0] if known is not None and known[1] == folder.status() else None


def set_back(path: Path) -> None:
    """Set a file's modification time back, so that a later change gives it another one.

    Otherwise a change within the same tick of the file system's clock could leave it equal.
    """
    before = time.time_ns() - BACK
    os.utime(path, ns=(before, before))
