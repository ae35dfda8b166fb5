"""Handles of directories whose entries are opened without following links.

On POSIX a handle is a file descriptor, and entries are opened relative to it, so that no part of
the path can be replaced between a check and its use. On platforms without these calls (Windows), a
handle is a path: every use first rejects links, and compares the opened file with the file at the
path.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import Protocol, Self

HAS_DESCRIPTORS = {
    os.open,
    os.stat,
    os.mkdir,
    os.rename,
    os.unlink,
} <= os.supports_dir_fd and hasattr(os, "O_DIRECTORY")
_FOLDER = getattr(os, "O_DIRECTORY", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)
_FILE = (
    getattr(os, "O_NOFOLLOW", 0)
    | getattr(os, "O_NONBLOCK", 0)  # opening a FIFO must not block
    | getattr(os, "O_CLOEXEC", 0)
    | getattr(os, "O_NOINHERIT", 0)
    | getattr(os, "O_BINARY", 0)  # Windows would translate line ends
)


class Directory(Protocol):
    """An open directory. Names have one part; every method raises `OSError`."""

    def copy(self) -> Directory:
        """Return another handle of the same directory."""
        ...

    def enter(self, name: str) -> Directory:
        """Return a handle of a directory in this one, which must be no link."""
        ...

    def names(self) -> list[str]:
        """Return the names of the entries."""
        ...

    def status(self, name: str) -> os.stat_result:
        """Return the status of an entry; of a link, its own."""
        ...

    def open(self, name: str, flags: int) -> int:
        """Open a file, which must be no link, and return its descriptor."""
        ...

    def make(self, name: str) -> None:
        """Create a directory."""
        ...

    def replace(self, name: str, target: str) -> None:
        """Rename an entry, replacing the one that has the name."""
        ...

    def remove(self, name: str) -> None:
        """Delete a file, or a link."""
        ...

    def close(self) -> None:
        """Release the handle."""
        ...


class DescriptorDirectory:
    """A directory as a descriptor; it stays the same one when another takes its path.

    Attributes:
        descriptor: the descriptor.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    @classmethod
    def at(cls, path: str | Path) -> Self:
        """Open a directory by its path, which may lead through links."""
        return cls(os.open(path, os.O_RDONLY | _FOLDER))

    def copy(self) -> DescriptorDirectory:
        """Return another handle of the same directory."""
        return DescriptorDirectory(os.dup(self.descriptor))

    def enter(self, name: str) -> DescriptorDirectory:
        """Return a handle of a directory in this one, which must be no link."""
        flags = os.O_RDONLY | _FOLDER | os.O_NOFOLLOW
        return DescriptorDirectory(os.open(name, flags, dir_fd=self.descriptor))

    def names(self) -> list[str]:
        """Return the names of the entries."""
        return os.listdir(self.descriptor)

    def status(self, name: str) -> os.stat_result:
        """Return the status of an entry; of a link, its own."""
        return os.stat(name, dir_fd=self.descriptor, follow_symlinks=False)

    def open(self, name: str, flags: int) -> int:
        """Open a file, which must be no link, and return its descriptor."""
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


class PathDirectory:
    """A directory as a path, for platforms without descriptors of directories.

    Attributes:
        path: the path.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def at(cls, path: str | Path) -> Self:
        """Open a directory by its path, which may lead through links."""
        if not stat.S_ISDIR(os.stat(path).st_mode):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path))
        return cls(Path(path))

    def copy(self) -> PathDirectory:
        """Return another handle of the same directory."""
        return PathDirectory(self.path)

    def enter(self, name: str) -> PathDirectory:
        """Return a handle of a directory in this one, which must be no link."""
        if not stat.S_ISDIR(self.status(name).st_mode):
            raise NotADirectoryError(
                errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(self.path / name)
            )
        return PathDirectory(self.path / name)

    def names(self) -> list[str]:
        """Return the names of the entries."""
        return os.listdir(self.path)

    def status(self, name: str) -> os.stat_result:
        """Return the status of an entry; of a link, its own."""
        return os.lstat(self.path / name)

    def open(self, name: str, flags: int) -> int:
        """Open a file, which must be no link, and return its descriptor."""
        place = self.path / name
        if os.path.lexists(place) and not stat.S_ISREG(self.status(name).st_mode):
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(place))
        descriptor = os.open(place, flags | _FILE, 0o666)
        if os.path.samestat(os.fstat(descriptor), self.status(name)):
            return descriptor
        os.close(descriptor)
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(place))

    def make(self, name: str) -> None:
        """Create a directory."""
        os.mkdir(self.path / name)

    def replace(self, name: str, target: str) -> None:
        """Rename an entry, replacing the one that has the name."""
        os.replace(self.path / name, self.path / target)

    def remove(self, name: str) -> None:
        """Delete a file, or a link."""
        os.unlink(self.path / name)

    def close(self) -> None:
        """Release the handle, which holds nothing."""


def open_directory(path: str | Path) -> Directory:
    """Open a directory by its path, which may lead through links.

    Raises:
        OSError: it does not exist, is no directory, or cannot be read.
    """
    return DescriptorDirectory.at(path) if HAS_DESCRIPTORS else PathDirectory.at(path)
