"""One writer at a time for a folder.

The folder itself is locked, so that deleting a lock file admits no second writer. Where folders cannot be
locked (NFS, Windows), the file ``lock`` in it is what counts, and its owner notices when it is replaced.
The file is locked in any case, for versions that know nothing else.
"""

from __future__ import annotations

import errno
import sys
from typing import BinaryIO

from compound.errors import RunDirectoryError
from compound.security.directory import DescriptorDirectory, Directory, open_directory
from compound.security.untrusted import UntrustedFolder, named

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl

FILE = "lock"
UNSUPPORTED = (errno.EBADF, errno.EINVAL, errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOTSUP)
TAKEN = (errno.EAGAIN, errno.EACCES, errno.EDEADLK)


class Lock:
    """The exclusive right to write into a folder, until `release` or the end of the process.

    Attributes:
        folder: the locked folder; its files are reached through a descriptor that stays with this folder even
            where another one takes its path.

    Raises:
        RunDirectoryError: another process holds the lock, or the folder cannot be written.
    """

    def __init__(self, unlocked: UntrustedFolder) -> None:
        path = unlocked.path
        with named(path):
            self._directory: Directory | None = open_directory(path)
        self.folder = UntrustedFolder(path, directory=self._directory)
        self._file: BinaryIO | None = None
        try:
            directory = self._directory
            self._whole = isinstance(directory, DescriptorDirectory) and self._take(directory.descriptor)
            self._file = self.folder.appender(FILE)
            self._require(self._take(self._file.fileno()) or self._whole)
        except BaseException:
            self.release()
            raise

    def _take(self, descriptor: int) -> bool:
        """Lock a file or folder; return whether its file system can do that."""
        try:
            _lock(descriptor)
        except OSError as error:
            if error.errno in TAKEN:
                raise RunDirectoryError(
                    f"{self.folder} is in use by another process", hint="wait for it, or choose another --run"
                ) from None
            if error.errno not in UNSUPPORTED:
                raise RunDirectoryError(f"{self.folder} cannot be locked: {error.strerror}") from error
            return False
        return True

    def _require(self, taken: bool) -> None:
        if not taken:
            raise RunDirectoryError(
                f"the file system of {self.folder} has no locks, so that two runs could write there at once",
                hint="choose a place on another disk",
            )

    def check(self) -> None:
        """Make sure that the lock is still the one that counts.

        Raises:
            RunDirectoryError: the lock file was deleted or replaced, so that another process may write.
        """
        if self._whole or self._file is None:
            return
        if not self.folder.is_same(FILE, self._file):
            raise RunDirectoryError(
                f"{self.folder}/{FILE} was deleted or replaced during the run: another process may be "
                "writing there as well",
                hint="end the other run; then the same command continues this one from its last checkpoint",
            )

    def release(self) -> None:
        """Let others write."""
        if self._file is not None:
            self._file.close()
        if self._directory is not None:
            self._directory.close()
            self._directory = None


def _lock(descriptor: int) -> None:
    """Lock an open file without waiting, until it is closed.

    The libraries for portable locks open the file by its path, and would follow a link.

    Raises:
        OSError: another process holds the lock, or the file system has none.
    """
    if sys.platform == "win32":
        msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
    else:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
