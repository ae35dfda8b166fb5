"""Open directories whose entries are opened without following links.

A directory is a file descriptor, and entries are opened relative to it, so that no part of the path
can be replaced between a check and its use.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Self

_FOLDER = os.O_DIRECTORY | os.O_NONBLOCK | os.O_CLOEXEC
_FILE = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # opening a FIFO must not block


class Directory:
    """An open directory; it stays the same one when another takes its path.

    Names have one part, and must be no links. Every method raises `OSError`.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    @classmethod
    def at(cls, path: str | Path) -> Self:
        """Open a directory by its path, which may lead through links."""
        return cls(os.open(path, os.O_RDONLY | _FOLDER))

    def copy(self) -> Directory:
        """Return another handle of the same directory."""
        return Directory(os.dup(self.descriptor))

    def enter(self, name: str) -> Directory:
        """Return a handle of a directory in this one."""
        flags = os.O_RDONLY | _FOLDER | os.O_NOFOLLOW
        return Directory(os.open(name, flags, dir_fd=self.descriptor))

    def names(self) -> list[str]:
        """Return the names of the entries."""
        return os.listdir(self.descriptor)

    def status(self, name: str) -> os.stat_result:
        """Return the status of an entry; of a link, its own."""
        return os.stat(name, dir_fd=self.descriptor, follow_symlinks=False)

    def open(self, name: str, flags: int) -> int:
        """Open a file and return its descriptor."""
        return os.open(name, flags | _FILE, 0o666, dir_fd=self.descriptor)

    def make(self, name: str) -> None:
        """Create a directory."""
        os.mkdir(name, dir_fd=self.descriptor)

    def replace(self, name: str, target: str) -> None:
        """Rename an entry, replacing the one that has the name."""
        os.replace(name, target, src_dir_fd=self.descriptor, dst_dir_fd=self.descriptor)

    def remove(self, name: str) -> None:
        """Delete a file, or a link."""
        os.unlink(name, dir_fd=self.descriptor)

    def close(self) -> None:
        """Release the handle."""
        os.close(self.descriptor)
