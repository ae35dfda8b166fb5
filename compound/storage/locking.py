"""Exclusive write access to a folder.

The folder itself is locked, so that deleting a lock file does not admit a second writer. Where
folders cannot be locked (NFS, Windows), the file ``lock`` inside it is used, and its owner detects when it is
replaced.
The file is always locked as well, for versions that only know the file.
"""

from __future__ import annotations

import errno
import sys
from typing import BinaryIO

from compound.errors import RunDirectoryError
from compound.security.directory import DescriptorDirectory, Directory, open_directory
from compound.security.untrusted import UntrustedFolder, os_errors_as

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl

FILE = "lock"
UNSUPPORTED = (errno.EBADF, errno.EINVAL, errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOTSUP)
TAKEN = (errno.EAGAIN, errno.EACCES, errno.EDEADLK)


class Lock:
    """Exclusive right to write into a folder, until `release` or the end of the process.

    Attributes:
        folder: the locked folder; its files are accessed through a descriptor that stays with this folder
            even if another one takes its path.

    Raises:
        RunDirectoryError: another process holds the lock, or the folder cannot be written.
    """

    def __init__(self, unlocked: UntrustedFolder) -> None:
        path = unlocked.path
        with os_errors_as(path):
            self._directory: Directory | None = open_directory(path)
        self.folder = UntrustedFolder(path, directory=self._directory)
        self._file: BinaryIO | None = None
        try:
            directory = self._directory
            self._whole = isinstance(directory, DescriptorDirectory) and self._lock(directory.descriptor)
            self._file = self.folder.appender(FILE)
            self._require(self._lock(self._file.fileno()) or self._whole)
        except BaseException:
            self.release()
            raise

    def _lock(self, descriptor: int) -> bool:
        """Lock a file or folder; return whether its file system supports it."""
        try:
            _lock_file(descriptor)
        except OSError as error:
            if error.errno in TAKEN:
                raise RunDirectoryError(
                    f"{self.folder} is in use by another process",
                    hint="wait until it ends, or choose another --run",
                ) from None
            if error.errno not in UNSUPPORTED:
                raise RunDirectoryError(f"{self.folder} cannot be locked: {error.strerror}") from error
            return False
        return True

    def _require(self, taken: bool) -> None:
        if not taken:
            raise RunDirectoryError(
                f"the file system of {self.folder} has no locks, so two runs could write to it at once",
                hint="choose a location on another disk",
            )

    def check(self) -> None:
        """Check that the lock is still effective.

        Raises:
            RunDirectoryError: the lock file was deleted or replaced, so that another process may write.
        """
        if self._whole or self._file is None:
            return
        if not self.folder.is_same(FILE, self._file):
            raise RunDirectoryError(
                f"{self.folder}/{FILE} was deleted or replaced during the run: another process may be "
                "writing to the folder",
                hint="end the other run, then run the same command to resume from the last checkpoint",
            )

    def release(self) -> None:
        """Release the lock."""
        if self._file is not None:
            self._file.close()
        if self._directory is not None:
            self._directory.close()
            self._directory = None


def _lock_file(descriptor: int) -> None:
    """Lock an open file without waiting, until it is closed.

    The libraries for portable locks open the file by its path, and would follow a link.

    Raises:
        OSError: another process holds the lock, or the file system has none.
    """
    if sys.platform == "win32":
        msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
    else:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
